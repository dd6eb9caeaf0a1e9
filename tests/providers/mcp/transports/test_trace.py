from __future__ import annotations

import json
import logging

import pytest
from mcp.client.client import Client
from mcp.server.mcpserver import MCPServer

from tests.providers.mcp.processes import plain
from tests.providers.mcp.transports.test_http_and_sse import serve
from toolspace.providers.mcp.open_connection import open_transport
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports.base import MessageTrace

SECRET = "hunter2-hunter2"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "toolspace.mcp"]


async def exchange(spec: ServerSpec, *, trace: bool) -> None:
    async with (
        open_transport("srv", spec, trace=trace) as transport,
        Client(transport, cache=None, mode="legacy") as session,
    ):
        arguments = {"text": f"{SECRET} Bearer abcdefgh12345", "password": "open sesame"}
        await session.call_tool("echo", arguments)


@pytest.mark.spec("4.11")
async def test_trace_shows_both_directions_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolspace.mcp")
    await exchange(plain(SOME_TOKEN=SECRET), trace=True)
    trace_lines = lines(caplog)
    assert trace_lines[0].startswith('srv → {"jsonrpc":"2.0","id":1,"method":"initialize"')
    assert trace_lines[1].startswith('srv ← {"jsonrpc":"2.0","id":1,"result":{"protocolVersion"')
    call = next(line for line in trace_lines if "tools/call" in line)
    assert '"arguments":{"text":"[hidden] Bearer [hidden]","password":"[hidden]"}' in call
    text = "\n".join(trace_lines)
    assert SECRET not in text
    assert "abcdefgh12345" not in text
    assert "sesame" not in text


@pytest.mark.spec("4.11")
@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_trace_works_on_every_transport(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    server = MCPServer("library")

    @server.tool()
    def echo(text: str) -> str:
        return text

    app, path = (server.streamable_http_app(), "/mcp") if kind == "http" else (server.sse_app(), "/sse")
    caplog.set_level(logging.DEBUG, "toolspace.mcp")
    async with serve(app) as url:
        headers = {"Authorization": f"Bearer {SECRET}"}
        await exchange(ServerSpec(url=url + path, headers=headers), trace=True)
    trace_lines = lines(caplog)
    assert {line[:5] for line in trace_lines} == {"srv →", "srv ←"}
    assert any("tools/call" in line for line in trace_lines)
    assert SECRET not in "\n".join(trace_lines)


@pytest.mark.spec("4.11")
async def test_trace_is_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolspace.mcp")
    await exchange(plain(), trace=False)
    assert lines(caplog) == []


async def test_traced_message_is_masked_before_it_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolspace.mcp")
    message = {"method": "x", "params": ["y" * 3_970, "Bearer " + "k" * 200, "z" * 9_000]}
    MessageTrace("srv")("←", json.dumps(message).encode())
    (line,) = lines(caplog)
    assert len(line) < 4_100
    assert line.endswith("characters)")
    assert "kkk" not in line


def test_invalid_json_is_traced_as_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolspace.mcp")
    MessageTrace("srv")("←", b"\xff not json, Bearer abcdefgh12345")
    MessageTrace("srv")("←", b"[" * 100_000)
    first, second = lines(caplog)
    assert first == 'srv ← "\ufffd not json, Bearer [hidden]"'
    assert len(second) < 4_100


def test_tracer_does_nothing_while_the_logger_is_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "toolspace.mcp")
    MessageTrace("srv")("→", b"{}")
    assert lines(caplog) == []

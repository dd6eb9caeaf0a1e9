"""Negotiation with servers, and the errors for URLs and commands that are no MCP servers."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.providers.mcp.conftest import SERVERS, open_toolspace
from toolspace import McpCallbacks, McpProvider, ServerSpec
from toolspace.providers.mcp.open_connection import ConnectionOptions


@pytest.mark.spec("3.10")
async def test_discovery_is_repeated_if_the_server_answers_it_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mcp.client.session.DISCOVER_TIMEOUT_SECONDS", 0.3)
    provider = McpProvider("s", ServerSpec(command=sys.executable, args=(str(SERVERS / "late.py"),)))
    async with open_toolspace(provider) as ts:
        status = provider.status()
        assert (status.state, status.era, status.restarts) == ("ready", "stateless", 0), status.last_error
        assert (await ts.call("s__hello")).result == "hello"


@pytest.mark.spec("3.10")
async def test_changes_of_roots_are_not_announced(tmp_path: Path) -> None:
    capabilities: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        message = await request.json()
        parameters = message.get("params") or {}
        meta = parameters.get("_meta") or {}
        client_capabilities = parameters.get("capabilities") or meta.get("io.modelcontextprotocol/clientCapabilities")
        capabilities.append(client_capabilities)
        error = {"code": -32601, "message": "unknown method"}
        return web.json_response({"jsonrpc": "2.0", "id": message.get("id"), "error": error})

    app = web.Application()
    app.router.add_post("/mcp", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    spec = ServerSpec(url="http://{}:{}/mcp".format(*runner.addresses[0][:2]))
    options = ConnectionOptions(callbacks=McpCallbacks(roots=lambda: (tmp_path,)))
    async with open_toolspace(McpProvider("s", spec, options)):
        pass
    await runner.cleanup()
    assert capabilities[:2] == [{"roots": {}}, {"roots": {}}]


@pytest.fixture
async def elsewhere() -> AsyncIterator[str]:
    """A web service that is no MCP server. The path selects its answer."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/page":
            return web.Response(text="<html>Welcome</html>", content_type="text/html")
        if request.path == "/data":
            return web.json_response({"hello": "world"})
        return web.Response(status=404, text="nothing here")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0][:2])
    await runner.cleanup()


@pytest.mark.spec("3.10")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("page", "the server answered with text/html, which is not MCP; is its url right?"),
        ("data", "the server's answer is not a JSON-RPC message; is its url right?"),
        ("gone", "the server answered with HTTP 404 Not Found: nothing here"),
    ],
)
async def test_errors_distinguish_urls_that_are_not_mcp(elsewhere: str, path: str, reason: str) -> None:
    async with open_toolspace(McpProvider("s", ServerSpec(url=f"{elsewhere}/{path}"))) as ts:
        assert ts.orchestrator.unavailable_providers() == {"s": reason}


@pytest.mark.spec("3.10")
async def test_refused_connection_is_reported() -> None:
    async with open_toolspace(McpProvider("s", ServerSpec(url="http://127.0.0.1:1/mcp"))) as ts:
        assert ts.orchestrator.unavailable_providers() == {"s": "cannot connect to 127.0.0.1: Connection refused"}


@pytest.mark.spec("3.12")
async def test_folder_as_command_is_reported(tmp_path: Path) -> None:
    async with open_toolspace(McpProvider("s", ServerSpec(command=str(tmp_path)))) as ts:
        reason = f"the command '{tmp_path}' of server 's' is a folder; name the program in it"
        assert ts.orchestrator.unavailable_providers() == {"s": reason}


@pytest.mark.spec("3.12")
async def test_last_output_of_a_killed_server_is_not_the_reason() -> None:
    spec = ServerSpec(command="sh", args=("-c", "echo all is well >&2; kill -9 $$"))
    async with open_toolspace(McpProvider("s", spec)) as ts:
        reason = "the server was ended by SIGKILL; its last output: all is well"
        assert ts.orchestrator.unavailable_providers() == {"s": reason}

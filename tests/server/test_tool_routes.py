"""Tools, MCP servers and stored outputs over HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.server.gateway import Gateway

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")


@server.tool()
def add(text: str) -> str:
    return text


server.run()
"""
TOOLS: list[dict[str, Any]] = [
    {"name": "echo", "description": "Says it again.", "executionType": "internal", "inputSchema": {"type": "object"}},
    {
        "name": "lookup",
        "description": "Looks a price up.",
        "executionType": "gateway",
        "execution": {"url": "https://prices.internal/", "headers": {"authorization": "Bearer private-token"}},
        "inputSchema": {"type": "object"},
    },
]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway.open(write_config(tmp_path, tools=TOOLS)) as open_gateway:
        yield open_gateway


@pytest.fixture
async def with_server(tmp_path: Path) -> AsyncIterator[ApiClient]:
    """A gateway with an MCP server."""
    (tmp_path / "server.py").write_text(SERVER)
    servers = {"notes": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}}
    async with (
        Gateway.open(write_config(tmp_path, mcpServers=servers)) as open_gateway,
        open_api(open_gateway) as client,
    ):
        yield client


async def names(api: ApiClient, query: str = "") -> list[str]:
    return [tool["name"] for tool in (await api.get(f"/api/tools{query}")).data["items"]]


@pytest.mark.spec("12.1")
async def test_tools_are_listed_read_and_counted(api: ApiClient) -> None:
    tool_names = await names(api)
    assert {"echo", "lookup"} <= set(tool_names)
    assert tool_names == sorted(tool_names)
    pages: list[str] = []
    query: str | None = "?limit=7"
    while query is not None:
        data = (await api.get(f"/api/tools{query}")).data
        pages += [tool["name"] for tool in data["items"]]
        query = f"?limit=7&cursor={data['next']}" if data["next"] else None
    assert pages == tool_names
    assert (await names(api, "?search=price&limit=3"))[0] == "lookup"
    assert "echo" not in await names(api, "?category=network")
    echo = (await api.get("/api/tools/echo")).data
    assert (echo["executionType"], echo["visible"], echo["inputSchema"]) == ("internal", False, {"type": "object"})
    assert "ecco" in (await api.get("/api/tools/ecco")).detail
    await api.create("/api/tools/echo/call", args={"text": "hi"})
    stats = (await api.get("/api/tools/stats")).data
    assert stats["callStats"]["echo"]["count"] == 1


async def test_how_a_tool_is_executed_is_not_shown(api: ApiClient) -> None:
    for path in ("/api/tools", "/api/tools/lookup", "/api/tools?search=price"):
        body = (await api.get(path)).body
        assert b"private-token" not in body
        assert b"prices.internal" not in body


@pytest.mark.spec("8.1")
async def test_a_tool_key_sees_only_its_tools(api: ApiClient) -> None:
    new_key = await api.create("/api/keys", kind="tools", name="ci", toolsAllowed=["ec*"])
    key = api.with_headers(authorization=f"Bearer {new_key['key']}")
    assert await names(key) == ["echo"]
    assert await names(key, "?search=price") == []
    assert (await key.get("/api/tools/echo")).status == 200
    assert (await key.get("/api/tools/lookup")).status == 403
    assert (await key.get("/api/tools/stats")).status == 403
    assert (await key.get("/api/servers")).status == 403


@pytest.mark.spec("12.1")
async def test_servers_report_their_status_and_are_restarted(with_server: ApiClient, tmp_path: Path) -> None:
    api = with_server
    await api.post("/api/tools/notes__add/call", {})  # It waits until the server has started.
    first = (await api.get("/api/servers/notes")).data
    assert (first["state"], first["tools"], first["restarts"]) == ("ready", 1, 0)
    second_response = await api.post("/api/servers/notes/restart")
    assert (second_response.status, second_response.data["state"], second_response.data["restarts"]) == (
        200,
        "ready",
        1,
    )
    assert second_response.data["pid"] != first["pid"]
    assert [server["name"] for server in (await api.get("/api/servers")).data["items"]] == ["notes"]
    for method, path in (("GET", "/api/servers/note"), ("POST", "/api/servers/note/restart")):
        reply = await api.request(method, path)
        assert reply.status == 404
        assert '"notes"' in reply.detail
    (tmp_path / "server.py").write_text("raise SystemExit('no luck today')")
    reply = await api.post("/api/servers/notes/restart")
    assert reply.status == 502
    assert "notes" in reply.detail


@pytest.mark.spec("12.1")
async def test_an_operator_reads_a_stored_output(gateway: Gateway, api: ApiClient) -> None:
    writer = await gateway.toolspace.outputs.create(session="s1", owner="ann", tool="read_file")
    await writer.write("<script>alert(1)</script>\nπ")
    handle = await writer.commit()
    reply = await api.get(f"/api/outputs/{handle.handle}")
    assert (reply.status, reply.body.decode()) == (200, "<script>alert(1)</script>\nπ")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert (reply.headers["x-output-tool"], reply.headers["x-output-lines"]) == ("read_file", "2")
    assert (await api.get(f"/api/outputs/{handle.handle}?maxBytes=7")).body == b"<script"
    for wrong in ("session-s1/0000000000000000", "session-s1/..", "..%2F..%2Fetc/passwd", "session-s1/x"):
        assert (await api.get(f"/api/outputs/{wrong}")).status == 404, wrong


@pytest.mark.spec("4.6")
async def test_a_caller_gets_the_handle_of_a_large_result(gateway: Gateway, api: ApiClient) -> None:
    data = list(range(50_000))
    reply = await api.post("/api/tools/json_stringify/call", {"args": {"data": data}})
    output = reply.data["result"]["tool_output"]
    assert output["reason"] == "size_limit_exceeded"
    assert len((await api.get(f"/api/outputs/{output['handle']}")).body) == output["bytes"] > 100_000
    whole_result = await gateway.toolspace.call("json_stringify", {"data": data})
    assert len(whole_result.text) == output["bytes"]


async def test_a_gateway_without_servers_has_an_empty_list(api: ApiClient) -> None:
    assert (await api.get("/api/servers")).data == {"items": [], "next": None}


@pytest.mark.spec("8.1")
@pytest.mark.spec("12.3")
async def test_suggestions_for_a_tool_key_contain_only_its_tools(api: ApiClient) -> None:
    new_key = await api.create("/api/keys", kind="tools", name="ci", toolsAllowed=["ec*", "agent__batch"])
    key = api.with_headers(authorization=f"Bearer {new_key['key']}")
    assert '"lookup"' in (await api.post("/api/tools/lookups/call")).detail
    response = await key.post("/api/tools/lookups/call")
    assert (response.status, response.detail) == (404, 'Tool "lookups" not found')
    assert '"echo"' in (await key.post("/api/tools/echos/call")).detail
    stream_response = await key.post("/api/tools/lookups/call", headers={"accept": "text/event-stream"})
    assert b"unknown_tool" in stream_response.body
    assert b"lookup\\" not in stream_response.body
    calls = [{"id": "1", "tool": "lookups", "parameters": {}}]
    batch_response = await key.post("/api/tools/agent__batch/call", {"args": {"calls": calls}})
    assert b"not found" in batch_response.body
    assert b'lookup\\"' not in batch_response.body

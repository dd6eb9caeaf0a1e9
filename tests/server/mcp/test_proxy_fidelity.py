"""What an MCP server behind sends arrives unchanged: both eras, over HTTP by either path, and over stdio."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.providers.mcp.conftest import SERVERS
from tests.providers.mcp.servers.complete import CONTENTS, LINK, RESULTS, TOOLS
from tests.server.mcp.conftest import META, Serve, Served
from tests.server.mcp.test_stdio import Process
from toolspace import ToolContext, Toolspace
from toolspace.server.responses import Problem

pytestmark = pytest.mark.spec("12.3")
Request = Callable[..., Awaitable[Any]]
"""Sends a request and returns the whole response."""


def configure(folder: Path, **settings: Any) -> Path:
    """Writes the configuration of two servers that differ in name only."""
    servers = {
        name: {"command": sys.executable, "args": [str(SERVERS / "complete.py"), name], **settings}
        for name in ("up", "other")
    }
    path = folder / "toolspace.yaml"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


@pytest.fixture
async def proxy(serve: Serve, tmp_path: Path) -> Served:
    return await serve(Toolspace.open(configure(tmp_path)))


def http_stateless(proxy: Served, **further_params: Any) -> Request:
    async def request(method: str, params: dict[str, Any]) -> Any:
        meta = {**META, **params.get("_meta", {})}
        return (await proxy.request(method, {**params, **further_params, "_meta": meta})).json

    return request


async def http_session(proxy: Served, **headers: str) -> Request:
    session = await proxy.open_session(**headers)

    async def request(method: str, params: dict[str, Any]) -> Any:
        if headers:  # A request for progress is left to the SDK.
            params = {**params, "_meta": {"progressToken": 1, **params.get("_meta", {})}}
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return (await proxy.post(body, headers=session)).json

    return request


def over_pipes(process: Process, *, stateless: bool) -> Request:
    async def request(method: str, params: dict[str, Any]) -> Any:
        params = {**params, "_meta": {**META, **params.get("_meta", {})}} if stateless else params
        await process.send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        while "id" not in (message := await process.read()):
            pass
        return message

    return request


@pytest.fixture(params=["stateless", "stateless-sdk", "session", "session-sdk", "pipes", "pipes-stateless"])
async def request_by(request: pytest.FixtureRequest, tmp_path: Path, serve: Serve) -> AsyncGenerator[Request]:
    path = configure(tmp_path)
    if request.param.startswith("pipes"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "toolspace", "mcp"),
            cwd=tmp_path,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**24,
        )
        client = Process(process)
        try:
            if request.param == "pipes":
                await client.handshake()
            yield over_pipes(client, stateless=request.param == "pipes-stateless")
        finally:
            process.kill()
            await process.wait()
        return
    proxy = await serve(Toolspace.open(path))
    match request.param:
        case "stateless":
            yield http_stateless(proxy)
        case "stateless-sdk":  # The fast path leaves requests with further parameters to the SDK.
            yield http_stateless(proxy, further="parameter")
        case "session":
            yield await http_session(proxy)
        case _:
            yield await http_session(proxy, **{"x-path": "sdk"})


async def wait_for_tools(request_by: Request) -> dict[str, dict[str, Any]]:
    async with asyncio.timeout(30):
        while True:
            tools = {tool["name"]: tool for tool in (await request_by("tools/list", {}))["result"]["tools"]}
            if {"up__show", "other__show"} <= tools.keys():
                return tools


async def test_definitions_arrive_unchanged(request_by: Request) -> None:
    tools = await wait_for_tools(request_by)
    show, measure, odd = TOOLS
    assert tools["up__show"] == {**show, "name": "up__show", "description": "[up] Returns a result of a kind."}
    assert tools["up__measure"] == {**measure, "name": "up__measure", "description": "[up] Measure"}
    assert tools["up__odd"] == {"name": "up__odd", "description": "[up] d", "inputSchema": odd["inputSchema"]}


async def test_results_arrive_unchanged(request_by: Request) -> None:
    await wait_for_tools(request_by)
    for kind, result in RESULTS.items():
        tool = "up__measure" if "structuredContent" in result else "up__show"
        response = (await request_by("tools/call", {"name": tool, "arguments": {"kind": kind}}))["result"]
        meta = response.get("_meta", {})
        meta.pop("io.modelcontextprotocol/serverInfo", None)
        assert meta == result.get("_meta", {}), kind
        for field in ("content", "structuredContent", "isError"):
            assert response.get(field) == result.get(field), (kind, field)


async def test_linked_resource_is_read_from_the_server_that_named_it(request_by: Request) -> None:
    await wait_for_tools(request_by)
    uri = {"uri": LINK["uri"]}
    assert "no result has named it" in (await request_by("resources/read", uri))["error"]["message"]
    for name in ("up", "other", "up"):
        await request_by("tools/call", {"name": f"{name}__show", "arguments": {"kind": "parts"}})
        result = (await request_by("resources/read", uri))["result"]
        assert result["contents"] == [{**CONTENTS, "text": f"the report of {name}"}]
        assert result["_meta"]["k"] == 8
    unreadable = await request_by("resources/read", {"uri": "mem://b"})
    assert "no such resource" in unreadable["error"]["message"]


async def test_same_uri_of_two_servers_is_told_apart_on_request(proxy: Served) -> None:
    session = await proxy.open_session()
    for name in ("up", "other"):
        params: dict[str, Any] = {"name": f"{name}__show", "arguments": {"kind": "parts"}}
        await proxy.post({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, headers=session)
    params = {"uri": LINK["uri"], "_meta": {"toolspace/server": "up"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "resources/read", "params": params}
    (contents,) = (await proxy.post(body, headers=session)).json["result"]["contents"]
    assert contents["text"] == "the report of up"


async def test_linked_resource_is_for_the_caller_who_got_it_while_it_may_use_the_tool(
    serve: Serve, tmp_path: Path
) -> None:
    def authorize(scope: Any) -> ToolContext:
        user = dict(scope["headers"]).get(b"x-user", b"").decode()
        if not user:
            raise Problem(401, "who?")
        return ToolContext(user_id=user)

    path = configure(tmp_path)
    proxy = await serve(Toolspace.open(path), authorize=authorize)

    async def read(user: str) -> Any:
        return (await proxy.request("resources/read", {"uri": LINK["uri"]}, x_user=user)).json

    await proxy.request("tools/call", {"name": "up__show", "arguments": {"kind": "parts"}}, x_user="ann")
    assert (await read("ann"))["result"]["contents"] == [{**CONTENTS, "text": "the report of up"}]
    assert "no result has named it" in (await read("bob"))["error"]["message"]
    configure(tmp_path, toolsDenied=["show"])
    await proxy.toolspace.reload()
    assert "can be read here any more" in (await read("ann"))["error"]["message"]

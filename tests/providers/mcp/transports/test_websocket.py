from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.datastructures import Headers

from toolspace.errors import ProviderError
from toolspace.providers.mcp.open_connection import open_transport
from toolspace.providers.mcp.server_spec import ServerSpec

Handle = Callable[[ServerConnection, dict[str, Any]], Awaitable[None]]


async def _echo(socket: ServerConnection, message: dict[str, Any]) -> None:
    match message["method"]:
        case "initialize":
            info = {"name": "sockets", "version": "1"}
            result: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": info}
        case "tools/list":
            result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
        case _:
            result = {"content": [{"type": "text", "text": json.dumps(message["params"]["arguments"])}]}
    await socket.send(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}))


@asynccontextmanager
async def run_server(on_call: Handle = _echo, **options: Any) -> AsyncIterator[str]:
    """A server that answers `initialize`, and leaves calls to `on_call`."""

    async def handle(socket: ServerConnection) -> None:
        async for data in socket:
            message = json.loads(data)
            if "id" in message:
                await (on_call if message["method"] == "tools/call" else _echo)(socket, message)

    async with serve(handle, "127.0.0.1", 0, max_size=2**26, **options) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/mcp"


@pytest.mark.spec("3.10")
async def test_websocket_server_works() -> None:
    requests: list[Request] = []

    def keep(socket: ServerConnection, request: Request) -> None:
        requests.append(request)

    async with (
        run_server(process_request=keep, subprotocols=["mcp"]) as url,
        open_transport("ws", ServerSpec(url=url, headers={"X-Api-Key": "k"})) as transport,
        Client(transport, cache=None, mode="legacy") as session,
    ):
        assert transport.transport == "websocket"
        result = await session.call_tool("t", {"text": "x" * 2_000_000})
        assert len(result.content[0].text) > 2_000_000  # type: ignore[union-attr]
        assert requests[0].headers["X-Api-Key"] == "k"
        assert requests[0].headers["Sec-WebSocket-Protocol"] == "mcp"


@pytest.mark.spec("3.13")
async def test_closed_websocket_is_reported_with_its_reason() -> None:
    async def close(socket: ServerConnection, message: dict[str, Any]) -> None:
        await socket.close(1001, "going to bed, Bearer abcdefgh1234")

    async with (
        run_server(close) as url,
        open_transport("ws", ServerSpec(url=url)) as transport,
        Client(transport, cache=None, mode="legacy") as session,
    ):
        with pytest.raises(MCPError):
            await session.call_tool("t", {})
        await transport.lost_event.wait()
        assert transport.loss_reason == "the server closed the websocket with code 1001: going to bed, Bearer [hidden]"
        with pytest.raises(MCPError):
            await session.call_tool("t", {})


async def test_too_large_message_loses_the_connection() -> None:
    async def flood(socket: ServerConnection, message: dict[str, Any]) -> None:
        await socket.send("x" * 200_000)

    async with (
        run_server(flood) as url,
        open_transport("ws", ServerSpec(url=url), max_message_bytes=100_000) as transport,
        Client(transport, cache=None, mode="legacy") as session,
    ):
        with pytest.raises(MCPError):
            await session.call_tool("t", {})
        assert transport.loss_reason == "the server sent a larger message than is allowed"


async def test_invalid_frames_are_skipped() -> None:
    async def noise(socket: ServerConnection, message: dict[str, Any]) -> None:
        for garbage in ("", "hello", b"\xff\x00", "[1, 2]"):
            await socket.send(garbage)
        await _echo(socket, message)

    async with (
        run_server(noise) as url,
        open_transport("ws", ServerSpec(url=url)) as transport,
        Client(transport, cache=None, mode="legacy") as session,
    ):
        assert (await session.call_tool("t", {})).content[0].text == "{}"  # type: ignore[union-attr]


async def test_headers_do_not_follow_a_redirect() -> None:
    visits: list[str] = []

    def redirect(socket: ServerConnection, request: Request) -> Response:
        visits.append(request.path)
        location = f"ws://127.0.0.1:{socket.local_address[1]}/elsewhere"
        return Response(HTTPStatus.FOUND, "Found", Headers({"location": location, "content-length": "0"}))

    async with run_server(process_request=redirect) as url:
        with pytest.raises(ProviderError, match="HTTP 302, not a websocket"):
            async with open_transport("ws", ServerSpec(url=url, headers={"X-Api-Key": "k"})):
                pass
    assert visits == ["/mcp"]


async def test_refused_websocket_is_reported() -> None:
    async with run_server() as url:
        pass
    with pytest.raises(ProviderError, match="cannot open the websocket"):
        async with open_transport("ws", ServerSpec(url=url)):
            pass


async def test_auth_over_a_websocket_is_refused() -> None:
    with pytest.raises(ProviderError, match="a websocket supports headers only"):
        async with open_transport("ws", ServerSpec(url="ws://127.0.0.1:1/"), auth=httpx2.BasicAuth("a", "b")):
            pass


async def test_silent_server_does_not_delay_a_cancelled_block() -> None:
    call_event = asyncio.Event()

    async def silent(socket: ServerConnection, message: dict[str, Any]) -> None:
        call_event.set()
        await socket.wait_closed()

    async def hold(url: str) -> None:
        async with (
            open_transport("ws", ServerSpec(url=url)) as transport,
            Client(transport, cache=None, mode="legacy") as session,
        ):
            await session.call_tool("t", {})

    async with run_server(silent) as url:
        task = asyncio.create_task(hold(url))
        await call_event.wait()
        task.cancel()
        await asyncio.wait((task,))

"""A minimal MCP server and forwarder: the lower bounds for the cost of a call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from benchmarks.connections import Connection, Target
from benchmarks.load import VERSION
from benchmarks.workloads import add

Application = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Any]

_INFO = {"io.modelcontextprotocol/serverInfo": {"name": "byhand", "version": "1"}}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
_PASSED_ON = (b"content-type", b"accept", b"mcp-protocol-version", b"mcp-method", b"mcp-name")


class _Params(msgspec.Struct):
    name: str = ""
    arguments: dict[str, Any] = {}


class _Request(msgspec.Struct):
    method: str
    id: int | str | None = None
    params: _Params = msgspec.field(default_factory=_Params)


def server(tools: int) -> Application:
    """Serves `add` and lists `tools` tools. Checks no headers and records nothing."""
    decode, encode = msgspec.json.Decoder(_Request).decode, msgspec.json.Encoder().encode
    functions = {"add": add}
    definitions = _tool_definitions(tools)

    async def answer(request: _Request) -> dict[str, Any]:
        if request.method == "tools/call":
            params = request.params
            value = await functions[params.name](**params.arguments)
            return {"content": [{"type": "text", "text": str(value)}], "resultType": "complete", "_meta": _INFO}
        if request.method == "tools/list":
            return {"tools": definitions, "ttlMs": 0, "cacheScope": "private", "resultType": "complete", "_meta": _INFO}
        if request.method == "server/discover":
            return {
                "supportedVersions": [VERSION],
                "capabilities": {"tools": {}},
                "ttlMs": 0,
                "cacheScope": "private",
                "resultType": "complete",
                "_meta": _INFO,
            }
        raise LookupError(request.method)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = decode(await _body(receive))
        try:
            outcome: dict[str, Any] = {"result": await answer(request)}
            status = 200
        except LookupError:
            outcome = {"error": {"code": -32601, "message": f"unknown: {request.method}"}}
            status = 404
        await _respond(send, status, encode({"jsonrpc": "2.0", "id": request.id, **outcome}))

    return app


def forwarder(url: str) -> Application:
    """Forwards every request unchanged over persistent connections and returns the answer."""
    target = Target.of(url)
    idle: list[Connection] = []
    responses: dict[Connection, asyncio.Future[bytes]] = {}

    def on_answer(connection: Connection, head: bytes, rest: bytes) -> None:
        responses.pop(connection).set_result(rest)
        idle.append(connection)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name in _PASSED_ON}
        request = target.post(await _body(receive), headers)
        while idle and not idle[-1].is_open:
            idle.pop()
        connection = idle.pop() if idle else await Connection.open(target, on_answer)
        future = responses[connection] = asyncio.get_running_loop().create_future()
        connection.send(request)
        await _respond(send, 200, await future)

    return app


def aiohttp_forwarder(url: str) -> Application:
    """The same with aiohttp, the client that Toolspace uses."""
    import aiohttp

    session: aiohttp.ClientSession | None = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal session
        if session is None:
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name in _PASSED_ON}
        async with session.post(url, data=await _body(receive), headers=headers) as response:
            await _respond(send, response.status, await response.read())

    return app


def _tool_definitions(count: int) -> list[dict[str, Any]]:
    """Definitions of `count` tools; `add` is the last, so that a linear search visits all others."""
    other_tools = [
        {"name": f"add_{number:05d}", "description": f"Add two numbers, way {number}.", "inputSchema": _SCHEMA}
        for number in range(count - 1)
    ]
    return json.loads(
        json.dumps([*other_tools, {"name": "add", "description": "Add two numbers.", "inputSchema": _SCHEMA}])
    )


async def _body(receive: Any) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    return body


async def _respond(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

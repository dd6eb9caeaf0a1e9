"""The servers of the measures: `python -m benchmarks.server_roles ROLE …` prints its URL and serves."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from benchmarks.workloads import add


async def hand_written(tools: str = "1") -> None:
    from benchmarks.hand_written_mcp import server

    await _serve(server(int(tools)))


async def forwarder(url: str) -> None:
    from benchmarks.hand_written_mcp import forwarder

    await _serve(forwarder(url))


async def aiohttp_forwarder(url: str) -> None:
    from benchmarks.hand_written_mcp import aiohttp_forwarder

    await _serve(aiohttp_forwarder(url))


async def sdk() -> None:
    await _serve(_sdk_server().streamable_http_app(), lifespan="on")


async def stdio() -> None:
    await _sdk_server().run_stdio_async()


async def fastmcp() -> None:
    from fastmcp import FastMCP

    server = FastMCP("bench")
    server.tool(add)
    await _serve(server.http_app(json_response=True), lifespan="on")


async def fastmcp_proxy(url: str) -> None:
    """With a client that is connected already: the way that costs it least."""
    from fastmcp import Client
    from fastmcp.server import create_proxy

    async with Client(url) as client:
        await _serve(create_proxy(client).http_app(json_response=True), lifespan="on")


async def gateway(config: str) -> None:
    from benchmarks.gateway_roles import run_gateway

    await run_gateway(config)


async def fan_out(writes: str) -> None:
    from benchmarks.gateway_roles import fan_out

    await _serve(fan_out(joins=writes == "joined"))


async def chat() -> None:
    from benchmarks.model_server import serve

    await serve()


async def rest() -> None:
    """Answers every request with the same small JSON, from a protocol of its own: no web framework in between."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Rest, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


class _Rest(asyncio.Protocol):
    _BODY = b'{"id":7,"name":"kettle","price":19.5,"tags":["kitchen","steel"],"stock":{"shop":3,"store":12}}'
    _ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._pieces = b""

    def data_received(self, data: bytes) -> None:
        self._pieces += data
        while (end := self._pieces.find(b"\r\n\r\n")) >= 0:
            self._pieces = self._pieces[end + 4 :]
            self._transport.write(self._ANSWER)


def _sdk_server() -> Any:
    from mcp.server.mcpserver import MCPServer

    server: MCPServer[Any] = MCPServer("bench", log_level="WARNING")
    server.add_tool(add)
    return server


async def _serve(app: Any, *, lifespan: Literal["on", "off"] = "off") -> None:
    import uvicorn

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    config = uvicorn.Config(app, http="httptools", lifespan=lifespan, log_level="warning", access_log=False)
    await Announced(config).serve(sockets=[listener])


ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "chat": chat,
    "byhand": hand_written,
    "forwarder": forwarder,
    "aiohttp-forwarder": aiohttp_forwarder,
    "sdk": sdk,
    "stdio": stdio,
    "fastmcp": fastmcp,
    "fastmcp-proxy": fastmcp_proxy,
    "gateway": gateway,
    "fan-out": fan_out,
    "rest": rest,
}

if __name__ == "__main__":
    import uvloop

    logging.disable(logging.INFO)
    uvloop.run(ROLES[sys.argv[1]](*sys.argv[2:]))

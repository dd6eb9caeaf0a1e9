"""Real HTTP and TCP servers on loopback that record the requests they receive. Tests of every package use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ReceivedRequest:
    """One request as it arrived."""

    method: str
    target: str
    """Path and query as they were on the wire."""
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Lower-case names."""
    body: bytes


@dataclass
class HttpTestServer:
    host: str = "127.0.0.1"
    port: int = 0
    requests: list[ReceivedRequest] = field(default_factory=list[ReceivedRequest])

    @property
    def address(self) -> str:
        """`host:port`, the entry of `allowedHosts` that allows only this server."""
        return f"{self.host}:{self.port}"

    def url(self, path: str = "/") -> str:
        return f"http://{self.address}{path}"


@asynccontextmanager
async def http_server(respond: Respond | None = None, *, host: str = "127.0.0.1") -> AsyncIterator[HttpTestServer]:
    """A server that records every request and answers it with `respond`, or with `{}`."""
    server = HttpTestServer(host)

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = await request.read()
        query = dict(request.query)
        server.requests.append(ReceivedRequest(request.method, request.raw_path, request.path, query, headers, body))
        return await respond(request) if respond is not None else web.json_response({})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(*pieces: bytes) -> AsyncIterator[HttpTestServer]:
    """A server that reads one request, writes `pieces` and closes the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listener:
        yield HttpTestServer(port=listener.sockets[0].getsockname()[1])

"""Small real HTTP and TCP servers on loopback, for tests of what goes over the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    port: int
    seen: list[Seen] = field(default_factory=list)

    @property
    def host(self) -> str:
        """The entry of `allowedHosts` that allows this server alone."""
        return f"127.0.0.1:{self.port}"

    def url(self, path: str = "/") -> str:
        return f"http://{self.host}{path}"


@asynccontextmanager
async def http_server(answer: Answer) -> AsyncIterator[Server]:
    """A server that answers every request with `answer`, and remembers what it was asked."""
    server = Server(0)

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = await request.read()
        server.seen.append(Seen(request.method, request.path, dict(request.query), headers, body))
        return await answer(request)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_server(answer: bytes, *, times: int = 1) -> AsyncIterator[Server]:
    """A server that reads a request, writes these bytes (`times` over) and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(times):
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listener:
        yield Server(listener.sockets[0].getsockname()[1])

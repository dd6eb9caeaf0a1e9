"""Real HTTP servers on loopback that remember what they were asked, and answer as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from toolspace.core.result import ToolResult
from toolspace.providers.rest.client import HttpClient
from toolspace.providers.rest.provider import RestProvider
from toolspace.providers.rest.spec import RestSpec
from toolspace.toolspace import Toolspace

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    target: str
    """Path and query, as they were on the wire."""
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    host: str
    port: int = 0
    seen: list[Seen] = field(default_factory=list[Seen])

    def url(self, path: str = "/") -> str:
        return f"http://{self.host}:{self.port}{path}"


@asynccontextmanager
async def http_server(answer: Answer | None = None, *, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    """A server that answers every request with `answer`, or with `{}`."""
    server = Server(host)

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        server.seen.append(Seen(request.method, request.raw_path, headers, await request.read()))
        return await answer(request) if answer is not None else web.json_response({})

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
async def raw_server(*pieces: bytes, hold: bool = False) -> AsyncIterator[str]:
    """The URL of a server that reads one request, sends these bytes, and closes; or holds the line for ever."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if hold:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"


def tool(url: str, **fields: Any) -> RestSpec:
    """A tool `t` that takes anything."""
    fields.setdefault("parameters_schema", {"type": "object"})
    return RestSpec(name="t", url=url, **fields)


def rest(spec: RestSpec, *, client: HttpClient | None = None, **options: Any) -> Toolspace:
    """A toolspace that has this one tool, `rest__t`."""
    return Toolspace(providers=[RestProvider([spec], client=client)], **options)


async def call(spec: RestSpec, arguments: dict[str, Any] | None = None) -> ToolResult:
    """One call through a toolspace of its own."""
    async with rest(spec) as toolspace:
        return await toolspace.call("rest__t", arguments or {})

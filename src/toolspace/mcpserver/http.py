"""Runs the MCP endpoint on a web server of its own. The gateway does not need it: it mounts the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Literal

import uvicorn

from toolspace.mcpserver import wire
from toolspace.mcpserver.wire import Receive, Scope, Send

MAX_HEAD = 64 * 1024
"""Bytes of headers, or of what follows a body, about; a piece that was read at once may be larger."""
_STOP_SECONDS = 2
"""How long requests may take to end once the server is asked to stop."""


@asynccontextmanager
async def serving(
    app: wire.Application, *, host: str = "127.0.0.1", port: int = 0, path: str = "/mcp"
) -> AsyncGenerator[str]:
    """Serves the application at one path while the block runs; gives the URL. Port 0 takes one that is free.

    Raises `OSError` where the address cannot be had.
    """
    listening = _listen(host, port)
    server = _Server(
        uvicorn.Config(
            _at(path, app),
            http=_protocol(),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await server.ready(running)
        yield _url(listening, path)
    finally:
        server.should_exit = True
        try:
            await running
        finally:
            listening.close()


def _protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """What reads requests: the fast parser where there is one, with the bound on headers that only the other has."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # Its parser is not there everywhere.
    except ImportError:
        return "h11"

    class Bounded(HttpToolsProtocol):
        """Refuses a head without end, before it is known who sends it: each piece costs more time than the last."""

        _unread = 0
        """Bytes since the parser last came to something."""

        def data_received(self, data: bytes) -> None:
            self._unread += len(data)
            super().data_received(data)
            if self._unread > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response("The headers are too large.")

        def on_message_begin(self) -> None:
            self._unread = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._unread = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unread = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unread = 0
            super().on_message_complete()

    return Bounded


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def ready(self, running: asyncio.Task[None]) -> None:
        """Waits until it answers."""
        while not self.started:
            if running.done():
                await running
                raise OSError("the web server ended before it answered")
            await asyncio.sleep(0.005)  # It has no event to wait for.


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio sends small answers at once only on sockets that it knows to be TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except BaseException:
        listening.close()
        raise
    return listening


def _url(listening: socket.socket, path: str) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def _at(path: str, app: wire.Application) -> wire.Application:
    """The application at its path alone."""
    paths = (path, path.rstrip("/") or "/", path.rstrip("/") + "/")

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in paths:
            await app(scope, receive, send)
        else:
            await wire.refuse(send, 404, f"Not Found: the MCP endpoint is at {path}")

    return routed

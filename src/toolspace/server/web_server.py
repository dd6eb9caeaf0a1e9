"""Runs an application on a web server: the MCP endpoint alone here; the gateway takes the parts for its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import uvicorn

from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.json_rpc import Receive, Scope, Send

_log = logging.getLogger("toolspace.http")

MAX_HEADER_BYTES = 64 * 1024
"""Bytes of headers, or of what follows a body, about; a piece that was read at once may be larger."""
HEADER_TIMEOUT_SECONDS = 30.0
"""How long a head may take to arrive; before that nothing is known of whoever holds the connection."""
READ_TIMEOUT_SECONDS = 30.0
"""How long a client may read nothing of an answer that is out: until then it has to be kept for it."""
_TICK_SECONDS = 0.1
_STOP_SECONDS = 2
"""How long requests may take to end once the server is asked to stop."""


@asynccontextmanager
async def serve_mcp(
    app: json_rpc.Application, *, host: str = "127.0.0.1", port: int = 0, path: str = "/mcp"
) -> AsyncGenerator[str]:
    """Serves the application at one path while the block runs; gives the URL. Port 0 takes one that is free.

    Raises `OSError` where the address cannot be had.
    """
    listening = bind_socket(host, port)
    server = WebServer(uvicorn_config(_at(path, app), stop_seconds=_STOP_SECONDS))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await server.wait_until_started(running)
        yield socket_url(listening, path)
    finally:
        server.stop()
        try:
            await running
        finally:
            listening.close()


def uvicorn_config(app: json_rpc.Application, *, stop_seconds: float, **more: Any) -> uvicorn.Config:
    """How every server of ours is set up."""
    return uvicorn.Config(
        app,
        http=http_protocol(),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=math.ceil(stop_seconds),
        **more,
    )


def http_protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """What reads requests: the fast parser where there is one, with the bound on headers that only the other has."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # Its parser is not there everywhere.
    except ImportError:
        return "h11"

    class Bounded(HttpToolsProtocol):
        """Refuses a head without end, before it is known who sends it: each piece costs more time than the last."""

        _unread = 0
        """Bytes since the parser last came to something."""
        _in_head = True
        _patience: asyncio.TimerHandle | None = None
        """Runs while a head is expected or half there. One that comes in one piece, as most do, needs none."""
        _waiting: asyncio.TimerHandle | None = None
        """Runs while an answer is not read. Most are taken at once, and need none."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._patience = self.loop.call_later(HEADER_TIMEOUT_SECONDS, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_patience()
            if self._waiting is not None:
                self._waiting.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._unread += len(data)
            super().data_received(data)
            if self._unread > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too large.")
            if not self._in_head:
                if self._patience is not None:
                    self._stop_patience()
            elif self._patience is None:
                self._patience = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self.transport.close)

        def _stop_patience(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            unread = self.transport.get_write_buffer_size()
            if unread and self._waiting is None:
                self._waiting = self.loop.call_later(READ_TIMEOUT_SECONDS, self._see_whether_it_reads, unread)

        def _see_whether_it_reads(self, before: int) -> None:
            self._waiting = None
            unread = self.transport.get_write_buffer_size()
            if unread >= before:
                self.transport.abort()  # Closing it politely would wait for what is never read.
            elif unread:
                self._waiting = self.loop.call_later(READ_TIMEOUT_SECONDS, self._see_whether_it_reads, unread)

        def on_message_begin(self) -> None:
            self._unread = 0
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._unread = 0
            self._in_head = False
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unread = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unread = 0
            super().on_message_complete()

    return Bounded


class WebServer(uvicorn.Server):
    """Leaves signals to whoever runs it, and stops without delay."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def wait_until_started(self, running: asyncio.Task[None]) -> None:
        """Waits until it answers."""
        while not self.started:
            if running.done():
                await running
                raise OSError("the web server ended before it answered")
            await asyncio.sleep(0.005)  # It has no event to wait for.

    def stop(self) -> None:
        """Takes nobody new, and ends once the last answer is out."""
        self.should_exit = True
        self._asked.set()

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):
            tick = (tick + 1) % 864_000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._asked.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # In place of the library's own, which sleeps a tenth of a second at least, and leaves tasks that it canceled.
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()
        state = self.server_state
        for connection in tuple(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110 - nothing tells when the last is out
                    await asyncio.sleep(0.005)
        left = tuple(state.tasks)
        if left:
            _log.warning("%d requests had not ended, and were cut off", len(left))
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connection in tuple(state.connections):
            connection.transport.abort()


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket at an address. It takes no connections yet: what is to serve them may still have to start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio sends small answers at once only on sockets that it knows to be TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except BaseException:
        listening.close()
        raise
    return listening


def socket_url(listening: socket.socket, path: str = "") -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def _at(path: str, app: json_rpc.Application) -> json_rpc.Application:
    """The application at its path alone."""
    paths = (path, path.rstrip("/") or "/", path.rstrip("/") + "/")

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in paths:
            await app(scope, receive, send)
        else:
            await json_rpc.send_error(send, 404, f"Not Found: the MCP endpoint is at {path}")

    return routed


# MERGED from listener: Puts a gateway on the network, and takes it off again in the right order. Builds no gateway…

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

RESPONSE_SECONDS = 3.0
"""How long the last answers may take to go out, once all that was running has ended."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than the clients that are common keep a connection: so it is they who close it, not we while they send."""


@asynccontextmanager
async def serve_gateway(gateway: Gateway, listening: socket.socket) -> AsyncGenerator[str]:
    """Serves a gateway on a socket while the block runs, and drains it afterwards; gives the URL.

    Raises `OSError` where the socket cannot be listened on.
    """
    server_settings = gateway.config.server
    server = WebServer(
        uvicorn_config(
            gateway.app,
            stop_seconds=server_settings.stop_timeout + RESPONSE_SECONDS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            # Only what a proxy of ours says of where a request comes from is believed.
            proxy_headers=server_settings.public_url is not None,
        )
    )
    url = socket_url(listening)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await server.wait_until_started(running)
        gateway.readiness.started = True
        yield url
    finally:
        gateway.readiness.stopping = True
        server.stop()
        try:
            if not running.done():
                await gateway.drain(server_settings.stop_timeout)
        finally:
            try:
                await running
            finally:
                listening.close()

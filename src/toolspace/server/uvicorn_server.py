"""Runs uvicorn, which serves the gateway and the MCP endpoint. Knows no routes.

A gateway stops in this order: `/ready` responds with 503; no new connections; streams end, and requests that wait for a
result get "pending"; running calls get `server.stopTimeout`, then they are cancelled; the last responses are sent.
The code that opened the gateway closes it afterwards, the database last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import uvicorn

from toolspace.server.rate_limit import ConnectionLimiter
from toolspace.server.requests import Application

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

_log = logging.getLogger("toolspace.http")

MAX_HEADER_BYTES = 64 * 1024
"""Approximate limit for request headers, and for trailers; a chunk that was read at once may be larger."""
HEADER_TIMEOUT_SECONDS = 30.0
"""Time for the headers to arrive. Until then the client is not authenticated."""
READ_TIMEOUT_SECONDS = 30.0
"""How long a client may read nothing of a complete response, which the server has to keep in memory meanwhile."""
RESPONSE_SECONDS = 3.0
"""How long the last responses may take, once all running calls have ended."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than common clients keep a connection, so that the client closes it and no request is lost in a race."""
_TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
"""The response to a connection beyond `server.maxConnectionsPerAddress`."""
_TICK_SECONDS = 0.1
_POLL_SECONDS = 0.005


@asynccontextmanager
async def serve(
    app: Application,
    listen_socket: socket.socket,
    *,
    stop_seconds: float,
    drain: Callable[[], Awaitable[None]] | None = None,
    **settings: Any,
) -> AsyncGenerator[str]:
    """Serves an application on a socket while the block runs; yields the URL. Raises `OSError`.

    After the block the server accepts no connections, runs `drain`, and waits up to `stop_seconds` for open requests.
    """
    server = WebServer(uvicorn_config(app, stop_seconds=stop_seconds, **settings))
    server_task = asyncio.create_task(server.serve(sockets=[listen_socket]))
    try:
        await server.wait_until_started(server_task)
        yield socket_url(listen_socket)
    finally:
        server.stop()
        try:
            if drain is not None and not server_task.done():
                await drain()
        finally:
            try:
                await server_task
            finally:
                listen_socket.close()


@asynccontextmanager
async def serve_gateway(gateway: Gateway, listen_socket: socket.socket) -> AsyncGenerator[str]:
    """Serves a gateway on a socket while the block runs, and drains it afterwards; yields the URL. Raises `OSError`."""
    settings = gateway.config.server
    async with serve(
        gateway.app,
        listen_socket,
        stop_seconds=settings.stop_timeout + RESPONSE_SECONDS,
        drain=lambda: gateway.drain(settings.stop_timeout),
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        max_connections_per_address=settings.max_connections_per_address,
        # X-Forwarded-For is trusted only behind a proxy.
        proxy_headers=settings.public_url is not None,
    ) as url:
        gateway.readiness.is_started = True
        try:
            yield url
        finally:
            gateway.readiness.is_stopping = True


def uvicorn_config(
    app: Application, *, stop_seconds: float, max_connections_per_address: int | None = None, **settings: Any
) -> uvicorn.Config:
    protocol = http_protocol()
    if max_connections_per_address is not None and not isinstance(protocol, str):
        limiter = ConnectionLimiter(min(max_connections_per_address, _max_open_files() // 2))
        protocol = type(protocol.__name__, (protocol,), {"connection_limiter": limiter})
    return uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=math.ceil(stop_seconds),
        **settings,
    )


def http_protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """Returns uvicorn's fast HTTP protocol with limits on header size and idle reading; `h11` has its own limits."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # httptools is missing on some platforms.
    except ImportError:
        return "h11"

    class LimitedProtocol(HttpToolsProtocol):
        """Closes connections with endless headers, slow headers, or responses that the client does not read."""

        connection_limiter: ConnectionLimiter | None = None
        _release_connection: Callable[[], None] | None = None
        _unparsed_bytes = 0
        """Bytes since the parser last completed something."""
        _in_headers = True
        _header_timer: asyncio.TimerHandle | None = None
        """Runs while headers are expected or incomplete. Headers that arrive in one chunk need none."""
        _read_timer: asyncio.TimerHandle | None = None
        """Runs while a complete response is not read. Most are read at once and need none."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if self.connection_limiter is not None:
                peer = transport.get_extra_info("peername")
                self._release_connection = self.connection_limiter.admit(peer[0] if peer else "")
                if self._release_connection is None:
                    transport.write(_TOO_MANY_CONNECTIONS)
                    transport.close()
                    return
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            if self._read_timer is not None:
                self._read_timer.cancel()
            if self._release_connection is not None:
                self._release_connection()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._unparsed_bytes += len(data)
            super().data_received(data)
            if self._unparsed_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too large.")
            if not self._in_headers:
                if self._header_timer is not None:
                    self._stop_header_timer()
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self.transport.close)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            unread_bytes = self.transport.get_write_buffer_size()
            if unread_bytes and self._read_timer is None:
                self._start_read_timer(unread_bytes)

        def _start_read_timer(self, unread_bytes: int) -> None:
            self._read_timer = self.loop.call_later(READ_TIMEOUT_SECONDS, self._check_reading, unread_bytes)

        def _check_reading(self, previous_unread_bytes: int) -> None:
            self._read_timer = None
            unread_bytes = self.transport.get_write_buffer_size()
            if unread_bytes >= previous_unread_bytes:
                self.transport.abort()  # `close` would wait until the client has read the data.
            elif unread_bytes:
                self._start_read_timer(unread_bytes)

        def on_message_begin(self) -> None:
            self._unparsed_bytes = 0
            self._in_headers = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._unparsed_bytes = 0
            self._in_headers = False
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unparsed_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._unparsed_bytes = 0
            super().on_message_complete()

    return LimitedProtocol


def _max_open_files() -> int:
    """Returns how many files and connections the system allows this process to have open."""
    try:
        import resource  # Windows has none.
    except ImportError:
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


class WebServer(uvicorn.Server):
    """A uvicorn server that handles no signals, and stops as soon as the last response is sent."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_requested = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def wait_until_started(self, server_task: asyncio.Task[None]) -> None:
        """Returns when the server accepts connections. Raises `OSError` if it ended before."""
        while not self.started:
            if server_task.done():
                await server_task
                raise OSError("the web server stopped before it accepted connections")
            await asyncio.sleep(_POLL_SECONDS)  # uvicorn has no event for it.

    def stop(self) -> None:
        """Accepts no more connections; the server ends after the last response."""
        self.should_exit = True
        self._stop_requested.set()

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick):
            tick = (tick + 1) % 864_000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._stop_requested.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Replaces the method of uvicorn, which sleeps at least 0.1 s and does not await the tasks that it cancels.
        for server in self.servers:
            server.close()
        for listen_socket in sockets or ():
            listen_socket.close()
        state = self.server_state
        for connection in tuple(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(_POLL_SECONDS)
        open_tasks = tuple(state.tasks)
        if open_tasks:
            _log.warning("web server stopped: %d requests did not end in time and were canceled", len(open_tasks))
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        for connection in tuple(state.connections):
            connection.transport.abort()


def bind_socket(host: str, port: int) -> socket.socket:
    """Binds a socket. It accepts no connections yet, so that the application can start first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP: asyncio sets TCP_NODELAY, so that small responses are sent at once, only if the protocol is named.
    listen_socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listen_socket.bind((host, port))
    except BaseException:
        listen_socket.close()
        raise
    return listen_socket


def socket_url(listen_socket: socket.socket) -> str:
    host, port = listen_socket.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"

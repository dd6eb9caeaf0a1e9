"""Opens one connection to a server: transport, protocol era, tool list. Does not retry.

`connection` uses it for every attempt. `open_transport` opens the transport that a `ServerSpec` names, after checking
its URL and headers. `StartupLimiter` bounds how many servers start at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

from toolspace.core.http_messages import is_token
from toolspace.core.secret_masking import is_secret_name, register_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.oauth.authorization import HttpAuth
from toolspace.providers.mcp.server_spec import NO_CALLBACKS, McpCallbacks, ServerSpec
from toolspace.providers.mcp.session import McpSession, ServerToolList, SessionOptions, open_session
from toolspace.providers.mcp.tool_cache import ToolCacheFile
from toolspace.providers.mcp.transports.base import (
    MAX_MESSAGE_BYTES,
    MessageTrace,
    OpenTransport,
    ServerUnreachable,
    classify_error,
    is_connection_lost,
    trace_streams,
)
from toolspace.providers.mcp.transports.stateless_http import StatelessHttpDispatcher

_SLOT_SECONDS = 3.0
_SCHEMES = {"http": ("http", "https"), "sse": ("http", "https"), "websocket": ("ws", "wss")}
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?|")
_LIBRARY_LOG_LEVELS = {
    "httpx2": logging.WARNING,
    "httpcore2": logging.WARNING,
    "mcp.client": logging.CRITICAL,
    "mcp.shared": logging.CRITICAL,
}
T = TypeVar("T")


class StartupLimiter:
    """Limits how many servers of one toolspace start at once. A server that starts slowly frees its slot early."""

    def __init__(self, limit: int, *, slot_seconds: float = _SLOT_SECONDS) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._slot_seconds = slot_seconds

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Holds a slot until the block ends or `slot_seconds` have passed."""
        await self._slots.acquire()
        is_free = False

        def release() -> None:
            nonlocal is_free
            if not is_free:
                is_free = True
                self._slots.release()

        timer = asyncio.get_running_loop().call_later(self._slot_seconds, release)
        try:
            yield
        finally:
            timer.cancel()
            release()


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a connection that are not part of its server's specification."""

    callbacks: McpCallbacks = NO_CALLBACKS
    startup_limiter: StartupLimiter | None = None
    auth: HttpAuth | None = None
    """Authorizes HTTP requests."""
    tool_cache: ToolCacheFile | None = None
    """Keeps the tools for the next start; None: they are not kept."""
    trace: bool = False
    version: str = "0"
    """Toolspace's version, as it is reported to servers."""


class ConnectionLostDuringDiscovery(Exception):
    """The connection broke when the server was asked for its protocol era."""


async def connect(
    stack: AsyncExitStack, spec: ServerSpec, options: ConnectionOptions, session: SessionOptions, *, handshake: bool
) -> tuple[McpSession, OpenTransport | None, ServerToolList]:
    """Returns the session, its transport (None for stateless HTTP) and the tools. The stack closes them.

    With `handshake` the server is not asked for its era, and gets the handshake at once.
    """
    mcp_session, transport = await _open_session(stack, spec, options, session, handshake=handshake)
    try:
        return mcp_session, transport, await mcp_session.list_tools()
    except MCPError as error:
        if transport is None or transport.loss_reason is None or not is_connection_lost(error):
            raise
        raise ServerUnreachable(transport.loss_reason, was_sent=False) from None


async def _open_session(
    stack: AsyncExitStack, spec: ServerSpec, options: ConnectionOptions, session: SessionOptions, *, handshake: bool
) -> tuple[McpSession, OpenTransport | None]:
    name = session.name
    if spec.kind == "sse":  # Many servers of that time support streamable HTTP now; the transport falls back to SSE.
        spec = msgspec.structs.replace(spec, transport="http")
    is_refused = False
    if spec.kind == "http" and not handshake:
        async with AsyncExitStack() as stateless_stack:
            prepare_transport(name, spec)
            trace = MessageTrace(name) if options.trace else None
            dispatcher = StatelessHttpDispatcher(_get_url(name, spec), spec.headers, auth=options.auth, trace=trace)
            mcp_session = await stateless_stack.enter_async_context(open_session(session, dispatcher))
            if await _check_discovery(mcp_session.discover(), handshake=False):
                stack.push_async_exit(stateless_stack.pop_all())
                return mcp_session, None
        is_refused = True  # The server has just answered that it does not know the stateless era.
    transport = await stack.enter_async_context(open_transport(name, spec, auth=options.auth, trace=options.trace))
    mcp_session = await stack.enter_async_context(open_session(session, JSONRPCDispatcher(*transport.streams)))
    try:
        await _check_discovery(mcp_session.negotiate(handshake=handshake or is_refused), handshake=handshake)
    except ServerUnreachable as error:
        raise ServerUnreachable(transport.loss_reason or str(error), was_sent=False) from None
    return mcp_session, transport


async def _check_discovery(discovery: Awaitable[T], *, handshake: bool) -> T:
    """Raises ConnectionLostDuringDiscovery: some old servers end at the unknown request instead of refusing it."""
    try:
        return await discovery
    except MCPError as mcp_error:
        error = classify_error(mcp_error)
        if not is_connection_lost(error):
            raise error from None
        if not handshake and getattr(error, "was_sent", True):
            raise ConnectionLostDuringDiscovery from None
        raise ServerUnreachable(str(error), was_sent=False) from None


@asynccontextmanager
async def open_transport(
    name: str,
    spec: ServerSpec,
    *,
    auth: httpx2.Auth | None = None,
    trace: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncGenerator[OpenTransport]:
    """Opens the transport for the duration of the block; afterwards no process, socket or task of it is left.

    Raises ProviderError if it cannot be opened. A later failure is never raised into the block; it sets
    `OpenTransport.lost_event`.
    """
    prepare_transport(name, spec)
    async with _open_transport(name, spec, auth, max_message_bytes) as transport:
        if trace:
            transport.streams = trace_streams(name, transport.streams)
        yield transport


def _open_transport(
    name: str, spec: ServerSpec, auth: httpx2.Auth | None, max_message_bytes: int
) -> AbstractAsyncContextManager[OpenTransport]:
    # Each transport is imported when it is used, because most programs use one or two of them.
    if spec.kind == "stdio":
        from toolspace.providers.mcp.transports.stdio import open_stdio

        return open_stdio(name, spec, max_message_bytes=max_message_bytes)
    url = _get_url(name, spec)
    if spec.kind == "websocket":
        if auth is not None:
            raise ProviderError(f"server {name!r}: login works over http and sse; a websocket supports headers only")
        from toolspace.providers.mcp.transports.websocket import open_websocket

        return open_websocket(name, url, spec, max_message_bytes=max_message_bytes)
    from toolspace.providers.mcp.transports.http_and_sse import open_http

    return open_http(name, url, spec, auth=auth, max_message_bytes=max_message_bytes)


def _get_url(name: str, spec: ServerSpec) -> str:
    """Returns the URL if it fits the transport, else raises ProviderError. No message shows it: it may hold a key."""
    schemes = _SCHEMES[spec.kind]
    expected = " or ".join(f"{scheme}://" for scheme in schemes)
    if not spec.url:
        raise ProviderError(f"server {name!r} ({spec.kind}) has no url; give it one that begins with {expected}")
    try:
        parts = urlsplit(spec.url)
        is_valid, _ = parts.scheme.lower() in schemes and bool(parts.hostname), parts.port
    except ValueError:
        is_valid = False
    if not is_valid or any(ord(character) <= 32 or ord(character) == 127 for character in spec.url):
        raise ProviderError(f"the url of server {name!r} is not valid for {spec.kind}: it must be {expected}host/…")
    return spec.url


def prepare_transport(name: str, spec: ServerSpec) -> None:
    """Registers the server's secrets for masking and checks its headers. Call it before anything is sent."""
    # A secret that a server receives must not appear in its output or in a trace.
    secrets = [value for key, value in {**spec.env, **spec.headers}.items() if is_secret_name(key)]
    register_secrets([*secrets, *(value.rpartition(" ")[2] for value in secrets)])
    # The libraries log URLs, session ids and whole messages with their secrets, and tracebacks of malformed ones. Their
    # errors reach the caller as exceptions, and `MessageTrace` logs messages with secrets masked.
    for library, level in _LIBRARY_LOG_LEVELS.items():
        logger = logging.getLogger(library)
        if logger.level == logging.NOTSET:  # A level that the program has set stays.
            logger.setLevel(level)
    for key, value in spec.headers.items():
        # The HTTP libraries would refuse them too, but show the value.
        if not is_token(key) or not _HEADER_VALUE.fullmatch(value):
            raise ProviderError(f"the header {key!r} of server {name!r} has characters that HTTP does not allow")

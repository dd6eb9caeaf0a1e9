"""Opens one connection to a server: chooses transport and protocol era, and lists the tools. Does not retry.

`connection` uses it for every attempt. `StartupLimiter` bounds how many servers start at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import msgspec
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

from toolspace.providers.mcp.callbacks import NO_CALLBACKS, McpCallbacks
from toolspace.providers.mcp.errors import ServerUnreachable, classify_error, is_connection_lost
from toolspace.providers.mcp.oauth.authorization import HttpAuth
from toolspace.providers.mcp.session import McpSession, ServerToolList, SessionOptions, open_session
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.transports.base import OpenTransport
from toolspace.providers.mcp.transports.factory import open_transport, prepare_transport, validate_url
from toolspace.providers.mcp.transports.stateless_http import StatelessHttpDispatcher
from toolspace.providers.mcp.transports.trace import create_tracer

_SLOT_SECONDS = 3.0
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
    trace: bool = False
    version: str = "0"
    """Toolspace's version, as it is reported to servers."""


class ConnectionLostDuringDiscovery(Exception):
    """The connection broke when the server was asked for its protocol era."""


class ConnectionAttempt:
    """One attempt. With `handshake` the server is not asked for its era, and gets the handshake at once."""

    def __init__(
        self,
        name: str,
        spec: ServerSpec,
        options: ConnectionOptions,
        on_tools_changed: Callable[[], None],
        *,
        handshake: bool,
    ) -> None:
        self._name = name
        self._spec = spec
        self._options = options
        self._session_options = SessionOptions(
            name=name, callbacks=options.callbacks, version=options.version, on_tools_changed=on_tools_changed
        )
        self._handshake = handshake

    async def open(self, stack: AsyncExitStack) -> tuple[McpSession, OpenTransport | None, ServerToolList]:
        """Returns the session, its transport (None for stateless HTTP) and the tools. The stack closes them."""
        session, transport = await self._connect(stack)
        try:
            return session, transport, await session.list_tools()
        except MCPError as error:
            if transport is None or transport.loss_reason is None or not is_connection_lost(error):
                raise
            raise ServerUnreachable(transport.loss_reason, sent=False) from None

    async def _connect(self, stack: AsyncExitStack) -> tuple[McpSession, OpenTransport | None]:
        name, spec, options = self._name, self._spec, self._options
        handshake = self._handshake
        if spec.kind == "http" and not handshake:
            async with AsyncExitStack() as stateless_stack:
                prepare_transport(name, spec)
                trace = create_tracer(name) if options.trace else None
                dispatcher = StatelessHttpDispatcher(
                    validate_url(name, spec), spec.headers, auth=options.auth, trace=trace
                )
                session = await stateless_stack.enter_async_context(open_session(self._session_options, dispatcher))
                if await self._check_discovery(session.discover()):
                    stack.push_async_exit(stateless_stack.pop_all())
                    return session, None
            handshake = True  # The server has just answered that it does not know the stateless era.
        transport = await stack.enter_async_context(open_transport(name, spec, auth=options.auth, trace=options.trace))
        session = await stack.enter_async_context(
            open_session(self._session_options, JSONRPCDispatcher(*transport.streams))
        )
        try:
            await self._check_discovery(session.negotiate(handshake=handshake))
        except ServerUnreachable as error:
            raise ServerUnreachable(transport.loss_reason or str(error), sent=False) from None
        return session, transport

    async def _check_discovery(self, discovery: Awaitable[T]) -> T:
        """Raises ConnectionLostDuringDiscovery: some old servers end at the unknown request instead of refusing it."""
        try:
            return await discovery
        except MCPError as raised:
            error = classify_error(raised)
            if not is_connection_lost(error):
                raise error from None
            if not self._handshake and getattr(error, "sent", True):
                raise ConnectionLostDuringDiscovery from None
            raise ServerUnreachable(str(error), sent=False) from None

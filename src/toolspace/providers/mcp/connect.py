"""Opens one connection to a server: finds the way and the era, and asks for its tools. Does not try twice."""

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
from toolspace.providers.mcp.transports.factory import OpenTransport, open_transport, prepare_transport, validate_url
from toolspace.providers.mcp.transports.stateless_http import StatelessHttpDispatcher
from toolspace.providers.mcp.transports.trace import create_tracer

# MERGED from gate: Lets a few servers start at once. One that takes long gives its place up, so that it delays nob…

_PATIENCE_SECONDS = 3.0


class StartupLimiter:
    """Shared by the servers of one toolspace."""

    def __init__(self, limit: int, *, patience: float = _PATIENCE_SECONDS) -> None:
        self._places = asyncio.Semaphore(limit)
        self._patience = patience

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """A place to start in, for as long as the block runs, but no longer than the patience lasts."""
        await self._places.acquire()
        free = False

        def release() -> None:
            nonlocal free
            if not free:
                free = True
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._patience, release)
        try:
            yield
        finally:
            timer.cancel()
            release()


T = TypeVar("T")


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection is given by its surroundings."""

    callbacks: McpCallbacks = NO_CALLBACKS
    startup_limiter: StartupLimiter | None = None
    auth: HttpAuth | None = None
    """Signs requests over HTTP in."""
    trace: bool = False
    version: str = "0"
    """Ours, as servers see it."""


class ConnectionLostDuringDiscovery(Exception):
    """The server went away when it was asked which era it speaks."""


class ConnectionAttempt:
    """One attempt. `handshake`: greets the server in the old way, without asking for its era."""

    def __init__(
        self, name: str, spec: ServerSpec, hooks: ConnectionOptions, on_change: Callable[[], None], *, handshake: bool
    ) -> None:
        self._name = name
        self._spec = spec
        self._hooks = hooks
        self._peer = SessionOptions(name=name, callbacks=hooks.callbacks, version=hooks.version, on_change=on_change)
        self._handshake = handshake

    async def open(self, stack: AsyncExitStack) -> tuple[McpSession, OpenTransport | None, ServerToolList]:
        """The session, the transport below it if it is not the stateless one, and the tools. Closed by the stack."""
        session, link = await self._connected(stack)
        try:
            return session, link, await session.list_tools()
        except MCPError as error:
            if link is None or link.loss_reason is None or not is_connection_lost(error):
                raise
            raise ServerUnreachable(link.loss_reason, sent=False) from None

    async def _connected(self, stack: AsyncExitStack) -> tuple[McpSession, OpenTransport | None]:
        name, spec, hooks = self._name, self._spec, self._hooks
        handshake = self._handshake
        if spec.kind == "http" and not handshake:
            async with AsyncExitStack() as trial:
                prepare_transport(name, spec)
                trace = create_tracer(name) if hooks.trace else None
                way = StatelessHttpDispatcher(validate_url(name, spec), spec.headers, auth=hooks.auth, trace=trace)
                session = await trial.enter_async_context(open_session(self._peer, way))
                if await self._greeted(session.discover()):
                    stack.push_async_exit(trial.pop_all())
                    return session, None
            handshake = True  # It just said that it does not know the other era.
        link = await stack.enter_async_context(open_transport(name, spec, auth=hooks.auth, trace=hooks.trace))
        session = await stack.enter_async_context(open_session(self._peer, JSONRPCDispatcher(*link.streams)))
        try:
            await self._greeted(session.negotiate(handshake=handshake))
        except ServerUnreachable as error:
            raise ServerUnreachable(link.loss_reason or str(error), sent=False) from None
        return session, link

    async def _greeted(self, greeting: Awaitable[T]) -> T:
        """Some older servers do not refuse the question for the era, but end at it: then not to be asked again."""
        try:
            return await greeting
        except MCPError as raised:
            error = classify_error(raised)
            if not is_connection_lost(error):
                raise error from None
            if not self._handshake and getattr(error, "sent", True):
                raise ConnectionLostDuringDiscovery from None
            raise ServerUnreachable(str(error), sent=False) from None

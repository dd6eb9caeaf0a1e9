"""Opens one connection to a server: finds the way and the era, and asks for its tools. Does not try twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

from toolspace.providers.mcp.callbacks import NO_CALLBACKS, Callbacks
from toolspace.providers.mcp.faults import Unreachable, classified, is_lost
from toolspace.providers.mcp.gate import Gate
from toolspace.providers.mcp.oauth import HttpAuth
from toolspace.providers.mcp.session import Listing, Peer, Session, opened
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.stateless import StatelessHttp
from toolspace.providers.mcp.trace import tracer
from toolspace.providers.mcp.transports import Link, checked_url, open_transport, prepare

T = TypeVar("T")


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection is given by its surroundings."""

    callbacks: Callbacks = NO_CALLBACKS
    gate: Gate | None = None
    auth: HttpAuth | None = None
    """Signs requests over HTTP in."""
    trace: bool = False
    version: str = "0"
    """Ours, as servers see it."""


class BrokeAtGreeting(Exception):
    """The server went away when it was asked which era it speaks."""


class Opening:
    """One attempt. `handshake`: greets the server in the old way, without asking for its era."""

    def __init__(
        self, name: str, spec: ServerSpec, hooks: Hooks, on_change: Callable[[], None], *, handshake: bool
    ) -> None:
        self._name = name
        self._spec = spec
        self._hooks = hooks
        self._peer = Peer(name=name, callbacks=hooks.callbacks, version=hooks.version, on_change=on_change)
        self._handshake = handshake

    async def enter(self, stack: AsyncExitStack) -> tuple[Session, Link | None, Listing]:
        """The session, the transport below it if it is not the stateless one, and the tools. Closed by the stack."""
        session, link = await self._connected(stack)
        try:
            return session, link, await session.list_tools()
        except MCPError as error:
            if link is None or link.reason is None or not is_lost(error):
                raise
            raise Unreachable(link.reason, sent=False) from None

    async def _connected(self, stack: AsyncExitStack) -> tuple[Session, Link | None]:
        name, spec, hooks = self._name, self._spec, self._hooks
        handshake = self._handshake
        if spec.kind == "http" and not handshake:
            async with AsyncExitStack() as trial:
                prepare(name, spec)
                trace = tracer(name) if hooks.trace else None
                way = StatelessHttp(checked_url(name, spec), spec.headers, auth=hooks.auth, trace=trace)
                session = await trial.enter_async_context(opened(self._peer, way))
                if await self._greeted(session.discover()):
                    stack.push_async_exit(trial.pop_all())
                    return session, None
            handshake = True  # It just said that it does not know the other era.
        link = await stack.enter_async_context(open_transport(name, spec, auth=hooks.auth, trace=hooks.trace))
        session = await stack.enter_async_context(opened(self._peer, JSONRPCDispatcher(*link.streams)))
        try:
            await self._greeted(session.negotiate(handshake=handshake))
        except Unreachable as error:
            raise Unreachable(link.reason or str(error), sent=False) from None
        return session, link

    async def _greeted(self, greeting: Awaitable[T]) -> T:
        """Some older servers do not refuse the question for the era, but end at it: then not to be asked again."""
        try:
            return await greeting
        except MCPError as raised:
            error = classified(raised)
            if not is_lost(error):
                raise error from None
            if not self._handshake and getattr(error, "sent", True):
                raise BrokeAtGreeting from None
            raise Unreachable(str(error), sent=False) from None

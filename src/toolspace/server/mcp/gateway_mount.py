"""The MCP endpoint inside the gateway: the same keys, the same limits, and per key its own tools and sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, Self

from toolspace.config.server_settings import ServerSettings
from toolspace.core.context import ToolContext
from toolspace.server.asgi import Message, Receive, Scope, Send
from toolspace.server.authentication import Authenticator
from toolspace.server.authorization import Caller, EntityCaller
from toolspace.server.host_and_cors import allowed_hosts
from toolspace.server.keys import ToolKeyPolicy
from toolspace.server.mcp.endpoint import McpEndpoint
from toolspace.server.problems import Problem, to_problem
from toolspace.server.rate_limit import RequestLimiter
from toolspace.toolspace import Toolspace

_LEAVE: Final = "toolspace.leave"
_LOOK_SECONDS: Final = 3.0
"""How often it is looked whether those who are connected for longer may still be."""


class McpMount:
    """An ASGI application for `/mcp`. Works inside its `async with`.

    Secret keys see every tool, tool keys those that they allow; entities with a public key are refused.
    """

    def __init__(
        self,
        toolspace: Toolspace,
        *,
        authenticator: Authenticator,
        limits: RequestLimiter,
        tool_keys: ToolKeyPolicy,
        server: ServerSettings,
    ) -> None:
        self._authenticator = authenticator
        self._limits = limits
        self._tool_keys = tool_keys
        self._endpoint = McpEndpoint(
            toolspace,
            allowed_hosts=allowed_hosts(server),
            allowed_origins=server.allowed_origins,
            authorize=self._authorize,
            max_body=server.max_body_bytes,
        )
        self._changed = asyncio.Event()
        authenticator.on_change(self._changed.set)
        self._under_way: dict[asyncio.Task[Any], _Exchange] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._endpoint)
        watching = asyncio.create_task(self._watch())
        self._stack.push_async_callback(_end, watching)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        exchange = self._under_way[task] = _Exchange(scope, send)
        try:
            await self._endpoint(scope, receive, exchange.send)
        except asyncio.CancelledError:
            if not exchange.cut:
                raise
            task.uncancel()
            await exchange.end()
        finally:
            del self._under_way[task]
            if (leave := scope.pop(_LEAVE, None)) is not None:
                leave()

    def _authorize(self, scope: Scope) -> ToolContext | Awaitable[ToolContext]:
        client = scope.get("client")
        caller = self._authenticator.authenticate(scope["headers"], client[0] if client else "")
        if isinstance(caller, Caller):
            return self._admit(scope, caller)
        return self._admit_later(scope, caller)

    async def _admit_later(self, scope: Scope, caller: Awaitable[Caller]) -> ToolContext:
        return self._admit(scope, await caller)

    def _admit(self, scope: Scope, caller: Caller) -> ToolContext:
        if isinstance(caller, EntityCaller):
            raise Problem(403, "the MCP endpoint takes secret keys and tool keys, no public ones")
        scope[_LEAVE] = self._limits.admit(caller, stream=scope["method"] == "GET")
        return self._tool_keys.context_for(caller)

    async def _watch(self) -> None:
        """Ends what those began whose key is revoked meanwhile: a stream may stay open for days."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._changed.wait()
            before = time.monotonic() - (0.0 if self._changed.is_set() else _LOOK_SECONDS)
            self._changed.clear()
            for task, exchange in list(self._under_way.items()):
                if exchange.began_at > before or exchange.cut or _LEAVE not in exchange.scope:
                    continue
                try:
                    holds = await self._authenticator.is_valid(exchange.scope["headers"])
                except Exception as error:  # The database is away: nobody can say, so nobody is sent away.
                    to_problem(error)
                    break
                if not holds and task in self._under_way:
                    exchange.cut = True
                    task.cancel()


class _Exchange:
    """A request and what was answered so far."""

    __slots__ = ("_begun", "_ended", "_send", "began_at", "cut", "scope")

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.began_at = time.monotonic()
        self.cut = False
        self._send = send
        self._begun = self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
        elif not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    async def end(self) -> None:
        """Answers, or ends the answer, of one who is sent away."""
        if not self._begun:
            await self.send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        if not self._ended:
            await self.send({"type": "http.response.body", "body": b""})


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

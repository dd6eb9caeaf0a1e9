"""The MCP endpoint inside the gateway, with the gateway's keys and limits: each key has its own tools and sessions."""

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

_RELEASE_SCOPE_KEY: Final = "toolspace.release"
_RECHECK_SECONDS: Final = 3.0
"""How often the keys of open connections are checked again."""


class McpMount:
    """An ASGI application for `/mcp`. Works inside its `async with`.

    Secret keys see every tool, tool keys those that they allow. Entities with a public key are refused.
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
        self._keys_changed = asyncio.Event()
        authenticator.on_change(self._keys_changed.set)
        self._requests: dict[asyncio.Task[Any], _OpenRequest] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._endpoint)
        watcher = asyncio.create_task(self._watch_keys())
        self._stack.push_async_callback(_cancel, watcher)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        request = self._requests[task] = _OpenRequest(scope, send)
        try:
            await self._endpoint(scope, receive, request.send)
        except asyncio.CancelledError:
            if not request.is_revoked:
                raise
            task.uncancel()
            await request.end()
        finally:
            del self._requests[task]
            if (release := scope.pop(_RELEASE_SCOPE_KEY, None)) is not None:
                release()

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
            raise Problem(403, "the MCP endpoint accepts secret keys and tool keys, not public keys")
        scope[_RELEASE_SCOPE_KEY] = self._limits.admit(caller, stream=scope["method"] == "GET")
        return self._tool_keys.context_for(caller)

    async def _watch_keys(self) -> None:
        """Ends requests whose key has been revoked: a stream may stay open for days."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECHECK_SECONDS):
                    await self._keys_changed.wait()
            started_before = time.monotonic() - (0.0 if self._keys_changed.is_set() else _RECHECK_SECONDS)
            self._keys_changed.clear()
            for task, request in list(self._requests.items()):
                is_admitted = _RELEASE_SCOPE_KEY in request.scope
                if request.started_at > started_before or request.is_revoked or not is_admitted:
                    continue
                try:
                    is_valid = await self._authenticator.is_valid(request.scope["headers"])
                except Exception as error:  # The database cannot be reached: all requests stay.
                    to_problem(error)
                    break
                if not is_valid and task in self._requests:
                    request.is_revoked = True
                    task.cancel()


class _OpenRequest:
    """A request, and how much of its response has been sent."""

    __slots__ = ("_is_ended", "_is_started", "_send", "is_revoked", "scope", "started_at")

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.started_at = time.monotonic()
        self.is_revoked = False
        self._send = send
        self._is_started = self._is_ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_started = True
        elif not message.get("more_body", False):
            self._is_ended = True
        await self._send(message)

    async def end(self) -> None:
        """Sends 401, or ends the response that has started."""
        if not self._is_started:
            await self.send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        if not self._is_ended:
            await self.send({"type": "http.response.body", "body": b""})


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

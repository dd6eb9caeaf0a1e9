"""Tells connected clients that a list changed: on their session, or on the stream that they opened for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    ResourcesListChanged,
    ServerEvent,
    ToolsListChanged,
)

_PATIENCE_SECONDS = 5.0
_METHODS: dict[type[Any], str] = {
    ToolsListChanged: "notifications/tools/list_changed",
    ResourcesListChanged: "notifications/resources/list_changed",
}


class Changes:
    """Both eras: sessions of the handshake era are told by themselves, later clients listen."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self.listen = ListenHandler(self._bus)
        self._sessions: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._tasks: dict[object, asyncio.Task[None]] = {}

    def joined(self, context: ServerRequestContext[Any, Any]) -> None:
        """A session of the handshake era is ready. Kept as long as the library keeps it."""
        self._sessions.add(context.session._connection)  # pyright: ignore[reportPrivateUsage] - there is no other way

    def tools(self) -> None:
        self._tell(ToolsListChanged())

    def outputs(self) -> None:
        self._tell(ResourcesListChanged())

    async def aclose(self) -> None:
        self.listen.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _tell(self, event: ServerEvent) -> None:
        self._start(type(event), lambda: self._bus.publish(event))
        for session in list(self._sessions):
            self._start((id(session), type(event)), lambda session=session: _notify(session, event))

    def _start(self, key: object, work: Callable[[], Any]) -> None:
        # One at a time for each: a client that does not read must not gather tasks.
        if key not in self._tasks:
            task = asyncio.get_running_loop().create_task(work())
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))


async def _notify(session: Connection, event: ServerEvent) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await session.notify(_METHODS[type(event)], None)
    except TimeoutError:
        pass  # It does not read. It will see the list when it asks.

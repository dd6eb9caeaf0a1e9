"""The in-process event bus: code subscribes to events by their type. A subscriber cannot fail a call."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from toolspace.core.events import Event, EventType
from toolspace.orchestrator.call import start_in_background

Subscriber = Callable[[Any], Awaitable[None] | None]
_log = logging.getLogger("toolspace.events")


class EventBus:
    """Delivers events at once and in order. An async subscriber runs as a task that the bus owns."""

    def __init__(self) -> None:
        self.subscribers: dict[EventType, tuple[Subscriber, ...]] = {}
        """Has only types with subscribers, so `type in bus.subscribers` is a cheap test."""
        self._tasks: set[asyncio.Task[None]] = set()

    def subscribe(self, subscriber: Subscriber, *types: EventType | type[Event]) -> Callable[[], None]:
        """Calls the subscriber for each event of these types; without types, for every event.

        Returns the function that ends the subscription.
        """
        event_types = [item if isinstance(item, EventType) else item.type for item in types] or list(EventType)
        for type in event_types:
            self.subscribers[type] = (*self.subscribers.get(type, ()), subscriber)

        def unsubscribe() -> None:
            for type in event_types:
                remaining = list(self.subscribers.get(type, ()))
                with suppress(ValueError):
                    remaining.remove(subscriber)
                if remaining:
                    self.subscribers[type] = tuple(remaining)
                else:
                    self.subscribers.pop(type, None)

        return unsubscribe

    def has_subscribers(self, type: EventType) -> bool:
        """Whether anyone subscribes to events of this type; if not, they need not be created."""
        return type in self.subscribers

    def emit(self, event: Event) -> None:
        self.deliver(event, self.subscribers.get(event.type, ()))

    def deliver(self, event: Event, subscribers: tuple[Subscriber, ...]) -> None:
        """Passes an event to subscribers that the caller has looked up."""
        for subscriber in subscribers:
            try:
                awaitable = subscriber(event)
                if awaitable is not None:
                    self._run(awaitable)
            except Exception:
                _log.exception("a subscriber of %s failed", event.type.name)

    async def stream(self, *types: EventType | type[Event], limit: int = 1_000) -> AsyncIterator[Event]:
        """Yields the events from now on. A consumer that is `limit` events behind loses the oldest."""
        with self.open_queue(*types, limit=limit) as queue:
            while True:
                yield await queue.get()

    @contextmanager
    def open_queue(
        self, *types: EventType | type[Event], limit: int = 1_000
    ) -> Generator[asyncio.Queue[Event], None, None]:
        """Yields a queue that receives the events until the block ends. A full queue drops its oldest event."""
        queue: asyncio.Queue[Event] = asyncio.Queue(limit)

        def put(event: Event) -> None:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

        unsubscribe = self.subscribe(put, *types)
        try:
            yield queue
        finally:
            unsubscribe()

    async def aclose(self) -> None:
        """Waits for the subscribers that are running."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _run(self, awaitable: object) -> None:
        if inspect.isawaitable(awaitable):
            # Outside the call that the event is about: calls that the subscriber makes are not part of it.
            start_in_background(self._tasks, _finish(awaitable))


async def _finish(awaitable: Awaitable[None]) -> None:
    try:
        await awaitable
    except Exception:
        _log.exception("an async subscriber failed")

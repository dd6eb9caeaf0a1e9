"""The in-process event bus: code subscribes by type. A subscriber can never fail a call."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from toolspace.core.events import Event, EventType
from toolspace.orchestrator.call import context_without_call

Subscriber = Callable[[Any], Awaitable[None] | None]
_log = logging.getLogger("toolspace.events")


class EventBus:
    """Delivers events at once and in order. An async subscriber runs as a task that the bus owns."""

    def __init__(self) -> None:
        self.subscribers: dict[EventType, tuple[Subscriber, ...]] = {}
        """Only types that someone listens to: `kind in bus.subscribers` is the cheap question."""
        self._tasks: set[asyncio.Task[None]] = set()

    def subscribe(self, subscriber: Subscriber, *types: EventType | type[Event]) -> Callable[[], None]:
        """Calls the subscriber for each event of these types; of all types where none is named.

        Returns the function that ends the subscription.
        """
        wanted = [one if isinstance(one, EventType) else one.type for one in types] or list(EventType)
        for one in wanted:
            self.subscribers[one] = (*self.subscribers.get(one, ()), subscriber)

        def unsubscribe() -> None:
            for one in wanted:
                rest = list(self.subscribers.get(one, ()))
                with suppress(ValueError):
                    rest.remove(subscriber)
                if rest:
                    self.subscribers[one] = tuple(rest)
                else:
                    self.subscribers.pop(one, None)

        return unsubscribe

    def has_subscribers(self, kind: EventType) -> bool:
        """Whether anyone listens: an event that nobody wants need not be made."""
        return kind in self.subscribers

    def emit(self, event: Event) -> None:
        self.deliver(event, self.subscribers.get(event.type, ()))

    def deliver(self, event: Event, subscribers: tuple[Subscriber, ...]) -> None:
        """Gives an event to subscribers that were looked up already."""
        for subscriber in subscribers:
            try:
                waiting = subscriber(event)
                if waiting is not None:
                    self._keep(waiting)
            except Exception:
                _log.exception("a subscriber of %s failed", event.type.name)

    async def stream(self, *types: EventType | type[Event], limit: int = 1_000) -> AsyncIterator[Event]:
        """The events from now on. A reader that falls `limit` events behind loses the oldest."""
        with self.open_queue(*types, limit=limit) as queue:
            while True:
                yield await queue.get()

    @contextmanager
    def open_queue(
        self, *types: EventType | type[Event], limit: int = 1_000
    ) -> Generator[asyncio.Queue[Event], None, None]:
        """A bounded queue that fills with events until the block ends."""
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
        """Lets the subscribers that are running finish."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _keep(self, waiting: object) -> None:
        if inspect.isawaitable(waiting):
            # Outside the call that is announced: what a subscriber calls is not a part of it.
            task = asyncio.get_running_loop().create_task(_finish(waiting), context=context_without_call())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _finish(waiting: Awaitable[None]) -> None:
    try:
        await waiting
    except Exception:
        _log.exception("an async subscriber failed")

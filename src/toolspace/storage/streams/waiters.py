"""Wakes whoever waits for a record, by key: `call:ID`, `inbox:AGENT`, `offers:TOOL`. Also timeouts. Stores nothing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, Final, Protocol

Listener = Callable[[Any], None]


class Waiters:
    """Futures and listeners by key. Everything happens on the event loop.

    A wake-up carries the changed record if this process changed it, and None if another one did: then the waiter reads
    the database.
    """

    def __init__(self) -> None:
        self._futures: dict[str, list[asyncio.Future[Any]]] = {}
        self._listeners: dict[str, list[Listener]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._futures.values()))

    def register(self, key: str) -> asyncio.Future[Any]:
        """A future for the next wake-up of a key. Register before you read the record, so that no change is missed.

        To stop waiting, cancel the future or pass it to `unregister`.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(key, []).append(future)
        return future

    def unregister(self, key: str, future: asyncio.Future[Any]) -> None:
        futures = self._futures.get(key)
        if futures is not None and future in futures:
            futures.remove(future)
            if not futures:
                del self._futures[key]

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Calls a function at every wake-up of a key. Returns a function that stops that."""
        self._listeners.setdefault(key, []).append(listener)

        def stop() -> None:
            listeners = self._listeners.get(key)
            if listeners is not None and listener in listeners:
                listeners.remove(listener)
                if not listeners:
                    del self._listeners[key]

        return stop

    def wake(self, key: str, value: Any = None) -> None:
        for future in self._futures.pop(key, ()):
            if not future.done():
                future.set_result(value)
        if (listeners := self._listeners.get(key)) is not None:
            for listener in tuple(listeners):
                listener(value)

    def wake_all(self) -> None:
        """Anything may have changed: every waiter reads the database."""
        for key in (*self._futures, *self._listeners):
            self.wake(key)

    def is_waited_for(self, key: str) -> bool:
        return key in self._futures or key in self._listeners


_MIN_CLOSED: Final = 64
"""Closed waiters that are kept in the heap before it is cleaned."""


class Expirable(Protocol):
    """A waiter with a timeout."""

    closed: bool

    def expire(self) -> None: ...


class DeadlineTimer:
    """Expires waiters that are not closed in time. One timer of the loop serves all of them, which costs less."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expirable]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._closed_count = 0

    def add(self, waiter: Expirable, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + max(seconds, 0.0)
        heapq.heappush(self._heap, (expires_at, next(self._numbers), waiter))
        if expires_at < self._timer_at:
            self._set_timer(expires_at, loop)

    def note_closed(self) -> None:
        """A waiter was closed. It stays in the heap until many are: most are closed long before their timeout."""
        self._closed_count += 1
        if self._closed_count > _MIN_CLOSED and self._closed_count * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].closed]
            heapq.heapify(self._heap)
            self._closed_count = 0

    def _expire_due(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer, self._timer_at = None, float("inf")
        while self._heap and self._heap[0][0] <= now:
            waiter = heapq.heappop(self._heap)[2]
            if waiter.closed:
                self._closed_count = max(self._closed_count - 1, 0)
            else:
                waiter.expire()
        if self._heap:
            self._set_timer(self._heap[0][0], loop)

    def _set_timer(self, expires_at: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = expires_at
        self._timer = loop.call_at(expires_at, self._expire_due)

"""Who waits for what, by key: `call:ID`, `inbox:AGENT`, `offers:TOOL`. Wakes them; stores nothing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, Protocol

Listener = Callable[[Any], None]


class Waiters:
    """Futures and listeners by key. Everything happens on the event loop.

    A wake-up carries what happened where that is known here, and None where another process did it: then whoever
    waits looks for itself.
    """

    def __init__(self) -> None:
        self._futures: dict[str, list[asyncio.Future[Any]]] = {}
        self._listeners: dict[str, list[Listener]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._futures.values()))

    def register(self, key: str) -> asyncio.Future[Any]:
        """A future for the next wake-up of a key. Register it before you look, so that nothing falls in between.

        Whoever stops waiting cancels it, or gives it back with `forget`.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(key, []).append(future)
        return future

    def unregister(self, key: str, future: asyncio.Future[Any]) -> None:
        """Nobody waits for this future any more."""
        waiting = self._futures.get(key)
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._futures[key]

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Calls a function at every wake-up of a key. The answer takes the request back."""
        self._listeners.setdefault(key, []).append(listener)

        def forget() -> None:
            listeners = self._listeners.get(key)
            if listeners is not None and listener in listeners:
                listeners.remove(listener)
                if not listeners:
                    del self._listeners[key]

        return forget

    def wake(self, key: str, value: Any = None) -> None:
        """Something happened."""
        for future in self._futures.pop(key, ()):
            if not future.done():
                future.set_result(value)
        if (listeners := self._listeners.get(key)) is not None:
            for listener in tuple(listeners):
                listener(value)

    def wake_all(self) -> None:
        """Anything may have happened: everybody looks for themselves."""
        for key in (*self._futures, *self._listeners):
            self.wake(key)

    def is_waited_for(self, key: str) -> bool:
        return key in self._futures or key in self._listeners


# MERGED from timers: One timer for many who wait: a timer of the loop for each would cost more than all else that …

_FEW = 64
"""So many that stopped waiting are kept without looking."""


class Expirable(Protocol):
    """Someone who waits no longer than to a time."""

    closed: bool

    def expire(self) -> None: ...


class DeadlineTimer:
    """Tells each when its time is up, unless it is closed by then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Expirable]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = float("inf")
        self._closed = 0

    def add(self, waits: Expirable, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        when = loop.time() + max(seconds, 0.0)
        heapq.heappush(self._heap, (when, next(self._numbers), waits))
        if when < self._rings_at:
            self._ring_at(when, loop)

    def note_closed(self) -> None:
        """One of them stopped waiting. Forgotten now and then: most stop long before their time."""
        self._closed += 1
        if self._closed > _FEW and self._closed * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].closed]
            heapq.heapify(self._heap)
            self._closed = 0

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer, self._rings_at = None, float("inf")
        while self._heap and self._heap[0][0] <= now:
            waits = heapq.heappop(self._heap)[2]
            if waits.closed:
                self._closed = max(self._closed - 1, 0)
            else:
                waits.expire()
        if self._heap:
            self._ring_at(self._heap[0][0], loop)

    def _ring_at(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = when
        self._timer = loop.call_at(when, self._ring)

"""One timer for many who wait: a timer of the loop for each would cost more than all else that waiting costs."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Protocol

_FEW = 64
"""So many that stopped waiting are kept without looking."""


class Waits(Protocol):
    """Someone who waits no longer than to a time."""

    closed: bool

    def expire(self) -> None: ...


class Deadlines:
    """Tells each when its time is up, unless it is closed by then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waits]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = float("inf")
        self._closed = 0

    def add(self, waits: Waits, seconds: float) -> None:
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

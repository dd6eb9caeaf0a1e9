"""What running calls say of themselves, led to whoever asked for their progress. Sends nothing itself."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from toolspace.core import json_text
from toolspace.core.events import CallPartial, CallProgress
from toolspace.orchestrator.event_bus import EventBus

_MOST_WAITING = 1_000
_LONGEST_MESSAGE = 2_000


class ProgressReport(NamedTuple):
    """How far a call is. Each is further than the one before, as MCP demands."""

    progress: float
    total: float | None
    message: str | None


class ProgressQueue:
    """The reports of one call that are still to be sent. A reader that is too slow loses the oldest."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[ProgressReport] = deque(maxlen=_MOST_WAITING)
        self._last = -math.inf
        self._counts = False
        """Whether the tool counts itself; where it only streams, its pieces are counted."""

    def drain(self) -> list[ProgressReport]:
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def add(self, event: CallProgress | CallPartial) -> None:
        if isinstance(event, CallProgress):
            self._counts = True
            self._put(event.progress, event.total, event.message)
        else:
            value = event.value
            text = value if isinstance(value, str) else json_text.encode(value)
            pieces = max(self._last, 0.0) + (0 if self._counts else 1)
            self._put(pieces, None, text)

    def _put(self, progress: float, total: float | None, message: str | None) -> None:
        if not math.isfinite(progress):
            progress = self._last if math.isfinite(self._last) else 0.0
        if progress <= self._last:
            progress = math.nextafter(self._last, math.inf)  # Further, by next to nothing: what it says is kept.
        self._last = progress
        if total is not None and not math.isfinite(total):
            total = None
        if message is not None:
            message = json_text.valid_text(message[:_LONGEST_MESSAGE])
        self._waiting.append(ProgressReport(progress, total, message))
        self._wake()


class ProgressSubscriptions:
    """Listens to the bus while anyone wants to know: calls that nobody follows pay nothing."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._followed: dict[str, ProgressQueue] = {}
        self._forget: Callable[[], None] | None = None

    @contextmanager
    def follow(self, call_id: str, reports: ProgressQueue) -> Generator[None]:
        self._followed[call_id] = reports
        if self._forget is None:
            self._forget = self._bus.subscribe(self._heard, CallProgress, CallPartial)
        try:
            yield
        finally:
            del self._followed[call_id]
            if not self._followed:
                self._forget()
                self._forget = None

    def _heard(self, event: CallProgress | CallPartial) -> None:
        reports = self._followed.get(event.call_id)
        if reports is not None:
            reports.add(event)


class WakeSignal:
    """Wakes the task that sends reports, and tells it when the call is over."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.is_over = False

    def wake(self) -> None:
        self._changed.set()

    def end(self) -> None:
        self.is_over = True
        self._changed.set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits for something to send. False where the time passed first."""
        if seconds is None:
            await self._changed.wait()
        else:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return False
        self._changed.clear()
        return True

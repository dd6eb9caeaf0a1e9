"""Collects the progress of running calls for clients that ask for it. Sends nothing itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from toolspace.core import json_text
from toolspace.core.events import CallPartial, CallProgress
from toolspace.orchestrator.event_bus import EventBus

_MAX_REPORTS = 1_000
_MAX_MESSAGE_CHARACTERS = 2_000


class ProgressReport(NamedTuple):
    """One progress notification. `progress` grows from report to report, as MCP requires."""

    progress: float
    total: float | None
    message: str | None


class ProgressQueue:
    """The unsent reports of one call. If the client reads too slowly, the oldest are dropped."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._reports: deque[ProgressReport] = deque(maxlen=_MAX_REPORTS)
        self._last_progress = -math.inf
        self._reports_progress = False
        """Whether the tool reports progress itself. If it only streams partial results, these are counted."""

    def drain(self) -> list[ProgressReport]:
        """Removes and returns all reports."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def add(self, event: CallProgress | CallPartial) -> None:
        if isinstance(event, CallProgress):
            self._reports_progress = True
            self._append(event.progress, event.total, event.message)
        else:
            value = event.value
            text = value if isinstance(value, str) else json_text.encode(value)
            count = max(self._last_progress, 0.0) + (0 if self._reports_progress else 1)
            self._append(count, None, text)

    def _append(self, progress: float, total: float | None, message: str | None) -> None:
        if not math.isfinite(progress):
            progress = self._last_progress if math.isfinite(self._last_progress) else 0.0
        if progress <= self._last_progress:
            progress = math.nextafter(self._last_progress, math.inf)  # The smallest growth, to keep the message.
        self._last_progress = progress
        if total is not None and not math.isfinite(total):
            total = None
        if message is not None:
            message = json_text.valid_text(message[:_MAX_MESSAGE_CHARACTERS])
        self._reports.append(ProgressReport(progress, total, message))
        self._wake()


class ProgressSubscriptions:
    """Subscribes to the event bus while a call is followed, so that other calls cost nothing."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._queues: dict[str, ProgressQueue] = {}
        self._unsubscribe: Callable[[], None] | None = None

    @contextmanager
    def follow(self, call_id: str, queue: ProgressQueue) -> Generator[None]:
        self._queues[call_id] = queue
        if self._unsubscribe is None:
            self._unsubscribe = self._bus.subscribe(self._handle_event, CallProgress, CallPartial)
        try:
            yield
        finally:
            del self._queues[call_id]
            if not self._queues:
                self._unsubscribe()
                self._unsubscribe = None

    def _handle_event(self, event: CallProgress | CallPartial) -> None:
        queue = self._queues.get(event.call_id)
        if queue is not None:
            queue.add(event)

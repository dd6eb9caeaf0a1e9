"""The recent events of a stream, shared by all who read it. Bounded in number and in bytes; knows no readers."""

from __future__ import annotations

from typing import Final

from toolspace.core import json_text
from toolspace.core.records import StreamEvent

MOST_EVENTS: Final = 4096
MOST_BYTES: Final = 16 * 1024 * 1024
_OVERHEAD: Final = 512
"""Bytes that an event takes beside its data, about."""
_DATA: Final = "data"


def encoded_data(event: StreamEvent) -> bytes:
    """The JSON of an event's data, made once."""
    text = event.frames.get(_DATA)
    if text is None:
        text = event.frames[_DATA] = json_text.encode_bytes(event.data)
    return text


class Ring:
    """Events at positions that grow by one. When there are too many, the oldest are let go."""

    __slots__ = ("_bytes", "_events", "_most", "_most_bytes", "first", "last")

    def __init__(self, last: int, *, most: int = MOST_EVENTS, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.restart(last)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def weight(self) -> int:
        """The bytes that it holds, about."""
        return self._bytes

    def restart(self, last: int) -> None:
        """Forgets everything: the next event has the position after this one."""
        self._events: list[StreamEvent] = []
        self._bytes = 0
        self.first = last + 1
        """The position of the oldest event; one beyond the last where there is none."""
        self.last = last

    def append(self, event: StreamEvent) -> None:
        """Adds the event of the next position."""
        self._events.append(event)
        self._bytes += _weigh(event)
        self.last += 1
        if len(self._events) > self._most or self._bytes > self._most_bytes:
            self._let_go()

    def holds(self, position: int) -> bool:
        """Whether everything behind a position is here."""
        return position >= self.first - 1

    def after(self, position: int, limit: int) -> list[StreamEvent]:
        """The events behind a position, in order; none where they are not all here."""
        start = position + 1 - self.first
        return self._events[start : start + limit] if start >= 0 else []

    def _let_go(self) -> None:
        # A quarter at once: moving the rest up for each event would cost more than keeping it.
        while len(self._events) > 1 and (len(self._events) > self._most or self._bytes > self._most_bytes):
            count = max(1, len(self._events) // 4)
            self._bytes -= sum(map(_weigh, self._events[:count]))
            del self._events[:count]
            self.first += count


def _weigh(event: StreamEvent) -> int:
    return len(encoded_data(event)) + _OVERHEAD

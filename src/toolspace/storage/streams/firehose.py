"""What happens in all streams from now on, for those who watch a whole process. Keeps no past; replays nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from toolspace.core.ids import now_ms
from toolspace.core.records import StreamEvent
from toolspace.storage.streams.ring import Ring

_log = logging.getLogger("toolspace.storage")

_PAGE: Final = 256
_STREAMS: Final = 10_000
"""Streams whose last id is remembered."""
_BACK: Final = 64
"""How far to look back in a stream that was not heard of before."""
_SKEW_MS: Final = 2_000
"""How much the clocks of other processes may differ."""


class _Reader(Protocol):
    def poke(self) -> None: ...

    def close(self) -> None: ...


class Everything:
    """One ring over all streams, filled only while someone reads it."""

    def __init__(self, load: Callable[[str, int, int], Awaitable[list[StreamEvent]]], ring: Ring) -> None:
        self.ring = ring
        self.subscriptions: set[_Reader] = set()
        self._load = load
        self._last: OrderedDict[str, int] = OrderedDict()
        """The last id of each stream that was put into the ring."""
        self._wanted: dict[str, int] = {}
        self._since = 0
        self._reading: asyncio.Task[None] | None = None

    def join(self, reader: _Reader) -> int:
        """Where a reader begins."""
        if not self.subscriptions:
            self.ring.restart(0)
            self._last.clear()
            self._since = now_ms() - _SKEW_MS
        self.subscriptions.add(reader)
        return self.ring.last

    def leave(self, reader: _Reader) -> None:
        self.subscriptions.discard(reader)
        if not self.subscriptions:
            self.ring.restart(0)
            self._wanted.clear()

    def wake(self) -> None:
        for reader in self.subscriptions:
            reader.poke()

    def take(self, event: StreamEvent) -> None:
        """An event that is stored. Whoever calls wakes the readers."""
        last = self._last.get(event.stream)
        if event.id == last + 1 if last is not None else event.stream not in self._wanted:
            self._append(event)
        elif last is None or event.id > last:
            self.expect(event.stream, event.id)

    def expect(self, stream: str, last_id: int) -> None:
        """Another process appended to a stream."""
        if last_id <= self._last.get(stream, 0):
            return
        self._wanted[stream] = max(last_id, self._wanted.get(stream, 0))
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    def look_again(self) -> None:
        if self.subscriptions:
            for stream, last in list(self._last.items()):
                self.expect(stream, last + 1)

    async def stopped(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while self._wanted and self.subscriptions:
                # Left there while it is read: what is told meanwhile must not be put in front of it.
                stream, wanted = next(iter(self._wanted.items()))
                after = self._last.get(stream, max(0, wanted - _BACK))
                try:
                    events = await self._load(stream, after, _PAGE)
                except Exception as error:  # Whoever watches sees that something is missing; nothing depends on it.
                    _log.warning("the events of %s cannot be read: %s", stream, error)
                    self._wanted.pop(stream, None)
                    continue
                for event in events:
                    if event.id > self._last.get(stream, 0) and event.at >= self._since:
                        self._append(event)
                if self._wanted.get(stream) == wanted:
                    del self._wanted[stream]
                if len(events) == _PAGE:
                    self.expect(stream, events[-1].id + 1)
                if events:
                    self.wake()
        finally:
            self._reading = None

    def _append(self, event: StreamEvent) -> None:
        self._last[event.stream] = event.id
        self._last.move_to_end(event.stream)
        if len(self._last) > _STREAMS:
            self._last.popitem(last=False)
        self.ring.append(event)

"""Readers of streams, as places: each knows how far it has read, and waits for more. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol, Self

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import StoredEvent
from toolspace.errors import ToolspaceError

# MERGED from ring: The recent events of a stream, shared by all who read it. Bounded in number and in bytes; knows…

MAX_EVENTS: Final = 4096
MAX_BYTES: Final = 16 * 1024 * 1024
_OVERHEAD: Final = 512
"""Bytes that an event takes beside its data, about."""
_DATA: Final = "data"


def encode_data(event: StoredEvent) -> bytes:
    """The JSON of an event's data, made once."""
    text = event.frames.get(_DATA)
    if text is None:
        text = event.frames[_DATA] = json_text.encode_bytes(event.data)
    return text


class Ring:
    """Events at positions that grow by one. When there are too many, the oldest are let go."""

    __slots__ = ("_bytes", "_events", "_most", "_most_bytes", "first", "last")

    def __init__(self, last: int, *, most: int = MAX_EVENTS, most_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.restart(last)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def byte_count(self) -> int:
        """The bytes that it holds, about."""
        return self._bytes

    def restart(self, last: int) -> None:
        """Forgets everything: the next event has the position after this one."""
        self._events: list[StoredEvent] = []
        self._bytes = 0
        self.first = last + 1
        """The position of the oldest event; one beyond the last where there is none."""
        self.last = last

    def append(self, event: StoredEvent) -> None:
        """Adds the event of the next position."""
        self._events.append(event)
        self._bytes += _weigh(event)
        self.last += 1
        if len(self._events) > self._most or self._bytes > self._most_bytes:
            self._let_go()

    def has_all_after(self, position: int) -> bool:
        """Whether everything behind a position is here."""
        return position >= self.first - 1

    def list_after(self, position: int, limit: int) -> list[StoredEvent]:
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


def _weigh(event: StoredEvent) -> int:
    return len(encode_data(event)) + _OVERHEAD


# MERGED from firehose: What happens in all streams from now on, for those who watch a whole process. Keeps no past…

_log = logging.getLogger("toolspace.storage")

_PAGE: Final = 256
_STREAMS: Final = 10_000
"""Streams whose last id is remembered."""
_BACK: Final = 64
"""How far to look back in a stream that was not heard of before."""
_SKEW_MS: Final = 2_000
"""How much the clocks of other processes may differ."""


class _Reader(Protocol):
    def wake(self) -> None: ...

    def close(self) -> None: ...


class AllStreams:
    """One ring over all streams, filled only while someone reads it."""

    def __init__(self, load: Callable[[str, int, int], Awaitable[list[StoredEvent]]], ring: Ring) -> None:
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
            reader.wake()

    def take(self, event: StoredEvent) -> None:
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

    def _append(self, event: StoredEvent) -> None:
        self._last[event.stream] = event.id
        self._last.move_to_end(event.stream)
        if len(self._last) > _STREAMS:
            self._last.popitem(last=False)
        self.ring.append(event)


PAGE: Final = 256
"""Events that are read, and handed out, at once."""
_FIRST: Final = 16
"""Stored events that are read before it is known how large they are."""
_BYTES: Final = 64 * 1024
"""Of stored events that are read at once, about: many readers may look back at large ones."""


class SubscriberTooSlow(ToolspaceError):
    """A reader was still busy with what it got when what comes next was let go."""


class StreamClosed(ToolspaceError):
    """There is nothing more to read: the subscription, or everything, was closed."""


class Topic(Protocol):
    """What a reader needs of the stream that it reads."""

    stream: str
    ring: Ring

    async def load(self, after: int, limit: int) -> list[StoredEvent]: ...

    async def bounds(self) -> tuple[int, int]: ...

    def expect(self, last_id: int) -> None:
        """Says that events up to this id are stored."""
        ...

    def leave(self, subscription: Subscription) -> None: ...


class _Cursor:
    """What readers have in common: they wait, are poked, and close."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Lets a `next` that waits return, with nothing where nothing happened."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    async def next_batch(self) -> list[StoredEvent]:
        raise NotImplementedError

    def close(self) -> None:
        """Ends it; a `next` that waits raises `StreamClosed`."""
        self.closed = True
        self.wake()

    async def __aiter__(self) -> AsyncIterator[list[StoredEvent]]:
        """Batches until it is closed."""
        while True:
            try:
                batch = await self.next_batch()
            except StreamClosed:
                return
            if batch:
                yield batch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Subscription(_Cursor):
    """One reader of one stream: first what is stored, then what happens, in order, nothing twice."""

    def __init__(self, topic: Topic) -> None:
        super().__init__()
        self._topic = topic
        self.cursor = 0
        """The id of the last event that was handed out."""
        self.reset_id: int | None = None
        """Where the position that was asked for is not kept: the id of the oldest event that is."""
        self._live = False
        """Whether it reads from the ring: then it must keep up."""
        self._page = _FIRST

    @property
    def stream(self) -> str:
        return self._topic.stream

    async def start(self, after: int | None) -> None:
        """Finds the place where it begins."""
        ring = self._topic.ring
        if after is None:
            self.cursor, self._live = ring.last, True
            return
        self.cursor = after
        if ring.has_all_after(after) and after <= ring.last:
            return
        oldest, newest = await self._topic.bounds()
        if after > newest or after + 1 < oldest:
            self.cursor, self.reset_id = oldest - 1, oldest
        self._topic.expect(newest)

    @property
    def ring(self) -> Ring:
        """The recent events, shared by all readers of the stream."""
        return self._topic.ring

    @property
    def has_fallen_behind(self) -> bool:
        """Whether the ring went on without it."""
        return self._live and not self._topic.ring.has_all_after(self.cursor)

    async def wait_for_events(self) -> bool:
        """Waits until there is more, and says whether the ring has it; False where it was poked, or must `replay`.

        Raises `TooSlow` where the ring went on while the reader was busy. One that was waiting here all the time, and
        only had no turn, reads what it missed from the store.
        """
        ring = self._topic.ring
        if self.has_fallen_behind:
            raise SubscriberTooSlow(
                f"{self.stream}: {ring.first - 1 - self.cursor} events were let go before they were read"
            )
        waited = False
        while not self.closed:
            if not ring.has_all_after(self.cursor):
                self._live = False
                return False
            if self.cursor < ring.last:
                self._live = True
                return True
            if waited:
                return False
            await self._wait()
            waited = True
        raise StreamClosed(f"{self.stream}: closed")

    @property
    def needs_replay(self) -> bool:
        """Whether what comes next is in the store alone."""
        return not self._topic.ring.has_all_after(self.cursor)

    async def replay(self) -> list[StoredEvent]:
        """The next events from the store, some at once."""
        batch = await self._topic.load(self.cursor, self._page)
        if batch:
            size = sum(len(encode_data(event)) for event in batch)
            # It grows slowly: behind a small one there may be large ones.
            self._page = min(max(_BYTES * len(batch) // size, 1), 2 * self._page, PAGE)
        # Nothing there though the ring begins later: what was between was removed for its age.
        self.cursor = batch[-1].id if batch else max(self.cursor, self._topic.ring.first - 1)
        return batch

    async def next_batch(self) -> list[StoredEvent]:
        """The next events, some at once; waits until there is one. Empty where it was poked. Raises as `ready` does."""
        if await self.wait_for_events():
            batch = self.ring.list_after(self.cursor, PAGE)
            self.cursor = batch[-1].id
            return batch
        return await self.replay() if self.needs_replay else []

    def close(self) -> None:
        super().close()
        self._topic.leave(self)


class AllStreamsSubscription(_Cursor):
    """One reader of all streams, from now on. Its events are in the order of their streams."""

    def __init__(self, everything: AllStreams) -> None:
        super().__init__()
        self._everything = everything
        self.cursor = everything.join(self)

    @property
    def has_fallen_behind(self) -> bool:
        """Whether the ring went on without it."""
        return not self._everything.ring.has_all_after(self.cursor)

    async def next_batch(self) -> list[StoredEvent]:
        """The next events of any stream. Raises `TooSlow` where they were let go before they were read."""
        ring = self._everything.ring
        poked = False
        while not self.closed:
            if not ring.has_all_after(self.cursor):
                raise SubscriberTooSlow(f"{ring.first - 1 - self.cursor} events were let go before they were read")
            if self.cursor < ring.last:
                batch = ring.list_after(self.cursor, PAGE)
                self.cursor += len(batch)
                return batch
            if poked:
                return []
            await self._wait()
            poked = True
        raise StreamClosed("closed")

    def close(self) -> None:
        super().close()
        self._everything.leave(self)

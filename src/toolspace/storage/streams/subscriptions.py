"""One stream with subscribers: its recent events in a ring, and subscriptions as cursors into it. Knows no HTTP.

A subscription reads from the ring. It reads from the database only the events that the ring does not have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final, Self

from toolspace.core import json_text
from toolspace.core.stored_records import StoredEvent
from toolspace.errors import ToolspaceError

_log = logging.getLogger("toolspace.storage")

LoadEvents = Callable[[str, int, int], Awaitable[list[StoredEvent]]]
"""`(stream, after, limit)`: the stored events after an id, in order."""
LoadBounds = Callable[[str], Awaitable[tuple[int, int]]]
"""The id of the oldest stored event (without any, the next id), and the highest id that the stream ever had."""

MAX_EVENTS: Final = 4096
MAX_BYTES: Final = 16 * 1024 * 1024
_EVENT_OVERHEAD: Final = 512
"""Bytes that an event takes besides its data, about."""
_DATA_FRAME: Final = "data"

PAGE: Final = 256
"""Events of one read, and of one batch."""
_FIRST_PAGE: Final = 16
"""Stored events that are read before their size is known."""
_PAGE_BYTES: Final = 64 * 1024
"""Bytes of one read from the database, about: many subscribers may replay large events."""

_RETRY_SECONDS: Final = (0.05, 0.2, 1.0, 3.0)
"""The pauses between reads while the database does not answer."""


def encode_data(event: StoredEvent) -> bytes:
    """The JSON of an event's data, encoded once."""
    text = event.frames.get(_DATA_FRAME)
    if text is None:
        text = event.frames[_DATA_FRAME] = json_text.encode_bytes(event.data)
    return text


class Ring:
    """Events at positions that grow by one. With too many events or bytes, it drops the oldest."""

    __slots__ = ("_bytes", "_events", "_max_bytes", "_max_events", "first", "last")

    def __init__(self, last: int, *, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self.restart(last)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def byte_count(self) -> int:
        """The bytes of its events, about."""
        return self._bytes

    def restart(self, last: int) -> None:
        """Drops all events: the next one has the position after `last`."""
        self._events: list[StoredEvent] = []
        self._bytes = 0
        self.first = last + 1
        """The position of the oldest event; of the next one, if it is empty."""
        self.last = last

    def append(self, event: StoredEvent) -> None:
        """Adds the event of the next position."""
        self._events.append(event)
        self._bytes += _size_of(event)
        self.last += 1
        if len(self._events) > self._max_events or self._bytes > self._max_bytes:
            self._drop_oldest()

    def has_all_after(self, position: int) -> bool:
        return position >= self.first - 1

    def list_after(self, position: int, limit: int) -> list[StoredEvent]:
        """The events after a position, in order; none if the ring does not have all of them."""
        start = position + 1 - self.first
        return self._events[start : start + limit] if start >= 0 else []

    def _drop_oldest(self) -> None:
        # A quarter at once: dropping one event moves all others.
        while len(self._events) > 1 and (len(self._events) > self._max_events or self._bytes > self._max_bytes):
            count = max(1, len(self._events) // 4)
            self._bytes -= sum(map(_size_of, self._events[:count]))
            del self._events[:count]
            self.first += count


def _size_of(event: StoredEvent) -> int:
    return len(encode_data(event)) + _EVENT_OVERHEAD


class SubscriberTooSlow(ToolspaceError):
    """The ring dropped the next events while the subscriber was busy with earlier ones."""


class StreamClosed(ToolspaceError):
    """There is nothing more to read: the subscription, or the hub, was closed."""


class Cursor:
    """A position in a ring, and what subscriptions of one and of all streams share: waiting and closing."""

    def __init__(self, stream: str, ring: Ring) -> None:
        self.stream = stream
        self.ring = ring
        """The recent events, shared by all subscribers of the stream."""
        self.cursor = 0
        """The position of the last event that the subscriber got; in a stream, its id."""
        self.closed = False
        self._wake_future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Lets a waiting `next_batch` return; without new events it returns an empty batch."""
        if self._wake_future is not None and not self._wake_future.done():
            self._wake_future.set_result(None)

    async def _wait_for_ring(self) -> bool:
        """Waits for the next events. Whether the ring has them; False if it was woken, or if the ring dropped them."""
        ring, has_waited = self.ring, False
        while not self.closed:
            if has_waited or self.cursor < ring.last or not ring.has_all_after(self.cursor):
                return self.cursor < ring.last and ring.has_all_after(self.cursor)
            self._wake_future = asyncio.get_running_loop().create_future()
            try:
                await self._wake_future
            finally:
                self._wake_future = None
            has_waited = True
        raise StreamClosed(f"{self.stream}: closed")

    def _check_speed(self) -> None:
        """Raises `SubscriberTooSlow` if the ring has dropped the next events."""
        if not self.ring.has_all_after(self.cursor):
            count = self.ring.first - 1 - self.cursor
            raise SubscriberTooSlow(f"{self.stream}: {count} events were dropped before the subscriber read them")

    async def next_batch(self) -> list[StoredEvent]:
        raise NotImplementedError

    def close(self) -> None:
        """A waiting `next_batch` raises `StreamClosed`."""
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


class Subscription(Cursor):
    """One subscriber of one stream: first stored events, then new ones, in order and each once."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic.stream, topic.ring)
        self._topic = topic
        self.reset_id: int | None = None
        """The id of the oldest stored event, if the position that was asked for is no longer stored."""
        self._is_live = False
        """Whether it reads from the ring: then it must keep up."""
        self._page = _FIRST_PAGE

    async def start(self, after: int | None) -> None:
        """Sets the position: after an id, or after the newest event."""
        if after is None:
            self.cursor, self._is_live = self.ring.last, True
            return
        self.cursor = after
        if self.ring.has_all_after(after) and after <= self.ring.last:
            return
        oldest, newest = await self._topic.bounds()
        if after > newest or after + 1 < oldest:
            self.cursor, self.reset_id = oldest - 1, oldest
        self._topic.expect(newest)

    @property
    def has_fallen_behind(self) -> bool:
        """Whether it read from the ring, and the ring has dropped the next events."""
        return self._is_live and self.needs_replay

    @property
    def needs_replay(self) -> bool:
        """Whether only the database has the next events."""
        return not self.ring.has_all_after(self.cursor)

    async def wait_for_events(self) -> bool:
        """Waits for the next events. Returns whether the ring has them; False if it was woken, or needs a replay.

        Raises `SubscriberTooSlow` if the ring dropped them while the subscriber was busy. A subscriber that waited here
        all the time, and only was not scheduled, reads the missing events from the database.
        """
        if self._is_live:
            self._check_speed()
        has_events = await self._wait_for_ring()
        self._is_live = has_events or (self._is_live and not self.needs_replay)
        return has_events

    async def replay(self) -> list[StoredEvent]:
        """The next events from the database."""
        batch = await self._topic.load(self.cursor, self._page)
        if batch:
            size = sum(len(encode_data(event)) for event in batch)
            # It at most doubles: after small events there may be large ones.
            self._page = min(max(_PAGE_BYTES * len(batch) // size, 1), 2 * self._page, PAGE)
        # Without events before the ring begins: they were deleted for their age.
        self.cursor = batch[-1].id if batch else max(self.cursor, self.ring.first - 1)
        return batch

    async def next_batch(self) -> list[StoredEvent]:
        """The next events; waits until there is one. Empty if it was woken. Raises as `wait_for_events` does."""
        if await self.wait_for_events():
            batch = self.ring.list_after(self.cursor, PAGE)
            self.cursor = batch[-1].id
            return batch
        return await self.replay() if self.needs_replay else []

    def close(self) -> None:
        super().close()
        self._topic.leave(self)


class Topic:
    """One stream with subscribers: its ring, and how it catches up with the database."""

    def __init__(
        self, stream: str, ring: Ring, load: LoadEvents, bounds: LoadBounds, on_empty: Callable[[Topic], None]
    ) -> None:
        """`on_empty` is called when the last subscription has left."""
        self.stream = stream
        self.ring = ring
        self.load = partial(load, stream)
        self.bounds = partial(bounds, stream)
        self._on_empty = on_empty
        self.subscriptions: set[Subscription] = set()
        self._is_open = False
        self._expected_id = 0
        """The highest id that this process was told of."""
        self._is_stale = False
        """Whether the database may have more than that."""
        self._open_task: asyncio.Task[None] | None = None
        self._catch_up_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Reads the last id of the stream. Subscribers that come at once share one read."""
        if self._is_open:
            return
        if self._open_task is None:
            self._open_task = asyncio.create_task(self._open())
            # Marks the error as retrieved, in case all who waited for it were cancelled.
            self._open_task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        await asyncio.shield(self._open_task)

    async def _open(self) -> None:
        try:
            _, newest = await self.bounds()
        finally:
            self._open_task = None
        self.ring.restart(newest)
        self._is_open = True
        self.expect(0)

    def add(self, event: StoredEvent) -> None:
        """Adds a stored event. The caller wakes the subscribers afterwards."""
        if not self._is_open:
            self._expected_id = max(self._expected_id, event.id)
        elif event.id == self.ring.last + 1:
            self.ring.append(event)
        else:
            # Another process stored events in between, or this one was added before: the database has the order.
            self.expect(event.id)

    def expect(self, last_id: int) -> None:
        """Events up to this id are stored."""
        self._expected_id = max(self._expected_id, last_id)
        if self._is_open and self._has_more() and self._catch_up_task is None:
            self._catch_up_task = asyncio.create_task(self._catch_up())

    def resync(self) -> None:
        self._is_stale = True
        self.expect(0)

    def wake(self) -> None:
        for subscription in self.subscriptions:
            subscription.wake()

    def leave(self, subscription: Subscription) -> None:
        self.subscriptions.discard(subscription)
        if not self.subscriptions:
            self._on_empty(self)
            if self._catch_up_task is not None:
                self._catch_up_task.cancel()

    def close(self) -> None:
        """Ends the subscriptions."""
        for subscription in tuple(self.subscriptions):
            subscription.close()

    async def stop(self) -> None:
        tasks = [task for task in (self._open_task, self._catch_up_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _has_more(self) -> bool:
        return self._is_stale or self._expected_id > self.ring.last

    async def _catch_up(self) -> None:
        failures = 0
        try:
            while self._has_more():
                self._is_stale = False
                expected_id = self._expected_id
                try:
                    events = await self.load(self.ring.last, PAGE)
                except Exception as error:
                    pause = _RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)]
                    _log.warning("stream %s: reading events failed, retrying in %s s: %s", self.stream, pause, error)
                    self._is_stale = True
                    await asyncio.sleep(pause)
                    failures += 1
                    continue
                failures = 0
                self._is_stale = self._is_stale or len(events) == PAGE
                if not events and self._expected_id == expected_id:
                    self._expected_id = self.ring.last  # The expected events were deleted already.
                self._merge(events)
        finally:
            self._catch_up_task = None

    def _merge(self, events: list[StoredEvent]) -> None:
        for event in events:
            if event.id > self.ring.last:
                if event.id > self.ring.last + 1:
                    self.ring.restart(event.id - 1)  # The events in between were deleted for their age.
                self.ring.append(event)
        self.wake()

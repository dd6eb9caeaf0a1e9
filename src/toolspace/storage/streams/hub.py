"""Gives stored events to the subscribers of this process. The database has the truth; knows no HTTP.

A stream with subscribers has one ring of its recent events, and each subscriber has a cursor into it: there is no queue
for each subscriber, so a slow one costs nothing. A stream without subscribers costs nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from toolspace.core.ids import now_ms
from toolspace.core.stored_records import StoredEvent
from toolspace.storage.streams.subscriptions import (
    MAX_BYTES,
    MAX_EVENTS,
    PAGE,
    Cursor,
    LoadBounds,
    LoadEvents,
    Ring,
    StreamClosed,
    Subscription,
    Topic,
)

_log = logging.getLogger("toolspace.storage")

_MAX_STREAMS: Final = 10_000
"""Streams whose last id the subscription to all streams remembers."""
_LOOK_BACK: Final = 64
"""How many events of a stream that is new to it the subscription to all streams reads."""
_CLOCK_SKEW_MS: Final = 2_000
"""How much the time of other processes may differ, which they measure at the same database."""


class Hub:
    """All streams of this process. Everything happens on one event loop."""

    def __init__(
        self,
        load: LoadEvents,
        bounds: LoadBounds,
        *,
        now_ms: Callable[[], int] = now_ms,
        max_events: int = MAX_EVENTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`now_ms`: the time that the events have."""
        self.load = load
        self.now_ms = now_ms
        self.closed = False
        self._bounds = bounds
        self._limits = {"max_events": max_events, "max_bytes": max_bytes}
        self._topics: dict[str, Topic] = {}
        self._all_streams = _AllStreams(self, Ring(0, **self._limits))

    @property
    def stream_count(self) -> int:
        """How many streams have subscribers."""
        return len(self._topics)

    @property
    def subscription_count(self) -> int:
        return sum(len(topic.subscriptions) for topic in self._topics.values()) + len(self._all_streams.subscriptions)

    def publish(self, events: Iterable[StoredEvent]) -> None:
        """Gives events to subscribers, after their commit."""
        if not self._topics and not self._all_streams.subscriptions:
            return
        topics: dict[str, Topic] = {}
        for event in events:
            topic = self._topics.get(event.stream)
            if topic is not None:
                topic.add(event)
                topics[event.stream] = topic
            if self._all_streams.subscriptions:
                self._all_streams.add(event)
        for topic in topics.values():
            topic.wake()
        self._all_streams.wake()

    def notify_appended(self, stream: str, last_id: int) -> None:
        """Another process appended to a stream, up to this id."""
        topic = self._topics.get(stream)
        if topic is not None:
            topic.expect(last_id)
        if self._all_streams.subscriptions:
            self._all_streams.expect(stream, last_id)

    def resync(self) -> None:
        """Anything may have been appended anywhere: reads every stream with subscribers again."""
        for topic in self._topics.values():
            topic.resync()
        self._all_streams.resync()

    async def subscribe(self, stream: str, *, after: int | None = None) -> Subscription:
        """Subscribes to a stream: to the events after an id, or to new ones.

        Once this returns, the subscription misses nothing that is appended. The caller closes it.
        """
        if self.closed:
            raise StreamClosed("the streams are closed")
        topic = self._topics.get(stream)
        if topic is None:
            ring = Ring(0, **self._limits)
            topic = self._topics[stream] = Topic(stream, ring, self.load, self._bounds, self._remove_topic)
        subscription = Subscription(topic)
        topic.subscriptions.add(subscription)
        try:
            await topic.open()
            await subscription.start(after)
        except BaseException:
            subscription.close()
            raise
        return subscription

    def subscribe_all(self) -> AllStreamsSubscription:
        """Subscribes to the new events of all streams. The caller closes the subscription."""
        if self.closed:
            raise StreamClosed("the streams are closed")
        return AllStreamsSubscription(self._all_streams)

    def close_stream(self, stream: str) -> None:
        """The subject of the stream was deleted: ends its subscriptions here."""
        if stream in self._topics:
            self._topics[stream].close()

    async def aclose(self) -> None:
        """Ends every subscription: its subscriber gets `StreamClosed`."""
        self.closed = True
        topics = list(self._topics.values())
        for topic in topics:
            topic.close()
        for subscription in tuple(self._all_streams.subscriptions):
            subscription.close()
        await asyncio.gather(*(topic.stop() for topic in topics), self._all_streams.stop())

    def _remove_topic(self, topic: Topic) -> None:
        if self._topics.get(topic.stream) is topic:
            del self._topics[topic.stream]


class _AllStreams:
    """One ring over all streams, filled only while it has subscribers. Replays nothing."""

    def __init__(self, hub: Hub, ring: Ring) -> None:
        self.ring = ring
        self.subscriptions: set[AllStreamsSubscription] = set()
        self._hub = hub
        self._last_ids: OrderedDict[str, int] = OrderedDict()
        """The last id of each stream that the ring got."""
        self._expected_ids: dict[str, int] = {}
        """Streams to read from the database, and up to which id."""
        self._since = 0
        self._read_task: asyncio.Task[None] | None = None

    def join(self, subscription: AllStreamsSubscription) -> int:
        """The position at which a subscription starts."""
        if not self.subscriptions:
            self.ring.restart(0)
            self._last_ids.clear()
            self._since = self._hub.now_ms() - _CLOCK_SKEW_MS
        self.subscriptions.add(subscription)
        return self.ring.last

    def leave(self, subscription: AllStreamsSubscription) -> None:
        self.subscriptions.discard(subscription)
        if not self.subscriptions:
            self.ring.restart(0)
            self._expected_ids.clear()

    def wake(self) -> None:
        for subscription in self.subscriptions:
            subscription.wake()

    def add(self, event: StoredEvent) -> None:
        """Adds a stored event. The caller wakes the subscribers afterwards."""
        last_id = self._last_ids.get(event.stream)
        if event.id == last_id + 1 if last_id is not None else event.stream not in self._expected_ids:
            self._append(event)
        elif last_id is None or event.id > last_id:
            self.expect(event.stream, event.id)

    def expect(self, stream: str, last_id: int) -> None:
        """Another process appended to a stream."""
        if last_id <= self._last_ids.get(stream, 0):
            return
        self._expected_ids[stream] = max(last_id, self._expected_ids.get(stream, 0))
        if self._read_task is None:
            self._read_task = asyncio.create_task(self._read())

    def resync(self) -> None:
        if self.subscriptions:
            for stream, last_id in list(self._last_ids.items()):
                self.expect(stream, last_id + 1)

    async def stop(self) -> None:
        if self._read_task is not None:
            self._read_task.cancel()
            await asyncio.gather(self._read_task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while self._expected_ids and self.subscriptions:
                # The stream stays in `_expected_ids` during the read: `add` must not put a later event before these.
                stream, expected_id = next(iter(self._expected_ids.items()))
                after = self._last_ids.get(stream, max(0, expected_id - _LOOK_BACK))
                try:
                    events = await self._hub.load(stream, after, PAGE)
                except Exception as error:  # The subscribers see a gap in the ids; nothing depends on these events.
                    _log.warning("stream %s: reading events failed, skipping them: %s", stream, error)
                    self._expected_ids.pop(stream, None)
                    continue
                for event in events:
                    if event.id > self._last_ids.get(stream, 0) and event.at >= self._since:
                        self._append(event)
                if self._expected_ids.get(stream) == expected_id:
                    del self._expected_ids[stream]
                if len(events) == PAGE:
                    self.expect(stream, events[-1].id + 1)
                if events:
                    self.wake()
        finally:
            self._read_task = None

    def _append(self, event: StoredEvent) -> None:
        self._last_ids[event.stream] = event.id
        self._last_ids.move_to_end(event.stream)
        if len(self._last_ids) > _MAX_STREAMS:
            self._last_ids.popitem(last=False)
        self.ring.append(event)


class AllStreamsSubscription(Cursor):
    """One subscriber of the new events of all streams. Events of one stream come in their order."""

    def __init__(self, all_streams: _AllStreams) -> None:
        super().__init__("all streams", all_streams.ring)
        self._all_streams = all_streams
        self.cursor = all_streams.join(self)

    @property
    def has_fallen_behind(self) -> bool:
        """Whether the ring has dropped the next events."""
        return not self.ring.has_all_after(self.cursor)

    async def next_batch(self) -> list[StoredEvent]:
        """The next events of any stream. Raises `SubscriberTooSlow` if the ring dropped them."""
        has_events = await self._wait_for_ring()
        self._check_speed()
        batch = self.ring.list_after(self.cursor, PAGE) if has_events else []
        self.cursor += len(batch)
        return batch

    def close(self) -> None:
        super().close()
        self._all_streams.leave(self)

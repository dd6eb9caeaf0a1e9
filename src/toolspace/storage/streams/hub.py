"""Brings events from where they are stored to those who read them. The store is the truth; knows no HTTP.

A stream that someone reads has one ring of its recent events, and each reader is a cursor into it: no queue per
reader, so that a slow one costs nothing. A stream that nobody reads costs nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from toolspace.core.records import StoredEvent
from toolspace.storage.streams.subscriptions import (
    MAX_BYTES,
    MAX_EVENTS,
    PAGE,
    AllStreams,
    AllStreamsSubscription,
    Ring,
    StreamClosed,
    Subscription,
)

_log = logging.getLogger("toolspace.storage")

Load = Callable[[str, int, int], Awaitable[list[StoredEvent]]]
"""`(stream, after, limit)`: the stored events behind an id, in order."""
Bounds = Callable[[str], Awaitable[tuple[int, int]]]
"""The id of the oldest event that is kept (one beyond the newest where none is), and that of the newest ever."""

_RETRY_SECONDS: Final = (0.05, 0.2, 1.0, 3.0)
"""How long to wait before the store is asked again after it did not answer."""


class Hub:
    """All streams of this process. Everything happens on one event loop."""

    def __init__(self, load: Load, bounds: Bounds, *, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES) -> None:
        self.load = load
        self.bounds = bounds
        self.closed = False
        self._sizes = {"most": max_events, "most_bytes": max_bytes}
        self._topics: dict[str, _Topic] = {}
        self._everything = AllStreams(load, Ring(0, **self._sizes))

    @property
    def stream_count(self) -> int:
        """How many streams are read now."""
        return len(self._topics)

    @property
    def subscription_count(self) -> int:
        """How many readers there are now."""
        return sum(len(topic.subscriptions) for topic in self._topics.values()) + len(self._everything.subscriptions)

    def publish(self, events: Iterable[StoredEvent]) -> None:
        """Hands on what was stored just now, after the commit."""
        if not self._topics and not self._everything.subscriptions:
            return  # Nobody reads anything.
        told: dict[str, _Topic] = {}
        for event in events:
            topic = self._topics.get(event.stream)
            if topic is not None:
                topic.take(event)
                told[event.stream] = topic
            if self._everything.subscriptions:
                self._everything.take(event)
        for topic in told.values():
            topic.wake()
        self._everything.wake()

    def notify_appended(self, stream: str, last_id: int) -> None:
        """Another process appended to a stream, up to this id."""
        topic = self._topics.get(stream)
        if topic is not None:
            topic.expect(last_id)
        if self._everything.subscriptions:
            self._everything.expect(stream, last_id)

    def resync(self) -> None:
        """Anything may have been appended anywhere: every stream that is read is looked at again."""
        for topic in self._topics.values():
            topic.look_again()
        self._everything.look_again()

    async def subscribe(self, stream: str, *, after: int | None = None) -> Subscription:
        """Begins to read a stream: behind an id, or with what happens from now on.

        Once this returns, nothing that is appended can be missed. Whoever reads closes it.
        """
        if self.closed:
            raise StreamClosed("the streams are closed")
        topic = self._topics.get(stream)
        if topic is None:
            topic = self._topics[stream] = _Topic(self, stream, Ring(0, **self._sizes))
        subscription = Subscription(topic)
        topic.subscriptions.add(subscription)
        try:
            await topic.opened()
            await subscription.start(after)
        except BaseException:
            subscription.close()
            raise
        return subscription

    def subscribe_all(self) -> AllStreamsSubscription:
        """Begins to read what happens from now on in all streams. Whoever reads closes it."""
        if self.closed:
            raise StreamClosed("the streams are closed")
        return AllStreamsSubscription(self._everything)

    def close_stream(self, stream: str) -> None:
        """What the stream is about is gone: ends its readers here, and forgets what they read."""
        topic = self._topics.get(stream)
        if topic is not None:
            for subscription in tuple(topic.subscriptions):
                subscription.close()

    async def aclose(self) -> None:
        """Ends every subscription: its reader gets `StreamClosed`."""
        self.closed = True
        topics = list(self._topics.values())
        for topic in topics:
            for subscription in tuple(topic.subscriptions):
                subscription.close()
        for follower in tuple(self._everything.subscriptions):
            follower.close()
        await asyncio.gather(*(topic.stopped() for topic in topics), self._everything.stopped())

    def remove_topic(self, topic: _Topic) -> None:
        """Nobody reads that stream any more."""
        if self._topics.get(topic.stream) is topic:
            del self._topics[topic.stream]


class _Topic:
    """One stream that is read: its ring, and how it keeps up with the store."""

    def __init__(self, hub: Hub, stream: str, ring: Ring) -> None:
        self.hub = hub
        self.stream = stream
        self.ring = ring
        self.subscriptions: set[Subscription] = set()
        self._is_open = False
        self._known = 0
        """The highest id that was heard of."""
        self._stale = False
        """Whether the store may have more than was heard of."""
        self._opening: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None

    async def load(self, after: int, limit: int) -> list[StoredEvent]:
        return await self.hub.load(self.stream, after, limit)

    async def bounds(self) -> tuple[int, int]:
        return await self.hub.bounds(self.stream)

    async def opened(self) -> None:
        """Waits until it is known where the stream is. Those who come at once wait for one look at the store."""
        if self._is_open:
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_heed)
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        try:
            _, newest = await self.bounds()
        finally:
            self._opening = None
        self.ring.restart(newest)
        self._is_open = True
        self.expect(0)

    def take(self, event: StoredEvent) -> None:
        """An event that is stored. Whoever calls wakes the readers."""
        if not self._is_open:
            self._known = max(self._known, event.id)
        elif event.id == self.ring.last + 1:
            self.ring.append(event)
        else:
            # Something was stored in between that was not told here, or was told here before: the store has the order.
            self.expect(event.id)

    def expect(self, last_id: int) -> None:
        self._known = max(self._known, last_id)
        if self._is_open and (self._stale or self._known > self.ring.last) and self._catching_up is None:
            self._catching_up = asyncio.create_task(self._catch_up())

    def look_again(self) -> None:
        self._stale = True
        self.expect(0)

    def wake(self) -> None:
        for subscription in self.subscriptions:
            subscription.wake()

    def leave(self, subscription: Subscription) -> None:
        self.subscriptions.discard(subscription)
        if not self.subscriptions:
            self.hub.remove_topic(self)
            if self._catching_up is not None:
                self._catching_up.cancel()

    async def stopped(self) -> None:
        tasks = [task for task in (self._opening, self._catching_up) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _catch_up(self) -> None:
        failures = 0
        try:
            while self._stale or self._known > self.ring.last:
                self._stale = False
                wanted = self._known
                try:
                    events = await self.load(self.ring.last, PAGE)
                except Exception as error:
                    _log.warning("the events of %s cannot be read: %s", self.stream, error)
                    self._stale = True
                    await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
                    failures += 1
                    continue
                failures = 0
                self._stale = self._stale or len(events) == PAGE
                if not events and self._known == wanted:
                    self._known = self.ring.last  # What was heard of is not there: it was removed already.
                self._merge(events)
        finally:
            self._catching_up = None

    def _merge(self, events: list[StoredEvent]) -> None:
        for event in events:
            if event.id > self.ring.last:
                if event.id > self.ring.last + 1:
                    self.ring.restart(event.id - 1)  # What was between was removed for its age.
                self.ring.append(event)
        self.wake()


def _heed(task: asyncio.Task[None]) -> None:
    """A fault is for those who wait; where all of them went away, for nobody."""
    if not task.cancelled():
        task.exception()

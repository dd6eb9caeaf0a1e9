"""Events as bytes: what readers of one stream, one dialect and one audience share, so that each event is encoded once.

Where readers are at the same place, which they nearly always are, they share the joined bytes too.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Final

from toolspace.core import json_text
from toolspace.core.records import StoredEvent
from toolspace.server.dialects import Dialect, Payload, Translator
from toolspace.server.redaction import Viewer, redact_event
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.subscriptions import (
    PAGE,
    AllStreamsSubscription,
    Ring,
    StreamClosed,
    Subscription,
    encode_data,
)

_MOST_BYTES: Final = 64 * 1024
"""What is written at once, about: as much as a server buffers before it says that a reader is slow."""
_SLICES: Final = 8
_WINDOW: Final = 1_000
"""How many events a translator looks back to know what is open."""
_LOOK: Final = 32
"""How many of them it looks at at once: each may be large."""


class SharedFeed:
    """What the readers of one stream, dialect and audience share."""

    def __init__(self, hub: Hub, stream: str, dialect: Dialect, audience: Viewer) -> None:
        self.hub = hub
        self.stream = stream
        self.dialect = dialect
        self.viewer: Viewer = audience
        self.reader_count = 0
        self.opening = asyncio.Lock()
        self._key = (dialect.name, audience)
        self._slices: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._translator: Translator | None = None
        self._position = -1
        """The event up to which the shared translator has come."""

    def encode(self, event: StoredEvent, translator: Translator | None) -> list[bytes]:
        """The frames of an event: none where the audience may not see it."""
        seen = redact_event(event, self.viewer)
        if seen is None:
            return []
        if translator is None:
            return [b"id: %d\nevent: %b\ndata: %b\n\n" % (seen.id, seen.type.encode(), encode_data(seen))]
        return _numbered(event.id, translator.translate(seen))

    def slice(self, ring: Ring, cursor: int) -> tuple[int, bytes]:
        """What comes behind a place, joined, as much as is written at once; and how far that goes."""
        found = self._slices.get(cursor)
        if found is None:
            found = join_frames(cursor, self._sharable(ring.list_after(cursor, PAGE)), self._shared)
            self._slices[cursor] = found
            if len(self._slices) > _SLICES:
                self._slices.popitem(last=False)
        return found

    def slice_until(self, ring: Ring, cursor: int, last: str) -> tuple[int, bytes, bool]:
        """As `slice`, but not beyond an event of this type; says whether it was there."""
        events = self.up_to(self._sharable(ring.list_after(cursor, PAGE)), last)
        end, data = join_frames(cursor, events, self._shared)
        return end, data, self.ends(events, end, last)

    def up_to(self, events: Iterable[StoredEvent], last: str | None) -> list[StoredEvent]:
        """The events up to the first of a type that the audience sees, and that one."""
        wanted: list[StoredEvent] = []
        for event in events:
            wanted.append(event)
            if self._is_last(event, last):
                break
        return wanted

    def ends(self, events: list[StoredEvent], end: int, last: str | None) -> bool:
        """Whether what was written up to an id ends with the event that was wanted last."""
        return end == events[-1].id and self._is_last(events[-1], last)

    def _is_last(self, event: StoredEvent, last: str | None) -> bool:
        # One that is not shown must not show by the end of the stream either.
        return event.type == last and redact_event(event, self.viewer) is not None

    def can_continue_at(self, ring: Ring, cursor: int) -> bool:
        """Whether the shared translator can say what comes behind a place in the ring."""
        if self.dialect.translator is None:
            return True
        if self._position < cursor and self._translator is not None and ring.has_all_after(self._position):
            for event in ring.list_after(self._position, cursor - self._position):
                self._shared(event)
        if self._position == cursor:
            return True
        following = ring.list_after(cursor, 1)
        return bool(following) and self._key in following[0].frames

    def _sharable(self, events: list[StoredEvent]) -> Iterable[StoredEvent]:
        """Those that were said before, and those that the shared translator comes to next."""
        if self.dialect.translator is None:
            return events
        return takewhile(lambda event: self._key in event.frames or event.id == self._position + 1, events)

    def adopt(self, translator: Translator, cursor: int) -> bool:
        """Takes a reader's translator for the shared one, if it has come further."""
        if cursor <= self._position:
            return False
        self._translator, self._position = translator, cursor
        self._slices.clear()
        return True

    def join_point(self, cursor: int) -> tuple[int, list[Payload]] | None:
        """Where a new reader can join at once, and what opens the stream for it; None where nobody knows yet."""
        if self._translator is None or self._position < cursor:
            return None
        return self._position, self._translator.opening()

    async def replay_translator(self, cursor: int) -> Translator | None:
        """A translator that has seen what is stored up to a place."""
        if self.dialect.translator is None:
            return None
        translator = self.dialect.translator(self.stream)
        after = max(0, cursor - _WINDOW)
        while after < cursor:
            events = await self.hub.load(self.stream, after, min(_LOOK, cursor - after))
            for event in events:
                if event.id <= cursor and (seen := redact_event(event, self.viewer)) is not None:
                    translator.translate(seen)
            if not events:
                break
            after = events[-1].id
        return translator

    def _shared(self, event: StoredEvent) -> bytes:
        frame = event.frames.get(self._key)
        if frame is None:
            frame = event.frames[self._key] = b"".join(self.encode(event, self._translator))
            self._position = event.id
        return frame


class StreamEventSource:
    """One reader of a feed: first what is stored, then what is shared."""

    def __init__(self, feed: SharedFeed, subscription: Subscription, *, until: str | None = None) -> None:
        self._feed = feed
        self._subscription = subscription
        self._until = until
        self._own: Translator | None = None
        """Where the shared translator is elsewhere: one that has come as far as this reader."""
        self.is_complete = False
        """Whether the event came that the reader wanted to read up to."""

    @property
    def has_lost_events(self) -> bool:
        return self._subscription.has_fallen_behind

    async def first_frames(self, *, replays: bool, skip: int) -> bytes:
        """What a reader gets first. One that comes new is told what is open; one that comes back knows.

        `skip` frames of the event behind the cursor were read before.
        """
        subscription, feed = self._subscription, self._feed
        said: list[bytes] = []
        if feed.dialect.translator is not None:
            if not replays:
                said = await self._join()
            elif subscription.reset_id is not None:
                self._own = feed.dialect.translator(feed.stream)
            elif not feed.can_continue_at(subscription.ring, subscription.cursor):
                self._own = await feed.replay_translator(subscription.cursor)
        if subscription.reset_id is not None:
            said += self._reset(subscription.reset_id)
        elif skip:
            said += await self._rest(skip)
        # Whoever is cut off before the first event comes back to this place.
        return b"retry: 1000\n\n" + b"".join(said) + b"id: %d\n\n" % subscription.cursor

    async def next(self) -> bytes:
        """What to write next; empty where there was nothing to see. Raises as a subscription does."""
        subscription, feed = self._subscription, self._feed
        if self.is_complete:
            raise StreamClosed(f"{feed.stream}: complete")
        if not await subscription.wait_for_events():
            return await self._replay() if subscription.needs_replay else b""
        ring, cursor = subscription.ring, subscription.cursor
        if not feed.can_continue_at(ring, cursor):
            if self._own is None:
                self._own = await feed.replay_translator(cursor)
            if self._own is not None and not feed.adopt(self._own, cursor):
                return self._alone(ring.list_after(cursor, PAGE))
        self._own = None
        if self._until is None:
            subscription.cursor, data = feed.slice(ring, cursor)
        else:
            subscription.cursor, data, self.is_complete = feed.slice_until(ring, cursor, self._until)
        return data

    def ping(self) -> bytes:
        # With the place: what is not shown to this reader moves it too.
        return b": ping\nid: %d\n\n" % self._subscription.cursor

    def final_frame(self) -> bytes:
        return self._feed.dialect.ending

    def wake(self) -> None:
        self._subscription.wake()

    def close(self) -> None:
        self._subscription.close()

    async def _join(self) -> list[bytes]:
        feed, subscription = self._feed, self._subscription
        async with feed.opening:  # Many who come at once wait for one look back.
            feed.can_continue_at(subscription.ring, subscription.cursor)
            if feed.join_point(subscription.cursor) is None:
                folded = await feed.replay_translator(subscription.cursor)
                assert folded is not None
                feed.adopt(folded, subscription.cursor)
            joined = feed.join_point(subscription.cursor)
        assert joined is not None
        subscription.cursor, opening = joined
        return [_unnumbered(payload) for payload in opening]

    async def _rest(self, skip: int) -> list[bytes]:
        """What is left of an event in the middle of which the reader was cut off."""
        feed, subscription = self._feed, self._subscription
        events = await feed.hub.load(feed.stream, subscription.cursor, 1)
        if not events:
            return []
        if feed.dialect.translator is not None and self._own is None:
            self._own = await feed.replay_translator(subscription.cursor)
        frames = feed.encode(events[0], self._own)
        subscription.cursor = events[0].id
        return frames[skip:]

    def _reset(self, oldest: int) -> list[bytes]:
        """Says that something is missing before what comes."""
        event = StoredEvent(self._feed.stream, oldest - 1, "stream.reset", {"oldest": oldest}, at=0)
        if self._own is None:
            return [b"event: stream.reset\ndata: %b\n\n" % encode_data(event)]
        return [_unnumbered(payload) for payload in self._own.translate(event)]

    async def _replay(self) -> bytes:
        if self._own is None:
            self._own = await self._feed.replay_translator(self._subscription.cursor)
        return self._alone(await self._subscription.replay())

    def _alone(self, events: list[StoredEvent]) -> bytes:
        """Events that are not shared with other readers."""
        if not events:
            return b""
        events = self._feed.up_to(events, self._until)
        cursor = self._subscription.cursor
        end, data = join_frames(cursor, events, lambda event: b"".join(self._feed.encode(event, self._own)))
        self._subscription.cursor = end
        self.is_complete = self._feed.ends(events, end, self._until)
        return data


class FirehoseEventSource:
    """A reader of all streams, from now on, as its operator sees them. It cannot come back to a place."""

    is_complete = False

    def __init__(self, follower: AllStreamsSubscription) -> None:
        self._follower = follower

    @property
    def has_lost_events(self) -> bool:
        return self._follower.has_fallen_behind

    async def first_frames(self) -> bytes:
        return b"retry: 1000\n\n"

    async def next(self) -> bytes:
        return b"".join(map(_tailed, await self._follower.next_batch()))

    def ping(self) -> bytes:
        return b": ping\n\n"

    def final_frame(self) -> bytes:
        return b""

    def wake(self) -> None:
        self._follower.wake()

    def close(self) -> None:
        self._follower.close()


def join_frames(end: int, events: Iterable[StoredEvent], encode: Callable[[StoredEvent], bytes]) -> tuple[int, bytes]:
    """The frames of events, as many as are written at once, and the id of the last; `end` where there is none."""
    parts: list[bytes] = []
    size = 0
    for event in events:
        frame = encode(event)
        parts.append(frame)
        size += len(frame)
        end = event.id
        if size >= _MOST_BYTES:
            break
    return end, b"".join(parts)


def _numbered(id: int, payloads: list[Payload]) -> list[bytes]:
    """Frames of one event. All but the last have a number within it, so that a reader can come back to the middle."""
    last = len(payloads) - 1
    return [
        b"id: %b\ndata: %b\n\n" % (b"%d" % id if place == last else b"%d.%d" % (id, place), _json(payload))
        for place, payload in enumerate(payloads)
    ]


def _unnumbered(payload: Payload) -> bytes:
    return b"data: %b\n\n" % _json(payload)


def _json(payload: Payload) -> bytes:
    return json_text.encode_bytes(payload)


def _tailed(event: StoredEvent) -> bytes:
    frame = event.frames.get("tail")
    if frame is None:
        head = json_text.encode_bytes({"stream": event.stream, "id": event.id, "type": event.type, "at": event.at})
        data = b'%b,"data":%b}' % (head[:-1], encode_data(event))
        frame = event.frames["tail"] = b"event: %b\ndata: %b\n\n" % (event.type.encode(), data)
    return frame

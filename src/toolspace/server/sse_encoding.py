"""Encodes the events of a stream as server-sent events, once for all subscribers with the same dialect and viewer.

Subscribers at the same position, which nearly all are, also share the joined bytes. `sse_responses` sends them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, Final

from toolspace.core import json_text
from toolspace.core.stored_records import StoredEvent
from toolspace.server.dialects.ag_ui import AgUiTranslator
from toolspace.server.dialects.ai_sdk import UiMessageStreamTranslator
from toolspace.server.dialects.base import NATIVE, Dialect, Payload, Translator
from toolspace.server.redaction import Viewer, redact_event
from toolspace.storage.streams.hub import AllStreamsSubscription, Hub
from toolspace.storage.streams.subscriptions import (
    PAGE,
    Ring,
    StreamClosed,
    Subscription,
    encode_data,
)

UI_MESSAGE_STREAM: Final = Dialect(
    "ui-message-stream",
    translator=UiMessageStreamTranslator,
    headers=((b"x-vercel-ai-ui-message-stream", b"v1"),),
    ending=b"data: [DONE]\n\n",
)
AG_UI: Final = Dialect("ag-ui", translator=AgUiTranslator)
DIALECTS: Final[Mapping[str, Dialect]] = {dialect.name: dialect for dialect in (NATIVE, UI_MESSAGE_STREAM, AG_UI)}
"""Dialects by the value of `?format=`."""
PING: Final = b": ping\n\n"
_CHUNK_BYTES: Final = 64 * 1024
"""About how much is written at once: as much as uvicorn buffers before a write waits for the client."""
_MAX_CHUNKS: Final = 8
_REPLAYED_EVENTS: Final = 1_000
"""How many events a translator replays to know which messages and calls are open."""
_REPLAY_PAGE: Final = 32
"""How many of them are loaded at once: each may be large."""


class SharedFeed:
    """What the subscribers of one stream with the same dialect and viewer share: encoded events and a translator."""

    def __init__(self, hub: Hub, stream: str, dialect: Dialect, viewer: Viewer) -> None:
        self.hub = hub
        self.stream = stream
        self.dialect = dialect
        self.viewer: Viewer = viewer
        self.join_lock = asyncio.Lock()
        self._key = (dialect.name, viewer)
        self._chunks: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        """Cursor → the cursor after the chunk, and its bytes."""
        self._translator: Translator | None = None
        self._position = -1
        """The last event that the shared translator has translated."""

    def encode(self, event: StoredEvent, translator: Translator | None) -> list[bytes]:
        """Returns the frames of an event; none if the viewer may not see it."""
        visible_event = redact_event(event, self.viewer)
        if visible_event is None:
            return []
        if translator is None:
            return [
                b"id: %d\nevent: %b\ndata: %b\n\n"
                % (visible_event.id, visible_event.type.encode(), encode_data(visible_event))
            ]
        return _encode_payloads(event.id, translator.translate(visible_event))

    def read_chunk(self, ring: Ring, cursor: int) -> tuple[int, bytes]:
        """Returns the cursor after the next chunk, and the bytes of the chunk."""
        chunk = self._chunks.get(cursor)
        if chunk is None:
            chunk = join_frames(cursor, self._shareable(ring.list_after(cursor, PAGE)), self._encode_shared)
            self._chunks[cursor] = chunk
            if len(self._chunks) > _MAX_CHUNKS:
                self._chunks.popitem(last=False)
        return chunk

    def read_chunk_until(self, ring: Ring, cursor: int, last_type: str) -> tuple[int, bytes, bool]:
        """Like `read_chunk`, but stops after an event of this type; also returns whether it was reached."""
        events = self.take_until(self._shareable(ring.list_after(cursor, PAGE)), last_type)
        end, data = join_frames(cursor, events, self._encode_shared)
        return end, data, self.is_end(events, end, last_type)

    def take_until(self, events: Iterable[StoredEvent], last_type: str | None) -> list[StoredEvent]:
        """Returns the events up to and including the first visible one of a type."""
        taken_events: list[StoredEvent] = []
        for event in events:
            taken_events.append(event)
            if self._is_last(event, last_type):
                break
        return taken_events

    def is_end(self, events: list[StoredEvent], end: int, last_type: str | None) -> bool:
        """Whether the bytes up to the event id `end` include the last event of the stream."""
        return end == events[-1].id and self._is_last(events[-1], last_type)

    def _is_last(self, event: StoredEvent, last_type: str | None) -> bool:
        # A hidden event must not become visible by ending the stream.
        return event.type == last_type and redact_event(event, self.viewer) is not None

    def can_continue_at(self, ring: Ring, cursor: int) -> bool:
        """Whether the shared translator can encode the events after a cursor in the ring."""
        if self.dialect.translator is None:
            return True
        if self._position < cursor and self._translator is not None and ring.has_all_after(self._position):
            for event in ring.list_after(self._position, cursor - self._position):
                self._encode_shared(event)
        if self._position == cursor:
            return True
        next_events = ring.list_after(cursor, 1)
        return bool(next_events) and self._key in next_events[0].frames

    def _shareable(self, events: list[StoredEvent]) -> Iterable[StoredEvent]:
        """Yields the leading events that are encoded already, or that the shared translator encodes next."""
        if self.dialect.translator is None:
            return events
        return takewhile(lambda event: self._key in event.frames or event.id == self._position + 1, events)

    def adopt(self, translator: Translator, cursor: int) -> bool:
        """Makes a subscriber's translator the shared one if it is further ahead."""
        if cursor <= self._position:
            return False
        self._translator, self._position = translator, cursor
        self._chunks.clear()
        return True

    def join_point(self, cursor: int) -> tuple[int, list[Payload]] | None:
        """Returns the cursor and the opening payloads for a new subscriber; None if the translator is not there yet."""
        if self._translator is None or self._position < cursor:
            return None
        return self._position, self._translator.opening_payloads()

    async def replay_translator(self, cursor: int) -> Translator | None:
        """Returns a translator that has translated the stored events up to a cursor."""
        if self.dialect.translator is None:
            return None
        translator = self.dialect.translator(self.stream)
        after = max(0, cursor - _REPLAYED_EVENTS)
        while after < cursor:
            events = await self.hub.load(self.stream, after, min(_REPLAY_PAGE, cursor - after))
            for event in events:
                if event.id <= cursor and (visible_event := redact_event(event, self.viewer)) is not None:
                    translator.translate(visible_event)
            if not events:
                break
            after = events[-1].id
        return translator

    def _encode_shared(self, event: StoredEvent) -> bytes:
        frame = event.frames.get(self._key)
        if frame is None:
            frame = event.frames[self._key] = b"".join(self.encode(event, self._translator))
            self._position = event.id
        return frame


class EventSource:
    """Provides the bytes of a streaming response."""

    is_complete = False
    """Whether the last event was returned."""

    @property
    def has_lost_events(self) -> bool:
        """Whether events were dropped before the subscriber received them."""
        return False

    async def next(self) -> bytes:
        """Returns the next bytes; none after `wake`. Raises `StreamClosed` or `SubscriberTooSlow`."""
        raise NotImplementedError

    def ping(self) -> bytes:
        return PING

    def final_frame(self) -> bytes:
        return b""

    def wake(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class StreamEventSource(EventSource):
    """One subscriber of a feed: first the stored events, then the shared ones."""

    def __init__(self, feed: SharedFeed, subscription: Subscription, *, until: str | None = None) -> None:
        self._feed = feed
        self._subscription = subscription
        self._until = until
        self._translator: Translator | None = None
        """This subscriber's own translator, while the shared one is at another position."""

    @property
    def has_lost_events(self) -> bool:
        return self._subscription.has_fallen_behind

    async def first_frames(self, *, replays: bool, skip: int) -> bytes:
        """Returns the first bytes. A new subscriber gets what is open; one that resumes has it already.

        The client has received `skip` frames of the event after the cursor.
        """
        subscription, feed = self._subscription, self._feed
        frames: list[bytes] = []
        if feed.dialect.translator is not None:
            if not replays:
                frames = await self._join()
            elif subscription.reset_id is not None:
                self._translator = feed.dialect.translator(feed.stream)
            elif not feed.can_continue_at(subscription.ring, subscription.cursor):
                self._translator = await feed.replay_translator(subscription.cursor)
        if subscription.reset_id is not None:
            frames += self._encode_reset(subscription.reset_id)
        elif skip:
            frames += await self._encode_rest(skip)
        # The id: a client that is disconnected before the first event resumes here.
        return b"retry: 1000\n\n" + b"".join(frames) + b"id: %d\n\n" % subscription.cursor

    async def next(self) -> bytes:
        """Returns the next bytes; none if no event was visible. Raises what the subscription raises."""
        subscription, feed = self._subscription, self._feed
        if self.is_complete:
            raise StreamClosed(f"{feed.stream}: complete")
        if not await subscription.wait_for_events():
            return await self._replay() if subscription.needs_replay else b""
        ring, cursor = subscription.ring, subscription.cursor
        if not feed.can_continue_at(ring, cursor):
            if self._translator is None:
                self._translator = await feed.replay_translator(cursor)
            if self._translator is not None and not feed.adopt(self._translator, cursor):
                return self._encode_own(ring.list_after(cursor, PAGE))
        self._translator = None
        if self._until is None:
            subscription.cursor, data = feed.read_chunk(ring, cursor)
        else:
            subscription.cursor, data, self.is_complete = feed.read_chunk_until(ring, cursor, self._until)
        return data

    def ping(self) -> bytes:
        # With the id: hidden events move the cursor too.
        return b": ping\nid: %d\n\n" % self._subscription.cursor

    def final_frame(self) -> bytes:
        return self._feed.dialect.ending

    def wake(self) -> None:
        self._subscription.wake()

    def close(self) -> None:
        self._subscription.close()

    async def _join(self) -> list[bytes]:
        feed, subscription = self._feed, self._subscription
        async with feed.join_lock:  # Subscribers that join at once share one replay.
            feed.can_continue_at(subscription.ring, subscription.cursor)
            if feed.join_point(subscription.cursor) is None:
                translator = await feed.replay_translator(subscription.cursor)
                assert translator is not None
                feed.adopt(translator, subscription.cursor)
            join_point = feed.join_point(subscription.cursor)
        assert join_point is not None
        subscription.cursor, payloads = join_point
        return [_encode_payload(payload) for payload in payloads]

    async def _encode_rest(self, skip: int) -> list[bytes]:
        """Returns the remaining frames of an event of which the client received a part."""
        feed, subscription = self._feed, self._subscription
        events = await feed.hub.load(feed.stream, subscription.cursor, 1)
        if not events:
            return []
        if feed.dialect.translator is not None and self._translator is None:
            self._translator = await feed.replay_translator(subscription.cursor)
        frames = feed.encode(events[0], self._translator)
        subscription.cursor = events[0].id
        return frames[skip:]

    def _encode_reset(self, oldest: int) -> list[bytes]:
        """Returns the frames that tell the client that events are missing."""
        event = StoredEvent(self._feed.stream, oldest - 1, "stream.reset", {"oldest": oldest}, at=0)
        if self._translator is None:
            return [b"event: stream.reset\ndata: %b\n\n" % encode_data(event)]
        return [_encode_payload(payload) for payload in self._translator.translate(event)]

    async def _replay(self) -> bytes:
        if self._translator is None:
            self._translator = await self._feed.replay_translator(self._subscription.cursor)
        return self._encode_own(await self._subscription.replay())

    def _encode_own(self, events: list[StoredEvent]) -> bytes:
        """Encodes events that are not shared with other subscribers."""
        if not events:
            return b""
        events = self._feed.take_until(events, self._until)
        cursor = self._subscription.cursor
        end, data = join_frames(cursor, events, lambda event: b"".join(self._feed.encode(event, self._translator)))
        self._subscription.cursor = end
        self.is_complete = self._feed.is_end(events, end, self._until)
        return data


class AllEventsSource(EventSource):
    """A subscriber of all streams, from the present on, for operators. It cannot resume."""

    def __init__(self, subscription: AllStreamsSubscription) -> None:
        self._subscription = subscription

    @property
    def has_lost_events(self) -> bool:
        return self._subscription.has_fallen_behind

    async def first_frames(self) -> bytes:
        return b"retry: 1000\n\n"

    async def next(self) -> bytes:
        return b"".join(map(_encode_with_stream, await self._subscription.next_batch()))

    def wake(self) -> None:
        self._subscription.wake()

    def close(self) -> None:
        self._subscription.close()


def encode_event(type: str, data: Any) -> bytes:
    """Encodes an event without an id."""
    return b"event: %b\ndata: %b\n\n" % (type.encode(), json_text.encode_bytes(data))


def join_frames(end: int, events: Iterable[StoredEvent], encode: Callable[[StoredEvent], bytes]) -> tuple[int, bytes]:
    """Joins the frames of events, up to one chunk. Returns the id of the last event, or `end`, and the bytes."""
    parts: list[bytes] = []
    size = 0
    for event in events:
        frame = encode(event)
        parts.append(frame)
        size += len(frame)
        end = event.id
        if size >= _CHUNK_BYTES:
            break
    return end, b"".join(parts)


def _encode_payloads(id: int, payloads: list[Payload]) -> list[bytes]:
    """Encodes the payloads of one event. All but the last have ids such as `7.0`, so that clients can resume there."""
    last = len(payloads) - 1
    return [
        b"id: %b\ndata: %b\n\n"
        % (b"%d" % id if index == last else b"%d.%d" % (id, index), json_text.encode_bytes(payload))
        for index, payload in enumerate(payloads)
    ]


def _encode_payload(payload: Payload) -> bytes:
    """Encodes a payload without an id."""
    return b"data: %b\n\n" % json_text.encode_bytes(payload)


def _encode_with_stream(event: StoredEvent) -> bytes:
    frame = event.frames.get("tail")
    if frame is None:
        head = json_text.encode_bytes({"stream": event.stream, "id": event.id, "type": event.type, "at": event.at})
        data = b'%b,"data":%b}' % (head[:-1], encode_data(event))
        frame = event.frames["tail"] = b"event: %b\ndata: %b\n\n" % (event.type.encode(), data)
    return frame

"""Server-sent events: answers that go on until someone ends them. Writes bytes; what they say is for their sources.

A reader costs a connection and a cursor. One that does not read is dropped, one that went away is noticed at once, and
one timer for all of them sees to heartbeats, to writes that are stuck and to rights that were taken away.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec

from toolspace.core.names import did_you_mean
from toolspace.core.records import EVENT_TYPES
from toolspace.errors import StorageUnavailable
from toolspace.server.asgi import Receive, Scope, Send
from toolspace.server.broadcast import FirehoseEventSource, SharedFeed, StreamEventSource
from toolspace.server.dialects import DIALECTS, NATIVE, Dialect
from toolspace.server.problems import Problem, unavailable
from toolspace.server.redaction import Viewer
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.subscriptions import StreamClosed, SubscriberTooSlow

# MERGED from stream_options: How someone wants to read a stream: in which language, and from where. Reads nothing …

_PLACE: Final = re.compile(r"(\d{1,18})(?:\.(\d{1,6}))?", re.ASCII)


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How a stream is to be read."""

    format: str = NATIVE.name
    """`native`, `ui-message-stream` or `ag-ui`."""
    last_event_id: str = ""
    """The id of the last event that was read, where the header Last-Event-ID cannot be set."""
    from_: Literal["now", "start"] = msgspec.field(name="from", default="now")
    """Where to begin without an id: with what happens from now on, or with what is kept."""
    until: str | None = None
    """The type of event after which the stream ends, such as `run.done`."""


@dataclass(frozen=True)
class StreamOptions:
    """What a reader wants: a language, and a place to begin."""

    dialect: Dialect = NATIVE
    after: int | None = None
    """The last event that was read whole; None: from now on."""
    skip: int = 0
    """How many frames of the event behind it were read too."""
    resumes: bool = False
    """Whether it was here before, and must be told if something is missing."""
    until: str | None = None


def parse_stream_options(query: StreamQuery, last_event_id: str | None) -> StreamOptions:
    """What the query and the header Last-Event-ID ask for. Raises `Problem` 400 where that means nothing.

    The header wins: a browser comes back with the same address, and the header says how far it came.
    """
    dialect = DIALECTS.get(query.format)
    if dialect is None:
        known = ", ".join(f'"{name}"' for name in DIALECTS)
        raise Problem(400, f'the format "{query.format[:80]}" is not known; there are {known}', path="$.format")
    if query.until is not None and query.until not in EVENT_TYPES:
        near = did_you_mean(query.until[:80], EVENT_TYPES) or f"; there are {', '.join(EVENT_TYPES)}"
        raise Problem(400, f'no event is a "{query.until[:80]}"{near}', path="$.until")
    place = last_event_id or query.last_event_id
    if not place:
        return StreamOptions(dialect, 0 if query.from_ == "start" else None, until=query.until)
    match = _PLACE.fullmatch(place)
    after, skip = (int(match[1]), int(match[2]) + 1 if match[2] else 0) if match else (0, 0)
    if match is None or (skip and not after):
        raise Problem(400, f'"{place[:80]}" is no id of an event; send one that came in an "id:" line, or none')
    return StreamOptions(dialect, after - 1 if skip else after, skip, resumes=True, until=query.until)


_log = logging.getLogger("toolspace.server")

HEARTBEAT_SECONDS: Final = 15.0
STALL_SECONDS: Final = 20.0
"""How long one write may be stuck before its reader is dropped."""
RECHECK_SECONDS: Final = 2.0
"""How long a reader's right to read is believed."""
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)
_NEVER: Final = float("-inf")

PermissionCheck = Callable[[], Awaitable[bool]]
"""Whether a reader may still read."""


class EventSource(Protocol):
    """Where an answer's bytes come from."""

    is_complete: bool
    """Whether it has said everything."""

    @property
    def has_lost_events(self) -> bool:
        """Whether what comes next was let go before it was read."""
        ...

    async def next(self) -> bytes:
        """What comes next; empty where it was poked. Raises `StreamClosed` at the end, `TooSlow` where it is lost."""
        ...

    def ping(self) -> bytes: ...

    def final_frame(self) -> bytes: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class StreamRegistry:
    """All streams that are being read from this process, and the timer that looks after them."""

    def __init__(
        self, *, heartbeat: float = HEARTBEAT_SECONDS, stall: float = STALL_SECONDS, recheck: float = RECHECK_SECONDS
    ) -> None:
        self.heartbeat = heartbeat
        self.stall = stall
        self.recheck_after = recheck
        self.dropped_count = 0
        """Readers that did not keep up, so far."""
        self._readers: set[SseResponse] = set()
        self._feeds: dict[tuple[Hub, str, str, Viewer], SharedFeed] = {}
        self._timer: asyncio.Task[None] | None = None
        self._ended = False

    def __len__(self) -> int:
        return len(self._readers)

    async def open_stream(
        self,
        hub: Hub,
        stream: str,
        reading: StreamOptions | None = None,
        *,
        audience: Viewer,
        allowed: PermissionCheck | None = None,
        strict: bool = False,
        expires_at: int | None = None,
    ) -> SseResponse:
        """An answer that streams events, ready to be written. `allowed` is asked again and again, where it is `strict`
        before each write; at `expires_at` (Unix milliseconds) it ends."""
        self._check_open()
        reading = reading or StreamOptions()
        try:
            subscription = await hub.subscribe(stream, after=reading.after)
        except StreamClosed:
            raise _stopping() from None
        feed = self._feed(hub, stream, reading.dialect, audience)
        if not reading.resumes:
            subscription.reset_id = None  # Whoever reads from the start gets what there is.
        source = StreamEventSource(feed, subscription, until=reading.until)
        try:
            first = await source.first_frames(replays=reading.after is not None, skip=reading.skip)
        except BaseException:
            source.close()
            self._leave(feed)
            raise

        def closed() -> None:
            self._leave(feed)

        headers = (*_HEADERS, *reading.dialect.headers)
        return SseResponse(
            self,
            source,
            first,
            headers=headers,
            allowed=allowed,
            strict=strict,
            expires_at=expires_at,
            on_close=closed,
        )

    async def open_firehose(self, hub: Hub, *, allowed: PermissionCheck | None = None) -> SseResponse:
        """An answer that streams the events of all streams, for operators."""
        self._check_open()
        source = FirehoseEventSource(hub.subscribe_all())
        return SseResponse(self, source, await source.first_frames(), allowed=allowed)

    def recheck_permissions(self) -> None:
        """Rights may have been taken away: everyone is asked for theirs before anything more is written."""
        for reader in tuple(self._readers):
            reader.recheck_permission()

    def close_all(self) -> None:
        """Ends all streams, for good; readers come back elsewhere, with the id that they have."""
        self._ended = True
        for reader in tuple(self._readers):
            reader.end()

    async def aclose(self) -> None:
        """Ends all streams and waits until they are gone. One that does not read is cut off."""
        self.close_all()
        for reader in tuple(self._readers):
            if reader.is_writing:
                reader.drop()
        await asyncio.gather(*(reader.closed.wait() for reader in tuple(self._readers)))
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)

    def add(self, reader: SseResponse) -> None:
        self._readers.add(reader)
        if self._ended:
            reader.end()
        elif self._timer is None:
            self._timer = asyncio.create_task(self._look_after())

    def discard(self, reader: SseResponse) -> None:
        self._readers.discard(reader)

    async def _look_after(self) -> None:
        tick = min(1.0, self.heartbeat / 4, self.stall / 4, self.recheck_after / 2)
        while True:
            await asyncio.sleep(tick)
            now, wall = time.monotonic(), time.time() * 1000
            for reader in tuple(self._readers):
                try:
                    reader.check_timers(now, wall)
                except Exception:  # One reader's fault must not end what looks after all.
                    _log.exception("a stream could not be looked after")

    def _feed(self, hub: Hub, stream: str, dialect: Dialect, audience: Viewer) -> SharedFeed:
        key = (hub, stream, dialect.name, audience)
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = SharedFeed(hub, stream, dialect, audience)
        feed.reader_count += 1
        return feed

    def _leave(self, feed: SharedFeed) -> None:
        feed.reader_count -= 1
        if not feed.reader_count:
            self._feeds.pop((feed.hub, feed.stream, feed.dialect.name, feed.viewer), None)

    def _check_open(self) -> None:
        if self._ended:
            raise _stopping()


class SseResponse:
    """One answer that writes itself, from a source, until it is ended or its reader is gone."""

    def __init__(
        self,
        readers: StreamRegistry,
        source: EventSource,
        first: bytes,
        *,
        headers: tuple[tuple[bytes, bytes], ...] = _HEADERS,
        allowed: PermissionCheck | None = None,
        strict: bool = False,
        expires_at: int | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.closed = asyncio.Event()
        self._readers = readers
        self._source = source
        self._first = first
        self._headers = headers
        self._allowed = allowed
        self._strict = strict and allowed is not None
        self._expires_at = expires_at
        self._on_close = on_close
        self._send: Send | None = None
        self._transport: Any = None
        self._task: asyncio.Task[Any] | None = None
        self._writing_since = 0.0
        self._wrote_at = self._checked_at = time.monotonic()
        self._dropped = False

    @property
    def is_writing(self) -> bool:
        return bool(self._writing_since)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._transport = find_transport(receive)
        self._task = asyncio.current_task()
        self._readers.add(self)
        leaving = asyncio.create_task(self._notice(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})
            if not self._strict or await self._is_allowed(time.monotonic(), writes=True):
                await self._write(self._first)
                self._first = b""
                await self._pump()
            if self._dropped:
                await leaving  # Until the server has seen that the connection is gone, and expects no end.
            else:
                await self._finish()
        except asyncio.CancelledError:
            if not self._dropped:
                raise
        finally:
            self._readers.discard(self)
            leaving.cancel()
            self.close()

    def close(self) -> None:
        """Lets go of what it holds. Whoever opened it and does not let it write itself closes it."""
        if not self.closed.is_set():
            self.closed.set()
            self._source.close()
            if self._on_close is not None:
                self._on_close()

    def check_timers(self, now: float, wall: float) -> None:
        """What the timer sees to."""
        if self._writing_since:
            if now - self._writing_since > self._readers.stall or self._source.has_lost_events:
                self.drop()
        elif self._expires_at is not None and wall >= self._expires_at:
            self.end()
        elif now - self._wrote_at >= self._readers.heartbeat or self._is_unchecked(now):
            self._source.wake()

    def recheck_permission(self) -> None:
        if self._allowed is not None:
            self._checked_at = _NEVER
            self._source.wake()

    def end(self) -> None:
        """Ends it politely: the reader sees that it is over, and may come back."""
        self._source.close()

    def drop(self) -> None:
        """Cuts off a reader that does not read."""
        if self._dropped:
            return
        self._dropped = True
        self._readers.dropped_count += 1
        _log.info("a reader that did not read was dropped")
        self._source.close()
        if self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()

    async def _pump(self) -> None:
        source = self._source
        try:
            while True:
                data = await source.next()
                now = time.monotonic()
                unchecked = self._is_unchecked(now) or (data and self._strict)
                if unchecked and not await self._is_allowed(now, writes=bool(data)):
                    return
                if data:
                    await self._write(data)
                elif now - self._wrote_at >= self._readers.heartbeat:
                    await self._write(source.ping())
        except StreamClosed:
            return
        except StorageUnavailable as error:
            _log.warning("a stream ends, its reader may come back: %s", error)
        except SubscriberTooSlow as error:
            _log.debug("%s", error)
            self.drop()

    async def _write(self, data: bytes) -> None:
        assert self._send is not None
        self._writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing_since = 0.0
        self._wrote_at = time.monotonic()

    async def _finish(self) -> None:
        assert self._send is not None
        self._writing_since = time.monotonic()
        last = self._source.final_frame() if self._source.is_complete else b""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
        self._writing_since = 0.0

    def _is_unchecked(self, now: float) -> bool:
        return self._allowed is not None and now - self._checked_at >= self._readers.recheck_after

    async def _is_allowed(self, now: float, *, writes: bool) -> bool:
        assert self._allowed is not None
        self._checked_at = now  # Before it is asked: rights that change meanwhile are asked for again.
        try:
            return await self._allowed()
        except Exception as error:
            # Nobody knows. What is not written can be read later; a stream that only waits may go on waiting.
            _log.warning("a stream's reader cannot be checked: %s", error)
            self._checked_at = _NEVER
            return not writes

    async def _notice(self, receive: Receive) -> None:
        """Ends it when the reader goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._source.close()


def find_transport(receive: Receive) -> Any:
    """The connection of a request, to cut it off: closing it politely would wait for a reader that does not read."""
    return getattr(getattr(receive, "__self__", None), "transport", None)  # uvicorn's `receive` belongs to it.


def _stopping() -> Problem:
    return unavailable("the gateway is stopping; try again")

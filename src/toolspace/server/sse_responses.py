"""Server-sent events: responses that continue until the client or the server ends them.

A subscriber of a stream costs a connection and a cursor. One that does not read is disconnected. One timer for all
streams sends heartbeats, finds stuck writes and checks permissions again. `sse_encoding` encodes the events; this
module sends bytes. `CallStream` is the stream of one tool call: progress, partial output, result.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

import msgspec

from toolspace.core.events import CallPartial, CallProgress, Event, EventType
from toolspace.core.ids import new_id
from toolspace.core.names import did_you_mean
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.stored_records import EVENT_TYPES, StreamFormat
from toolspace.errors import StorageUnavailable
from toolspace.server.dialects.base import NATIVE, Dialect
from toolspace.server.redaction import Viewer
from toolspace.server.requests import Receive, Scope, Send, find_transport, wait_for_disconnect
from toolspace.server.responses import Problem, unavailable
from toolspace.server.sse_encoding import (
    DIALECTS,
    AllEventsSource,
    EventSource,
    SharedFeed,
    StreamEventSource,
    encode_event,
)
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.subscriptions import StreamClosed, SubscriberTooSlow
from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.server")

HEARTBEAT_SECONDS: Final = 15.0
STALL_SECONDS: Final = 20.0
"""How long one write may take before the client is disconnected."""
RECHECK_SECONDS: Final = 2.0
"""How often the permission of a subscriber is checked."""
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)
_CALL_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
_MAX_UNSENT_EVENTS: Final = 1_000
"""Further events of a call are dropped if its client is slow; the result never is."""
_MAX_UNSENT_BYTES: Final = 1024 * 1024
_EVENT_ID: Final = re.compile(r"(\d{1,18})(?:\.(\d{1,6}))?", re.ASCII)
_NEVER: Final = float("-inf")

PermissionCheck = Callable[[], Awaitable[bool]]
"""Whether a subscriber may still read."""


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Selects the format and the start of a stream."""

    format: str | None = None
    """The dialect: `native`, `ui-message-stream` (AI SDK) or `ag-ui`. The default is `native`, unless
    `runtime.response.type` of the agent says otherwise."""
    last_event_id: str = ""
    """The last event id that was received, if the header `Last-Event-ID` cannot be set."""
    from_: Literal["now", "start"] = msgspec.field(name="from", default="now")
    """Where to start without a last event id: at the present, or at the oldest stored event."""
    until: str | None = None
    """The type of event after which the stream ends, such as `run.done`."""


@dataclass(frozen=True)
class StreamOptions:
    """The dialect and the start of one subscription."""

    dialect: Dialect = NATIVE
    after: int | None = None
    """The last event that was received completely; None starts at the present."""
    skip: int = 0
    """How many frames of the next event were received too."""
    is_resume: bool = False
    """Whether the stream has to report missing events."""
    until: str | None = None


def parse_stream_options(
    query: StreamQuery, last_event_id: str | None, *, default_format: StreamFormat = "native"
) -> StreamOptions:
    """Returns the options of a request. Raises `Problem` 400.

    The header Last-Event-ID takes precedence over the query: a browser reconnects with the same URL and a new header.
    """
    format = default_format if query.format is None else query.format
    dialect = DIALECTS.get(format)
    if dialect is None:
        names = ", ".join(f'"{name}"' for name in DIALECTS)
        raise Problem(400, f'Unknown format "{format[:80]}"; known: {names}', path="$.format")
    if query.until is not None and query.until not in EVENT_TYPES:
        hint = did_you_mean(query.until[:80], EVENT_TYPES) or f"; known: {', '.join(EVENT_TYPES)}"
        raise Problem(400, f'Unknown event type "{query.until[:80]}"{hint}', path="$.until")
    event_id = last_event_id or query.last_event_id
    if not event_id:
        return StreamOptions(dialect, 0 if query.from_ == "start" else None, until=query.until)
    match = _EVENT_ID.fullmatch(event_id)
    after, skip = (int(match[1]), int(match[2]) + 1 if match[2] else 0) if match else (0, 0)
    if match is None or (skip and not after):
        raise Problem(400, f'"{event_id[:80]}" is not an event id; send the last one from an "id:" line, or none')
    return StreamOptions(dialect, after - 1 if skip else after, skip, is_resume=True, until=query.until)


class StreamRegistry:
    """All open streams of this process, and the timer that checks them."""

    def __init__(
        self, *, heartbeat: float = HEARTBEAT_SECONDS, stall: float = STALL_SECONDS, recheck: float = RECHECK_SECONDS
    ) -> None:
        self.heartbeat = heartbeat
        self.stall = stall
        self.recheck_after = recheck
        self.dropped_count = 0
        """Subscribers that were disconnected because they did not read."""
        self._responses: set[SseResponse] = set()
        self._feeds: WeakValueDictionary[tuple[Hub, str, str, Viewer], SharedFeed] = WeakValueDictionary()
        """Each is kept by its subscribers."""
        self._timer: asyncio.Task[None] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._responses)

    async def open_stream(
        self,
        hub: Hub,
        stream: str,
        options: StreamOptions | None = None,
        *,
        viewer: Viewer,
        is_allowed: PermissionCheck | None = None,
        check_each_write: bool = False,
        expires_at: int | None = None,
    ) -> SseResponse:
        """Subscribes to a stream; returns a response that is ready to be sent.

        `is_allowed` is checked periodically, with `check_each_write` also before each write.
        The stream ends at `expires_at` (Unix milliseconds).
        """
        self._check_open()
        options = options or StreamOptions()
        try:
            subscription = await hub.subscribe(stream, after=options.after)
        except StreamClosed:
            raise _refuse_while_stopping() from None
        key = (hub, stream, options.dialect.name, viewer)
        if (feed := self._feeds.get(key)) is None:
            feed = self._feeds[key] = SharedFeed(hub, stream, options.dialect, viewer)
        if not options.is_resume:
            subscription.reset_id = None  # A client that reads from the start misses nothing.
        source = StreamEventSource(feed, subscription, until=options.until)
        try:
            first = await source.first_frames(replays=options.after is not None, skip=options.skip)
        except BaseException:
            source.close()
            raise
        return SseResponse(
            self,
            source,
            first,
            headers=(*_HEADERS, *options.dialect.headers),
            is_allowed=is_allowed,
            check_each_write=check_each_write,
            expires_at=expires_at,
        )

    async def open_all_events(self, hub: Hub, *, is_allowed: PermissionCheck | None = None) -> SseResponse:
        """Subscribes to the events of all streams, for operators."""
        self._check_open()
        source = AllEventsSource(hub.subscribe_all())
        return SseResponse(self, source, await source.first_frames(), is_allowed=is_allowed)

    def recheck_permissions(self) -> None:
        """Checks the permission of every subscriber before the next write."""
        for response in tuple(self._responses):
            response.recheck_permission()

    def close_all(self) -> None:
        """Ends all streams and opens no more. Clients can resume at another process with their last event id."""
        self._is_closed = True
        for response in tuple(self._responses):
            response.end()

    async def aclose(self) -> None:
        """Ends all streams and waits for them. Subscribers that do not read are disconnected."""
        self.close_all()
        for response in tuple(self._responses):
            if response.is_writing:
                response.drop()
        await asyncio.gather(*(response.closed.wait() for response in tuple(self._responses)))
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)

    def add(self, response: SseResponse) -> None:
        self._responses.add(response)
        if self._is_closed:
            response.end()
        elif self._timer is None:
            self._timer = asyncio.create_task(self._run_timer())

    def discard(self, response: SseResponse) -> None:
        self._responses.discard(response)

    async def _run_timer(self) -> None:
        tick = min(1.0, self.heartbeat / 4, self.stall / 4, self.recheck_after / 2)
        while True:
            await asyncio.sleep(tick)
            now, unix_ms = time.monotonic(), time.time() * 1000
            for response in tuple(self._responses):
                try:
                    response.check_timers(now, unix_ms)
                except Exception:  # An error in one stream must not end the timer of all.
                    _log.exception("timer of a stream failed")

    def _check_open(self) -> None:
        if self._is_closed:
            raise _refuse_while_stopping()


class SseResponse:
    """One streaming response. It sends the bytes of a source until it is ended or the client disconnects."""

    def __init__(
        self,
        registry: StreamRegistry,
        source: EventSource,
        first: bytes,
        *,
        headers: tuple[tuple[bytes, bytes], ...] = _HEADERS,
        is_allowed: PermissionCheck | None = None,
        check_each_write: bool = False,
        expires_at: int | None = None,
    ) -> None:
        self.closed = asyncio.Event()
        self._registry = registry
        self._source = source
        self._first = first
        self._headers = headers
        self._permission_check = is_allowed
        self._checks_each_write = check_each_write and is_allowed is not None
        self._expires_at = expires_at
        self._send: Send | None = None
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[Any] | None = None
        self._writing_since = 0.0
        self._last_write = self._last_check = time.monotonic()
        self._is_dropped = False

    @property
    def is_writing(self) -> bool:
        return bool(self._writing_since)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._transport = find_transport(receive)
        self._task = asyncio.current_task()
        self._registry.add(self)
        disconnect = asyncio.create_task(self._end_on_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})
            if not self._checks_each_write or await self._is_allowed(time.monotonic(), has_data=True):
                await self._write(self._first)
                self._first = b""
                await self._send_events()
            if self._is_dropped:
                await disconnect  # The web server then knows that the connection is closed, and expects no end.
            else:
                await self._write(self._source.final_frame() if self._source.is_complete else b"", is_last=True)
        except asyncio.CancelledError:
            if not self._is_dropped:
                raise
        finally:
            self._registry.discard(self)
            disconnect.cancel()
            self.close()

    def close(self) -> None:
        """Releases the subscription. A caller that opened the response but does not send it has to close it."""
        if not self.closed.is_set():
            self.closed.set()
            self._source.close()

    def check_timers(self, now: float, unix_ms: float) -> None:
        """Ends an expired stream, drops a stuck one, and wakes one that needs a heartbeat or a permission check."""
        if self._writing_since:
            if now - self._writing_since > self._registry.stall or self._source.has_lost_events:
                self.drop()
        elif self._expires_at is not None and unix_ms >= self._expires_at:
            self.end()
        elif now - self._last_write >= self._registry.heartbeat or self._needs_check(now):
            self._source.wake()

    def recheck_permission(self) -> None:
        if self._permission_check is not None:
            self._last_check = _NEVER
            self._source.wake()

    def end(self) -> None:
        """Ends the response properly; the client may reconnect."""
        self._source.close()

    def drop(self) -> None:
        """Disconnects a client that does not read."""
        if self._is_dropped:
            return
        self._is_dropped = True
        self._registry.dropped_count += 1
        _log.info("stream subscriber disconnected: it did not read")
        self._source.close()
        if self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()

    async def _send_events(self) -> None:
        source = self._source
        try:
            while True:
                data = await source.next()
                now = time.monotonic()
                needs_check = self._needs_check(now) or (data and self._checks_each_write)
                if needs_check and not await self._is_allowed(now, has_data=bool(data)):
                    return
                if data:
                    await self._write(data)
                elif now - self._last_write >= self._registry.heartbeat:
                    await self._write(source.ping())
        except StreamClosed:
            return
        except StorageUnavailable as error:
            _log.warning("stream ended because the database is unavailable; the client may reconnect: %s", error)
        except SubscriberTooSlow as error:
            _log.debug("%s", error)
            self.drop()

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        assert self._send is not None
        self._writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._writing_since = 0.0
        self._last_write = time.monotonic()

    def _needs_check(self, now: float) -> bool:
        return self._permission_check is not None and now - self._last_check >= self._registry.recheck_after

    async def _is_allowed(self, now: float, *, has_data: bool) -> bool:
        assert self._permission_check is not None
        self._last_check = now  # Before the check: a permission that changes meanwhile is checked again.
        try:
            return await self._permission_check()
        except Exception as error:
            # The permission is unknown. The client can read later what is not sent now; an idle stream may stay open.
            _log.warning("cannot check the permission of a stream subscriber: %s", error)
            self._last_check = _NEVER
            return not has_data

    async def _end_on_disconnect(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self._source.close()


class CallStream:
    """A streaming response that makes a call. If the client disconnects, the call is cancelled."""

    def __init__(
        self,
        toolspace: Toolspace,
        start_call: Callable[[str], Coroutine[Any, Any, ToolResult]],
        host: GatewayCallHost,
        call_id: str | None = None,
    ) -> None:
        self._toolspace = toolspace
        self._start_call = start_call
        self._host = host
        self._call_id = call_id or new_id("call")
        self._frames: list[bytes] = []
        self._unsent_bytes = 0
        self._has_result = False
        """Whether sending the result has begun."""
        self._wake_event = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unsubscribe = self._toolspace.bus.subscribe(
            self._on_event, EventType.TOOL_CALL_PROGRESS, EventType.TOOL_CALL_PARTIAL
        )
        call = asyncio.create_task(self._start_call(self._call_id))
        call.add_done_callback(lambda _: self._wake_event.set())
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        disconnect.add_done_callback(lambda _: self._wake_event.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_CALL_HEADERS)})
            while not call.done() and not disconnect.done():
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await self._wake_event.wait()
                except TimeoutError:
                    self._frames.append(b": still there\n\n")
                self._wake_event.clear()
                await self._write(send)
            if call.done() and not disconnect.done():  # A client that disconnected does not get the result.
                await self._send_result(call.result(), send)
        except TimeoutError:
            if (transport := find_transport(receive)) is not None:
                transport.abort()
        finally:
            unsubscribe()
            disconnect.cancel()
            call.cancel()
            await asyncio.gather(call, disconnect, return_exceptions=True)
            if self._host.inline_call_ids:
                self._host.pending_calls.mark_undelivered(self._host.inline_call_ids, may_be_known=self._has_result)

    async def _send_result(self, result: ToolResult, send: Send) -> None:
        data = result.to_dict()
        if (pending_id := result.extras.get(PENDING_CALL_KEY)) is not None:
            data |= {"status": "pending", PENDING_CALL_KEY: pending_id}
        if self._host.acknowledgeable_ids:
            data["acknowledge"] = self._host.acknowledgeable_ids
        self._has_result = True
        self._frames.append(encode_event("result", data))
        await self._write(send)
        await send({"type": "http.response.body", "body": b""})
        call_ids, self._host.inline_call_ids = self._host.inline_call_ids, []
        self._host.pending_calls.mark_delivered(call_ids)

    async def _write(self, send: Send) -> None:
        if self._frames:
            frames, self._frames, self._unsent_bytes = self._frames, [], 0
            async with asyncio.timeout(STALL_SECONDS):
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})

    def _on_event(self, event: Event) -> None:
        if len(self._frames) >= _MAX_UNSENT_EVENTS or self._unsent_bytes >= _MAX_UNSENT_BYTES:
            return
        if isinstance(event, CallProgress) and event.call_id == self._call_id:
            type = "tool.progress"
            data = {"progress": event.progress, "total": event.total, "message": event.message}
        elif isinstance(event, CallPartial) and event.call_id == self._call_id:
            type = "tool.streaming"
            data = {"output": event.value, "preliminary": True}
        else:
            return
        frame = encode_event(type, {"toolCallId": event.call_id, "toolName": event.tool_name, **data})
        self._frames.append(frame)
        self._unsent_bytes += len(frame)
        self._wake_event.set()


def _refuse_while_stopping() -> Problem:
    return unavailable("The gateway is stopping; try again")

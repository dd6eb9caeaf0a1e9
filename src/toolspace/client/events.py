"""Event streams of a gateway as async iterators, which reconnect after the last event that was delivered."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import aiohttp
import msgspec

from toolspace.client.errors import (
    ApiError,
    GatewayUnreachable,
    ServerError,
    TooManyRequests,
    Unauthorized,
    UnexpectedResponse,
)
from toolspace.client.transport import SILENCE_SECONDS, Transport, retry_delay, retry_delays
from toolspace.core import json_text
from toolspace.core.sse_decoder import SseDecoder, SseEvent, SseSizeError

_log = logging.getLogger("toolspace.client")

RESET: Final = "stream.reset"
"""The type of the event that says: the requested event is deleted, so the stream starts at its oldest event."""
_POSITION: Final = ""
"""The type of an event without data. It moves the position past events that this subscriber may not see."""
_MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
_FIRST_DELAY: Final = 0.1
_MAX_DELAY: Final = 5.0


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str | None = None
    """Its position: pass it as `last_event_id` to continue after this event."""
    type: str
    data: Any = None


def read_event(event: SseEvent) -> StreamEvent:
    """Returns an event of a stream with its data parsed; data that is not JSON stays text."""
    if event.data is None:
        return StreamEvent(id=event.id, type=_POSITION)
    try:
        data = json_text.decode(event.data)
    except ValueError:
        data = event.data.decode("utf-8", "replace")
    return StreamEvent(id=event.id, type=event.event, data=data)


class EventSubscription:
    """An async iterator over the events of a stream. It reconnects by itself and repeats no event.

    It ends when it is closed. It raises `ApiError` for refusals that a retry cannot fix (401, 403, 404). It does not
    read ahead: the gateway disconnects a subscriber that does not iterate for long, and the next iteration reconnects
    after the last event.
    """

    def __init__(
        self,
        transport: Transport,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        last_event_id: str | int | None = None,
        max_delay: float = _MAX_DELAY,
        retry_unreachable: bool = True,
        on_connection: Callable[[bool], None] | None = None,
    ) -> None:
        """`on_connection` is called with True when the connection is open, and with False when it is lost."""
        self.last_event_id = None if last_event_id is None else str(last_event_id)
        """The id of the last event that was returned. A new subscription can continue after it."""
        self.connected = asyncio.Event()
        """Set while the connection is open."""
        self._transport = transport
        self._path = path
        self._query = dict(query or {})
        self._max_delay = max_delay
        self._on_connection = on_connection
        self._retry_unreachable = retry_unreachable
        """Whether to retry forever while the gateway cannot be reached."""
        self._response: aiohttp.ClientResponse | None = None
        self._decoder = SseDecoder(_MAX_EVENT_BYTES)
        self._buffer: list[StreamEvent] = []
        """Events that were read but not returned, in reverse order: the next one is the last item."""
        self._delays = retry_delays(first=_FIRST_DELAY, longest=max_delay)
        self._has_warned = False
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._is_closed:
            if self._buffer:
                event = self._buffer.pop()
                if event.id is not None:
                    self.last_event_id = event.id
                if event.type != _POSITION:
                    return event
            elif self._response is None:
                await self._connect()
            else:
                await self._read(self._response)
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The iteration was not finished: its connection must not stay open until the client is closed.
        if self._response is not None:
            self._response.close()

    def close(self) -> None:
        """Ends the iteration, also while it waits for an event."""
        self._is_closed = True
        self._disconnect()
        self._buffer.clear()

    async def _connect(self) -> None:
        has_renewed = False
        while not self._is_closed:
            try:
                self._response = await self._transport.open_stream(
                    self._path, query=self._query, last_event_id=self.last_event_id, renew=has_renewed
                )
            except Unauthorized:
                if has_renewed or not self._transport.can_renew:
                    raise
                has_renewed = True
                await self._transport.relocate()
                continue
            except (TooManyRequests, ServerError, GatewayUnreachable) as error:
                if isinstance(error, GatewayUnreachable) and not self._retry_unreachable:
                    raise
                await self._wait_to_retry(error)
                await self._transport.relocate()
                continue
            if self._is_closed:
                self._disconnect()
                return
            self._decoder = SseDecoder(_MAX_EVENT_BYTES)
            self.connected.set()
            if self._on_connection is not None:
                self._on_connection(True)
            if self._has_warned:
                _log.info("%s%s: reconnected", self._transport.url, self._path)
            return

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        try:
            chunk = await response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            is_timeout = isinstance(error, TimeoutError)
            reason = f"no data for {SILENCE_SECONDS:g} s" if is_timeout else str(error) or type(error).__name__
            await self._reconnect_later(reason)
            return
        if not chunk:
            await self._reconnect_later("the gateway closed the stream")
            return
        try:
            events = [read_event(event) for event in self._decoder.feed(chunk)]
        except SseSizeError as error:
            raise UnexpectedResponse(str(error)) from None
        if events:
            self._buffer = events[::-1]
            if any(event.type != _POSITION for event in events):  # New events: the delays start again.
                self._delays = retry_delays(first=_FIRST_DELAY, longest=self._max_delay)
                self._has_warned = False

    async def _reconnect_later(self, reason: str) -> None:
        self._disconnect()
        if self._is_closed:
            return
        if self._on_connection is not None:
            self._on_connection(False)
        url = f"{self._transport.url}{self._path}"
        _log.debug("%s: connection lost (%s); reconnecting after event %s", url, reason, self.last_event_id)
        # A restart of the gateway disconnects many clients at once, so they reconnect at random times.
        spread = random.uniform(0.0, min(self._decoder.retry or 0.0, self._max_delay))
        await asyncio.sleep(max(next(self._delays), spread))

    async def _wait_to_retry(self, error: ApiError | GatewayUnreachable) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s; retrying", error)
        delay = next(self._delays)
        await asyncio.sleep(retry_delay(error, delay) if isinstance(error, ApiError) else delay)

    def _disconnect(self) -> None:
        self.connected.clear()
        response, self._response = self._response, None
        if response is not None:
            response.close()

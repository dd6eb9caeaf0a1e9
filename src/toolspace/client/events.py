"""Reads a stream of server-sent events for as long as someone wants it: comes back where it was when a line breaks."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from types import TracebackType
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
from toolspace.client.transport import Transport, retry_delay, retry_delays
from toolspace.core import json_text
from toolspace.core.sse import SseDecoder, SseEvent, SseSizeError

_log = logging.getLogger("toolspace.client")

RESET: Final = "stream.reset"
"""The place that was asked for is not kept any more: what follows begins with the oldest that is."""
_PLACE: Final = ""
"""The type of a frame that says nothing but how far the reader has come: what it may not see moves it too."""
_MOST_EVENT: Final = 64 * 1024 * 1024
_FIRST_PAUSE: Final = 0.1
_MOST_PAUSE: Final = 5.0


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str | None = None
    """Its place: what to give as `last_event_id` to go on behind it."""
    type: str
    data: Any = None


def read_event(event: SseEvent) -> StreamEvent:
    """Returns an event of a stream with its data parsed; data that is not JSON stays text."""
    if event.data is None:
        return StreamEvent(id=event.id, type=_PLACE)
    try:
        data = json_text.decode(event.data)
    except ValueError:
        data = event.data.decode("utf-8", "replace")
    return StreamEvent(id=event.id, type=event.event, data=data)


class EventSubscription:
    """An iterator over the events of a stream that reconnects by itself: none is missed, none comes twice.

    It ends when it is closed, and raises where the gateway refuses for good (401, 403, 404). Nothing is read ahead: who
    does not iterate for long is disconnected by the gateway, and goes on where it was.
    """

    def __init__(
        self,
        transport: Transport,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        last_event_id: str | int | None = None,
        max_delay: float = _MOST_PAUSE,
        retry_unreachable: bool = True,
    ) -> None:
        self.last_event_id = None if last_event_id is None else str(last_event_id)
        """The id of the last event that was handed out: a new subscription can go on from it."""
        self.connected = asyncio.Event()
        """Set while the line stands."""
        self._transport = transport
        self._path = path
        self._query = dict(query or {})
        self._most_pause = max_delay
        self._patient = retry_unreachable
        """Whether to try for ever while the gateway cannot be reached."""
        self._response: aiohttp.ClientResponse | None = None
        self._decoder = SseDecoder(_MOST_EVENT)
        self._ready: list[StreamEvent] = []
        self._waits = retry_delays(first=_FIRST_PAUSE, most=max_delay)
        self._told = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._closed:
            if self._ready:
                event = self._ready.pop()
                if event.id is not None:
                    self.last_event_id = event.id
                if event.type != _PLACE:
                    return event
            elif self._response is None:
                await self._connect()
            else:
                await self._read(self._response)
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Left in the middle of a loop: the connection must not stay open for as long as the client does.
        if self._response is not None:
            self._response.close()

    def close(self) -> None:
        """Ends it; one that waits for an event is ended too."""
        self._closed = True
        self._drop()
        self._ready.clear()

    async def _connect(self) -> None:
        renewed = False
        while not self._closed:
            try:
                self._response = await self._transport.open_stream(
                    self._path, query=self._query, last_event_id=self.last_event_id, renew=renewed
                )
            except Unauthorized:
                if renewed or not self._transport.can_renew:
                    raise
                renewed = True
                continue
            except (TooManyRequests, ServerError) as error:
                await self._pause(error)
                continue
            except GatewayUnreachable as error:
                if not self._patient:
                    raise
                await self._pause(error)
                continue
            if self._closed:
                self._drop()
                return
            self._decoder = SseDecoder(_MOST_EVENT)
            self.connected.set()
            if self._told:
                _log.info("%s%s: connected again", self._transport.url, self._path)
            return

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        try:
            chunk = await response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._lost(str(error) or "nothing was heard for too long")
            return
        if not chunk:
            await self._lost("the gateway ended it")
            return
        try:
            events = [read_event(event) for event in self._decoder.feed(chunk)]
        except SseSizeError as error:
            raise UnexpectedResponse(str(error)) from None
        if events:
            self._ready = events[::-1]  # Taken from the end.
            if any(event.type != _PLACE for event in events):  # It came further: the next break is a first one.
                self._waits = retry_delays(first=_FIRST_PAUSE, most=self._most_pause)
                self._told = False

    async def _lost(self, why: str) -> None:
        self._drop()
        if self._closed:
            return
        _log.debug("%s%s: lost (%s); coming back behind %s", self._transport.url, self._path, why, self.last_event_id)
        # Many may have been cut off at once, by a gateway that starts anew: they come back over the time that it names.
        spread = random.uniform(0.0, min(self._decoder.retry or 0.0, self._most_pause))
        await asyncio.sleep(max(next(self._waits), spread))

    async def _pause(self, error: ApiError | GatewayUnreachable) -> None:
        if not self._told:
            self._told = True
            _log.warning("%s; trying again", error)
        own = next(self._waits)
        await asyncio.sleep(retry_delay(error, own) if isinstance(error, ApiError) else own)

    def _drop(self) -> None:
        self.connected.clear()
        response, self._response = self._response, None
        if response is not None:
            response.close()

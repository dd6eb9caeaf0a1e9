"""Connects to a server over the oldest HTTP transport: an SSE stream from the server, POST requests to it.

The MCP SDK's own SSE client is not used, for two reasons: its limit of 1 MiB for a message cannot be raised, and one
failed POST loses the whole connection while the request that waits for it hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import anyio
import httpx2
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, ErrorData, JSONRPCError, JSONRPCRequest, RequestId

from toolspace.errors import ProviderError
from toolspace.providers.mcp.transports.base import (
    MessageDecoder,
    MessageReader,
    MessageStreams,
    MessageWriter,
    OpenTransport,
    encode_message,
)
from toolspace.providers.mcp.transports.http_client import (
    McpHttpClient,
    describe_http_error,
    may_have_been_sent,
    same_origin,
    send_within_origin,
)

_OPEN_SECONDS = 10.0
_QUEUE_SIZE = 16


class SseConnection:
    """One SSE connection: `open` it, use its `streams`, `aclose` it."""

    def __init__(
        self, name: str, url: str, client: McpHttpClient, transport: OpenTransport, max_message_bytes: int
    ) -> None:
        self._log = logging.getLogger(f"toolspace.mcp.{name}")
        self._decode = MessageDecoder(name)
        self._client = client
        self._transport = transport
        self._max_message_bytes = max_message_bytes
        self._url = httpx2.URL(url)
        self._endpoint = self._url
        self._response: httpx2.Response | None = None
        self._reader: asyncio.Task[None] | None = None
        self._posts: set[asyncio.Task[None]] = set()
        self._queue: asyncio.Queue[SessionMessage | None] = asyncio.Queue(_QUEUE_SIZE)
        self.streams: MessageStreams = (_SseReader(self._queue), _PostWriter(self))

    async def open(self) -> None:
        """Raises ProviderError if the server has no SSE stream at this URL."""
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                request = self._client.build_request("GET", self._url, headers=headers)
                self._response = response = await send_within_origin(self._client, request)
                if response.status_code != 200:
                    status = f"HTTP {response.status_code} {response.reason_phrase}".strip()
                    raise ProviderError(f"the server answered the request for an event stream with {status}")
                events = aiter(httpx2.EventSource(response, max_event_size=self._max_message_bytes))
                first_event = await anext(events)
        except BaseException as error:
            await self.aclose()
            if isinstance(error, TimeoutError):
                raise ProviderError("the server opened no event stream in time") from None
            if isinstance(error, StopAsyncIteration):
                raise ProviderError("the server closed its event stream before the first event") from None
            if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
                raise ProviderError(describe_http_error(error, self._url)) from None
            raise
        self._endpoint = response.request.url.join(first_event.data)
        if first_event.event != "endpoint" or not same_origin(response.request.url, self._endpoint):
            await self.aclose()
            raise ProviderError("the server's event stream names no endpoint of the same origin for messages")
        self._reader = asyncio.create_task(self._read(events))

    async def aclose(self) -> None:
        tasks = [*self._posts, *([self._reader] if self._reader is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._response is not None:
            await self._response.aclose()

    async def _read(self, events: AsyncIterator[httpx2.ServerSentEvent]) -> None:
        reason = "the server closed its event stream"
        try:
            async for event in events:
                if event.event == "message" and (message := self._decode(event.data.encode())) is not None:
                    await self._queue.put(message)
        except httpx2.HTTPError as error:
            reason = describe_http_error(error, self._url)
        self._transport.mark_lost(reason)
        await self._queue.put(None)

    async def send(self, message: SessionMessage) -> None:
        content = message.message
        if isinstance(content, JSONRPCRequest):
            # In its own task, because some servers answer the POST only after the request is done.
            self.send_request(encode_message(message), content.id)
        else:
            await self._post(encode_message(message), None)

    def send_request(self, body: bytes, request_id: RequestId) -> None:
        task = asyncio.create_task(self._post(body, request_id))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def _post(self, body: bytes, request_id: RequestId | None) -> None:
        try:
            request = self._client.build_request(
                "POST", self._endpoint, content=body, headers={"content-type": "application/json"}
            )
            response = await send_within_origin(self._client, request)
            await response.aclose()
            if response.is_success:
                return
            reason = f"the server answered with HTTP {response.status_code} {response.reason_phrase}".strip()
            code, data = INVALID_REQUEST, {"status": response.status_code}
        except Exception as error:
            reason = describe_http_error(error, self._url)
            code, data = CONNECTION_CLOSED, {"sent": may_have_been_sent(error)}
        if request_id is None:
            self._log.debug("a notification was not delivered: %s", reason)
            return
        error_data = ErrorData(code=code, message=reason, data=data)
        await self._queue.put(SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error_data)))


class _SseReader(MessageReader):
    def __init__(self, queue: asyncio.Queue[SessionMessage | None]) -> None:
        self._queue = queue
        self._is_ended = False

    async def receive(self) -> SessionMessage:
        if not self._is_ended and (message := await self._queue.get()) is not None:
            return message
        self._is_ended = True
        raise anyio.EndOfStream

    async def aclose(self) -> None:
        self._is_ended = True


class _PostWriter(MessageWriter):
    def __init__(self, connection: SseConnection) -> None:
        self._connection = connection

    async def send(self, item: SessionMessage, /) -> None:
        await self._connection.send(item)

    async def aclose(self) -> None:
        """Does nothing: the SSE connection is closed as a whole."""

"""Connects to a server over streamable HTTP, or over SSE if it supports only that.

The first message shows which of the two a server supports, so a server of the newer kind costs no extra request. The
MCP SDK implements streamable HTTP. Its SSE client is not used, for two reasons: its limit of 1 MiB for a message cannot
be raised, and one failed POST loses the whole connection while the request that waits for it hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import msgspec
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, JSONRPCRequest, RequestId

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.oauth.http import tls_context
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports.base import (
    UNKNOWN_SESSION_DATA,
    MessageDecoder,
    MessageReader,
    MessageWriter,
    OpenTransport,
    WrappedReader,
    WrappedWriter,
    encode_message,
    error_message,
    unwrap_group,
    wait_until_done,
)
from toolspace.providers.mcp.transports.http_client import (
    McpHttpClient,
    describe_http_error,
    may_have_been_sent,
    same_origin,
    send_within_origin,
)

_OPEN_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_QUEUE_SIZE = 16
_sse_urls: set[str] = set()
"""URLs of servers that supported only SSE the last time; reconnecting starts with SSE."""


@asynccontextmanager
async def open_http(
    name: str, url: str, spec: ServerSpec, *, auth: httpx2.Auth | None, max_message_bytes: int
) -> AsyncGenerator[OpenTransport]:
    """Opens streamable HTTP, or SSE if the server supports only that or the spec asks for it."""
    await asyncio.to_thread(tls_context)  # Slow the first time.
    connection = _HttpConnection(name, url, spec, auth, max_message_bytes)
    try:
        await connection.open(only_sse=spec.kind == "sse")
        yield connection.transport
    finally:
        await wait_until_done(asyncio.create_task(connection.close()))


class _HttpConnection:
    def __init__(self, name: str, url: str, spec: ServerSpec, auth: httpx2.Auth | None, max_message_bytes: int) -> None:
        self.transport = OpenTransport("http")
        self._url = url
        self._max_message_bytes = max_message_bytes
        self._client = McpHttpClient(
            spec.headers,
            auth,
            max_message_bytes=max_message_bytes,
            on_refused=self._fall_back_to_sse,
            on_doubt=self.transport.doubt_event.set,
        )
        self._sse = _SseConnection(name, url, self._client, self.transport, max_message_bytes)
        self._close_event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._streams: tuple[_SwitchableReader, WrappedWriter] | None = None

    async def open(self, *, only_sse: bool) -> None:
        if only_sse or self._url in _sse_urls:
            try:
                await self._sse.open()
            except ProviderError:
                _sse_urls.discard(self._url)
                if only_sse:
                    raise
            else:
                self.transport.transport = "sse"
                self.transport.streams = self._sse, self._sse
                return
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # In its own task: when the SDK's transport breaks, it cancels the task that entered it.
        self._task = asyncio.create_task(self._run(ready))
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._task.result()
        reader, writer = ready.result()
        self.transport.streams = self._streams = _SwitchableReader(reader), WrappedWriter(writer)

    async def _run(self, ready: asyncio.Future[Any]) -> None:
        try:
            async with streamable_http_client(
                self._url, http_client=self._client, max_sse_event_size=self._max_message_bytes
            ) as streams:
                ready.set_result(streams)
                await self._close_event.wait()
        except Exception as group:
            error = unwrap_group(group)
            self.transport.mark_lost(f"the HTTP transport broke: {mask_secrets(str(error)) or type(error).__name__}")

    async def _fall_back_to_sse(self, body: bytes) -> bool:
        """Sends the first message over SSE instead, if the server supports it. Returns whether it did."""
        message = msgspec.json.decode(body)
        if self._streams is None or "id" not in message:
            return False
        try:
            await self._sse.open()
        except ProviderError:
            return False
        _sse_urls.add(self._url)
        self.transport.transport = "sse"
        reader, writer = self._streams
        reader.inner = writer.inner = self._sse
        self._sse.send_request(body, message["id"])
        return True

    async def close(self) -> None:
        try:
            self._close_event.set()
            if self._task is not None:
                # The SDK tells the server that the session ends. The server may not answer.
                await asyncio.wait((self._task,), timeout=_CLOSE_SECONDS)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            await self._sse.close()
            await self._client.aclose()


class _SwitchableReader(WrappedReader):
    """The fallback replaces `inner`. The old one then holds only the refusal of the first message."""

    async def receive(self) -> SessionMessage | Exception:
        while True:
            inner = self.inner
            item = await inner.receive()
            if inner is self.inner:
                return item


class _SseConnection(MessageReader, MessageWriter):
    """An SSE stream from the server, POST requests to it. It is both streams of the transport."""

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
        self._tasks: set[asyncio.Task[None]] = set()
        """Reads the stream, and sends requests."""
        self._queue: asyncio.Queue[SessionMessage | None] = asyncio.Queue(_QUEUE_SIZE)
        self._is_ended = False

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
            self._endpoint = response.request.url.join(first_event.data)
            if first_event.event != "endpoint" or not same_origin(response.request.url, self._endpoint):
                raise ProviderError("the server's event stream names no endpoint of the same origin for messages")
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise ProviderError(f"the server opened no event stream within {_OPEN_SECONDS:g} s") from None
            if isinstance(error, StopAsyncIteration):
                raise ProviderError("the server closed its event stream before the first event") from None
            if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
                raise ProviderError(describe_http_error(error, self._url)) from None
            raise
        self._start(self._read(events))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._response is not None:
            await self._response.aclose()

    async def receive(self) -> SessionMessage:
        if not self._is_ended and (message := await self._queue.get()) is not None:
            return message
        self._is_ended = True
        raise anyio.EndOfStream

    async def send(self, item: SessionMessage, /) -> None:
        message = item.message
        if isinstance(message, JSONRPCRequest):
            headers = item.metadata.headers if isinstance(item.metadata, ClientMessageMetadata) else None
            self.send_request(encode_message(item), message.id, headers)
        else:
            await self._post(encode_message(item), None)

    def send_request(self, body: bytes, request_id: RequestId, headers: Mapping[str, str] | None = None) -> None:
        """Sends it in its own task, because some servers answer the POST only after the request is done."""
        self._start(self._post(body, request_id, headers))

    async def aclose(self) -> None:
        self._is_ended = True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    async def _post(self, body: bytes, request_id: RequestId | None, headers: Mapping[str, str] | None = None) -> None:
        all_headers = {**(headers or {}), "content-type": "application/json"}
        try:
            request = self._client.build_request("POST", self._endpoint, content=body, headers=all_headers)
            response = await send_within_origin(self._client, request)
            await response.aclose()
            if response.is_success:
                return
            reason = f"the server answered with HTTP {response.status_code} {response.reason_phrase}".strip()
            code, data = INVALID_REQUEST, {"status": response.status_code}
            if response.status_code == 404:  # The session is part of the endpoint's URL.
                data = UNKNOWN_SESSION_DATA
                if request_id is None:
                    self._transport.doubt_event.set()
        except Exception as error:
            reason = describe_http_error(error, self._url)
            code, data = CONNECTION_CLOSED, {"sent": may_have_been_sent(error)}
        if request_id is None:
            self._log.debug("a notification was not delivered: %s", reason)
        else:
            await self._queue.put(error_message(request_id, code, reason, data))

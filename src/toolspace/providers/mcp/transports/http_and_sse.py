"""Connects to a server over streamable HTTP, and falls back to SSE for servers that support only that.

The first message shows which of the two a server supports, so a server of the newer kind costs no extra request. The
MCP SDK implements streamable HTTP; `sse` implements the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Protocol

import anyio
import httpx2
import msgspec
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, ErrorData, JSONRPCError, JSONRPCRequest, RequestId

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.transports.base import (
    MessageDecoder,
    MessageReader,
    MessageStreams,
    MessageWriter,
    OpenTransport,
    encode_message,
    unwrap_group,
    wait_until_done,
)
from toolspace.providers.mcp.transports.http_client import (
    McpHttpClient,
    describe_http_error,
    may_have_been_sent,
    same_origin,
    send_within_origin,
    tls_context,
)

# MERGED from sse: Connects to a server over the oldest HTTP transport: an SSE stream from the server, POST requests to

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


_CLOSE_SECONDS = 2.0
_sse_urls: set[str] = set()
"""URLs of servers that supported only SSE the last time; reconnecting starts with SSE."""


class _ReadStream(Protocol):
    """What is needed of the SDK's reader, whose own type is private."""

    async def receive(self) -> SessionMessage | Exception: ...
    async def aclose(self) -> None: ...


class _WriteStream(Protocol):
    async def send(self, item: SessionMessage, /) -> None: ...
    async def aclose(self) -> None: ...


_SdkStreams = tuple[_ReadStream, _WriteStream]


@asynccontextmanager
async def open_streamable_http(
    name: str, url: str, spec: ServerSpec, *, auth: httpx2.Auth | None, max_message_bytes: int
) -> AsyncGenerator[OpenTransport]:
    """Opens streamable HTTP, or SSE if the server supports only that or the spec asks for it."""
    await asyncio.to_thread(tls_context)  # Slow the first time.
    connection = _HttpConnection(name, url, spec, auth, max_message_bytes)
    try:
        await connection.open(only_sse=spec.kind == "sse")
        yield connection.transport
    finally:
        await connection.aclose()


class _HttpConnection:
    def __init__(self, name: str, url: str, spec: ServerSpec, auth: httpx2.Auth | None, max_message_bytes: int) -> None:
        self.transport = OpenTransport("http")
        self._url = url
        self._max_message_bytes = max_message_bytes
        self._client = McpHttpClient(
            spec.headers, auth, max_message_bytes=max_message_bytes, on_refused=self._fall_back_to_sse
        )
        self._sse = SseConnection(name, url, self._client, self.transport, max_message_bytes)
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._streams: tuple[_SwitchableReader, _SwitchableWriter] | None = None

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
                self.transport.streams = self._sse.streams
                return
        ready: asyncio.Future[_SdkStreams] = asyncio.get_running_loop().create_future()
        # In its own task: when the SDK's transport breaks, it cancels the task that entered it.
        self._task = asyncio.create_task(self._run(ready))
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._task.result()
        reader, writer = ready.result()
        self._streams = _SwitchableReader(reader), _SwitchableWriter(writer)
        self.transport.streams = self._streams

    async def _run(self, ready: asyncio.Future[_SdkStreams]) -> None:
        try:
            async with streamable_http_client(
                self._url, http_client=self._client, max_sse_event_size=self._max_message_bytes
            ) as streams:
                ready.set_result(streams)
                await self._closing.wait()
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
        reader.inner, writer.inner = self._sse.streams
        self._sse.send_request(body, message["id"])
        return True

    async def aclose(self) -> None:
        await wait_until_done(asyncio.create_task(self._close()))

    async def _close(self) -> None:
        try:
            self._closing.set()
            if self._task is not None:
                # The SDK tells the server that the session ends. The server may not answer.
                await asyncio.wait((self._task,), timeout=_CLOSE_SECONDS)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            await self._sse.aclose()
            await self._client.aclose()


class _SwitchableReader(MessageReader):
    """Reads from `inner`, which the fallback replaces. The old one then holds only the refusal of the first message."""

    def __init__(self, inner: _ReadStream) -> None:
        self.inner = inner

    @property
    def last_context(self) -> Context | None:
        """The SDK handles a message in the context of its sender, if the reader knows it."""
        return getattr(self.inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        while True:
            inner = self.inner
            item = await inner.receive()
            if inner is self.inner:
                return item

    async def aclose(self) -> None:
        await self.inner.aclose()


class _SwitchableWriter(MessageWriter):
    def __init__(self, inner: _WriteStream) -> None:
        self.inner = inner

    async def send(self, item: SessionMessage, /) -> None:
        await self.inner.send(item)

    async def aclose(self) -> None:
        await self.inner.aclose()

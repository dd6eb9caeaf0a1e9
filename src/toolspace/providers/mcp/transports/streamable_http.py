"""Connects to a server over streamable HTTP, and falls back to SSE for servers that support only that.

The first message shows which of the two a server supports, so a server of the newer kind costs no extra request. The
MCP SDK implements streamable HTTP; `sse` implements the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Protocol

import httpx2
import msgspec
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.errors import unwrap_group
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.transports.base import MessageReader, MessageWriter, OpenTransport, wait_until_done
from toolspace.providers.mcp.transports.http_client import McpHttpClient, tls_context
from toolspace.providers.mcp.transports.sse import SseConnection

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

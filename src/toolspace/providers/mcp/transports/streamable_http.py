"""Speaks with a server over HTTP: the SDK's streamable transport, or the event stream of servers that know no better.

Which of the two is found out with the first message, so that it costs nothing where all is well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import Context
from typing import TYPE_CHECKING, cast

import httpx2
import msgspec
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.transports.base import MessageReader, MessageWriter, OpenTransport, wait_until_done
from toolspace.providers.mcp.transports.http_client import McpHttpClient, tls_context
from toolspace.providers.mcp.transports.sse import SseConnection

if TYPE_CHECKING:  # A private module of the SDK: for its names only.
    from mcp.client._transport import ReadStream, TransportStreams, WriteStream

_CLOSE_SECONDS = 2.0
_event_streams: set[str] = set()
"""URLs behind which there was an event stream the last time: reconnecting need not find out again."""


@asynccontextmanager
async def open_streamable_http(
    name: str, url: str, spec: ServerSpec, *, auth: httpx2.Auth | None, max_message: int
) -> AsyncGenerator[OpenTransport]:
    """The HTTP transport that the server speaks, or only the event stream where the spec asks for it."""
    await asyncio.to_thread(tls_context)  # Only the first time takes long.
    connection = _Connection(name, url, spec, auth, max_message)
    try:
        await connection.open(only_events=spec.kind == "sse")
        yield connection.link
    finally:
        await connection.aclose()


class _Connection:
    def __init__(self, name: str, url: str, spec: ServerSpec, auth: httpx2.Auth | None, max_message: int) -> None:
        self.link = OpenTransport("http")
        self._url = url
        self._max_message = max_message
        self._client = McpHttpClient(spec.headers, auth, max_message=max_message, on_refused=self._fall_back)
        self._events = SseConnection(name, url, self._client, self.link, max_message)
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._streams: tuple[_Switch, _SwitchSink] | None = None

    async def open(self, *, only_events: bool) -> None:
        if only_events or self._url in _event_streams:
            try:
                await self._events.open()
            except ProviderError:
                _event_streams.discard(self._url)
                if only_events:
                    raise
            else:
                self.link.transport = "sse"
                self.link.streams = self._events.streams
                return
        ready: asyncio.Future[TransportStreams] = asyncio.get_running_loop().create_future()
        # In a task of its own: when the SDK's transport breaks, it cancels the task that entered it.
        self._task = asyncio.create_task(self._run(ready))
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._task.result()
        self._streams = _Switch(ready.result()[0]), _SwitchSink(ready.result()[1])
        self.link.streams = self._streams

    async def _run(self, ready: asyncio.Future[TransportStreams]) -> None:
        try:
            async with streamable_http_client(
                self._url, http_client=self._client, max_sse_event_size=self._max_message
            ) as streams:
                ready.set_result(streams)
                await self._closing.wait()
        except Exception as error:  # A group of what went wrong in there.
            self.link.mark_lost(_innermost(error))

    async def _fall_back(self, body: bytes) -> bool:
        """Takes the first message over, where there is an event stream instead."""
        message = msgspec.json.decode(body)
        if self._streams is None or "id" not in message:
            return False
        try:
            await self._events.open()
        except ProviderError:
            return False
        _event_streams.add(self._url)
        self.link.transport = "sse"
        read, write = self._streams
        read.source, write.sink = self._events.streams
        self._events.send_request(body, message["id"])
        return True

    async def aclose(self) -> None:
        await wait_until_done(asyncio.create_task(self._close()))

    async def _close(self) -> None:
        try:
            self._closing.set()
            if self._task is not None:
                # The SDK tells the server that the session ends. It may not listen.
                await asyncio.wait((self._task,), timeout=_CLOSE_SECONDS)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            await self._events.aclose()
            await self._client.aclose()


class _Switch(MessageReader):
    """Reads from what is in use. When that changes, the old one has only the refusal of the first message to say."""

    def __init__(self, source: ReadStream[SessionMessage | Exception]) -> None:
        self.source = source

    @property
    def last_context(self) -> Context | None:
        """The SDK runs what a message causes in the context of its sender, where that is known."""
        return getattr(self.source, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        while True:
            source = self.source
            item = await source.receive()
            if source is self.source:
                return item

    async def aclose(self) -> None:
        await self.source.aclose()


class _SwitchSink(MessageWriter):
    def __init__(self, sink: WriteStream[SessionMessage]) -> None:
        self.sink = sink

    async def send(self, item: SessionMessage, /) -> None:
        await self.sink.send(item)

    async def aclose(self) -> None:
        await self.sink.aclose()


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return f"the HTTP transport broke: {mask_secrets(str(error)) or type(error).__name__}"

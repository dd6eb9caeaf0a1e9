"""Speaks with a server over its standard input and output: one message per line. Knows nothing of what is said."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import anyio
from mcp.shared.message import SessionMessage

from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.transports.base import (
    MessageDecoder,
    MessageReader,
    MessageWriter,
    OpenTransport,
    encode_message,
)
from toolspace.providers.mcp.transports.process import GRACE_SECONDS, ServerProcess, start_process

_HIGH, _LOW = 512 * 1024, 128 * 1024
"""Bytes of unread lines at which the server has to wait, and below which it goes on."""
_REASON_SECONDS = 1.0
"""The end of a server's input is seen before it is known why."""
_TURN = 10
"""Messages after which others get their turn: a flood must not stop the whole program."""


@asynccontextmanager
async def open_stdio(name: str, spec: ServerSpec, *, max_message: int) -> AsyncGenerator[OpenTransport]:
    """Starts the server, and ends it with everything that it started when the block ends."""
    link = OpenTransport("stdio")
    lines = _Lines(name, link, max_message)
    process = await start_process(name, spec, receive=lines.feed, on_end=lines.end)
    lines.process, link.pid = process, process.pid
    link.streams = lines, _Input(process, link)
    if process.is_ended:
        lines.end()  # Gone already, before we knew it.
    try:
        yield link
    finally:
        lines.close()
        await process.stop(0 if link.lost_event.is_set() else GRACE_SECONDS)


class _Lines(MessageReader):
    """What the server says. It is parsed when it is asked for, so that what waits is bytes, and bounded."""

    def __init__(self, name: str, link: OpenTransport, max_message: int) -> None:
        self.process: ServerProcess | None = None
        self._decode = MessageDecoder(name)
        self._link = link
        self._max = max_message
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._ended = False
        self._turn = 0
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> None:
        if self._ended:
            return
        head, newline, rest = data.partition(b"\n")
        if newline:
            self._add(b"".join((*self._partial, head)))
            self._partial.clear()
            self._partial_size = 0
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._add(line)
        else:
            rest = data
        if rest:
            self._partial.append(rest)
            self._partial_size += len(rest)
            if self._partial_size > self._max:
                self._link.mark_lost(f"the server wrote a line of more than {self._max:,} bytes")
                self.close()
                return
        if self._size > _HIGH and self.process is not None:
            self.process.pause()
        self._wake()

    def _add(self, line: bytes) -> None:
        if line and not line.isspace():
            self._lines.append(line)
            self._size += len(line)

    def end(self) -> None:
        """Nothing more will come. What is there is still read."""
        if self.process is not None:
            self._link.mark_lost(self.process.exit_description)
        self._ended = True
        self._wake()

    def close(self) -> None:
        self._ended = True
        self._lines.clear()
        self._partial.clear()
        self._wake()

    async def receive(self) -> SessionMessage:
        while True:
            while self._lines:
                if self._turn >= _TURN:
                    self._turn = 0
                    await asyncio.sleep(0)
                    continue
                self._turn += 1
                line = self._lines.popleft()
                self._size -= len(line)
                if self._size < _LOW and self.process is not None:
                    self.process.resume()
                if (message := self._decode(line)) is not None:
                    return message
            if self._ended:
                raise anyio.EndOfStream
            self._turn = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def aclose(self) -> None:
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Input(MessageWriter):
    def __init__(self, process: ServerProcess, link: OpenTransport) -> None:
        self._process = process
        self._link = link
        self._closed = False

    async def send(self, item: SessionMessage, /) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            await self._process.write(encode_message(item) + b"\n")
        except BrokenPipeError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REASON_SECONDS):
                    await self._link.lost_event.wait()
            self._link.mark_lost("the server closed its input")
            raise anyio.BrokenResourceError from None

    async def aclose(self) -> None:
        self._closed = True

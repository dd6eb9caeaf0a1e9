"""Connects to a server over its standard input and output: one message per line. `process` runs the server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import anyio
from mcp.shared.message import SessionMessage

from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports.base import (
    MessageDecoder,
    MessageReader,
    MessageWriter,
    OpenTransport,
    encode_message,
)
from toolspace.providers.mcp.transports.process import GRACE_SECONDS, ServerProcess, start_process

_PAUSE_BYTES, _RESUME_BYTES = 512 * 1024, 128 * 1024
"""Unread output at which reading from the server pauses, and below which it resumes."""
_EXIT_REASON_SECONDS = 1.0
"""How long a failed write waits for the reason: a broken pipe is noticed before the exit of the process."""
_MESSAGES_PER_TURN = 10
"""Messages after which other tasks get a turn: a flood of messages must not stop the whole program."""


@asynccontextmanager
async def open_stdio(name: str, spec: ServerSpec, *, max_message_bytes: int) -> AsyncGenerator[OpenTransport]:
    """Starts the server. When the block ends, stops it and every process that it started."""
    transport = OpenTransport("stdio")
    reader = _LineReader(name, transport, max_message_bytes)
    process = await start_process(name, spec, receive=reader.feed, on_end=reader.end)
    reader.process, transport.pid = process, process.pid
    transport.streams = reader, _LineWriter(process, transport)
    if process.is_ended:
        reader.end()  # It ended before `reader.process` was set.
    try:
        yield transport
    finally:
        reader.close()
        await process.stop(0 if transport.lost_event.is_set() else GRACE_SECONDS)


class _LineReader(MessageReader):
    """The server's output. Lines are parsed when they are read; what waits is raw bytes, of bounded size."""

    def __init__(self, name: str, transport: OpenTransport, max_message_bytes: int) -> None:
        self.process: ServerProcess | None = None
        self._decode = MessageDecoder(name)
        self._transport = transport
        self._max_bytes = max_message_bytes
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._partial_line: list[bytes] = []
        self._partial_size = 0
        self._is_ended = False
        self._messages_this_turn = 0
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> None:
        if self._is_ended:
            return
        head, newline, rest = data.partition(b"\n")
        if newline:
            self._add(b"".join((*self._partial_line, head)))
            self._partial_line.clear()
            self._partial_size = 0
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._add(line)
        else:
            rest = data
        if rest:
            self._partial_line.append(rest)
            self._partial_size += len(rest)
            if self._partial_size > self._max_bytes:
                self._transport.mark_lost(f"the server wrote a line of more than {self._max_bytes:,} bytes")
                self.close()
                return
        if self._size > _PAUSE_BYTES and self.process is not None:
            self.process.pause()
        self._wake()

    def _add(self, line: bytes) -> None:
        if line and not line.isspace():
            self._lines.append(line)
            self._size += len(line)

    def end(self) -> None:
        """Ends the stream after the lines that have already arrived."""
        if self.process is not None:
            self._transport.mark_lost(self.process.exit_description)
        self._is_ended = True
        self._wake()

    def close(self) -> None:
        self._is_ended = True
        self._lines.clear()
        self._partial_line.clear()
        self._wake()

    async def receive(self) -> SessionMessage:
        while True:
            while self._lines:
                if self._messages_this_turn >= _MESSAGES_PER_TURN:
                    self._messages_this_turn = 0
                    await asyncio.sleep(0)
                    continue
                self._messages_this_turn += 1
                line = self._lines.popleft()
                self._size -= len(line)
                if self._size < _RESUME_BYTES and self.process is not None:
                    self.process.resume()
                if (message := self._decode(line)) is not None:
                    return message
            if self._is_ended:
                raise anyio.EndOfStream
            self._messages_this_turn = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def aclose(self) -> None:
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _LineWriter(MessageWriter):
    def __init__(self, process: ServerProcess, transport: OpenTransport) -> None:
        self._process = process
        self._transport = transport
        self._is_closed = False

    async def send(self, item: SessionMessage, /) -> None:
        if self._is_closed:
            raise anyio.ClosedResourceError
        try:
            await self._process.write(encode_message(item) + b"\n")
        except BrokenPipeError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_REASON_SECONDS):
                    await self._transport.lost_event.wait()
            self._transport.mark_lost("the server closed its input")
            raise anyio.BrokenResourceError from None

    async def aclose(self) -> None:
        self._is_closed = True

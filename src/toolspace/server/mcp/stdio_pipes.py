"""Standard input and output for `stdio`: claims them for the server, reads lines and writes bytes without blocking.

Does not import the MCP SDK, so that `toolspace mcp` can claim them before that slow import.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

MAX_LINE_BYTES = 16 * 1024 * 1024
_EXIT_SECONDS = 15.0
"""How long the last responses and the stop of MCP servers may take after the client is gone."""


class ClaimedPipes(NamedTuple):
    """The original standard input and output, under descriptors that nothing else uses."""

    input: int
    output: int


@contextmanager
def claim_stdio() -> Generator[ClaimedPipes]:
    """Claims standard input and output for the block. Others then read an empty input and write to standard error.

    Works on the descriptors and not only in `sys`, because programs that tools start inherit them.
    """
    sys.stdout.flush()
    pipes = ClaimedPipes(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield pipes
    finally:
        sys.stdout = stdout
        for number, descriptor in enumerate(pipes):
            with suppress(OSError):
                os.set_blocking(descriptor, True)  # The shell shares a terminal, and expects it to block.
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def exit_after_disconnect(descriptor: int, seconds: float = _EXIT_SECONDS) -> Generator[None]:
    """Exits the process if the block still runs some time after the other side of a pipe is gone.

    Uses a thread: a tool may block the event loop, and nobody is left to send a signal.
    """
    if not hasattr(select, "poll"):  # Not on Windows.
        yield
        return
    is_done = threading.Event()
    pipe = os.dup(descriptor)  # The block may close the original.
    wake_reader, wake_writer = os.pipe()
    poll = select.poll()
    for polled_descriptor in (pipe, wake_reader):
        poll.register(polled_descriptor, 0)  # Only the hang-up, which is always reported.

    def watch() -> None:
        poll.poll()
        if not is_done.wait(seconds):
            os._exit(1)

    thread = threading.Thread(target=watch, name="toolspace-stdin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        os.close(wake_writer)
        thread.join()
        os.close(pipe)
        os.close(wake_reader)


async def read_lines(descriptor: int, first_bytes: bytes = b"") -> AsyncGenerator[bytes]:
    """Yields the lines of a descriptor. Yields an empty one instead of one longer than `MAX_LINE_BYTES`.

    `first_bytes` were read from it already, and begin the first line.
    """
    if is_regular_file(descriptor):
        with os.fdopen(os.dup(descriptor), "rb") as file:
            while line := await asyncio.to_thread(file.readline, MAX_LINE_BYTES):
                yield line
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES, loop=loop)
    reader.feed_data(first_bytes)
    file = os.fdopen(os.dup(descriptor), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:
                yield b""
                continue
            if not line:
                return
            yield line
    finally:
        if not transport.is_closing():  # At the end of the input it is closed already.
            transport.close()


class PipeWriter:
    """Writes to a descriptor without blocking the event loop. `write` raises `OSError` if nobody reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._writer: asyncio.StreamWriter | None = None
        self._file: IO[bytes] | None = None

    async def __aenter__(self) -> PipeWriter:
        file = os.fdopen(os.dup(self._descriptor), "wb", buffering=0)
        if is_regular_file(self._descriptor):
            self._file = file
        else:
            loop = asyncio.get_running_loop()
            protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop))
            transport, _ = await loop.connect_write_pipe(lambda: protocol, file)
            self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
            try:
                async with asyncio.timeout(1):  # Unwritten data gets a moment: perhaps nobody reads it.
                    await self._writer.wait_closed()
            except TimeoutError:
                self._writer.transport.abort()
            except OSError:
                pass  # The client is gone.

    async def write(self, data: bytes) -> None:
        if self._file is not None:
            self._file.write(data)
        elif self._writer is None or self._writer.is_closing():
            raise BrokenPipeError("the client has closed its end")
        else:
            self._writer.write(data)
            await self._writer.drain()


def is_regular_file(descriptor: int) -> bool:
    """Whether it is a file or /dev/null, which asyncio cannot wait for and need not."""
    mode = os.fstat(descriptor).st_mode
    can_block = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    return not can_block

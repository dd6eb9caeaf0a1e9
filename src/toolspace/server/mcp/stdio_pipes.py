"""Standard input and output as asyncio can wait for them: lines in, bytes out, and nobody else's words between."""

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
_LEAVE_SECONDS = 15.0
"""How long the last answers, and the end of servers that were started, may take once the client is gone."""


class ClaimedPipes(NamedTuple):
    """The descriptors that standard input and output were, now out of everyone else's reach."""

    input: int
    output: int


@contextmanager
def claim_stdio() -> Generator[ClaimedPipes]:
    """Takes standard input and output for the block: others read nothing there, and write to standard error.

    On the descriptors, not only in `sys`: tools start programs, and those inherit them.
    """
    sys.stdout.flush()
    claimed = ClaimedPipes(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield claimed
    finally:
        sys.stdout = stdout
        for number, own in enumerate(claimed):
            with suppress(OSError):
                os.set_blocking(own, True)  # A terminal is shared with the shell, which expects it so.
            os.dup2(own, number)
            os.close(own)


@contextmanager
def exit_after_disconnect(descriptor: int, seconds: float = _LEAVE_SECONDS) -> Generator[None]:
    """Ends the process some time after the other side of a pipe is gone, if the block has not ended by itself.

    By a thread: a tool may block the loop, which then hears of no end, and there is nobody left to send a signal.
    """
    if not hasattr(select, "poll"):  # Not on Windows.
        yield
        return
    over = threading.Event()
    own = os.dup(descriptor)  # The block may close its own while we look at it.
    woken, wake = os.pipe()
    watched = select.poll()
    for one in (own, woken):
        watched.register(one, 0)  # Nothing but the end, which is always told.

    def watch() -> None:
        watched.poll()
        if not over.wait(seconds):
            os._exit(1)

    thread = threading.Thread(target=watch, name="toolspace-stdin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        os.close(wake)
        thread.join()
        os.close(own)
        os.close(woken)


async def read_lines(descriptor: int) -> AsyncGenerator[bytes]:
    """The lines of a descriptor until its end; an empty one in place of one longer than `LONGEST_LINE`."""
    if _is_plain(descriptor):
        with os.fdopen(os.dup(descriptor), "rb") as file:
            while line := await asyncio.to_thread(file.readline, MAX_LINE_BYTES):
                yield line
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES, loop=loop)
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
        if not transport.is_closing():  # After the end it is closed already, and must not be again.
            transport.close()


class PipeWriter:
    """Writes to a descriptor without holding the loop up. `write` raises `BrokenPipeError` where nobody reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._transport: asyncio.WriteTransport | None = None
        self._file: IO[bytes] | None = None
        self._state = _State()

    async def __aenter__(self) -> PipeWriter:
        file = os.fdopen(os.dup(self._descriptor), "wb", buffering=0)
        if _is_plain(self._descriptor):
            self._file = file
        else:
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.connect_write_pipe(lambda: self._state, file)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._transport is not None:
            # What is still to be written gets a moment; nobody may read it.
            self._transport.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._state.lost.wait()
            if not self._state.lost.is_set():
                self._transport.abort()

    async def write(self, data: bytes) -> None:
        if self._file is not None:
            self._file.write(data)
            return
        if self._state.lost.is_set() or self._transport is None:
            raise BrokenPipeError("nobody reads any more")
        self._transport.write(data)
        await self._state.ready.wait()


class _State(asyncio.BaseProtocol):
    """Whether the other side reads."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.lost = asyncio.Event()

    def pause_writing(self) -> None:
        self.ready.clear()

    def resume_writing(self) -> None:
        self.ready.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self.ready.set()


def _is_plain(descriptor: int) -> bool:
    """A file or /dev/null: asyncio cannot wait for it, and need not."""
    mode = os.fstat(descriptor).st_mode
    waits = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    return not waits

"""Runs one stdio server: a process in a session of its own, its pipes, its end. Knows nothing of MCP."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from toolspace.core.secret_masking import redact
from toolspace.errors import ProviderError
from toolspace.providers.mcp import descendants
from toolspace.providers.mcp.ending import to_the_end
from toolspace.providers.mcp.guardian import guardian
from toolspace.providers.mcp.launch import launch
from toolspace.providers.mcp.spec import ServerSpec

GRACE = 2.0
"""Seconds for a server to end by itself once its input is closed; after that it is told to, then killed."""
_ROUNDS = ((signal.SIGTERM, 1.0), (descendants.KILL, 1.0), (descendants.KILL, 0.5), (descendants.KILL, 0.5))
_REAP_SECONDS = 2.0
_PIPES_SECONDS = 0.25
"""How long the last words of a process that is gone are waited for: a child may hold its pipes open for ever."""
_KEPT_LINES = 20
_LINE = 4_000
_SHOWN = 500
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOISE = re.compile(r"\s*(Node\.js v\d|at |npm notice|npm error A complete log|\W*$)")
"""Lines that programs add below the one that says what is wrong."""


class ServerProcess(asyncio.SubprocessProtocol):
    """A running server. `start_process` makes one; `stop` ends it and everything that it started."""

    def __init__(self, name: str, receive: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.pid = 0
        self.ended = False
        """Whether nothing more will come: the process is gone, or has closed its output."""
        self.mark = descendants.new_mark()
        self._log = logging.getLogger(f"toolspace.mcp.{name}")
        self._receive: Callable[[bytes], None] | None = receive
        self._on_end = on_end
        self._errors: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._partial = b""
        self._first = descendants.Found(0, 0)
        self._transport: asyncio.SubprocessTransport | None = None
        self._open = {1, 2}
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._exited = asyncio.Event()
        self._closed = asyncio.Event()
        self._settling: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None as long as it runs."""
        return self._transport.get_returncode() if self._transport is not None else None

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines that it wrote to its standard error, without secrets."""
        lines = [*self._errors, self._partial]
        return tuple(text for line in lines if (text := _shown(line)))

    @property
    def ending(self) -> str:
        """What to tell of its end: `the server ended with exit code 1: no such file`."""
        code = self.exit_code
        if code is None:
            how = "the server closed its output"
        elif code < 0:
            how = f"the server was ended by {_signal_name(-code)}"
        else:
            how = f"the server ended with exit code {code}"
        words = self.last_words
        telling = [line for line in words if _NOISE.match(line) is None] or words
        if not telling:
            return how
        # Who ends by itself says why; who is killed said something else.
        return f"{how}: {telling[-1]}" if code is None or code >= 0 else f"{how}; its last words: {telling[-1]}"

    async def write(self, data: bytes) -> None:
        """Waits while the server does not read. BrokenPipeError when it is gone."""
        while not self._writable.is_set():  # Before, not after: what nobody reads must not pile up here.
            await self._writable.wait()
        pipe = self._pipe(0)
        if self.ended or pipe is None or pipe.is_closing():
            raise BrokenPipeError(errno.EPIPE, "the server is gone")
        cast("asyncio.WriteTransport", pipe).write(data)

    def pause(self) -> None:
        """Reads no more of its output for now: the server has to wait once its pipe is full."""
        pipe = self._pipe(1)
        if pipe is not None and not self._paused and 1 in self._open:
            self._paused = True
            cast("asyncio.ReadTransport", pipe).pause_reading()

    def resume(self) -> None:
        pipe = self._pipe(1)
        if pipe is not None and self._paused and 1 in self._open:
            self._paused = False
            cast("asyncio.ReadTransport", pipe).resume_reading()

    async def stop(self, grace: float = GRACE) -> None:
        """Ends it and everything that it started. Returns when that is done, also to a caller that is cancelled.

        Takes the grace and a few seconds at most, whatever the server does.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(grace))
        await to_the_end(self._stopping)

    async def _stop(self, grace: float) -> None:
        known = frozenset((self._first,))
        try:
            self._receive = None  # What it still says is read and dropped: it could not end otherwise.
            self.resume()
            known |= descendants.find(self._first, self.mark)
            if (pipe := self._pipe(0)) is not None:
                pipe.close()
            await _within(grace, self._exited)
            for kind, seconds in _ROUNDS:
                left = descendants.find(self._first, self.mark, known)
                if not left:
                    break
                known |= left
                descendants.send(kind, self.pid, left)
                await _gone(left, seconds)
            await _within(_REAP_SECONDS, self._exited)
        except asyncio.CancelledError:  # The loop is closing: at once, then.
            descendants.send(descendants.KILL, self.pid, descendants.find(self._first, self.mark, known))
            raise
        finally:
            self._release()
        await _within(_REAP_SECONDS, self._closed)

    def _release(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        if self._transport is not None:
            with suppress(PermissionError):  # Closing signals it once more; it may have changed its user.
                self._transport.close()
        guardian().remove_group(self.pid)
        guardian().remove_mark(self.mark)

    # What the event loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid = self._transport.get_pid()
        self._first = descendants.leader(self.pid)
        guardian().add_group(self.pid)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._hear(data)
        elif self._receive is not None:
            self._receive(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if fd == 0:
            self._writable.set()
        self._settle()

    def process_exited(self) -> None:
        self._exited.set()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _settle(self) -> None:
        """The end of the process and of its pipes come in any order, and some of them never."""
        if self._exited.is_set() and not self._open:
            self._finish()
        elif (self._exited.is_set() or 1 not in self._open) and self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(_PIPES_SECONDS, self._finish)

    def _finish(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        if not self.ended:
            self.ended = True
            self._writable.set()
            if self._stopping is None:
                self._on_end()

    def _hear(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._partial + lines[0]
            self._partial = b""
        self._partial = (self._partial + rest)[:_LINE]
        if self._log.isEnabledFor(logging.DEBUG):
            for line in lines:
                if text := _shown(line):
                    self._log.debug("%s", text)
        self._errors.extend(line[:_LINE] for line in lines[-_KEPT_LINES:])

    def _pipe(self, fd: int) -> asyncio.BaseTransport | None:
        return self._transport.get_pipe_transport(fd) if self._transport is not None else None


async def start_process(
    name: str, spec: ServerSpec, *, receive: Callable[[bytes], None], on_end: Callable[[], None]
) -> ServerProcess:
    """Starts a server. `receive` gets its output as it comes, `on_end` is called once when nothing more will come.

    Raises ProviderError, with the way out, where it cannot be started.
    """
    process = ServerProcess(name, receive, on_end)
    what = launch(name, spec, process.mark)
    # Before it starts: Toolspace could be killed right after.
    guardian().add_mark(process.mark)
    try:
        await asyncio.get_running_loop().subprocess_exec(
            lambda: process, what.program, *what.args, cwd=what.cwd, env=what.env, start_new_session=True
        )
    except OSError as error:
        guardian().remove_mark(process.mark)
        hint = "; does its first line name a program (#!)?" if error.errno == errno.ENOEXEC else ""
        raise ProviderError(
            f"the command {what.program!r} of server {name!r} cannot be started: {error}{hint}"
        ) from None
    except BaseException:  # Cancelled while it starts: it may be there already.
        if process.pid:
            await process.stop(0)
        else:
            descendants.kill_marked(process.mark)
            guardian().remove_mark(process.mark)
        raise
    return process


async def _within(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _gone(found: frozenset[descendants.Found], seconds: float) -> None:
    """Waits for processes that are not our children: there is no event for their end."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + seconds, 0.002
    while descendants.living(found) and loop.time() < deadline:
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)


def _shown(line: bytes) -> str:
    text = _CONTROL.sub("", line.decode("utf-8", "replace")).strip()
    return redact(text)[:_SHOWN] if text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

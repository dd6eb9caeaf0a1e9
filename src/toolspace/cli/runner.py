"""Runs a command's coroutine so that Ctrl-C, SIGTERM and a closed terminal stop it cleanly, and surely."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from ipaddress import ip_address
from types import FrameType
from typing import Any

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_GRACE_SECONDS = 5.0
"""Without another word: a tool that blocks the loop must not keep the process."""


class Interrupts:
    """The first signal asks the work to stop; a second one, or the end of the grace, ends the process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.stop: Callable[[], bool] | None = None
        """How to stop what runs, so that it still ends by itself. Says whether there was anything to stop."""
        self.grace = _GRACE_SECONDS
        """How long cleaning up may take."""
        self.ends_well = False
        """Whether a signal is the way in which the work is meant to end: its own exit code counts then."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def exit_code(self) -> int | None:
        """As a shell reports a process that a signal ended; None where there was none."""
        return None if self.signal is None else 128 + self.signal

    def watch(self) -> None:
        """From now on signals stop the current task. Those that the caller ignores (`nohup`) stay ignored."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for one in _SIGNALS:
            if signal.getsignal(one) is not signal.SIG_IGN:
                # Not the loop's own handlers: those never run while a tool blocks the loop.
                signal.signal(one, self._received)

    def _received(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        if number == signal.SIGINT and os.isatty(2):
            os.write(2, b"\n")  # After the ^C that the terminal shows. Not through the stream: it may be in use.
        guard = threading.Timer(self.grace, os._exit, (128 + number,))
        guard.daemon = True
        guard.start()
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed: the work has ended.
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self.stop is not None and self.stop():
            return
        if self._task is not None:
            self._task.cancel()


def run(
    work: Callable[[Interrupts], Coroutine[Any, Any, int]],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Runs the work to its end; its exit code, or the signal's."""
    interrupts = Interrupts()

    async def watched() -> int:
        interrupts.watch()
        try:
            code = await work(interrupts)
        except asyncio.CancelledError:
            if interrupts.exit_code is None:
                raise
            code = interrupts.exit_code
        if interrupts.exit_code is not None:
            # At once: the end of the loop and of the interpreter would wait for threads that nobody can stop.
            sys.stderr.flush()
            os._exit(code if interrupts.ends_well else interrupts.exit_code)
        return code

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(watched())


# MERGED from serving: What the commands that serve have in common: their loop, their address, how their process is…

_OBJECTS = 10_000
"""How many more objects there may be before it is looked whether some of them are garbage."""
_TURN_SECONDS = 0.0002
"""How long a thread may keep the others waiting. Python's own measure is 25 times that: one thread that computes would
hold up every answer."""


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The faster loop, where there is one: not on Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def wait_for_signal(interrupts: Interrupts) -> None:
    """Waits for a signal."""
    asked = asyncio.Event()

    def stop() -> bool:
        asked.set()
        return True

    interrupts.stop = stop
    await asked.wait()
    interrupts.stop = None


def tune_process() -> None:
    """Sets the process up for serving, once all that it needs is there."""
    gc.collect()
    gc.freeze()  # What is there now stays: looking through it again and again costs the slowest calls most.
    gc.set_threshold(_OBJECTS, 10, 10)  # Most of what a request makes is gone before that, by itself.
    sys.setswitchinterval(_TURN_SECONDS)

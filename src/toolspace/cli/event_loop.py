"""Runs the coroutine of a command: signals, the event loop, and the settings of a process that serves.

Every command uses `run`. Ctrl-C, SIGTERM and a closed terminal stop the coroutine cleanly; if that takes too long, the
process ends anyway.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_GRACE_SECONDS = 5.0
"""Then the process ends, even if a tool blocks the event loop."""
_GC_THRESHOLD = 10_000
"""New objects before the garbage collector runs."""
_SWITCH_INTERVAL_SECONDS = 0.0002
"""How long a thread may keep the others waiting. With Python's default, 25 times as long, one thread that computes
delays every response."""


class Interrupts:
    """Stops the command on the first signal, and ends the process on the second or when the grace period is over."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that was received."""
        self.stop: Callable[[], bool] | None = None
        """Asks the running work to end by itself. Returns False if there was nothing to stop."""
        self.grace = _GRACE_SECONDS
        """How long stopping may take, in seconds."""
        self.is_normal_end = False
        """Whether a signal is the normal way to end the command. Then its own exit code is returned."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def exit_code(self) -> int | None:
        """128 + the signal, as shells report it; None without a signal."""
        return None if self.signal is None else 128 + self.signal

    def watch(self) -> None:
        """From now on signals stop the current task. Signals that the caller ignores (`nohup`) stay ignored."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                # Not with loop.add_signal_handler: those handlers never run while a tool blocks the loop.
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        if number == signal.SIGINT and os.isatty(2):
            os.write(2, b"\n")  # After the ^C of the terminal. Not through sys.stderr, which may be in use.
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
    """Runs the work to its end. Returns its exit code, or the one of the signal that stopped it."""
    interrupts = Interrupts()

    async def run_watched() -> int:
        interrupts.watch()
        try:
            code = await work(interrupts)
        except asyncio.CancelledError:
            if interrupts.exit_code is None:
                raise
            code = interrupts.exit_code
        if interrupts.exit_code is not None:
            # Closing the loop and the interpreter would wait for threads that cannot be stopped.
            sys.stderr.flush()
            os._exit(code if interrupts.is_normal_end else interrupts.exit_code)
        return code

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run_watched())


async def wait_for_signal(interrupts: Interrupts) -> None:
    """Returns when a signal arrives, instead of cancelling the current task."""
    arrival = asyncio.Event()

    def stop() -> bool:
        arrival.set()
        return True

    interrupts.stop = stop
    await arrival.wait()
    interrupts.stop = None


# Processes that serve


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns the factory of uvloop; None where it is not installed, as on Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    from ipaddress import ip_address

    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def tune_process() -> None:
    """Sets garbage collection and thread switching for a server. To be called when everything is set up."""
    gc.collect()
    gc.freeze()  # What exists now stays: scanning it again and again delays the slowest calls most.
    gc.set_threshold(_GC_THRESHOLD, 10, 10)  # Most objects of a request are freed by their reference counts.
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)

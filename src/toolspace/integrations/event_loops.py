"""Lets plain code wait for a coroutine, on the event loop that the coroutine's objects belong to."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
_PATIENCE = 10.0


class HomeLoop:
    """The loop it was made in; where there was none, one of its own in a thread of its own.

    A toolspace holds queues and connections that work on one loop only, so a plain call must go to that loop and
    never to a new one. Waiting for a loop that waits for the waiter would never end: that is an error instead.
    """

    def __init__(self, *, patience: float = _PATIENCE) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patience = patience
        self._lock = threading.Lock()
        with suppress(RuntimeError):  # A plain program has none: its loop is made when it is needed.
            self._loop = asyncio.get_running_loop()

    def wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        """What the work gives, awaited on the loop. Interrupting the wait cancels it."""
        loop = self._target()
        taken = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_announced(work, taken), loop)
        try:
            if not taken.wait(self._patience):
                raise RuntimeError(
                    f"the event loop of this toolspace did not take the call within {self._patience:g} s; it is "
                    "probably blocked by the code that waits for the call: use ainvoke"
                )
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _target(self) -> asyncio.AbstractEventLoop:
        if _running_here() is not None:
            raise RuntimeError("a plain call inside an event loop would block it; use ainvoke")
        with self._lock:
            if self._loop is None:
                self._loop = _start_thread(self)
        if not self._loop.is_running():
            raise RuntimeError("the event loop that these tools were made in has ended; make them again")
        return self._loop


async def _announced(work: Callable[[], Awaitable[T]], taken: threading.Event) -> T:
    taken.set()
    return await work()


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _start_thread(owner: HomeLoop) -> asyncio.AbstractEventLoop:
    """A loop in a thread, which end when the owner is no longer used."""
    started: Future[asyncio.AbstractEventLoop] = Future()
    thread = threading.Thread(target=_serve, args=(started,), name="toolspace-loop", daemon=True)
    thread.start()
    loop = started.result()
    weakref.finalize(owner, _stop, loop, thread)
    return loop


def _serve(started: Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.call_soon(started.set_result, loop)
        loop.run_forever()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(_PATIENCE)

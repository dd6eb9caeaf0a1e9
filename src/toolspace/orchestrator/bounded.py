"""Runs a coroutine within a time, in the caller's own task, and makes sure that it ends.

A timer is armed only when the coroutine suspends, because most tools that are fast never do. When time is up the
coroutine is cancelled; one that ignores that is closed after a grace, which no `except Exception` survives.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 2.0
"""How long a cancelled tool may clean up before it is closed."""


class Expired(Exception):
    """The time was up, and the coroutine has ended."""


class Watched(Protocol):
    """The call around the coroutine."""

    task: asyncio.Task[Any] | None
    interrupt: bool

    def watch(self) -> None: ...


class Guard:
    """Watches one suspended coroutine: the clock, and whether it obeys."""

    __slots__ = ("_cancels", "_handle", "_loop", "_task", "_waiting", "expired", "killed")

    def __init__(self, task: asyncio.Task[Any], seconds: float) -> None:
        self._loop = task.get_loop()
        self._task = task
        self._cancels = 0
        self._waiting = task.cancelling()
        self.expired = False
        self.killed = False
        self._handle = self._loop.call_later(seconds, self._expire) if seconds != float("inf") else None

    def ignored_cancel(self) -> None:
        """The coroutine went on after a cancellation: a last chance, if the cancellation was meant for it."""
        meant = self.expired or self._task.cancelling() - self._cancels > self._waiting
        if meant and not self.killed:
            self._arm(GRACE_SECONDS, self._kill)

    def close(self) -> bool:
        """Stops watching. Whether a cancellation by someone else is still to be obeyed."""
        if self._handle is not None:
            self._handle.cancel()
        remaining = self._task.cancelling()
        for _ in range(self._cancels):
            remaining = self._task.uncancel()
        return remaining > self._waiting

    def _expire(self) -> None:
        self.expired = True
        self._cancels += 1
        self._task.cancel()

    def _kill(self) -> None:
        self.killed = True
        self._cancels += 1
        self._task.cancel()

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(seconds, action)


async def finish_within(
    coroutine: Coroutine[Any, Any, T],
    waiting: Any,
    call: Watched,
    seconds: float,
    *,
    on_killed: Callable[[], None],
) -> T:
    """Runs a coroutine that has suspended on `waiting` to its end. Raises `Expired` where it ran out of time."""
    call.watch()
    assert call.task is not None, "a tool that suspends needs a running task"
    guard = Guard(call.task, seconds)
    try:
        value = await _resume(coroutine, waiting, call, guard, on_killed)
    except asyncio.CancelledError:
        if guard.close() or not guard.expired:
            raise
        raise Expired from None
    except BaseException:
        guard.close()
        raise
    if guard.close():
        raise asyncio.CancelledError
    if guard.expired:
        raise Expired
    return value


@types.coroutine
def _resume(
    coroutine: Coroutine[Any, Any, T], waiting: Any, call: Watched, guard: Guard, on_killed: Callable[[], None]
) -> Generator[Any, Any, T]:
    """Passes everything on between the task and the coroutine, as `await` would, until it ends or is ended."""
    try:
        while True:
            if call.interrupt:
                # Code in this very task canceled the call; a task cannot cancel itself without hitting its caller.
                call.interrupt = False
                waiting = coroutine.throw(asyncio.CancelledError())
                continue
            try:
                value = yield waiting
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                if guard.killed:
                    _close(coroutine, on_killed)
                    raise
                waiting = coroutine.throw(error)
                guard.ignored_cancel()
            else:
                waiting = coroutine.send(value)
    except StopIteration as done:
        return done.value


def _close(coroutine: Coroutine[Any, Any, Any], on_killed: Callable[[], None]) -> None:
    on_killed()
    try:
        coroutine.close()
    except RuntimeError:
        # It awaits even while it is being closed. Kept, so that nobody tries to close it again; never resumed.
        _undead.append(coroutine)


_undead: list[Coroutine[Any, Any, Any]] = []

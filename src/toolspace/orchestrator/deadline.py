"""Runs a coroutine within a time, in the caller's own task, and makes sure that it ends.

A timer is armed only when the coroutine suspends, because most tools that are fast never do. When time is up the
coroutine is cancelled; one that ignores that is closed after a grace, which no `except Exception` survives.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

GRACE_SECONDS = 2.0
"""How long a cancelled tool may clean up before it is closed."""


_GROUPS_FORGET = sys.version_info < (3, 13)
"""Whether `asyncio.TaskGroup` leaves its task's count of cancellations raised when a child fails while it waits."""


_ours: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
"""How many of a task's cancellations were made here, for a call in it, and will be taken back."""


def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task for the sake of one call in it."""
    _ours[task] = _ours.get(task, 0) + 1
    task.cancel()


def uncancel_task(task: asyncio.Task[Any]) -> int:
    """Takes that back, when the call has ended. How many cancellations are left."""
    left = _ours.get(task, 0) - 1
    if left > 0:
        _ours[task] = left
    else:
        _ours.pop(task, None)
    return task.uncancel()


class DeadlineExpired(Exception):
    """The time was up, and the coroutine has ended."""


class WatchedCall(Protocol):
    """The call around the coroutine."""

    task: asyncio.Task[Any] | None
    cancel_requested: bool
    interrupt_requested: bool

    def register(self) -> None: ...


class DeadlineGuard:
    """Watches one suspended coroutine: the clock, and whether it obeys."""

    __slots__ = (
        "_call",
        "_cancels",
        "_grace",
        "_group",
        "_loop",
        "_strangers",
        "_task",
        "_timer",
        "_waiting",
        "expired",
        "killed",
    )

    def __init__(self, call: WatchedCall, task: asyncio.Task[Any], seconds: float) -> None:
        self._call = call
        self._loop = task.get_loop()
        self._task = task
        self._cancels = 0
        self._waiting = task.cancelling()
        self._strangers = self._waiting - _ours.get(task, 0) if self._waiting else 0
        self.expired = False
        self.killed = False
        self._timer = self._loop.call_later(seconds, self._expire) if seconds != float("inf") else None
        self._grace: asyncio.TimerHandle | None = None
        self._group: asyncio.TaskGroup | None = None

    def before_throw(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Takes a cancellation back that the tool's own task group has made, where the group will not."""
        group = _group_that_cancelled(coroutine) if _GROUPS_FORGET else None
        if group is not None and group is not self._group:
            self._group = group
            self._task.uncancel()

    def coroutine_continued(self) -> None:
        """The coroutine waits again after an exception: a last chance, if that was a cancellation meant for it."""
        if self._grace is None and self._is_meant():
            self._grace = self._loop.call_later(GRACE_SECONDS, self._kill)

    def close(self) -> bool:
        """Stops watching. Whether a cancellation by someone else is still to be obeyed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._grace is not None:
            self._grace.cancel()
        remaining = self._task.cancelling()
        for _ in range(self._cancels):
            remaining = uncancel_task(self._task)
        return remaining > self._waiting

    def _expire(self) -> None:
        self.expired = True
        self._cancels += 1
        cancel_task(self._task)

    def _kill(self) -> None:
        self._grace = None
        if self._is_meant():
            self.killed = True
            self._cancels += 1
            cancel_task(self._task)
        # Else the tool cancelled its own task and took that back, as `asyncio.TaskGroup` and `asyncio.timeout` do.

    def _is_meant(self) -> bool:
        """Whether the coroutine has been told to end. One that waits for a call inside it, which was, has not."""
        strangers = self._task.cancelling() - _ours.get(self._task, 0)
        return self.expired or self._call.cancel_requested or strangers > self._strangers


async def finish_within(
    coroutine: Coroutine[Any, Any, T],
    waiting: Any,
    call: WatchedCall,
    seconds: float,
    *,
    on_killed: Callable[[], None],
) -> T:
    """Runs a coroutine that has suspended on `waiting` to its end. Raises `Expired` where it ran out of time."""
    call.register()
    assert call.task is not None, "a tool that suspends needs a running task"
    guard = DeadlineGuard(call, call.task, seconds)
    try:
        value = await _resume(coroutine, waiting, call, guard, on_killed)
    except asyncio.CancelledError:
        if guard.close() or not guard.expired:
            raise
        raise DeadlineExpired from None
    except BaseException:
        guard.close()
        raise
    if guard.close():
        raise asyncio.CancelledError
    if guard.expired:
        raise DeadlineExpired
    return value


@types.coroutine
def _resume(
    coroutine: Coroutine[Any, Any, T],
    waiting: Any,
    call: WatchedCall,
    guard: DeadlineGuard,
    on_killed: Callable[[], None],
) -> Generator[Any, Any, T]:
    """Passes everything on between the task and the coroutine, as `await` would, until it ends or is ended."""
    try:
        while True:
            if call.interrupt_requested:
                # Code in this very task canceled the call; a task cannot cancel itself without hitting its caller.
                waiting = coroutine.throw(asyncio.CancelledError())
                call.interrupt_requested = (
                    False  # Only now: the calls inside it look whom the cancellation was meant for.
                )
                guard.coroutine_continued()
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
                if isinstance(error, asyncio.CancelledError):
                    guard.before_throw(coroutine)
                waiting = coroutine.throw(error)
                guard.coroutine_continued()
            else:
                waiting = coroutine.send(value)
    except StopIteration as done:
        return done.value


def _group_that_cancelled(coroutine: Coroutine[Any, Any, Any]) -> asyncio.TaskGroup | None:
    """The group at whose end the coroutine waits, if a child failed meanwhile and the group cancelled the task."""
    inner: Any = coroutine
    while hasattr(below := getattr(inner, "cr_await", None), "cr_code"):
        inner = below
    if getattr(inner, "cr_code", None) is not asyncio.TaskGroup.__aexit__.__code__:
        return None
    names: dict[str, Any] = inner.cr_frame.f_locals
    group: Any = names["self"]
    # With an exception from inside its block, the group has taken its cancellation back already.
    return group if names["et"] is None and getattr(group, "_parent_cancel_requested", False) else None


def _close(coroutine: Coroutine[Any, Any, Any], on_killed: Callable[[], None]) -> None:
    on_killed()
    try:
        coroutine.close()
    except RuntimeError:
        # It awaits even while it is being closed. Kept, so that nobody tries to close it again; never resumed.
        _undead.append(coroutine)


_undead: list[Coroutine[Any, Any, Any]] = []

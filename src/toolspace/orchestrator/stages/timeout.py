"""The stage `timeout`: gives the provider its time, and makes sure that whatever runs longer ends.

The provider runs in the caller's own task. The timer starts only when its coroutine suspends, because most fast tools
never do. When the time is up the coroutine is cancelled. If it ignores that, it is closed after a grace period, which
no `except Exception` survives.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from toolspace.core.result import ToolResult
from toolspace.core.times import format_milliseconds
from toolspace.core.tool import PENDING_EXECUTION_TYPES
from toolspace.orchestrator.call import Call, call_cancellations, cancel_task, uncancel_task

if TYPE_CHECKING:
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

T = TypeVar("T")

GRACE_SECONDS = 2.0
"""How long a cancelled tool may clean up before it is closed."""

_GROUPS_KEEP_COUNT = sys.version_info < (3, 13)
"""Whether `asyncio.TaskGroup` leaves its task's count of cancellations raised if a child fails while it waits."""


def timeout(stage: StageContext, next: CallHandler, /) -> CallHandler:
    limit = stage.settings.timeout.value
    services, in_run = stage.services, stage.in_run
    is_pending_call = stage.entry.tool.execution_type in PENDING_EXECUTION_TYPES

    def count_killed() -> None:
        services.killed_count += 1

    async def run(call: Call) -> ToolResult:
        seconds = limit
        if in_run and call.run is not None and call.run.remaining_seconds < seconds:
            seconds = call.run.remaining_seconds
            if seconds <= 0:
                return call.fail("timeout", call.run.deadline_message, executed=False)
        if call.cancel_requested:
            return call.fail("canceled", "the call was canceled")
        call.allowed_seconds = seconds
        coroutine = next(call)
        call.provider_called = True
        if is_pending_call and call.base_context.host is not None:
            call.register()
            return await coroutine  # The host of the pending call keeps the time: a late result is not lost.
        # Most fast tools end without suspending once: then no timer is needed.
        try:
            pending_future = coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        try:
            return await finish_within(coroutine, pending_future, call, seconds, on_killed=count_killed)
        except DeadlineExpired:
            return call.fail("timeout", f"Tool execution timed out after {format_milliseconds(round(seconds, 3))}ms")

    return run


class DeadlineExpired(Exception):
    """The time was up, and the coroutine has ended."""


class DeadlineGuard(msgspec.Struct, eq=False):
    """Watches one suspended coroutine: cancels it at the deadline, and closes it if it does not end."""

    _call: Call
    _task: asyncio.Task[Any]
    _seconds: float
    has_expired: bool = False
    is_killed: bool = False
    _cancel_count: int = 0
    _count_before: int = 0
    _foreign_count_before: int = 0
    _timer: asyncio.TimerHandle | None = None
    _grace_timer: asyncio.TimerHandle | None = None
    _seen_group: asyncio.TaskGroup | None = None

    def __post_init__(self) -> None:
        self._count_before = self._task.cancelling()
        self._foreign_count_before = self._foreign_count() if self._count_before else 0
        if self._seconds != float("inf"):
            self._timer = self._task.get_loop().call_later(self._seconds, self._expire)

    def before_throw(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Withdraws a cancellation that the tool's own task group requested, if the group will not do so."""
        group = _group_that_cancelled(coroutine) if _GROUPS_KEEP_COUNT else None
        if group is not None and group is not self._seen_group:
            self._seen_group = group
            self._task.uncancel()

    def coroutine_continued(self) -> None:
        """Starts the grace period if the coroutine went on after an exception that was meant to end it."""
        if self._grace_timer is None and self._is_told_to_end():
            self._grace_timer = self._task.get_loop().call_later(GRACE_SECONDS, self._kill)

    def close(self) -> bool:
        """Stops watching. Returns whether someone else cancelled the task, so that the caller must end too."""
        if self._timer is not None:
            self._timer.cancel()
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        remaining = self._task.cancelling()
        for _ in range(self._cancel_count):
            remaining = uncancel_task(self._task)
        return remaining > self._count_before

    def _expire(self) -> None:
        self.has_expired = True
        self._cancel_count += 1
        cancel_task(self._task)

    def _kill(self) -> None:
        self._grace_timer = None
        if self._is_told_to_end():
            self.is_killed = True
            self._cancel_count += 1
            cancel_task(self._task)
        # Else the tool cancelled its own task and withdrew that, as `asyncio.TaskGroup` and `asyncio.timeout` do.

    def _is_told_to_end(self) -> bool:
        """Whether the coroutine should end. Not if it waits for a call inside it, and only that one was cancelled."""
        return self.has_expired or self._call.cancel_requested or self._foreign_count() > self._foreign_count_before

    def _foreign_count(self) -> int:
        """How many cancellations of the task come from code outside this module."""
        return self._task.cancelling() - call_cancellations.get(self._task, 0)


async def finish_within(
    coroutine: Coroutine[Any, Any, T], pending_future: Any, call: Call, seconds: float, *, on_killed: Callable[[], None]
) -> T:
    """Runs a coroutine that has suspended on `pending_future` to its end. Raises `DeadlineExpired` if that is late."""
    call.register()
    assert call.task is not None, "a tool that suspends needs a running task"
    guard = DeadlineGuard(call, call.task, seconds)
    try:
        value = await _resume(coroutine, pending_future, call, guard, on_killed)
    except asyncio.CancelledError:
        if guard.close() or not guard.has_expired:
            raise
        raise DeadlineExpired from None
    except BaseException:
        guard.close()
        raise
    if guard.close():
        raise asyncio.CancelledError
    if guard.has_expired:
        raise DeadlineExpired
    return value


@types.coroutine
def _resume(
    coroutine: Coroutine[Any, Any, T],
    pending_future: Any,
    call: Call,
    guard: DeadlineGuard,
    on_killed: Callable[[], None],
) -> Generator[Any, Any, T]:
    """Passes values and exceptions between the task and the coroutine, as `await` does, until the coroutine ends."""
    try:
        while True:
            if call.interrupt_requested:
                # Code in this same task cancelled the call. A task cannot cancel itself without hitting its caller.
                pending_future = coroutine.throw(asyncio.CancelledError())
                call.interrupt_requested = False  # Only now: calls inside this one check whom the exception is for.
                guard.coroutine_continued()
                continue
            try:
                value = yield pending_future
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                if guard.is_killed:
                    _close(coroutine, on_killed)
                    raise
                if isinstance(error, asyncio.CancelledError):
                    guard.before_throw(coroutine)
                pending_future = coroutine.throw(error)
                guard.coroutine_continued()
            else:
                pending_future = coroutine.send(value)
    except StopIteration as stop:
        return stop.value


def _group_that_cancelled(coroutine: Coroutine[Any, Any, Any]) -> asyncio.TaskGroup | None:
    """Returns the group at whose end the coroutine waits, if a child failed and the group cancelled the task."""
    innermost: Any = coroutine
    while hasattr(inner := getattr(innermost, "cr_await", None), "cr_code"):
        innermost = inner
    if getattr(innermost, "cr_code", None) is not asyncio.TaskGroup.__aexit__.__code__:
        return None
    names: dict[str, Any] = innermost.cr_frame.f_locals
    group: Any = names["self"]
    # If an exception came from inside its block, the group has withdrawn its cancellation already.
    return group if names["et"] is None and getattr(group, "_parent_cancel_requested", False) else None


def _close(coroutine: Coroutine[Any, Any, Any], on_killed: Callable[[], None]) -> None:
    on_killed()
    try:
        coroutine.close()
    except RuntimeError:
        # It awaits even while it is closed. Kept, so that the garbage collector does not close it again.
        _unclosable.append(coroutine)


_unclosable: list[Coroutine[Any, Any, Any]] = []

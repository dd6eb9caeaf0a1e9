"""One call: its state while it passes the stages, its cancellation, and the results that it ends with.

The orchestrator creates calls, the stages change them, and the tool sees one through its `ToolContext`. `ActiveCalls`
finds the calls of an orchestrator that wait, to cancel them or to wait for their end.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import os
import time
import types
from collections.abc import AsyncGenerator, Awaitable, Collection, Coroutine, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from toolspace.core import json_text
from toolspace.core.events import CallPartial, CallProgress, EventType, TaskStatusReported
from toolspace.core.names import AGENT_NAMESPACE
from toolspace.core.result import Content, ToolResult, get_content_parts, join_parts
from toolspace.core.secret_values import StreamMasking, reference_secrets
from toolspace.core.tool_context import ToolContext
from toolspace.errors import NOT_EXECUTED, ErrorKind, ToolTimeoutError
from toolspace.orchestrator.stages.large_results import NO_SPILL, SpillSettings, StreamCollector

if TYPE_CHECKING:
    from toolspace.core.tool import Tool
    from toolspace.orchestrator.catalog import CatalogEntry
    from toolspace.orchestrator.orchestrator import ToolOrchestrator
    from toolspace.orchestrator.run import Run, Span
    from toolspace.orchestrator.stages.queue import QueueSlot

T = TypeVar("T")
Arguments = Mapping[str, Any] | str | bytes | None

_NOT_RUN = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_SAFE_INTEGER = 1 << 53
"""Smaller integers are encoded here; `ToolResult` encodes the others."""
_JSON_TYPES = frozenset((str, int, float, bool, dict, type(None)))
"""Types of values that are results as they are. A list is not one of them: it may hold typed parts."""


def _new_ids() -> Iterator[str]:
    return map(f"call_{os.urandom(7).hex()}%06x".__mod__, itertools.count(1))


call_ids = _new_ids()
"""Yields ids that are unique across processes. Do not import it by name: a fork replaces it."""


def _renew_ids() -> None:
    global call_ids  # noqa: PLW0603 - a fork copies it, and both processes would use the same ids
    call_ids = _new_ids()


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(after_in_child=_renew_ids)


class Call(msgspec.Struct, weakref=False, eq=False, gc=True):
    """One call. The orchestrator creates it, the stages change it, and it is dropped when the call has ended."""

    id: str
    entry: CatalogEntry
    requested_name: str
    """The name that the caller used."""
    arguments: Arguments
    """As the caller passed them."""
    base_context: ToolContext
    owner: ToolOrchestrator
    run: Run | None
    parent: Call | None
    monotonic_start: float
    """When it started, in seconds of `time.perf_counter`."""
    started_at: float
    """Unix milliseconds."""
    task: asyncio.Task[Any] | None = None
    """The task that runs it; None until it first waits, because only then can it be cancelled."""
    values: Any = None
    """The validated and coerced arguments: a dict."""
    provider_called: bool = False
    """Whether the provider was called, so that an effect may have happened."""
    queue_wait: float = 0.0
    """Seconds spent waiting for a slot."""
    allowed_seconds: float = math.inf
    """How long the provider may take."""
    spill: SpillSettings = NO_SPILL
    """Where a stream is stored when it becomes too large."""
    is_for_program: bool = False
    """Whether a program gets the result, not a model or a remote caller: it gets more of it."""
    cache_hit: bool = False
    is_stored: bool = False
    """Whether the result is a handle of a stored output."""
    cancel_requested: bool = False
    interrupt_requested: bool = False
    """Whether `CancelledError` is to be raised in it at its next suspension."""
    task_cancelled: bool = False
    """Whether its task was cancelled because of it, which has to be withdrawn at its end."""
    cancel_count_before: int = 0
    """The task's count of cancellations before the call first waited."""
    defers_completion: bool = False
    """Whether its caller emits the completion event itself."""
    withholds_partials: bool = False
    """Whether hooks will decide about its result, so that no part of it may be emitted before."""
    partials: StreamMasking | None = None
    """Masks secrets in the partial results that a function emits by itself."""
    has_final_result: bool = False
    """Whether the hooks have seen its outcome already: that of a pending call, when it was submitted."""
    is_over: bool = False
    """Whether it has ended, though its thread may still run."""
    outcome: ToolResult | None = None
    slots: dict[object, QueueSlot] | None = None
    span: Span | None = None
    """Its span in the run's trace."""

    @property
    def tool(self) -> Tool:
        return self.entry.tool

    @property
    def canceled(self) -> bool:
        return self.is_over or self.cancel_requested

    @property
    def session(self) -> str:
        """The session that its stored outputs belong to."""
        return self.base_context.session_id or (self.owner.session if self.run is None else self.run.session)

    @property
    def remaining_seconds(self) -> float:
        """About how long it may still take. The time before the provider was called counts too, except in queues."""
        return self.allowed_seconds - (time.perf_counter() - self.monotonic_start - self.queue_wait)

    def register(self) -> None:
        """Adds the call to those that `cancel` finds. Must be called before the call waits for anything."""
        if self.task is None:
            self.task = task = asyncio.current_task()
            if task is not None:
                self.cancel_count_before = task.cancelling()
            self.owner.active_calls.add(self)

    def prepare_to_wait(self) -> None:
        """Registers the call, and raises `CancelledError` if it was cancelled. For stages, before they wait."""
        self.register()
        if self.interrupt_requested:
            self.interrupt_requested = False
            raise asyncio.CancelledError

    async def within_deadline(self, awaitable: Awaitable[T]) -> T:
        """Waits for the awaitable, but not beyond the deadline of the run. Raises `ToolTimeoutError` then."""
        run = self.run
        if run is None or (seconds := run.remaining_seconds) == math.inf:
            return await awaitable
        try:
            async with asyncio.timeout(seconds):
                return await awaitable
        except TimeoutError:
            raise ToolTimeoutError(run.deadline_message, executed=False) from None

    @property
    def context(self) -> ToolContext:
        """The context of this call, for the tool."""
        run_id = self.run.id if self.run is not None else self.base_context.run_id
        return self.base_context.bind(self, run_id=run_id, session_id=self.session)

    def cancel(self) -> None:
        """Cancels the call in whatever stage it is. Its caller gets a failed result."""
        if self.cancel_requested:
            return
        self.cancel_requested = self.interrupt_requested = True
        task = self.task
        if task is None:
            return
        if not is_running_loop(task.get_loop()):
            with suppress(RuntimeError):  # The loop is closed, and nothing runs on it.
                task.get_loop().call_soon_threadsafe(self._cancel_task)
        elif asyncio.current_task() is not task:
            self._cancel_task()
        # Else its own task cancels it, and it is interrupted at its next suspension: `task.cancel()` could hit the
        # caller instead, after this call.

    def _cancel_task(self) -> None:
        if self.interrupt_requested and not self.is_over and self.task is not None:
            self.interrupt_requested = False
            self.task_cancelled = True
            cancel_task(self.task)

    def withdraw_cancellation(self) -> None:
        """Withdraws the cancellation of the task: it ends with the call."""
        if self.task_cancelled and self.task is not None:
            self.task_cancelled = False
            uncancel_task(self.task)

    def complete(self, value: Any) -> ToolResult:
        """Returns the result of a call whose tool returned `value`."""
        elapsed_ms = (time.perf_counter() - self.monotonic_start) * 1000
        parts: tuple[Content, ...] = ()
        kind: object = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind not in _JSON_TYPES:
            if isinstance(value, ToolResult):
                return self._complete_result(value, elapsed_ms)
            if parts := get_content_parts(value):
                value = join_parts(parts)
            elif kind is not list:
                if isinstance(value, _NOT_RUN):
                    return self.fail("execution_error", "the tool returned a coroutine or generator, not a result")
                value = json_text.to_json_data(value)
        # Positional arguments: keywords would double the cost of this, which every call pays (benchmark `call`).
        entry, started = self.entry, self.started_at
        provider = entry.provider
        text = None
        if kind is str:
            if value.isascii():
                text = value
        elif kind is int and -_SAFE_INTEGER < value < _SAFE_INTEGER:
            text = str(value)
        return ToolResult(
            True, value, None, None, True, started, started + elapsed_ms, elapsed_ms,
            provider.kind, provider.namespace, parts, {}, entry.tool.name, self.id, text,
        )  # fmt: skip

    def fail(self, kind: ErrorKind, message: str, *, executed: bool | None = None) -> ToolResult:
        """Returns the result of a call that failed. By default, how far the call came decides `executed`."""
        elapsed_ms = (time.perf_counter() - self.monotonic_start) * 1000
        provider = self.entry.provider
        if executed is None:
            executed = (
                self.provider_called if kind in NOT_EXECUTED else self.values is not None or kind != "internal_error"
            )
        return ToolResult(
            ok=False,
            error=message,
            error_kind=kind,
            executed=executed,
            started_at=self.started_at,
            completed_at=self.started_at + elapsed_ms,
            duration_ms=elapsed_ms,
            kind=provider.kind,
            namespace=provider.namespace,
            tool=self.entry.tool.name,
            call_id=self.id,
        )

    @property
    def has_progress_listener(self) -> bool:
        return self.owner.bus.has_subscribers(EventType.TOOL_CALL_PROGRESS)

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        if self.owner.bus.has_subscribers(EventType.TOOL_CALL_PROGRESS) and not self.is_over:
            message = None if self.withholds_partials else message  # It may quote the result.
            if message is not None and self.owner.services.masks_secrets:
                message = reference_secrets.mask(message)
            event = CallProgress(**self._ids(), progress=progress, total=total, message=message)
            self._emit(event)

    def partial(self, value: object) -> None:
        if not self.owner.services.masks_secrets:
            self._emit_partial(value)
            return
        if self.partials is None:
            self.partials = _create_stream_masking()
        for masked_value in self.partials.add(value):
            self._emit_partial(masked_value)

    def finish_partials(self) -> None:
        """Emits the end of the partial results, which might have been the beginning of a secret."""
        if self.partials is not None:
            for masked_value in self.partials.finish():
                self._emit_partial(masked_value)

    def _emit_partial(self, value: object) -> None:
        if self.withholds_partials:
            return
        if self.owner.bus.has_subscribers(EventType.TOOL_CALL_PARTIAL) and not self.is_over:
            self._emit(CallPartial(**self._ids(), value=value))

    def report_status(self, status: Mapping[str, Any]) -> None:
        if self.owner.bus.has_subscribers(EventType.TASK_STATUS):
            self._emit(TaskStatusReported(**self._ids(), status=status))

    async def call(self, name: str, arguments: Mapping[str, Any] | str | None) -> ToolResult:
        # The code of a tool is a program. An internal tool, `agent__batch`, passes the results on to a model.
        is_for_program = self.entry.provider.namespace != AGENT_NAMESPACE
        token = current_call.set(self)
        try:
            return await self.owner.execute(name, arguments, is_for_program=is_for_program)
        finally:
            current_call.reset(token)

    async def collect(
        self, values: AsyncGenerator[Any, None], *, emit_partials: bool = True, is_json: bool = False
    ) -> ToolResult:
        """Returns the result of a stream. Emits each value as a partial result; stores the whole if it is too large."""
        collector = StreamCollector(self, self.spill, is_json=is_json)
        if self.owner.services.masks_secrets:
            values = _create_stream_masking().mask_all(values)
        try:
            async with aclosing(values):
                async for value in values:
                    if emit_partials:
                        self._emit_partial(value)
                    await collector.add(value)
            return self.complete(await collector.finish())
        except BaseException:
            await collector.discard()
            raise

    def _ids(self) -> dict[str, Any]:
        return {
            "at": time.time() * 1000,
            "call_id": self.id,
            "tool_name": self.entry.tool.name,
            "run_id": self.run.id if self.run is not None else None,
            "parent_id": self.parent.id if self.parent is not None else None,
        }

    def _emit(self, event: CallProgress | CallPartial | TaskStatusReported) -> None:
        task = self.task
        if task is None or is_running_loop(task.get_loop()):
            self.owner.bus.emit(event)
        else:
            # A plain function emits from its thread, but subscribers run on the loop.
            task.get_loop().call_soon_threadsafe(self.owner.bus.emit, event)

    def _complete_result(self, result: ToolResult, elapsed_ms: float) -> ToolResult:
        """Fills in the fields of a provider's result that only the orchestrator knows."""
        provider = self.entry.provider
        result.started_at = self.started_at
        result.completed_at = self.started_at + elapsed_ms
        result.duration_ms = elapsed_ms
        result.kind, result.namespace = provider.kind, provider.namespace
        result.tool, result.call_id = self.entry.tool.name, self.id
        if not result.ok:
            result.error_kind = result.error_kind or "execution_error"
        return result


call_cancellations: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
"""How many cancellations of a task were requested here, for a call in it, and will be withdrawn."""


def cancel_task(task: asyncio.Task[Any]) -> None:
    """Cancels a task because a call in it is cancelled."""
    call_cancellations[task] = call_cancellations.get(task, 0) + 1
    task.cancel()


def uncancel_task(task: asyncio.Task[Any]) -> int:
    """Withdraws that when the call has ended. Returns how many cancellations of the task remain."""
    remaining = call_cancellations.get(task, 0) - 1
    if remaining > 0:
        call_cancellations[task] = remaining
    else:
        call_cancellations.pop(task, None)
    return task.uncancel()


async def return_result(result: ToolResult) -> ToolResult:
    """Returns the result: the coroutine of a call that a stage ends early."""
    return result


def _create_stream_masking() -> StreamMasking:
    from toolspace.core.result_masking import create_stream_masking  # Imported here: few configurations need it.

    return create_stream_masking()


def is_running_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the current code runs on this loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


current_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("toolspace_call", default=None)
"""The call that the current code is part of. Calls that it makes become its children."""


def context_without_call() -> contextvars.Context:
    """Returns a copy of the current context without its call, for work that is not part of the call."""
    context = contextvars.copy_context()
    context.run(current_call.set, None)
    return context


def start_in_background(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts work that is not part of the current call. `tasks` holds its task until the end: the loop does not."""
    task = asyncio.get_running_loop().create_task(work, context=context_without_call())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for their end."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def call_chain(call: Call | None = None) -> Iterator[Call]:
    """Yields a call and its ancestors, innermost first. Without a call: those of the current code."""
    call = call or current_call.get()
    while call is not None:
        yield call
        call = call.parent


class ActiveCalls:
    """Has every running call of an orchestrator from its first wait on. A call that never waits is never in it."""

    def __init__(self) -> None:
        self._calls: dict[Call, None] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def ids(self) -> list[str]:
        return [call.id for call in self._calls]

    def add(self, call: Call) -> None:
        self._calls[call] = None
        if call.run is not None:
            call.run.active_calls[call] = None

    def remove(self, call: Call) -> None:
        call.is_over = True
        call.withdraw_cancellation()
        del self._calls[call]
        if call.run is not None:
            call.run.active_calls.pop(call, None)
        for waiter in tuple(self._waiters):
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    def find(self, owner: object, call_id: str | None) -> list[Call]:
        """Returns the call of this owner and its child calls; without an id, all of its calls.

        The calls that the current code is part of are found too, though they may not have waited yet.
        """
        return [
            call
            for call in {**self._calls, **dict.fromkeys(call_chain())}
            if call.owner is owner and (call_id is None or any(parent.id == call_id for parent in call_chain(call)))
        ]

    async def wait_until_idle(self) -> None:
        """Waits until the calls that are active now have ended; not for those that the current code is part of."""
        own_calls = set(call_chain())
        pending = {call for call in self._calls if call not in own_calls and not _is_dead(call)}
        while pending & self._calls.keys():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


def _is_dead(call: Call) -> bool:
    """Whether the loop of a call was closed, so that the call never ends."""
    return call.task is not None and call.task.get_loop().is_closed()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

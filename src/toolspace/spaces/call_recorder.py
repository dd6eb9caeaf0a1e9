"""Pipeline stage that stores the calls of runs: before they start, when they end, and their progress in between.

The gateway and the agents' host add it to their orchestrator with `add_stage(recorder.stage)`. Pending calls are stored
by `pending_calls`, not here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from toolspace.core import json_text
from toolspace.core.events import CallPartial, CallProgress, EventType
from toolspace.core.result import ToolResult
from toolspace.core.stored_records import CallRecord, NewEvent, Visibility
from toolspace.core.tool import PENDING_EXECUTION_TYPES, Tool
from toolspace.errors import RefusedError, StorageError, StorageUnavailable
from toolspace.orchestrator.call import Call, context_without_call
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.pipeline import CallHandler, StageContext
from toolspace.orchestrator.stages.large_results import exceeds_budget
from toolspace.spaces import call_transactions
from toolspace.spaces.call_context import GatewayCallHost, as_tool_error, not_in_a_space
from toolspace.spaces.call_transactions import StartedCall
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import runs
from toolspace.storage.queries.calls import NewCall

_log = logging.getLogger("toolspace.recorder")

_FLUSH_SECONDS: Final = 0.05
_MAX_PARTIAL_BYTES: Final = 1024 * 1024
"""Of the partial results of one call on a stream. The final result is not limited."""


class CallRecorder:
    """Stores the calls of runs."""

    def __init__(self, ledger: Ledger, bus: EventBus) -> None:
        self._ledger = ledger
        self._running_calls: dict[str, _RunningCall] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._is_closing = False
        self._unsubscribe = bus.subscribe(self._on_event, EventType.TOOL_CALL_PROGRESS, EventType.TOOL_CALL_PARTIAL)

    def stage(self, stage_context: StageContext, next: CallHandler, /) -> CallHandler:
        tool, is_registered = stage_context.entry.tool, stage_context.entry.is_registered
        visibility: Visibility = visibility_of(tool) if is_registered else "none"
        is_pending = tool.execution_type in PENDING_EXECUTION_TYPES and is_registered

        if not stage_context.in_run:
            return next  # Calls outside of runs are not stored.

        async def run(call: Call) -> ToolResult:
            host = call.base_context.host
            if not isinstance(host, GatewayCallHost) or host.run_id is None:
                return await next(call)
            if call.base_context.space_id != host.space_id:
                call.base_context = call.base_context.with_defaults(call.base_context)
                call.base_context.space_id = host.space_id
            if visibility == "full" and host.space_id is None:
                result = call.fail("not_permitted", not_in_a_space(tool.name))
                # Not visible: nobody may see it in a space that the run enters later.
                await self._store_ended_call(call, host, "none", result)
                return result
            if (record := host.resumed_calls.pop(call.id, None)) is not None:
                return await self._run_resumed(call, record, visibility, next)
            if is_pending:
                result = await next(call)
                if not host.has_opened(call.id):
                    await self._store_ended_call(call, host, visibility, result)
                elif exceeds_budget(result):
                    await self._mark_budget_exceeded(host.run_id)
                return result
            return await self._run_recorded(call, host, visibility, next)

        return run

    async def _run_recorded(
        self, call: Call, host: GatewayCallHost, visibility: Visibility, next: CallHandler
    ) -> ToolResult:
        started = host.stored_calls.pop(call.id, None)
        if started is None:
            started = await self._start(call, host, visibility)
            if isinstance(started, ToolResult):
                return started
        running_call = self._running_calls[call.id] = _RunningCall(started.call, visibility)
        try:
            result = await next(call)
        except BaseException:
            # The caller is gone; the end of the call is stored nevertheless.
            if host.run_moves_on and not call.cancel_requested:
                self._forget(running_call)  # The process that continues the run handles it.
            else:
                outcome = call.outcome or call.fail("canceled", "the caller was canceled")
                self._run_in_background(self._finish(running_call, outcome))
            raise
        await asyncio.shield(self._run_in_background(self._finish(running_call, result)))
        return result

    async def _run_resumed(
        self, call: Call, record: CallRecord, visibility: Visibility, next: CallHandler
    ) -> ToolResult:
        """Runs a call that was stored when its approval was asked for. `approvals.finish` stores its result."""
        running_call = self._running_calls[call.id] = _RunningCall(record, visibility)
        try:
            return await next(call)
        finally:
            self._forget(running_call)
            # The rest of its events comes before its end.
            await asyncio.shield(self._run_in_background(self._store_events(running_call)))

    def _forget(self, running_call: _RunningCall) -> None:
        call_id = running_call.call.call_id
        if self._running_calls.get(call_id) is running_call:  # Else it was approved, and is executed under the same id.
            del self._running_calls[call_id]

    async def _start(self, call: Call, host: GatewayCallHost, visibility: Visibility) -> StartedCall | ToolResult:
        """Stores a call before it runs. Returns its result if it must not run."""
        new = _build_new_call(call, host, visibility)
        start_task = self._run_in_background(self._ledger.commit(call_transactions.start, new))
        try:
            started = await asyncio.shield(start_task)
        except RefusedError as error:
            return call.fail("execution_error", str(error), executed=False)
        except StorageError as error:
            if isinstance(error, StorageUnavailable):
                host.storage_errors[call.id] = error
            result = call.fail("execution_error", str(as_tool_error(error)), executed=False)
            self._run_in_background(self._abandon(call.id, start_task, result))
            return result
        except BaseException:
            result = call.fail("canceled", "the caller was canceled")
            self._run_in_background(self._abandon(call.id, start_task, result))
            raise
        if not started.is_new:
            host.duplicate_call_id = call.id
            message = f'there is a call "{call.id}" already; give each call an id of its own'
            return call.fail("limit_exceeded", message, executed=False)
        return started

    async def _mark_budget_exceeded(self, run_id: str) -> None:
        try:
            await self._ledger.write(runs.mark_budget_exceeded, run_id)
        except StorageError as error:
            _log.warning("run %s: toolBudgetExceeded is not stored: %s", run_id, error)

    async def _abandon(self, call_id: str, start_task: asyncio.Task[StartedCall], result: ToolResult) -> None:
        """Ends a call that may have been stored, but did not run."""
        try:
            if not (await start_task).is_new:
                return
        except RefusedError:
            return
        except StorageError:
            if call_id in self._running_calls:
                return  # Another call has this id.
        await self._end(call_id, result, ())

    async def _finish(self, running_call: _RunningCall, result: ToolResult) -> None:
        self._forget(running_call)
        async with running_call.lock:  # Waits for a flush: its events come first.
            events, running_call.events = running_call.events, []
        await self._end(running_call.call.call_id, result, events, run_id=running_call.call.run_id)

    async def _end(
        self, call_id: str, result: ToolResult, events: Sequence[NewEvent], *, run_id: str | None = None
    ) -> None:
        def store() -> Awaitable[object]:
            return self._ledger.commit(_finish_call, call_id, result, events, self._ledger.node_id, run_id)

        try:
            await store()
        except StorageError as error:
            # The call had its effect, and the caller gets the result. The row is stored when the database is back.
            _log.warning("call %s: storing its end failed, retrying: %s", call_id, error)
            self._run_in_background(self._retry(store))

    async def _retry(self, store: Callable[[], Awaitable[object]]) -> None:
        delay = 0.2
        while not self._is_closing:
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)
            with suppress(StorageError):
                await store()
                break

    async def _store_ended_call(
        self, call: Call, host: GatewayCallHost, visibility: Visibility, result: ToolResult
    ) -> None:
        """Stores a call that nobody had to resolve: it failed before that, or its result was cached."""
        new = _build_new_call(call, host, visibility, visible=False)
        try:
            await self._ledger.commit(_start_and_finish, new, result)
        except (RefusedError, StorageError) as error:
            _log.warning("call %s: not stored: %s", call.id, error)

    # Progress and partial results

    def _on_event(self, event: Any) -> None:
        running_call = self._running_calls.get(event.call_id)
        if running_call is None:
            return
        ids = {"toolCallId": event.call_id, "toolName": event.tool_name}
        if isinstance(event, CallProgress):
            data = {**ids, "progress": event.progress, "total": event.total, "message": event.message}
            if running_call.events and running_call.events[-1].type == "tool.progress":
                running_call.events.pop()  # Only the latest progress matters.
            running_call.events.append(NewEvent("tool.progress", data))
        elif isinstance(event, CallPartial):
            value = json_text.to_json_data(event.value)
            running_call.partial_bytes += len(json_text.encode_bytes(value))
            if running_call.partial_bytes > _MAX_PARTIAL_BYTES:
                return
            running_call.events.append(NewEvent("tool.streaming", {**ids, "output": value, "preliminary": True}))
        if running_call.events and not running_call.is_flushing:
            running_call.is_flushing = True
            self._run_in_background(self._flush(running_call))

    async def _flush(self, running_call: _RunningCall) -> None:
        await asyncio.sleep(_FLUSH_SECONDS)
        await self._store_events(running_call)

    async def _store_events(self, running_call: _RunningCall) -> None:
        async with running_call.lock:
            running_call.is_flushing = False
            events, running_call.events = running_call.events, []
            if not events:
                return  # They were stored with the end of the call.
            try:
                await self._ledger.commit(
                    call_transactions.stream_events, running_call.call, running_call.visibility, events
                )
            except StorageError as error:
                _log.warning("call %s: %d events are lost: %s", running_call.call.call_id, len(events), error)

    async def aclose(self) -> None:
        self._is_closing = True
        self._unsubscribe()
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        # Outside the call's context: it continues if the call is cancelled.
        task = asyncio.get_running_loop().create_task(work, context=context_without_call())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


@dataclass(slots=True, eq=False)
class _RunningCall:
    """A running call, and its events that are not stored yet."""

    call: CallRecord
    visibility: Visibility
    events: list[NewEvent] = field(default_factory=list[NewEvent])
    partial_bytes: int = 0
    is_flushing: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def _finish_call(
    effects: Effects, call_id: str, result: ToolResult, events: Sequence[NewEvent], node_id: str, run_id: str | None
) -> Program[None]:
    yield from call_transactions.finish(effects, call_id, result, before=events, node_id=node_id)
    if run_id is not None and exceeds_budget(result):
        yield from runs.mark_budget_exceeded(run_id)


def _start_and_finish(effects: Effects, new: NewCall, result: ToolResult) -> Program[None]:
    started = yield from call_transactions.start(effects, new)
    if started.is_new:
        yield from call_transactions.finish(effects, new.call_id, result)


def visibility_of(tool: Tool) -> Visibility:
    """What subscribers with a public key see of the calls of a tool."""
    if tool.execution_type == "prebuilt":
        return "name"  # Goals, memories and the like are never shown, whatever the configuration says.
    return "full" if tool.visible else "none"


def build_new_call(
    tool: Tool, arguments: Any, call_id: str, host: GatewayCallHost, *, principal: str | None
) -> NewCall | None:
    """A call that can be stored before it is made, together with others.

    None if it has to be stored when it is made: it is a pending call, or it is visible and there is no space.
    """
    visibility = visibility_of(tool)
    if tool.execution_type in PENDING_EXECUTION_TYPES or (visibility == "full" and host.space_id is None):
        return None
    return host.new_call(tool, call_id, storable_arguments(arguments), visibility=visibility, principal=principal)


def _build_new_call(call: Call, host: GatewayCallHost, visibility: Visibility, **fields: Any) -> NewCall:
    if not call.entry.is_registered:
        fields["tool_name"] = call.requested_name
    arguments = storable_arguments(call.arguments)
    fields["principal"] = call.base_context.user_id
    return host.new_call(call.entry.tool, call.id, arguments, visibility=visibility, **fields)


def storable_arguments(arguments: Any) -> Any:
    """Arguments as JSON data; as text if they cannot be parsed."""
    try:
        return json_text.to_json_data(json_text.parse_arguments(arguments))
    except ValueError:
        text = arguments
        return json_text.valid_text(text if isinstance(text, str) else bytes(text).decode("utf-8", "replace"))  # pyright: ignore

"""Stage: writes the calls of runs down before they begin and when they end, and streams what they say on their way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from toolspace.core import json_text
from toolspace.core.events import CallPartial, CallProgress, EventType
from toolspace.core.records import CallRecord, CallStatus, NewEvent, Visibility
from toolspace.core.result import ToolResult
from toolspace.core.tool import PENDING_EXECUTION_TYPES, Tool
from toolspace.errors import RefusedError, StorageError, StorageUnavailable
from toolspace.orchestrator.call import Call, context_without_call
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.stage import CallHandler, StageContext
from toolspace.spaces import call_transactions
from toolspace.spaces.call_host import GatewayCallHost, as_tool_error, not_in_a_space
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.pending_calls import EXECUTION_TARGETS
from toolspace.storage.database import Program
from toolspace.storage.queries.calls import NewCall

_log = logging.getLogger("toolspace.recorder")

_FLUSH_SECONDS = 0.05
_MOST_PARTIAL_BYTES = 1024 * 1024
"""Of what one call may put on a stream before it ends; its result comes whole."""


class CallRecorder:
    """Keeps the calls of runs. Installed in an orchestrator with `use(recorder.stage)`."""

    def __init__(self, ledger: Ledger, bus: EventBus) -> None:
        self._ledger = ledger
        self._live: dict[str, _Live] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._forget = [
            bus.subscribe(self._heard, EventType.TOOL_CALL_PROGRESS, EventType.TOOL_CALL_PARTIAL),
        ]

    def stage(self, plan: StageContext, next: CallHandler, /) -> CallHandler:
        tool, known = plan.entry.tool, plan.entry.is_registered
        exposure: Visibility = exposure_of(tool) if known else "none"
        visible = exposure == "full"
        elsewhere = tool.execution_type in PENDING_EXECUTION_TYPES and known

        if not plan.in_run:
            return next  # Nothing of it is kept.

        async def run(call: Call) -> ToolResult:
            room = call.base_context.host
            if not isinstance(room, GatewayCallHost) or room.run_id is None:
                return await next(call)
            if call.base_context.space_id != room.space_id:
                call.base_context = call.base_context.with_defaults(call.base_context)
                call.base_context.space_id = room.space_id
            if visible and room.space_id is None:
                result = call.fail("not_permitted", not_in_a_space(tool.name))
                # It showed nowhere, so it is nobody's to see in a space that the run enters later.
                await self._note(call, room, "none", result)
                return result
            if elsewhere:  # Written down by the desk that hands it out.
                result = await next(call)
                if not room.has_opened(call.id):
                    await self._note(call, room, exposure, result)
                return result
            return await self._recorded(call, room, exposure, next)

        return run

    async def _recorded(self, call: Call, room: GatewayCallHost, exposure: Visibility, next: CallHandler) -> ToolResult:
        begun = room.stored_calls.pop(call.id, None)
        if begun is None:
            begun = await self._begin(call, room, exposure)
            if isinstance(begun, ToolResult):
                return begun
        live = self._live[call.id] = _Live(begun.call, exposure)
        try:
            result = await next(call)
        except BaseException:
            # Its caller is gone: what became of it is written down all the same.
            if room.run_moves_on and not call.cancel_requested:
                del self._live[call.id]  # It is left to the process that goes on with the run.
            else:
                self._own(self._finish(live, call.outcome or call.fail("canceled", "the caller was canceled")))
            raise
        await asyncio.shield(self._own(self._finish(live, result)))
        return result

    async def _begin(
        self, call: Call, room: GatewayCallHost, exposure: Visibility
    ) -> call_transactions.StartedCall | ToolResult:
        """Writes down that a call begins. A result where it may not."""
        beginning = self._own(self._ledger.commit(call_transactions.start, self._new(call, room, exposure, "running")))
        try:
            begun = await asyncio.shield(beginning)
        except RefusedError as error:
            return call.fail("execution_error", str(error), executed=False)
        except StorageError as error:
            if isinstance(error, StorageUnavailable):
                room.storage_errors[call.id] = error
            result = call.fail("execution_error", str(as_tool_error(error)), executed=False)
            self._own(self._abandon(call.id, beginning, result))
            return result
        except BaseException:
            self._own(self._abandon(call.id, beginning, call.fail("canceled", "the caller was canceled")))
            raise
        if not begun.is_new:
            room.duplicate_call_id = call.id
            message = f'there is a call "{call.id}" already; give each call an id of its own'
            return call.fail("limit_exceeded", message, executed=False)
        return begun

    async def _abandon(
        self, call_id: str, beginning: asyncio.Task[call_transactions.StartedCall], result: ToolResult
    ) -> None:
        """Ends a call that may have been written down, though it never began."""
        try:
            if not (await beginning).is_new:
                return
        except RefusedError:
            return
        except StorageError:  # Who knows. A call of this id that runs here is another one.
            if call_id in self._live:
                return
        await self._end(call_id, result, ())

    async def _finish(self, live: _Live, result: ToolResult) -> None:
        del self._live[live.call.call_id]
        async with live.lock:  # What is being flushed belongs in front.
            rest, live.events = live.events, []
        await self._end(live.call.call_id, result, rest)

    async def _end(self, call_id: str, result: ToolResult, rest: Sequence[NewEvent]) -> None:
        try:
            await self._write_end(call_id, result, rest)
        except StorageError as error:
            # The effect has happened, and its caller gets the result; the row follows when the database is back.
            _log.warning("call %s ended, which is not written down yet: %s", call_id, error)
            self._own(self._end_later(call_id, result, rest))

    async def _end_later(self, call_id: str, result: ToolResult, rest: Sequence[NewEvent]) -> None:
        delay = 0.2
        while not self._closing:
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)
            with suppress(StorageError):
                await self._write_end(call_id, result, rest)
                break

    async def _write_end(self, call_id: str, result: ToolResult, rest: Sequence[NewEvent]) -> None:
        await self._ledger.commit(
            call_transactions.finish,
            call_id,
            status=_status(result),
            result=_outcome(result),
            is_error=not result.ok,
            error_kind=result.error_kind,
            before=rest,
            node_id=self._ledger.node_id,
        )

    async def _note(self, call: Call, room: GatewayCallHost, exposure: Visibility, result: ToolResult) -> None:
        """Writes a call down that nobody was asked for: it failed before that, or its answer was known."""
        new = self._new(call, room, exposure, "running", shown=False)
        try:
            await self._ledger.commit(_ended, new, result)
        except (RefusedError, StorageError) as error:
            _log.warning("call %s could not be written down: %s", call.id, error)

    def _new(
        self, call: Call, room: GatewayCallHost, exposure: Visibility, status: CallStatus, *, shown: bool = True
    ) -> NewCall:
        tool: Tool = call.entry.tool
        return NewCall(
            call_id=call.id,
            run_id=room.run_id,
            agent_entity_id=room.agent_entity_id,
            space_id=room.space_id,
            tool_name=tool.name if call.entry.is_registered else call.requested_name,
            args=storable_arguments(call.arguments),
            execution_type=tool.execution_type,
            execution_target=EXECUTION_TARGETS.get(tool.execution_type, "server"),
            visible=shown and exposure == "full",
            is_async=tool.is_async,
            exposure=exposure,
            status=status,
            node_id=self._ledger.node_id,
        )

    # What calls say on their way

    def _heard(self, event: Any) -> None:
        live = self._live.get(event.call_id)
        if live is None:
            return
        ids = {"toolCallId": event.call_id, "toolName": event.tool_name}
        if isinstance(event, CallProgress):
            data = {**ids, "progress": event.progress, "total": event.total, "message": event.message}
            if live.events and live.events[-1].type == "tool.progress":
                live.events.pop()  # Only the latest counts.
            live.events.append(NewEvent("tool.progress", data))
        elif isinstance(event, CallPartial):
            value = json_text.to_json_data(event.value)
            live.bytes += len(json_text.encode_bytes(value))
            if live.bytes > _MOST_PARTIAL_BYTES:
                return
            live.events.append(NewEvent("tool.streaming", {**ids, "output": value, "preliminary": True}))
        if live.events and not live.flushing:
            live.flushing = True
            self._own(self._flush(live))

    async def _flush(self, live: _Live) -> None:
        await asyncio.sleep(_FLUSH_SECONDS)
        async with live.lock:
            live.flushing = False
            events, live.events = live.events, []
            if not events:
                return  # They went with the end of the call.
            try:
                await self._ledger.commit(call_transactions.stream_events, live.call, live.exposure, events)
            except StorageError as error:
                _log.warning("call %s: what it said is lost: %s", live.call.call_id, error)

    async def aclose(self) -> None:
        self._closing = True
        for forget in self._forget:
            forget()
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        # Outside the call: it goes on when the call is canceled.
        task = asyncio.get_running_loop().create_task(work, context=context_without_call())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Live:
    """A call that runs, and what it said that is not stored yet."""

    __slots__ = ("bytes", "call", "events", "exposure", "flushing", "lock")

    def __init__(self, call: CallRecord, exposure: Visibility) -> None:
        self.call = call
        self.exposure: Visibility = exposure
        self.events: list[NewEvent] = []
        self.bytes = 0
        self.flushing = False
        self.lock = asyncio.Lock()


def _ended(effects: Effects, new: NewCall, result: ToolResult) -> Program[None]:
    begun = yield from call_transactions.start(effects, new)
    if begun.is_new:
        yield from call_transactions.finish(
            effects,
            new.call_id,
            status=_status(result),
            result=_outcome(result),
            is_error=not result.ok,
            error_kind=result.error_kind,
        )


def _status(result: ToolResult) -> CallStatus:
    return "completed" if result.ok else "canceled" if result.error_kind == "canceled" else "failed"


def _outcome(result: ToolResult) -> Any:
    return json_text.to_json_data(result.result if result.ok else result.error)


def exposure_of(tool: Tool) -> Visibility:
    """What public readers see of the calls of a tool."""
    if tool.execution_type == "prebuilt":
        return "name"  # What an agent keeps in mind is never shown, whatever configuration says of its tools.
    return "full" if tool.visible else "none"


def build_new_call(tool: Tool, arguments: Any, call_id: str, room: GatewayCallHost, node_id: str) -> NewCall | None:
    """A call as it can be written down before it is made, together with others; None where it has to be the call itself
    that does it, because someone else answers it, or it would show where it may not."""
    exposure = exposure_of(tool)
    if tool.execution_type in PENDING_EXECUTION_TYPES or (exposure == "full" and room.space_id is None):
        return None
    return NewCall(
        call_id=call_id,
        run_id=room.run_id,
        agent_entity_id=room.agent_entity_id,
        space_id=room.space_id,
        tool_name=tool.name,
        args=storable_arguments(arguments),
        execution_type=tool.execution_type,
        execution_target=EXECUTION_TARGETS.get(tool.execution_type, "server"),
        visible=exposure == "full",
        is_async=tool.is_async,
        exposure=exposure,
        status="running",
        node_id=node_id,
    )


def storable_arguments(arguments: Any) -> Any:
    """Arguments as they are kept: as data, or as the text that could not be read."""
    try:
        return json_text.to_json_data(json_text.parse_arguments(arguments))
    except ValueError:
        text = arguments
        return json_text.valid_text(text if isinstance(text, str) else bytes(text).decode("utf-8", "replace"))  # pyright: ignore

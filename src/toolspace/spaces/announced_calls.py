"""Calls that are published while a model writes them, before they are stored.

`agents/live_output.py` announces them; `call_transactions.start` continues with `tool.ready`. A call that is announced
and never started ends with an error, also if its process was killed in between.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from toolspace.core.ids import new_id
from toolspace.core.stored_records import NewEvent, StoredEvent, Visibility, run_stream
from toolspace.core.tool import Tool
from toolspace.spaces.call_context import GatewayCallHost, execution_target_of
from toolspace.spaces.call_events import streams_of_call
from toolspace.spaces.call_recorder import visibility_of
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import calls, events


class AnnouncedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a model writes, in the run and space that it will have."""

    call_id: str
    tool_name: str
    run_id: str | None
    agent_entity_id: str | None
    space_id: str | None
    execution_type: str
    visibility: Visibility

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that have its events."""
        return streams_of_call(self.run_id, self.space_id, self.visibility)


def build_announcement(name: str, tool: Tool | None, host: GatewayCallHost, space_id: str | None) -> AnnouncedCall:
    """A new call. `tool` is None if no tool has the name."""
    visibility = visibility_of(tool) if tool is not None else "none"
    if visibility == "full" and space_id is None:
        visibility = "none"  # The call will be refused, and nobody may see it in a space that the run enters later.
    return AnnouncedCall(
        call_id=new_id("call"),
        tool_name=name,
        run_id=host.run_id,
        agent_entity_id=host.agent_entity_id,
        space_id=space_id,
        execution_type=tool.execution_type if tool is not None else "function",
        visibility=visibility,
    )


def announce(effects: Effects, call: AnnouncedCall) -> None:
    """Emits `tool.started`, without an input: the model is still writing it."""
    data = {
        "toolCallId": call.call_id,
        "toolName": call.tool_name,
        "runId": call.run_id,
        "agentEntityId": call.agent_entity_id,
        "spaceId": call.space_id,
        "executionType": call.execution_type,
        "executionTarget": execution_target_of(call.execution_type),
        "status": "running",
    }
    _emit(effects, call, "tool.started", data)


def stream_input(effects: Effects, call: AnnouncedCall, delta: str, *, restart: bool) -> None:
    """Emits a part of the input. `restart`: the earlier parts are void."""
    data: dict[str, Any] = {"toolCallId": call.call_id, "toolName": call.tool_name, "inputDelta": delta}
    if restart:
        data["restart"] = True
    _emit(effects, call, "tool.streaming", data)


def abandon(effects: Effects, call: AnnouncedCall, reason: str) -> None:
    """Emits the end of an announced call that will not be made."""
    data = {"toolCallId": call.call_id, "toolName": call.tool_name, "runId": call.run_id, "messageId": None}
    _emit(effects, call, "tool.error", {**data, "error": reason, "errorKind": "canceled"})


def end_interrupted(
    effects: Effects, run_id: str, planned_ids: Collection[str] = ()
) -> Program[dict[str, tuple[str, ...]]]:
    """Ends the announced calls of a run whose process is gone, unless they are stored or planned.

    Returns the planned ones that were announced and are not stored, each with the streams that have its `tool.started`.
    """
    start_events: dict[str, StoredEvent] = {}
    for event in (yield from events.list_of_types(run_stream(run_id), ("tool.started", "tool.error"))):
        call_id = str(event.data.get("toolCallId"))
        if event.type == "tool.started" and "input" not in event.data:
            start_events[call_id] = event
        else:
            start_events.pop(call_id, None)
    if not start_events:
        return {}
    for call_id in (yield from calls.list_stored(tuple(start_events))):
        del start_events[call_id]
    streams: dict[str, tuple[str, ...]] = {}
    for call_id, event in start_events.items():
        data = event.data
        call = AnnouncedCall(
            call_id=call_id,
            tool_name=str(data.get("toolName")),
            run_id=run_id,
            agent_entity_id=data.get("agentEntityId"),
            space_id=data.get("spaceId"),
            execution_type=str(data.get("executionType")),
            visibility=event.visibility,
        )
        if call_id in planned_ids:
            streams[call_id] = call.streams
        else:
            abandon(effects, call, "interrupted: the model did not finish this call")
    return streams


def _emit(effects: Effects, call: AnnouncedCall, type: str, data: dict[str, Any]) -> None:
    for stream in call.streams:
        effects.emit(stream, NewEvent(type, data, call.visibility))

"""The events of a call and the content of the message that shows it. Changes no row.

`call_transactions` and `announced_calls` emit them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from toolspace.core import json_text
from toolspace.core.schema_size import MAX_SHOWN_SCHEMA_BYTES
from toolspace.core.stored_records import (
    OPEN_CALL,
    CallRecord,
    MessageStatus,
    NewEvent,
    Visibility,
    run_stream,
    space_stream,
)
from toolspace.errors import UnstorableValueError
from toolspace.spaces.ledger import Effects
from toolspace.storage.queries.calls import CallTransition, NewCall


def shown_schema(schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The schema for the events and the row of a call; None if it is too large, or if databases cannot store it."""
    try:
        is_small = schema is not None and len(json_text.encode_for_storage(schema)) <= MAX_SHOWN_SCHEMA_BYTES
    except UnstorableValueError:
        return None
    return schema if is_small else None


def emit_start(effects: Effects, call: CallRecord, new: NewCall, status: MessageStatus) -> None:
    """Emits `tool.started`, unless the call was announced while the model wrote it, and `tool.ready`."""
    data: dict[str, Any] = {
        "toolCallId": call.call_id,
        "toolName": call.tool_name,
        "runId": call.run_id,
        "agentEntityId": call.agent_entity_id,
        "spaceId": call.space_id,
        "messageId": call.message_id,
        "input": call.args,
        "executionType": call.execution_type,
        "executionTarget": call.execution_target,
        "status": status,
    }
    emit(effects, call, new.visibility, "tool.started", data, except_streams=new.announced_streams)
    schemas = {"inputSchema": new.input_schema, "outputSchema": new.output_schema}
    ready_data = data | {name: schema for name, schema in schemas.items() if schema is not None}
    emit(effects, call, new.visibility, "tool.ready", ready_data)


def emit_end(effects: Effects, transition: CallTransition) -> None:
    call = transition.call
    data: dict[str, Any] = {
        "toolCallId": call.call_id,
        "toolName": call.tool_name,
        "runId": call.run_id,
        "messageId": call.message_id,
    }
    if call.is_error:
        reason = call.result if isinstance(call.result, str) else None
        data["error"], data["errorKind"] = reason or "the tool failed", call.error_kind or "execution_error"
        if reason is None:
            data["output"] = call.result
    else:
        data["output"], data["source"] = call.result, call.source
    data["durationMs"] = (call.resolved_at or call.created_at) - call.created_at
    emit(effects, call, transition.visibility, "tool.error" if call.is_error else "tool.done", data)


def emit(
    effects: Effects,
    call: CallRecord,
    visibility: Visibility,
    type: str,
    data: Any,
    *,
    except_streams: Collection[str] = (),
) -> None:
    event = NewEvent(type, data, visibility)
    for stream in streams_of_call(call.run_id, call.space_id, visibility):
        if stream not in except_streams:
            effects.emit(stream, event)


def streams_of_call(run_id: str | None, space_id: str | None, visibility: Visibility) -> tuple[str, ...]:
    """The streams that have the events of a call: its run, and its space unless nothing of the call is shown there."""
    streams = (run_stream(run_id),) if run_id is not None else ()
    return streams if space_id is None or visibility == "none" else (*streams, space_stream(space_id))


def message_content(call: CallRecord) -> dict[str, Any]:
    content: dict[str, Any] = {"toolCallId": call.call_id, "toolName": call.tool_name, "input": call.args}
    if call.status in OPEN_CALL and call.output_schema is not None:
        content["outputSchema"] = call.output_schema
    if call.status in ("completed", "resolved") and not call.is_error:
        content["output"] = call.result
    elif call.is_error:
        content["error"] = call.result
    return content

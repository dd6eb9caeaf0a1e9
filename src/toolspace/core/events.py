"""Events of the in-process event bus: what happens to calls, and changes of the tool list.

The orchestrator emits them. Their codes and their wire form are part of the API.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from toolspace.core import json_text
from toolspace.core.result import ToolResult


class EventType(enum.IntEnum):
    TOOL_CALL_REQUESTED = 400
    """A call starts. In logs and telemetry: `tool_started`."""
    TOOL_CALL_PROGRESS = 402
    """A running call reports its progress."""
    TOOL_CALL_PARTIAL = 404
    """A running call emits a part of its result."""
    TOOL_CALL_COMPLETED = 410
    """A call has succeeded and is recorded. In logs and telemetry: `tool_finished`."""
    TOOL_CALL_FAILED = 420
    """A call has failed and is recorded. In logs and telemetry: `tool_finished`."""
    TASK_STATUS = 430
    """An agent reported its progress with `agent__task_status`."""
    TOOLS_CHANGED = 440
    """The list of tools changed."""


class Event(msgspec.Struct, frozen=True, weakref=False, eq=False):
    """The base of all events. `at` is Unix milliseconds."""

    type: ClassVar[EventType]

    at: float

    def payload(self) -> dict[str, Any]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Returns the event in its wire form."""
        return {"type": self.type.name, "code": int(self.type), "at": round(self.at), **self.payload()}


class CallEvent(Event, frozen=True, weakref=False, eq=False):
    """The base of all events of one call."""

    call_id: str
    tool_name: str
    run_id: str | None
    parent_id: str | None


class CallRequested(CallEvent, frozen=True, weakref=False, eq=False):
    type = EventType.TOOL_CALL_REQUESTED

    arguments: Mapping[str, Any] | str | bytes | None
    """As the caller passed them: a mapping, or the JSON text that a model wrote."""

    @property
    def params(self) -> Any:
        """The arguments as data. Text that is not JSON stays text."""
        try:
            return json_text.parse_arguments(self.arguments)
        except ValueError:
            return self.arguments

    def payload(self) -> dict[str, Any]:
        return {**_ids(self), "params": json_text.to_json_data(self.params)}


class CallProgress(CallEvent, frozen=True, weakref=False, eq=False):
    type = EventType.TOOL_CALL_PROGRESS

    progress: float
    total: float | None = None
    message: str | None = None

    def payload(self) -> dict[str, Any]:
        return {**_ids(self), "progress": self.progress, "total": self.total, "message": self.message}


class CallPartial(CallEvent, frozen=True, weakref=False, eq=False):
    type = EventType.TOOL_CALL_PARTIAL

    value: Any

    def payload(self) -> dict[str, Any]:
        return {**_ids(self), "value": json_text.to_json_data(self.value)}


class CallCompleted(CallEvent, frozen=True, weakref=False, eq=False):
    type = EventType.TOOL_CALL_COMPLETED

    result: ToolResult

    def payload(self) -> dict[str, Any]:
        value = json_text.to_json_data(self.result.result)
        return {**_ids(self), "result": value, "durationMs": round(self.result.duration_ms, 3)}


class CallFailed(CallEvent, frozen=True, weakref=False, eq=False):
    type = EventType.TOOL_CALL_FAILED

    result: ToolResult

    def payload(self) -> dict[str, Any]:
        return {
            **_ids(self),
            "error": self.result.error,
            "errorKind": self.result.error_kind,
            "executed": self.result.executed,
            "durationMs": round(self.result.duration_ms, 3),
        }


class TaskStatusReported(CallEvent, frozen=True, weakref=False, eq=False):
    type = EventType.TASK_STATUS

    status: Mapping[str, Any]

    def payload(self) -> dict[str, Any]:
        return {**_ids(self), "status": dict(self.status)}


class ToolsChanged(Event, frozen=True, weakref=False, eq=False):
    type = EventType.TOOLS_CHANGED

    namespace: str = ""

    def payload(self) -> dict[str, Any]:
        return {"namespace": self.namespace}


def _ids(event: CallEvent) -> dict[str, Any]:
    ids: dict[str, Any] = {"callId": event.call_id, "toolName": event.tool_name}
    if event.run_id is not None:
        ids["runId"] = event.run_id
    if event.parent_id is not None:
        ids["parentId"] = event.parent_id
    return ids

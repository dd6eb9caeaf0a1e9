"""What a reader may see of an event, a call or a run. The one place where what is private is taken out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from toolspace.core.records import CallRecord, RunRecord, StoredEvent, Visibility

Viewer = Literal["secret", "public"]
"""Who reads: the holder of a secret key, who sees everything; or a member of the space, who does not."""

_NAMED: Final = frozenset(("tool.started", "tool.done", "tool.error"))
"""The events of which the name of the tool is shown, where no more may be."""
_OPERATORS: Final[dict[str, frozenset[str]]] = {"run.done": frozenset(("usage", "error"))}
"""What of an event that members see is only for those who operate the agent."""
_OPERATORS_OF_RUN: Final = frozenset(("trigger", "usage", "error"))


def redact_event(event: StoredEvent, audience: Viewer) -> StoredEvent | None:
    """The event as that audience may see it, or None."""
    if audience == "secret":
        return event
    if event.visibility == "full":
        hidden = _OPERATORS.get(event.type)
        if hidden is None:
            return event
        return _with(event, {key: value for key, value in event.data.items() if key not in hidden})
    if event.visibility == "name" and event.type in _NAMED:
        return _with(event, {"toolCallId": event.data.get("toolCallId"), "toolName": event.data.get("toolName")})
    return None


def redact_call(call: CallRecord, exposure: Visibility, audience: Viewer) -> dict[str, Any] | None:
    """The call as that audience may see it, or None. The exposure is the one that its events have."""
    if audience == "secret" or exposure == "full":
        return call.wire()
    if exposure == "name":
        return {"toolCallId": call.call_id, "toolName": call.tool_name}
    return None


def redact_calls(calls: Iterable[tuple[CallRecord, Visibility]], audience: Viewer) -> list[dict[str, Any]]:
    """The calls that the audience may see, each as far as it may."""
    seen = (redact_call(call, exposure, audience) for call, exposure in calls)
    return [call for call in seen if call is not None]


def redact_run(run: RunRecord, audience: Viewer) -> dict[str, Any]:
    """The run; for members without what began it, what it cost and why it failed."""
    data: dict[str, Any] = msgspec.to_builtins(run)
    if audience == "secret":
        return data
    return {key: value for key, value in data.items() if key not in _OPERATORS_OF_RUN}


def _with(event: StoredEvent, data: dict[str, Any]) -> StoredEvent:
    return StoredEvent(event.stream, event.id, event.type, data, event.at, event.visibility)

"""Redaction: what a viewer may see of a stored event, call, run or entity. Responses and streams use it.

Failed calls of tool keys lose the addresses and paths of this installation.

One decision is taken earlier: `spaces/runs.py` stores the events of a space without the usage and the error of a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Literal, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.result import ToolResult
from toolspace.core.stored_records import CallRecord, Entity, RunRecord, StoredEvent, Visibility
from toolspace.orchestrator.call import Arguments
from toolspace.server.authorization import Caller, EntityCaller, SecretKeyCaller

Viewer = Literal["secret", "public"]
"""`secret` sees everything; `public`, a member of the space, does not."""

_NAMED_EVENTS: Final = frozenset(("tool.started", "tool.ready", "tool.done", "tool.error"))
"""Events with the visibility `name` (of prebuilt tools), of which a member sees only the call id and tool name."""
_OPERATOR_EVENT_FIELDS: Final[dict[str, frozenset[str]]] = {"run.done": frozenset(("usage", "error"))}
_OPERATOR_RUN_FIELDS: Final = frozenset(("trigger", "usage", "error", "principal", "toolBudgetExceeded", "sessionId"))


_ADDRESS: Final = re.compile(
    r"""
    [a-z][a-z0-9+.-]*://[^\s"'<>)\]]+                    # a URL
    | \[[0-9a-f.]*:[0-9a-f:.]*\](?::\d+)?               # an IPv6 address in brackets
    | (?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:.])
    | (?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.]*\d)
    | (?<![\w.-])[a-z][\w.-]*:\d{2,5}(?!\w)             # a host and a port
    | (?<![\w/.])~?(?:/[\w.@+~-]+){2,}/?                # the path of a file
    | (?<!\w)[a-z]:\\[^\s"'<>]+
    """,
    re.IGNORECASE | re.VERBOSE,
)
_BATCH_TOOL: Final = "agent__batch"
_TOOL_ERRORS: Final = frozenset(("execution_error", "invalid_parameters"))
"""Errors that a tool writes for its caller, and errors about the arguments."""


def conceal_addresses(result: ToolResult, arguments: Arguments) -> None:
    """Replaces addresses and paths in the error of a failed call by `…`, except those that the caller sent itself.

    For callers who are no operators: they must not learn the hosts, ports and files of this installation.
    """
    if not result.ok:
        if result.error is not None and result.error_kind not in _TOOL_ERRORS:
            result.error, result.encoded = _conceal(result.error, arguments), None
    elif result.tool == _BATCH_TOOL:
        for entry in cast("list[dict[str, Any]]", result.result.get("results", [])):
            if "error" in entry and entry["errorKind"] not in _TOOL_ERRORS:
                entry["error"], result.encoded = _conceal(entry["error"], arguments), None


def _conceal(text: str, arguments: Arguments) -> str:
    sent_text = arguments if isinstance(arguments, str) else json_text.encode(arguments)
    return _ADDRESS.sub(lambda match: match[0] if match[0] in sent_text else "…", text)


def viewer_of(caller: Caller) -> Viewer:
    return "secret" if isinstance(caller, SecretKeyCaller) else "public"


def redact_event(event: StoredEvent, viewer: Viewer) -> StoredEvent | None:
    """Returns the event as the viewer may see it, or None."""
    if viewer == "secret":
        return event
    if event.visibility == "full":
        hidden_fields = _OPERATOR_EVENT_FIELDS.get(event.type)
        if hidden_fields is None:
            return event
        return _replace_data(event, {key: value for key, value in event.data.items() if key not in hidden_fields})
    if event.visibility == "name" and event.type in _NAMED_EVENTS:
        return _replace_data(
            event, {"toolCallId": event.data.get("toolCallId"), "toolName": event.data.get("toolName")}
        )
    return None


def redact_calls(calls: Iterable[tuple[CallRecord, Visibility]], viewer: Viewer) -> list[dict[str, Any]]:
    """Returns the calls that the viewer may see. The visibility is the one of the call's events."""
    fields = (_redact_call(call, visibility, viewer) for call, visibility in calls)
    return [call for call in fields if call is not None]


def redact_run(run: RunRecord, viewer: Viewer) -> dict[str, Any]:
    """Returns the run; for members without its trigger, usage, error, principal, budget and session."""
    data: dict[str, Any] = msgspec.to_builtins(run)
    if viewer == "secret":
        return data
    return {key: value for key, value in data.items() if key not in _OPERATOR_RUN_FIELDS}


def redact_entity(entity: Entity, caller: Caller) -> Entity:
    """Returns the entity; without its metadata if the caller is another entity."""
    if isinstance(caller, EntityCaller) and caller.entity_id != entity.id:
        return msgspec.structs.replace(entity, metadata={})
    return entity


def _redact_call(call: CallRecord, visibility: Visibility, viewer: Viewer) -> dict[str, Any] | None:
    if viewer == "secret" or visibility == "full":
        return call.wire()
    if visibility == "name":
        return {"toolCallId": call.call_id, "toolName": call.tool_name}
    return None


def _replace_data(event: StoredEvent, data: dict[str, Any]) -> StoredEvent:
    return StoredEvent(event.stream, event.id, event.type, data, event.at, event.visibility)

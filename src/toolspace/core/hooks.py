"""Hooks: functions that see calls before they run, their results, or their failures, and may change or deny them.

`Hook` says which function runs for which tools. The function gets a `HookCall` and returns a `HookDecision`, or None to
change nothing. The stages of the orchestrator run hooks; this module only describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.result import Content, ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind

HookPoint = Literal["before", "after", "error"]
FailureMode = Literal["open", "closed"]
HOOK_TIMEOUT_SECONDS = 5.0
_ALLOWED_CHANGES: Mapping[HookPoint, frozenset[str]] = {
    "before": frozenset(("arguments",)),
    "after": frozenset(("result",)),
    "error": frozenset(("error", "result")),
}


class HookCall(msgspec.Struct, frozen=True, kw_only=True):
    """The call that a hook sees: a copy, which only a `HookDecision` changes."""

    on: HookPoint
    tool: Tool
    """The definition of the tool, under its full name."""
    arguments: Mapping[str, Any]
    """Validated. Of a call that failed before that: as the caller sent them."""
    principal: str
    """For whom the call is made: an entity, an API key (`key/…`, `tools/…`), or `local`."""
    call_id: str
    run_id: str | None = None
    agent_entity_id: str | None = None
    space_id: str | None = None
    outcome: ToolResult | None = None
    """The whole result or failure; None before the call."""

    @property
    def result(self) -> Any:
        """The result as JSON data. None before the call, and for a failure."""
        return self.outcome.result if self.outcome is not None else None

    @property
    def content(self) -> Sequence[Content]:
        """The result as typed parts."""
        return self.outcome.content if self.outcome is not None else ()

    @property
    def error(self) -> str | None:
        """The text of a failure."""
        return self.outcome.error if self.outcome is not None else None

    @property
    def error_kind(self) -> ErrorKind | None:
        return self.outcome.error_kind if self.outcome is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the wire form, which webhooks receive."""
        wire: dict[str, Any] = {
            "on": self.on,
            "tool": self.tool.to_dict(),
            "callId": self.call_id,
            "runId": self.run_id,
            "agentEntityId": self.agent_entity_id,
            "spaceId": self.space_id,
            "principal": self.principal,
            "arguments": self.arguments,
        }
        outcome = self.outcome
        if outcome is not None and outcome.ok:
            wire |= {"result": outcome.result, "content": outcome.content, "executed": outcome.executed}
        elif outcome is not None:
            wire |= {"error": outcome.error, "errorKind": outcome.error_kind, "executed": outcome.executed}
        return json_text.to_json_data(wire)


class HookDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a hook decides: nothing, which lets the call pass, or exactly one of these."""

    deny: str | None = None
    """The reason to deny the call, or to withhold its result."""
    arguments: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The arguments to use instead. They are validated again. Only for `before`."""
    result: Any = msgspec.UNSET
    """The result to use instead: JSON data, typed parts, or a `ToolResult`. For `after` and `error`."""
    error: str | None = None
    """The text of the failure to use instead. Only for `error`."""

    def __post_init__(self) -> None:
        names = [*self.list_changes(), *(["deny"] if self.deny is not None else [])]
        if len(names) > 1:
            raise ValueError(f"a hook decides one thing, not {' and '.join(names)}")

    def list_changes(self) -> list[str]:
        """Returns the names of the fields that replace something."""
        changes = {
            "arguments": self.arguments is not msgspec.UNSET,
            "result": self.result is not msgspec.UNSET,
            "error": self.error is not None,
        }
        return [name for name, is_set in changes.items() if is_set]


PASS = HookDecision()
HookFunction = Callable[[HookCall], Any]
"""Returns a `HookDecision`, a mapping with its fields, or None. Plain functions run in a thread."""


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """A function that runs for the calls of some tools."""

    use: HookFunction
    on: HookPoint = "before"
    tools: str | Sequence[str] = "*"
    """A glob, or several. Compared with every name of a tool: full, local, original spelling and aliases."""
    on_failure: FailureMode = "closed"
    """What happens if the hook raises, takes too long or returns something else: the call passes, or it is denied."""
    timeout: float = HOOK_TIMEOUT_SECONDS
    name: str = ""
    """How messages call it; without it the name of the function."""
    source: str = "Settings.hooks"
    """Where it is configured."""

    @property
    def patterns(self) -> Sequence[str]:
        return (self.tools,) if isinstance(self.tools, str) else self.tools

    @property
    def label(self) -> str:
        return self.name or getattr(self.use, "__name__", None) or type(self.use).__name__


def parse_decision(value: object, on: HookPoint) -> HookDecision:
    """Returns the decision in what a hook returned. Raises `ValueError` if there is none for this point."""
    if value is None:
        return PASS
    if isinstance(value, HookDecision):
        decision = value
    elif isinstance(value, Mapping):
        try:
            decision = msgspec.convert(dict(cast("Mapping[str, Any]", value)), HookDecision)
        except msgspec.ValidationError as error:
            raise ValueError(f"its decision is wrong: {error}") from None
    else:
        raise ValueError(f"it returned a {type(value).__name__}; it has to be a HookDecision or None")
    for name in decision.list_changes():
        if name not in _ALLOWED_CHANGES[on]:
            allowed_names = " or ".join(sorted(_ALLOWED_CHANGES[on]))
            raise ValueError(f"it replaced {name}, but on: {on} can replace only {allowed_names}")
    return decision

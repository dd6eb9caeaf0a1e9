"""What a gateway's answers are to a program, beside the records that it keeps: pages, results of calls, keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from toolspace.client.errors import UnexpectedResponse
from toolspace.core.records import CallStatus, ExecutionTarget, InboxEvent, Record, ResultSource
from toolspace.errors import ERROR_CLASSES, ErrorKind, ToolExecutionError

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list; `next` is the cursor of the part behind it, None at the end."""

    items: list[T]
    next: str | None = None


class CallResult(Record, frozen=True):
    """What a call gave, or that it is pending: then its result comes to the agent's inbox, and `calls.get` has it."""

    ok: bool
    result: Any = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    executed: bool = False
    tool: str | None = None
    call_id: str | None = None
    duration_ms: float = 0.0
    content: Any = None
    extras: Mapping[str, Any] = {}
    status: Literal["pending"] | None = None
    pending_tool_call_id: str | None = None

    @property
    def is_pending(self) -> bool:
        return self.pending_tool_call_id is not None

    def unwrap(self) -> Any:
        """The result, or the exception that the failure is."""
        if self.ok:
            return self.result
        raise ERROR_CLASSES.get(self.error_kind or "execution_error", ToolExecutionError)(
            self.error or "the tool failed", tool=self.tool, executed=self.executed
        )


class RunCall(Record, frozen=True):
    """A call of a run, as far as it is to be seen: of an agent's own tools, members see which and no more."""

    tool_call_id: str
    tool_name: str
    seq: int | None = None
    args: Any = None
    execution_type: str | None = None
    execution_target: ExecutionTarget | None = None
    status: CallStatus | None = None
    result: Any = None
    is_error: bool = False
    source: ResultSource | None = None
    started_at: int | None = None
    completed_at: int | None = None


class InboxClaim(Record, frozen=True):
    """Inbox events that were taken: say how each ended, under this claim, before the lease ends."""

    claim: str
    lease_until: int
    items: list[InboxEvent]


class ToolInfo(Record, frozen=True):
    """A tool as the gateway lists it."""

    name: str
    description: str = ""
    input_schema: Mapping[str, Any] = {}
    output_schema: Mapping[str, Any] | None = None
    category: str = "custom"
    execution_type: str | None = None
    visible: bool = False
    is_async: bool = False


class ApiKey(Record, frozen=True):
    """A key without what opens doors; `key` is there once, in the answer that makes it."""

    id: str
    kind: Literal["secret", "public", "tools"]
    name: str
    hint: str
    tools_allowed: Sequence[str] | None = None
    tools_denied: Sequence[str] = ()
    agent_entity_id: str | None = None
    created_at: int = 0
    revoked_at: int | None = None
    last_used_at: int | None = None
    calls: int = 0
    failed: int = 0
    key: str | None = None

    def __repr__(self) -> str:
        return f"Key(id={self.id!r}, kind={self.kind!r}, name={self.name!r}, hint={self.hint!r})"


def decode_response(kind: type[T], data: Any) -> T:
    """The answer as this type."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UnexpectedResponse(
            f"the answer is not as this client knows it: {error}; are both of one version?"
        ) from None

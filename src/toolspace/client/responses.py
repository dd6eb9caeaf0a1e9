"""The types of responses that are not stored records: pages, results of calls, claims, tools and keys.

Records such as `Entity` and `Message` are in `toolspace.core.records`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from toolspace.client.errors import UnexpectedResponse
from toolspace.core.records import CallStatus, ExecutionTarget, InboxEvent, Record, ResultSource
from toolspace.errors import ERROR_CLASSES, ErrorKind, ToolExecutionError

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A page of a list. `next` is the cursor of the next page; None on the last one."""

    items: list[T]
    next: str | None = None


class CallResult(Record, frozen=True):
    """The result of a call. If it is pending, the result comes later to the agent's inbox and to `calls.get`."""

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
        """Returns the result of a successful call. Raises the `ToolError` of a failed one."""
        if self.ok:
            return self.result
        raise ERROR_CLASSES.get(self.error_kind or "execution_error", ToolExecutionError)(
            self.error or "the tool failed", tool=self.tool, executed=self.executed
        )


class RunCall(Record, frozen=True):
    """A call of a run. Of calls to the agent's own tools, members of the space see only the tool."""

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
    """Claimed inbox events. Each must be acknowledged or released with this claim before the lease expires."""

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
    """An API key. `key` is its secret text, which only the response of `create` has."""

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
    """Returns the response as a type. Raises `UnexpectedResponse`."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UnexpectedResponse(
            f"the response has an unknown form: {error}; do the client and the gateway have the same version?"
        ) from None

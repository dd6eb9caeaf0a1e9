"""What the calls of a gateway get through `ToolContext.host`: their run and space, whoever resolves them, and services.

`server/` and `agents/` make a `GatewayCallHost` for each request or run. Tools of agents reach the ledger, the document
library and the notifiers through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from toolspace.core import json_text
from toolspace.core.approvals import ApprovalDecision, ApprovalRequest
from toolspace.core.result import ToolResult
from toolspace.core.stored_records import CallRecord, CallStatus, ExecutionTarget, Visibility
from toolspace.core.times import parse_duration
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import (
    NOT_EXECUTED,
    RefusedError,
    StorageError,
    StorageUnavailable,
    ToolCanceledError,
    ToolError,
    ToolExecutionError,
    ToolPermissionError,
)
from toolspace.spaces.call_events import shown_schema
from toolspace.spaces.call_transactions import StartedCall
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries.calls import NewCall

if TYPE_CHECKING:
    from toolspace.spaces.pending_calls import PendingCalls

_EXECUTION_TARGETS: Mapping[str, ExecutionTarget] = {"external": "external", "space": "client"}
"""Who executes a tool of an execution type; the gateway executes all others."""


class ApprovalGrant(NamedTuple):
    """What exactly was approved."""

    tool_name: str
    tool_version: str
    principal: str
    digest: str
    policy_version: str

    @classmethod
    def of(cls, request: ApprovalRequest) -> ApprovalGrant:
        """What a request asks for."""
        return cls(request.tool.name, request.tool_version, request.principal, request.digest, request.policy_version)


@dataclass(slots=True, eq=False, kw_only=True)
class GatewayCallHost:
    """What the calls of one request share. The `host` of their contexts."""

    pending_calls: PendingCalls = field(kw_only=False)
    run_id: str | None = None
    agent_entity_id: str | None = None
    space_id: str | None = None
    """Where visible calls are shown. `enter_space` changes it for the calls that follow."""
    session_id: str | None = None
    """The session of the agent that the calls belong to; None: its main session."""
    confirms_delivery: bool = True
    """Whether the sender of the response says which results arrived. If not, handing it a result is the delivery."""
    approval_mode: Literal["pause", "wait", "return"] = "return"
    """What a call that needs approval does: pause its run, wait up to its timeout, or return that it is pending."""
    requester: str | None = None
    """The key that makes the calls, if their user is another."""
    approved_calls: dict[str, ApprovalGrant] = field(init=False, default_factory=dict[str, ApprovalGrant])
    """Calls that were approved, by id, and may run once."""
    paused_call_ids: list[str] = field(init=False, default_factory=list[str])
    """Calls that pause the run until they are approved."""
    inline_call_ids: list[str] = field(init=False, default_factory=list[str])
    """Calls whose results go back with the response."""
    storage_errors: dict[str, StorageUnavailable] = field(init=False, default_factory=dict[str, StorageUnavailable])
    """Calls whose state is unknown, because the database did not answer."""
    stored_calls: dict[str, StartedCall] = field(init=False, default_factory=dict[str, StartedCall])
    """Calls that were stored before they are made, by id."""
    resumed_calls: dict[str, CallRecord] = field(init=False, default_factory=dict[str, CallRecord])
    """Calls of a run that are executed after their approval, by id, as they are stored."""
    duplicate_call_id: str | None = field(init=False, default=None)
    """A call whose id was in use already."""
    announced_calls: dict[str, tuple[str, ...]] = field(init=False, default_factory=dict[str, tuple[str, ...]])
    """Calls whose `tool.started` was published while the model wrote them, each with the streams that have it."""
    run_moves_on: bool = field(init=False, default=False)
    """Whether another process continues the run: it then handles the calls that are interrupted here."""
    _opened_ids: set[str] | None = field(init=False, default=None)

    @property
    def ledger(self) -> Ledger:
        return self.pending_calls.ledger

    @property
    def services(self) -> AgentServices:
        return self.pending_calls.services

    def has_approval(self, call_id: str) -> bool:
        return call_id in self.approved_calls

    def note_opened(self, call_id: str) -> None:
        """A pending call of the run is stored."""
        if self.run_id is not None:
            self._opened_ids = self._opened_ids or set()
            self._opened_ids.add(call_id)

    def has_opened(self, call_id: str) -> bool:
        return self._opened_ids is not None and call_id in self._opened_ids

    @property
    def acknowledgeable_ids(self) -> list[str]:
        """Calls whose results go back with the response, and would come to the inbox if it were lost."""
        return self.inline_call_ids if self.agent_entity_id is not None else []

    def deliver_inline(self, call_id: str) -> None:
        """The result of a call goes back with the response."""
        if self.confirms_delivery:
            self.inline_call_ids.append(call_id)
        else:
            self.pending_calls.mark_delivered((call_id,))

    def new_call(
        self,
        tool: Tool,
        call_id: str,
        args: Any,
        *,
        visibility: Visibility,
        status: CallStatus = "running",
        **fields: Any,
    ) -> NewCall:
        """A call of a tool in this run and space, to be stored. `fields`: more fields of `NewCall`."""
        values: dict[str, Any] = {"tool_name": tool.name, "visible": visibility == "full", **fields}
        return NewCall(
            call_id=call_id,
            run_id=self.run_id,
            agent_entity_id=self.agent_entity_id,
            space_id=self.space_id,
            args=args,
            execution_type=tool.execution_type,
            execution_target=execution_target_of(tool.execution_type),
            is_async=tool.is_async,
            visibility=visibility,
            status=status,
            node_id=self.pending_calls.ledger.node_id,
            input_schema=shown_schema(tool.input_schema),
            output_schema=shown_schema(tool.output_schema),
            announced_streams=self.announced_calls.pop(call_id, ()),
            session_id=self.session_id,
            **values,
        )

    async def wait_for_result(self, tool: Tool, parameters: Mapping[str, Any], context: ToolContext) -> ToolResult:
        if tool.execution_type == "space" and self.space_id is None:
            reason = not_in_a_space if self.run_id is not None else _not_in_a_run
            raise ToolPermissionError(reason(tool.name))
        try:
            return await self.pending_calls.execute(self, tool, parameters, context)
        except (RefusedError, StorageError) as error:
            if isinstance(error, StorageUnavailable):
                self.storage_errors[context.call_id or ""] = error
            raise as_tool_error(error) from error

    async def request_approval(
        self, request: ApprovalRequest, *, timeout: float
    ) -> ApprovalDecision | ToolResult | None:
        if self.pending_calls.approvals is None:
            return None
        try:
            return await self.pending_calls.approvals.request(self, request, timeout=timeout)
        except (RefusedError, StorageError) as error:
            if isinstance(error, StorageUnavailable):
                self.storage_errors[request.call_id] = error
            raise as_tool_error(error) from error

    async def ask_space(self, name: str, args: Mapping[str, Any], context: ToolContext, *, timeout: float) -> Any:
        try:
            return await self.pending_calls.ask_members(self, name, args, context, timeout=timeout)
        except (RefusedError, StorageError) as error:
            raise as_tool_error(error) from error


def execution_target_of(execution_type: str) -> ExecutionTarget:
    """Who executes the calls of a tool of this execution type."""
    return _EXECUTION_TARGETS.get(execution_type, "server")


def result_of(call: CallRecord) -> ToolResult:
    """The result of a call that has ended, for its caller. Raises `ToolCanceledError` if it was cancelled."""
    if not call.is_error:
        return ToolResult(True, call.result)
    text = call.result if isinstance(call.result, str) else None
    if call.status == "canceled":
        raise ToolCanceledError(text or "the call was canceled", executed=True)
    kind: Any = call.error_kind or ("timeout" if call.status == "expired" else "execution_error")
    extras: dict[str, Any] = {} if text is not None else {"result": call.result}
    error = text or json_text.describe(call.result, 500)
    executed = kind not in NOT_EXECUTED or call.source != "server"  # A hook withholds the result of a worker.
    return ToolResult(False, error=error, error_kind=kind, executed=executed, extras=extras)


def timer_seconds(tool: Tool, parameters: Mapping[str, Any]) -> float | None:
    """How long a call of a `wait` tool takes; None for other tools. Raises `ToolExecutionError`."""
    if tool.execution_type != "wait":
        return None
    duration = (tool.execution or {}).get("duration", parameters.get("duration"))
    if duration is None:
        raise ToolExecutionError(f'tool "{tool.name}" waits for a duration, and none is given')
    try:
        return parse_duration(duration)
    except ValueError as error:
        raise ToolExecutionError(f'tool "{tool.name}" cannot wait: {error}') from None


def not_in_a_space(tool_name: str) -> str:
    return f'Tool "{tool_name}" is visible but you are not in a space. Call enter_space first.'


def _not_in_a_run(tool_name: str) -> str:
    return (
        f'Tool "{tool_name}" asks the people in a space, and this call is in none: '
        "open a run there (POST /api/runs) and call it in that (POST /api/runs/{runId}/calls)"
    )


def as_tool_error(error: RefusedError | StorageError) -> ToolError:
    """The error of a call that was not executed."""
    if isinstance(error, StorageUnavailable):  # Not every caller may know the address of the database.
        return ToolExecutionError("the database does not answer now; try again", executed=False)
    return ToolExecutionError(str(error), executed=False)


class AgentServices:
    """What the tools of agents use besides the database: the document library, and notifications to people."""

    def __init__(
        self,
        library: DocumentLibrary | None = None,
        *,
        notifier: Notifier | None = None,
        notifiers: Mapping[str, Notifier] | None = None,
    ) -> None:
        self.library = library
        """None: documents are searched by words alone, without embeddings."""
        self.notifier = notifier
        self.notifiers = dict(notifiers or {})
        """Notifiers of single agents, by the id of their entity."""

    def find_notifier(self, agent_id: str) -> Notifier | None:
        return self.notifiers.get(agent_id, self.notifier)


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """A notification of an agent to a person, outside of any space."""

    title: str
    body: str
    to: str | None = None
    """A mail address; None: the configured recipients."""
    agent_id: str
    agent_name: str
    id: str
    """Identifies the notification if it is sent twice."""


class NotificationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Which channels sent a notification."""

    channels: Sequence[str]
    """The channels that accepted it: `webhook`, `email`."""
    recipients: Sequence[str]
    """The mail addresses that it was sent to."""
    failed: Mapping[str, str]
    """The channels that failed, and why."""


class Notifier(Protocol):
    """Sends notifications to people."""

    async def send(self, notification: Notification) -> NotificationResult:
        """Raises a `ToolError` if every channel failed."""
        ...

"""Approvals of a gateway: stores calls that need approval, takes decisions, and executes approved calls once.

A call that needs approval is a pending call. Approving it is one compare-and-set, which also names the process that
executes it: nobody else does, and after a crash the call counts as interrupted. Its result goes where the result of a
pending call goes. `call_context` asks for approval; `server/` submits decisions and says how to execute a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from toolspace.core import json_text
from toolspace.core.approvals import CALLER, MEMBERS, OPERATORS, ApprovalDecision, ApprovalRequest
from toolspace.core.ids import new_id
from toolspace.core.result import PAUSES_RUN_KEY, ToolResult
from toolspace.core.stored_records import ApprovalRecord, CallRecord, NewEvent, Visibility
from toolspace.core.tool import PENDING_EXECUTION_TYPES
from toolspace.errors import RefusedError, StorageError, ToolPermissionError
from toolspace.orchestrator.call import context_without_call
from toolspace.spaces import call_events, call_transactions
from toolspace.spaces.call_context import ApprovalGrant, GatewayCallHost, execution_target_of, timer_seconds
from toolspace.spaces.call_recorder import visibility_of
from toolspace.spaces.call_transactions import StartedCall
from toolspace.spaces.ledger import Effects
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.submission_hooks import to_stored_result
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries import approvals, calls, entities_and_spaces, messages, runs
from toolspace.storage.queries.approvals import ApprovedCall, NewApproval
from toolspace.storage.queries.calls import NewCall

_log = logging.getLogger("toolspace.approvals")
APPROVALS_STREAM: Final = "approvals"
"""The stream of the events of calls that have neither a run nor a space."""
_GROUPS: Final = frozenset((OPERATORS, MEMBERS, CALLER))
_MAX_REASON: Final = 2_000
_RETRY_SECONDS: Final = 1.0
_SHARED_FIELDS: Final = tuple(
    field for field in NewCall.__struct_fields__ if field in CallRecord.__struct_fields__ and field != "created_at"
)

ExecuteCall = Callable[[ApprovedCall, GatewayCallHost], Awaitable[ToolResult]]
"""Executes an approved call in the process where it was approved."""


class Approver(msgspec.Struct, frozen=True, kw_only=True):
    """Who decides: a secret key, an entity, or the key that made the call."""

    name: str
    """The principal of this approver: `key/…`, `tools/…`, or the id of an entity."""
    is_operator: bool = False
    entity_id: str | None = None


class GatewayApprovals:
    """Asks for approval, takes decisions and executes approved calls. One for each process."""

    def __init__(self, pending_calls: PendingCalls, execute: ExecuteCall) -> None:
        self._pending_calls = pending_calls
        self._ledger = pending_calls.ledger
        self._execute = execute
        self._background: set[asyncio.Task[None]] = set()

    async def request(
        self, host: GatewayCallHost, request: ApprovalRequest, *, timeout: float
    ) -> ApprovalDecision | ToolResult:
        """Stores the call and asks for approval. Returns the result, or that the call is pending; or the decision, if
        the call was approved before or a decision is remembered."""
        grant = host.approved_calls.pop(request.call_id, None)
        if grant is not None:
            if grant == ApprovalGrant.of(request):
                return ApprovalDecision(True)
            return ApprovalDecision(False, "the tool or its policies changed after the request; call it again")
        context = request.context
        scopes = ["always", *_scope_names(context.run_id, context.session_id).values()]
        rule = await self._ledger.read(approvals.find_remembered, request.tool.name, request.principal, scopes)
        if rule is not None:
            return ApprovalDecision(rule.decision == "approved", rule.reason)
        pauses = host.approval_mode == "pause" and not request.is_nested
        waits = not pauses and (host.approval_mode != "return" or request.is_nested)
        new = self._new_call(host, request, timeout if waits else None, pauses=pauses)
        approval = self._new_approval(host, request, new)
        seconds = timeout if waits else 0.0
        result = await self._pending_calls.open_approval(
            host, new, context, seconds, start=partial(_open, approval=approval)
        )
        if pauses and result.ok:
            host.paused_call_ids.append(request.call_id)
            result.extras = {**result.extras, PAUSES_RUN_KEY: True}
        return result

    async def decide(self, approval_id: str, decision: ApprovalDecision, approver: Approver) -> ApprovalRecord:
        """Approves or denies a call, once. Raises `RefusedError` if it is not there, not theirs, or over.

        An approved call is executed in the background; its result goes where the result of a pending call goes.
        """
        if decision.reason is not None:
            decision = msgspec.structs.replace(decision, reason=json_text.storable_text(decision.reason)[:_MAX_REASON])
        denial = None if decision.is_approved else await self._describe_denial(approval_id, decision, approver)
        approved_call, approval = await self._ledger.commit(
            _decide, approval_id, decision, approver, self._ledger.node_id, denial
        )
        if approved_call is not None:
            task = asyncio.get_running_loop().create_task(
                self._execute_approved(approved_call), context=context_without_call()
            )
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        return approval

    async def _describe_denial(self, approval_id: str, decision: ApprovalDecision, approver: Approver) -> ToolResult:
        """The failure of a call that is denied, as the error-hooks of its tool return it."""
        reason = f"{ToolPermissionError.prefix}{decision.reason or 'the call was not approved'}"
        denial = ToolResult(False, error=reason, error_kind="not_permitted", executed=False)
        hooks = self._pending_calls.hooks
        if hooks is None:
            return denial
        call = await self._ledger.read(_find_requested_call, approval_id, approver)
        return denial if call is None else await hooks.process_outcome(call, denial)

    async def aclose(self) -> None:
        """Waits for approved calls that are executed here."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _execute_approved(self, approved_call: ApprovedCall) -> None:
        approval = approved_call.approval
        host = GatewayCallHost(
            self._pending_calls,
            run_id=approval.run_id,
            agent_entity_id=approval.agent_entity_id,
            space_id=approval.space_id,
            session_id=approved_call.context["agentSessionId"],
            confirms_delivery=False,
        )
        host.approved_calls[approval.id] = ApprovalGrant(
            approval.tool_name, approval.tool_version, approval.principal, approval.digest, approval.policy_version
        )
        try:
            if approval.run_id is not None:
                record = await self._ledger.read(calls.find, approval.id)
                if record is not None:
                    host.resumed_calls[approval.id] = record
            result = await self._execute(approved_call, host)
        except Exception as error:
            _log.exception("call %s: executing it after its approval failed", approval.id)
            result = ToolResult(False, error=f"{type(error).__name__}: {error}", error_kind="internal_error")
        while True:
            try:
                await self._ledger.commit(finish, approval.id, result)
                return
            except StorageError as error:
                _log.warning("call %s: storing its result failed, retrying: %s", approval.id, error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _new_call(
        self, host: GatewayCallHost, request: ApprovalRequest, seconds: float | None, *, pauses: bool
    ) -> NewCall:
        now = self._ledger.now_ms()
        tool = request.tool
        ttl = request.expires_after or tool.expires_after or self._pending_calls.ttl
        # Nobody sees or executes it before it is approved.
        new = host.new_call(
            tool,
            request.call_id,
            dict(request.arguments),
            visibility="none",
            status="pending" if seconds is None else "waiting",
            created_at=now,
            expires_at=now + round(ttl * 1000),
            wait_until=None if seconds is None else now + round(min(seconds, ttl) * 1000),
            pauses_run=pauses,
            principal=request.context.user_id,
        )
        is_submitted = tool.execution_type in PENDING_EXECUTION_TYPES  # The result is checked after the approval.
        return msgspec.structs.replace(
            new,
            execution_type=call_transactions.APPROVAL,
            execution_target="server",
            output_schema=new.output_schema if is_submitted else None,
        )

    def _new_approval(self, host: GatewayCallHost, request: ApprovalRequest, new: NewCall) -> NewApproval:
        context, tool = request.context, request.tool
        visibility = visibility_of(tool)
        is_pending = tool.execution_type in PENDING_EXECUTION_TYPES
        expires_in = round((tool.expires_after or self._pending_calls.ttl) * 1000) if is_pending else None
        due_in = timer_seconds(tool, request.arguments)
        # In a run of an agent, the agent makes the call; the person it works for may approve it.
        user_id = context.user_id if context.user_id is not None and "/" in context.user_id else None
        requesters = {host.requester, host.agent_entity_id, user_id} - {None} or {request.principal}
        return NewApproval(
            id=request.call_id,
            tool_name=tool.name,
            tool_version=request.tool_version,
            digest=request.digest,
            principal=request.principal,
            requested_by=sorted(filter(None, requesters)),
            policy_version=request.policy_version,
            rule=request.source,
            reason=request.reason,
            approvers=request.approvers,
            context={
                "userId": context.user_id,
                "agentId": context.agent_id,
                "sessionId": context.session_id,
                "agentSessionId": host.session_id,
                "taskId": context.task_id,
                "memoryDir": None if context.memory_dir is None else str(context.memory_dir),
                "sessionDir": None if context.session_dir is None else str(context.session_dir),
            },
            execution={
                "type": tool.execution_type,
                "target": execution_target_of(tool.execution_type),
                "visible": visibility == "full" and new.space_id is not None,
                "visibility": visibility,
                "isPending": is_pending,
                "inputSchema": new.input_schema if is_pending else None,
                "announcedStreams": new.announced_streams,
                "expiresIn": expires_in,
                "dueIn": None if due_in is None else round(due_in * 1000),
            },
            expires_at=new.expires_at or 0,
        )


def _scope_names(run_id: str | None, session_id: str | None) -> dict[str, str]:
    """The names of the scopes that a call belongs to, by kind."""
    scopes = {"run": run_id, "session": session_id}
    return {kind: f"{kind}:{id}" for kind, id in scopes.items() if id is not None}


# Transactions


def _open(effects: Effects, new: NewCall, *, approval: NewApproval) -> Program[StartedCall]:
    """Makes a call pending until it is approved; the call of a run may be stored already."""
    transition = yield from approvals.ask(
        new.call_id,
        new.node_id,
        args=new.args,
        status=new.status,
        expires_at=approval.expires_at,
        wait_until=new.wait_until,
        pauses=new.pauses_run,
    )
    if transition is None:
        started = yield from call_transactions.start(effects, new)
        if not started.is_new:
            return started
        call, visibility = started.call, new.visibility
    else:
        call, visibility = transition.call, transition.visibility
        if new.pauses_run and call.run_id is not None:
            yield from runs.update_status(call.run_id, "waiting_tool", from_statuses=("running", "queued"))
        if call.message_id is not None:
            yield from messages.update_status(call.message_id, status="requires_action")
    yield from approvals.create(approval)
    data = {
        "approvalId": call.call_id,
        "toolCallId": call.call_id,
        "toolName": call.tool_name,
        "runId": call.run_id,
        "agentEntityId": call.agent_entity_id,
        "spaceId": call.space_id,
        "input": call.args,
        "principal": approval.principal,
        "reason": approval.reason,
        "approvers": list(approval.approvers),
        "expiresAt": approval.expires_at,
    }
    _emit(effects, call, visibility, approval.approvers, "approval.requested", data)
    return StartedCall(call, is_new=True)


def _decide(
    effects: Effects,
    approval_id: str,
    decision: ApprovalDecision,
    approver: Approver,
    node_id: str,
    denial: ToolResult | None,
) -> Program[tuple[ApprovedCall | None, ApprovalRecord]]:
    """Returns the call if this process has to execute it now, and the decided approval.

    `denial`: the result of the call if it is denied.
    """
    yield from calls.lock_paused_run(approval_id)
    approval = yield from approvals.find(approval_id)
    if approval is None:
        raise RefusedError("not_found", f'there is no approval "{approval_id}"')
    yield from _check_approver(approval, approver)
    approved_call = yield from approvals.get_approved_call(approval)
    is_executed_here = decision.is_approved and not approved_call.execution["isPending"]
    now = yield from current_time()
    if approval.status == "requested" and approval.expires_at <= now:
        raise RefusedError("gone", f'the approval "{approval_id}" has expired; call the tool again')
    has_changed = yield from approvals.decide(
        approval_id,
        "approved" if decision.is_approved else "denied",
        decided_by=approver.name,
        reason=decision.reason,
        remember=decision.remember,
        node_id=node_id if is_executed_here else None,
    )
    if not has_changed:
        is_expired = approval.status == "expired"
        raise RefusedError(
            "gone" if is_expired else "conflict",
            f'the approval "{approval_id}" is {approval.status} already; it is decided once',
            approvalStatus=approval.status,
        )
    if decision.remember is not None:
        yield from _remember(approval, approved_call, decision, approver)
    call = yield from calls.find(approval_id)
    assert call is not None
    data = {
        "approvalId": approval_id,
        "toolCallId": approval_id,
        "toolName": approval.tool_name,
        "decision": "approved" if decision.is_approved else "denied",
        "reason": decision.reason,
        "decidedBy": approver.name,
    }
    visibility: Visibility = approved_call.execution["visibility"]
    _emit(effects, call, visibility, approval.approvers, "approval.decided", data)
    if denial is None:
        yield from _continue(effects, call, approved_call)
    else:
        result = to_stored_result(denial)
        yield from _resolve(effects, call, result, is_error=not denial.ok, error_kind=denial.error_kind)
    decided_approval = yield from approvals.find(approval_id)
    assert decided_approval is not None
    return approved_call if is_executed_here else None, decided_approval


def _continue(effects: Effects, call: CallRecord, approved_call: ApprovedCall) -> Program[None]:
    """Releases an approved call to whoever executes it: the gateway, a worker, the people of a space, a timer."""
    execution = approved_call.execution
    message_id = None
    if execution["visible"] and call.message_id is None and call.space_id is not None and execution["isPending"]:
        message_id = new_id("msg")
    transition = yield from approvals.continue_approved(call.call_id, execution, message_id=message_id)
    assert transition is not None
    continued_call = transition.call
    if execution["isPending"]:
        new = NewCall(
            **{field: getattr(continued_call, field) for field in _SHARED_FIELDS},
            visibility=execution["visibility"],
            node_id="",
            input_schema=execution["inputSchema"],
            announced_streams=tuple(execution["announcedStreams"]),
        )
        yield from call_transactions.announce_start(effects, continued_call, new)
        if execution["dueIn"] is not None:
            effects.wake_keys.append("plans")  # The sweeper finds the timer.
    elif call.message_id is not None:
        yield from messages.update_status(call.message_id, status="running")


def finish(effects: Effects, approval_id: str, result: ToolResult) -> Program[None]:
    """Stores the result of an approved call that was executed here."""
    yield from calls.lock_paused_run(approval_id)
    yield from approvals.end_execution(approval_id)
    call = yield from calls.find(approval_id)
    if call is not None:
        value = json_text.to_json_data(result.result if result.ok else result.error)
        yield from _resolve(effects, call, value, is_error=not result.ok, error_kind=result.error_kind)


def interrupt(effects: Effects, approval_id: str) -> Program[None]:
    """Ends an approved call whose process died: nobody knows whether it had an effect, so it is not repeated."""
    reason = "interrupted: the process that executed the approved call ended before it did"
    yield from finish(effects, approval_id, ToolResult(False, error=reason, error_kind="internal_error"))


def _resolve(
    effects: Effects, call: CallRecord, result: Any, *, is_error: bool, error_kind: str | None
) -> Program[None]:
    transition = yield from calls.resolve(
        call.call_id, result=result, is_error=is_error, source="server", submission=None, error_kind=error_kind
    )
    if transition is not None:
        yield from call_transactions.settle(effects, transition)


def _remember(
    approval: ApprovalRecord, approved_call: ApprovedCall, decision: ApprovalDecision, approver: Approver
) -> Program[None]:
    scopes = {"always": "always", **_scope_names(approval.run_id, approved_call.context.get("sessionId"))}
    scope = scopes.get(decision.remember or "")
    if scope is None:
        raise RefusedError("invalid", f'the call belongs to no {decision.remember}, so "remember" cannot name it')
    yield from approvals.remember(
        approval.tool_name,
        approval.principal,
        scope,
        decision="approved" if decision.is_approved else "denied",
        reason=decision.reason,
        created_by=approver.name,
    )


def _find_requested_call(approval_id: str, approver: Approver) -> Program[CallRecord | None]:
    """Returns the call that an approver may decide about; None if it is decided. Raises as `_decide` does."""
    approval = yield from approvals.find(approval_id)
    if approval is None or approval.status != "requested":
        return None
    yield from _check_approver(approval, approver)
    return (yield from calls.find(approval_id))


def _check_approver(approval: ApprovalRecord, approver: Approver) -> Program[None]:
    """Raises `RefusedError` unless the rule names this approver, and somebody else made the call."""
    if CALLER in approval.approvers and approver.name in (*approval.requested_by, approval.principal):
        return
    if approver.name in approval.requested_by:
        raise RefusedError("forbidden", f'"{approver.name}" made the call "{approval.id}"; somebody else approves it')
    if OPERATORS in approval.approvers and approver.is_operator:
        return
    entity_id, space_id = approver.entity_id, approval.space_id
    if entity_id is not None and entity_id in approval.approvers and entity_id not in _GROUPS:
        return
    if MEMBERS in approval.approvers and entity_id is not None and space_id is not None:
        is_member = yield from entities_and_spaces.is_member(space_id, entity_id)
        if is_member:
            return
    raise RefusedError("forbidden", f'the approval "{approval.id}" is for {", ".join(approval.approvers)}')


def _emit(
    effects: Effects, call: CallRecord, visibility: Visibility, approvers: Any, type: str, data: Mapping[str, Any]
) -> None:
    """Emits an event to the run and the space of a call; to a stream of its own if it has neither."""
    if MEMBERS in approvers:
        visibility = "full"
    if call.run_id is None and call.space_id is None:
        effects.emit(APPROVALS_STREAM, NewEvent(type, data, "none"))
    else:
        call_events.emit(effects, call, visibility, type, data)

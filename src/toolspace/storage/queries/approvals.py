"""SQL programs for approvals and for decisions that are remembered. A decision is one compare-and-set.

The row of an approval has the id of its call. `node_id` names the process that executes the approved call, until the
call has its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.core.stored_records import ApprovalRecord, ApprovalRule, ApprovalStatus, CallStatus
from toolspace.storage.database import Program, current_time, long_running
from toolspace.storage.queries import calls
from toolspace.storage.queries.calls import CallTransition
from toolspace.storage.queries.statement_builder import (
    Table,
    delete_selected,
    first_column,
    has_changed,
    insert_into,
    placeholders,
    where_clause,
)

_OWN_COLUMNS: Final = (
    "tool_name", "principal", "status", "created_at", "expires_at", "reason", "node_id",
)  # fmt: skip
_FROM_CALL: Final = ("args", "agent_entity_id", "run_id", "space_id")
_APPROVAL = Table(
    "approvals JOIN calls ON calls.call_id = approvals.id",
    ApprovalRecord,
    columns={
        **{column: f"approvals.{column}" for column in _OWN_COLUMNS},
        **{column: f"calls.{column}" for column in _FROM_CALL},
    },
    json=("args",),
    decoders=dict.fromkeys(("requested_by", "approvers"), lambda text: tuple(json_text.decode(text))),
)
_RULE = Table("approval_rules", ApprovalRule)


class NewApproval(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval that is stored with its call."""

    id: str
    tool_name: str
    tool_version: str
    digest: str
    principal: str
    requested_by: Sequence[str]
    policy_version: str
    rule: str
    reason: str
    approvers: Sequence[str]
    context: Mapping[str, Any]
    """What the context of the call needs to be built again."""
    execution: Mapping[str, Any]
    """How the call continues after it was approved: the columns of its row."""
    expires_at: int


class ApprovedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What the execution of an approved call needs besides its row."""

    approval: ApprovalRecord
    context: Mapping[str, Any]
    execution: Mapping[str, Any]


def create(new: NewApproval) -> Program[None]:
    values = msgspec.structs.asdict(new)
    for field in ("requested_by", "approvers", "context", "execution"):
        values[field] = json_text.encode_for_storage(values[field])
    now = yield from current_time()
    values |= {"status": "requested", "created_at": now}
    yield insert_into("approvals", tuple(values)), tuple(values.values())


def find(approval_id: str) -> Program[ApprovalRecord | None]:
    return _APPROVAL.find("WHERE approvals.id = ?", approval_id)


def get_approved_call(approval: ApprovalRecord) -> Program[ApprovedCall]:
    rows = yield "SELECT context, execution FROM approvals WHERE id = ?", (approval.id,)
    context, execution = map(json_text.decode, rows[0])
    return ApprovedCall(approval=approval, context=context, execution=execution)


def decide(
    approval_id: str,
    status: ApprovalStatus,
    *,
    decided_by: str | None = None,
    reason: str | None = None,
    remember: str | None = None,
    node_id: str | None = None,
) -> Program[bool]:
    """requested → approved, denied, expired or cancelled. False if it was decided before."""
    update = (
        "UPDATE approvals SET status = ?, decided_by = ?, decision_reason = ?, remember = ?, node_id = ?, "
        "decided_at = ? WHERE id = ? AND status = 'requested'"
    )
    now = yield from current_time()
    return (yield from has_changed(update, status, decided_by, reason, remember, node_id, now, approval_id))


def end_execution(approval_id: str) -> Program[None]:
    """The approved call has its result."""
    yield "UPDATE approvals SET node_id = NULL WHERE id = ?", (approval_id,)


def list_executing(node_id: str, *, limit: int) -> Program[list[str]]:
    """The ids of approved calls that a process executes."""
    return first_column("SELECT id FROM approvals WHERE node_id = ? ORDER BY id LIMIT ?", node_id, limit)


def list_approvals(
    *,
    statuses: Sequence[str] = (),
    entity_id: str | None = None,
    principal: str | None = None,
    space_id: str | None = None,
    run_id: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[ApprovalRecord]]:
    """Approvals, newest first. `entity_id`: only those that this entity may decide. `principal`: only those of calls
    that this principal made and may decide. `before`: older than this approval."""
    member = "calls.space_id IN (SELECT space_id FROM members WHERE entity_id = ?)"
    # As in the stored list; ids have no other characters that mean something to LIKE.
    name = '%"' + (entity_id or "").replace("_", "\\_") + '"%'
    is_approver = (
        f"((approvals.approvers LIKE '%\"members\"%' AND {member}) OR approvals.approvers LIKE ? ESCAPE '\\' "
        "OR (approvals.approvers LIKE '%\"caller\"%' AND approvals.principal = ?))"
    )
    filters = (
        ("calls.space_id = ?", space_id),
        ("calls.run_id = ?", run_id),
        ("approvals.approvers LIKE '%\"caller\"%' AND approvals.principal = ?", principal),
        (is_approver, [entity_id, name, entity_id] if entity_id is not None else None),
        ("(approvals.created_at, approvals.id) < (SELECT created_at, id FROM approvals WHERE id = ?)", before),
    )
    records: list[ApprovalRecord] = []
    for status in dict.fromkeys(statuses or get_args(ApprovalStatus)):  # The index has those of one status in order.
        conditions, values = where_clause(("approvals.status = ?", status), *filters)
        order = "ORDER BY approvals.created_at DESC, approvals.id DESC LIMIT ?"
        records += yield from _APPROVAL.select(f"{conditions}{order}", *values, limit)
    return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)[:limit]


# The calls that need approval


def ask(
    call_id: str, node_id: str, *, args: Any, status: CallStatus, expires_at: int, wait_until: int | None, pauses: bool
) -> Program[CallTransition | None]:
    """running → waiting or pending: a person has to approve the call first. None if it does not run here.

    `args` are the arguments that the approval holds for.
    """
    update = (
        "UPDATE calls SET status = ?, execution_type = 'approval', args = ?, expires_at = ?, wait_until = ?, "
        "pauses = ? WHERE call_id = ? AND status = 'running' AND node_id = ?"
    )
    stored_args = json_text.encode_for_storage(args)
    return calls.transition(update, status, stored_args, expires_at, wait_until, int(pauses), call_id, node_id)


def continue_approved(
    call_id: str, execution: Mapping[str, Any], *, message_id: str | None
) -> Program[CallTransition | None]:
    """An approved call is executed now, by the gateway or by others. `execution`: what its row has from now on."""
    now = yield from current_time()
    due_in, expires_in = execution["dueIn"], execution["expiresIn"]
    return (
        yield from calls.transition(
            "UPDATE calls SET execution_type = ?, execution_target = ?, visible = ?, exposure = ?, message_id = "
            "COALESCE(message_id, ?), due_at = ?, expires_at = ? WHERE call_id = ?",
            execution["type"],
            execution["target"],
            int(execution["visible"]),
            execution["visibility"],
            message_id,
            None if due_in is None else now + due_in,
            None if expires_in is None else now + expires_in,
            call_id,
        )
    )


# Remembered decisions


def remember(
    tool_name: str, principal: str, scope: str, *, decision: str, reason: str | None, created_by: str
) -> Program[None]:
    """Stores a decision for later calls. It replaces an earlier one of the same tool, principal and scope."""
    now = yield from current_time()
    yield from _RULE.insert(
        "ON CONFLICT (tool_name, principal, scope) DO UPDATE SET decision = excluded.decision, "
        "reason = excluded.reason, created_by = excluded.created_by, created_at = excluded.created_at",
        id=new_id("apr"),
        tool_name=tool_name,
        principal=principal,
        scope=scope,
        decision=decision,
        reason=reason,
        created_by=created_by,
        created_at=now,
    )


def find_remembered(tool_name: str, principal: str, scopes: Sequence[str]) -> Program[ApprovalRule | None]:
    """The newest decision for a tool and a principal in one of these scopes. A denial comes first."""
    return _RULE.find(
        f"WHERE tool_name = ? AND principal = ? AND scope IN ({placeholders(scopes)}) "
        "ORDER BY decision DESC, created_at DESC LIMIT 1",
        tool_name,
        principal,
        *scopes,
    )


def list_rules(*, limit: int = 1000) -> Program[list[ApprovalRule]]:
    return _RULE.select("ORDER BY created_at DESC, id LIMIT ?", limit)


def delete_rule(rule_id: str) -> Program[bool]:
    return has_changed("DELETE FROM approval_rules WHERE id = ?", rule_id)


@long_running
def delete_old_rules(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` decisions that were remembered for runs or sessions before a time."""
    clauses = "WHERE created_at < ? AND scope <> 'always' ORDER BY created_at LIMIT ?"
    return len((yield from delete_selected("approval_rules", "id", clauses, before, limit)))

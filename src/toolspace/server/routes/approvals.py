"""Routes of approvals: list the calls that wait for a decision, decide, and remove remembered decisions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from toolspace.core.approvals import ApprovalDecision, ApprovalScope
from toolspace.core.stored_records import ApprovalRecord, ApprovalRule, ApprovalStatus
from toolspace.server.api_types import Id, PageQuery, ResultPage, build_page
from toolspace.server.authorization import Access, Caller, EntityCaller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Problem, Response
from toolspace.server.routing import RouteTable
from toolspace.server.tool_permissions import principal_of
from toolspace.spaces.approvals import Approver
from toolspace.storage.queries import approvals

_STATUSES: Final[tuple[str, ...]] = get_args(ApprovalStatus)
_DECISIONS: Final = {"approve": True, "approved": True, "allow": True, "deny": False, "denied": False, "reject": False}

routes = RouteTable("approvals")


class ApprovalResponse(ApprovalRecord, frozen=True, kw_only=True):
    """A call that waits for a decision, or that was decided. `callId` and `toolCallId` repeat the id."""

    call_id: str
    """The id of the call."""
    tool_call_id: str
    """The id of the call."""


class ApprovalListQuery(PageQuery, frozen=True, kw_only=True):
    status: Annotated[str, Meta(max_length=200, examples=["requested"])] = "requested"
    """Only approvals with one of these statuses, separated by commas; `all` for every status."""
    run_id: Id | None = None
    """Only approvals of calls of this run."""
    space_id: Id | None = None
    """Only approvals of calls in this space."""


class DecisionBody(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a person decides about a call."""

    decision: Literal["approve", "deny", "approved", "denied", "allow", "reject"]
    """`approve` executes the call, `deny` refuses it. The other words mean the same."""
    reason: Annotated[str, Meta(max_length=2000)] | None = None
    """Why; the caller of a denied call reads it."""
    remember: ApprovalScope | None = None
    """Decide later calls of the same tool and principal in the same way: in this run, this session, or always."""


@routes.add(
    "GET",
    "/api/approvals",
    "List approvals, newest first",
    access=Access.ANY,
    description="Calls that wait for a decision, or with `status` the others. A secret key sees all, an entity those "
    "that it may decide, a tool key those of its own calls that it may decide.",
    query=ApprovalListQuery,
    response=ResultPage[ApprovalResponse],
)
async def list_approvals(request: Request) -> ResultPage[dict[str, Any]]:
    query, caller = request.query(ApprovalListQuery), request.caller
    records = await request.read(
        approvals.list_approvals,
        statuses=_parse_statuses(query.status),
        entity_id=caller.entity_id if isinstance(caller, EntityCaller) else None,
        principal=principal_of(caller) if isinstance(caller, ToolKeyCaller) else None,
        space_id=query.space_id,
        run_id=query.run_id,
        before=query.cursor,
        limit=query.limit + 1,
    )
    return build_page([record.wire() for record in records], query.limit, lambda approval: approval["id"])


@routes.add(
    "POST",
    "/api/approvals/{approvalId}",
    "Approve or deny a call",
    access=Access.ANY,
    description="Approving executes the call once. Whoever made the call may not decide, unless the rule says "
    "`approvers: caller`.",
    body=DecisionBody,
    response=ApprovalResponse,
    error_statuses=(403, 404, 409, 410),
)
async def decide_approval(request: Request) -> dict[str, Any]:
    body = await request.json(DecisionBody)
    decision = ApprovalDecision(_DECISIONS[body.decision], body.reason, body.remember)
    approval = await request.gateway.approvals.decide(
        request.params["approvalId"], decision, approver_of(request.caller)
    )
    return approval.wire()


@routes.add("GET", "/api/approval-rules", "List remembered decisions, newest first")
async def list_rules(request: Request) -> ResultPage[ApprovalRule]:
    return ResultPage(items=await request.read(approvals.list_rules), next=None)


@routes.add("DELETE", "/api/approval-rules/{ruleId}", "Remove a remembered decision", status=204)
async def delete_rule(request: Request) -> Response:
    rule_id = request.params["ruleId"]
    if not await request.ledger.write(approvals.delete_rule, rule_id):
        raise Problem(404, f'Rule "{rule_id[:200]}" not found; GET /api/approval-rules lists the rules')
    return NO_CONTENT


def approver_of(caller: Caller) -> Approver:
    """Who decides, if this caller does."""
    return Approver(
        name=caller.entity_id if isinstance(caller, EntityCaller) else principal_of(caller),
        is_operator=isinstance(caller, SecretKeyCaller),
        entity_id=caller.entity_id if isinstance(caller, EntityCaller) else None,
    )


def _parse_statuses(text: str) -> list[str]:
    statuses = [] if text == "all" else list(dict.fromkeys(text.split(",")))
    for status in statuses:
        if status not in _STATUSES:
            raise Problem(400, f'Unknown status "{status}"; known: {", ".join(_STATUSES)}, all', path="$.status")
    return statuses

"""The stage `policy`: applies the policies and rules to a call whose arguments are valid, and asks for approval.

Policies of the program decide first, then the rules of the configuration; the strictest of both holds. What depends on
the tool alone is decided when the handler is compiled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from toolspace.core import json_text
from toolspace.core.approvals import CALLER, ApprovalCallback, ApprovalDecision, ApprovalRequest
from toolspace.core.extension_points import Allow, Ask, Decision, Deny, Policy
from toolspace.core.result import ToolResult
from toolspace.core.times import format_milliseconds
from toolspace.errors import ToolError, ToolTimeoutError
from toolspace.orchestrator.call import Call, return_result
from toolspace.orchestrator.policy_rules import ToolPolicy, compile_policy

if TYPE_CHECKING:
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

_log = logging.getLogger("toolspace.policies")
_ALLOW: Final = Allow()
_CONFIRMATION_SCHEMA: Final = {
    "type": "object",
    "properties": {"approve": {"type": "boolean", "title": "Run it?"}},
    "required": ["approve"],
}
_MAX_REMEMBERED: Final = 10_000


def policy(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Denies a call, or asks a person first, if a policy or a rule says so."""
    tool_policy, policies = find_policy(stage), tuple(stage.services.policies)
    if tool_policy.always_allows and not policies:
        return next

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        try:
            decision = _decide(call, policies, tool_policy)
        except Exception as error:  # A policy is code of an extension.
            _log.exception('a policy failed for a call of "%s"', call.tool.name)
            return return_result(call.fail("internal_error", f"{type(error).__name__}: {error}", executed=False))
        if isinstance(decision, Allow):
            return next(call)
        if isinstance(decision, Deny):
            return return_result(call.fail("not_permitted", f"Permission denied: {decision.reason}"))
        return _ask(stage, call, decision, tool_policy, next)

    return run


def find_policy(stage: StageContext) -> ToolPolicy:
    """The rules that apply to the tool that a stage is compiled for."""
    return compile_policy(stage.services.policy_rules, stage.entry, stage.settings.approval)


def _decide(call: Call, policies: Sequence[Policy], tool_policy: ToolPolicy) -> Decision:
    """The strictest decision of the program's policies and of the first rule that matches."""
    decision = _ask_policies(call, policies) if policies else _ALLOW
    if isinstance(decision, Deny):
        return decision
    rule_decision = tool_policy.decide(call)
    return rule_decision if isinstance(decision, Allow) or isinstance(rule_decision, Deny) else decision


def _ask_policies(call: Call, policies: Sequence[Policy]) -> Decision:
    """The decision of the program's policies. Denying wins; asking wins over allowing."""
    ask: Ask | None = None
    for item in policies:
        # A policy is code of an extension: it may return anything.
        decision = cast("object", item.decide(call.tool, call.base_context))
        if isinstance(decision, Deny):
            return decision
        if isinstance(decision, Ask):
            ask = ask or (
                decision
                if decision.source
                else Ask(decision.reason, decision.approvers, decision.expires_after, f"the policy ({item.rule})")
            )
        elif not isinstance(decision, Allow):
            raise TypeError(f"the policy ({item.rule}) decided {decision!r}; it has to be Allow, Ask or Deny")
    return ask or _ALLOW


async def _ask(stage: StageContext, call: Call, ask: Ask, tool_policy: ToolPolicy, next: CallHandler) -> ToolResult:
    """Asks whoever may approve the call. Runs it if it is approved while its caller waits."""
    context = call.context
    request = ApprovalRequest(
        call_id=call.id,
        tool=call.tool,
        arguments=json_text.to_json_data(call.values),
        context=context,
        reason=ask.reason,
        approvers=ask.approvers,
        source=ask.source,
        policy_version=tool_policy.version,
        expires_after=ask.expires_after,
        is_nested=call.parent is not None,
    )
    seconds = stage.settings.timeout.value
    call.prepare_to_wait()
    try:
        outcome = None
        if CALLER in ask.approvers and context.caller_client is not None:
            outcome = await call.within_deadline(_ask_caller(request))
        if outcome is None and context.host is not None:
            outcome = await context.host.request_approval(request, timeout=seconds)
        if outcome is None and stage.services.approvals is not None:
            outcome = await call.within_deadline(stage.services.approvals.ask(request, seconds))
    except ToolError as error:
        kind = error.kind if not isinstance(error, ToolTimeoutError) else "not_permitted"
        return call.fail(kind, str(error), executed=False)
    if outcome is None:
        return call.fail("not_permitted", f"Permission denied: {_explain_approval(request)}", executed=False)
    if isinstance(outcome, ToolResult):
        return call.complete(outcome)
    if not outcome.is_approved:
        reason = outcome.reason or "the call was not approved"
        return call.fail("not_permitted", f"Permission denied: {reason}", executed=False)
    return await next(call)


async def _ask_caller(request: ApprovalRequest) -> ApprovalDecision | None:
    """Asks the client that makes the call. None if it cannot be asked."""
    try:
        result = await request.context.elicit(request.message, _CONFIRMATION_SCHEMA, key=f"approval:{request.digest}")
    except ToolTimeoutError:
        raise
    except ToolError:
        return None
    is_approved = result.action == "accept" and bool(result.content and result.content.get("approve"))
    return ApprovalDecision(is_approved, None if is_approved else "the user did not approve the call")


def _explain_approval(request: ApprovalRequest) -> str:
    source = f" ({request.source})" if request.source else ""
    return (
        f'the tool "{request.tool.name}" needs approval{source}, and nobody can be asked here; a program passes '
        "on_approval=… to Toolspace, a person calls it in a terminal (toolspace call), and a gateway "
        "(toolspace serve) takes decisions at POST /api/approvals/{id}"
    )


class ProgramApprovals:
    """Asks the callback of a program, and remembers its decisions as long as the toolspace is open."""

    def __init__(self, callback: ApprovalCallback) -> None:
        self._callback = callback
        self._decisions: dict[tuple[str, str, str], ApprovalDecision] = {}
        """By tool, principal and scope."""

    async def ask(self, request: ApprovalRequest, seconds: float) -> ApprovalDecision:
        """Returns the decision; a denial if the callback does not decide in time."""
        scopes = _list_scopes(request)
        for scope in scopes.values():
            decision = self._decisions.get((request.tool.name, request.principal, scope))
            if decision is not None:
                return decision
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                answer = self._callback(request)
                if inspect.isawaitable(answer):
                    answer = await answer
        except TimeoutError:
            return ApprovalDecision(False, f"nobody approved the call within {format_milliseconds(seconds)}ms")
        decision = answer if isinstance(answer, ApprovalDecision) else ApprovalDecision(answer is True)
        if decision.remember is not None and (scope := scopes.get(decision.remember)) is not None:
            while len(self._decisions) >= _MAX_REMEMBERED:
                del self._decisions[next(iter(self._decisions))]
            self._decisions[request.tool.name, request.principal, scope] = decision
        return decision


def _list_scopes(request: ApprovalRequest) -> dict[str, str]:
    """The names of the scopes that a call belongs to, by kind."""
    context = request.context
    scopes = {"always": "always"}
    if context.run_id is not None:
        scopes["run"] = f"run:{context.run_id}"
    if context.session_id is not None:
        scopes["session"] = f"session:{context.session_id}"
    return scopes

"""Stage: refuses a call that configuration, a policy or the run does not allow. It never reaches the provider."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, cast

from toolspace.core.interfaces import Allow, Deny, Policy
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stage import Handler, Plan, ended


def permission(plan: Plan, next: Handler, /) -> Handler:
    tool = plan.entry.tool
    refusal = plan.entry.refusal
    policies = tuple(plan.services.policies)

    async def refuse(call: Call) -> ToolResult:
        return call.fail("not_permitted", f"Permission denied: {refusal}")

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        for policy in _all(policies, call):
            decision = cast("object", policy.decide(tool, call.base))  # Others' code: it may return anything.
            if isinstance(decision, Deny):
                return ended(call.fail("not_permitted", f"Permission denied: {decision.reason}"))
            if not isinstance(decision, Allow):
                raise TypeError(f"the policy ({policy.rule}) decided {decision!r}; it has to be Allow or Deny")
        return next(call)

    if refusal is not None:
        return refuse
    return run if policies or plan.in_run else next


def _all(policies: tuple[Policy, ...], call: Call) -> tuple[Policy, ...]:
    own = call.run.policy if call.run is not None else None
    return policies if own is None else (*policies, own)

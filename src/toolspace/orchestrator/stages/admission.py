"""Stage: refuses a call that configuration, a policy or the run does not allow. It never reaches the provider."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, cast

from toolspace.core.interfaces import Allow, Deny, Policy
from toolspace.core.result import ToolResult
from toolspace.core.validation import InvalidArguments
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stage import CallHandler, StageContext, return_result


def permission(plan: StageContext, next: CallHandler, /) -> CallHandler:
    tool = plan.entry.tool
    refusal = plan.entry.denial_reason
    policies = tuple(plan.services.policies)

    async def refuse(call: Call) -> ToolResult:
        return call.fail("not_permitted", f"Permission denied: {refusal}")

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        for policy in _all(policies, call):
            decision = cast("object", policy.decide(tool, call.base_context))  # Others' code: it may return anything.
            if isinstance(decision, Deny):
                return return_result(call.fail("not_permitted", f"Permission denied: {decision.reason}"))
            if not isinstance(decision, Allow):
                raise TypeError(f"the policy ({policy.rule}) decided {decision!r}; it has to be Allow or Deny")
        return next(call)

    if refusal is not None:
        return refuse
    return run if policies or plan.in_run else next


def _all(policies: tuple[Policy, ...], call: Call) -> tuple[Policy, ...]:
    own = call.run.policy if call.run is not None else None
    return policies if own is None else (*policies, own)


# MERGED from validate: Stage: checks the arguments against the schema, and coerces what is plain. Knows no types i…


def validate(plan: StageContext, next: CallHandler, /) -> CallHandler:
    validator = plan.entry.tool.validator
    from_json, from_mapping = validator.from_json, validator.from_mapping

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        arguments = call.arguments
        try:
            if type(arguments) is str or isinstance(arguments, str | bytes):
                call.values = from_json(arguments)
            else:
                call.values = from_mapping({} if arguments is None else arguments)
        except InvalidArguments as error:
            return return_result(call.fail("invalid_parameters", f"Parameter validation failed: {error}"))
        return next(call)

    return run


# MERGED from limits: Stage: how many calls a run may make in one turn, and whether it may still call at all.


def limits(plan: StageContext, next: CallHandler, /) -> CallHandler:
    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        if call.run is not None:
            if call.run.canceled:
                return return_result(call.fail("canceled", f"run {call.run.id} was canceled"))
            if refusal := call.run.count_call():
                return return_result(call.fail("limit_exceeded", refusal))
        return next(call)

    return run if plan.in_run else next

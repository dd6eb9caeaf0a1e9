"""The stages `permission`, `validate` and `limits`: decide whether a call may run, before it reaches the provider."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

from toolspace.core.argument_validation import InvalidArguments
from toolspace.core.extension_points import Allow, Deny
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call, return_result

if TYPE_CHECKING:
    from toolspace.orchestrator.pipeline import CallHandler, StageContext


def permission(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Denies a call that the configuration, a policy or the run does not allow."""
    tool = stage.entry.tool
    denial_reason = stage.entry.denial_reason
    policies = tuple(stage.services.policies)

    async def deny(call: Call) -> ToolResult:
        return call.fail("not_permitted", f"Permission denied: {denial_reason}")

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        run_policy = call.run.policy if call.run is not None else None
        for policy in policies if run_policy is None else (*policies, run_policy):
            # A policy is code of an extension: it may return anything.
            decision = cast("object", policy.decide(tool, call.base_context))
            if isinstance(decision, Deny):
                return return_result(call.fail("not_permitted", f"Permission denied: {decision.reason}"))
            if not isinstance(decision, Allow):
                raise TypeError(f"the policy ({policy.rule}) decided {decision!r}; it has to be Allow or Deny")
        return next(call)

    if denial_reason is not None:
        return deny
    return run if policies or stage.in_run else next


def validate(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Validates the arguments against the tool's schema, and coerces obvious mistakes such as `"5"` for 5."""
    validator = stage.entry.tool.validator
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


def limits(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Limits the calls of one turn, and refuses calls of a run that was cancelled or has given its final report."""

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        if call.run is not None:
            if call.run.canceled:
                return return_result(call.fail("canceled", f"run {call.run.id} was canceled"))
            if refusal := call.run.count_call():
                return return_result(call.fail("limit_exceeded", refusal))
        return next(call)

    return run if stage.in_run else next

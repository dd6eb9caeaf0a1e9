"""The stages `permission`, `validate` and `limits`: decide whether a call may run, before it reaches the provider.

`restore_names` acts before all stages.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

from toolspace.core.argument_validation import InvalidArguments
from toolspace.core.extension_points import Allow, Deny
from toolspace.core.names import AGENT_NAMESPACE, SEPARATOR
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call, return_result

if TYPE_CHECKING:
    from toolspace.core.tool import Tool
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

BATCH = "agent__batch"
_RUN_CONTROL_PREFIX = AGENT_NAMESPACE + SEPARATOR


def permission(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Denies a call that the configuration, the caller's key or the run does not allow."""
    tool = stage.entry.tool
    denial_reason = stage.entry.denial_reason
    permissions = tuple(stage.services.permissions)

    async def deny(call: Call) -> ToolResult:
        return call.fail("not_permitted", f"Permission denied: {denial_reason}")

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        run_policy = call.run.policy if call.run is not None else None
        for policy in permissions if run_policy is None else (*permissions, run_policy):
            # A policy is code of an extension: it may return anything.
            decision = cast("object", policy.decide(tool, call.base_context))
            if isinstance(decision, Deny):
                return return_result(call.fail("not_permitted", f"Permission denied: {decision.reason}"))
            if not isinstance(decision, Allow):
                raise TypeError(f"the policy ({policy.rule}) decided {decision!r}; it has to be Allow or Deny")
        return next(call)

    if denial_reason is not None:
        return deny
    return run if permissions or stage.in_run else next


def restore_names(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Gives arguments their own names, if models get other ones for this tool."""
    try:
        names = stage.entry.tool.argument_names
    except Exception:
        return next  # The schema of this tool cannot be built: `validate` reports it.
    if names is None:
        return next

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        if call.arguments:
            call.arguments = names.restore(call.arguments)
        return next(call)

    return run


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
            return return_result(refuse_arguments(call, error))
        return next(call)

    return run


def refuse_arguments(call: Call, error: InvalidArguments, note: str = "") -> ToolResult:
    """Returns the result of a call whose arguments do not fit its schema."""
    result = call.fail("invalid_parameters", f"Parameter validation failed: {error}{note}")
    result.issues = [{"path": issue.path, "message": str(issue._replace(path=""))} for issue in error.issues]
    return result


def limits(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Limits the calls of one turn and the equal calls of a model. Refuses calls of a run that was cancelled or has
    given its final report."""
    counts_equal_calls = is_limited_when_repeated(stage.entry.tool)

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        run = call.run
        if run is not None:
            if run.canceled:
                return return_result(call.fail("canceled", f"run {run.id} was canceled"))
            refusal = run.count_call()
            if refusal is None and counts_equal_calls and run.max_repeated_calls is not None and _is_of_model(call):
                refusal = run.count_equal_call(call.tool, call.values)
            if refusal is not None:
                return return_result(call.fail("limit_exceeded", refusal))
        return next(call)

    return run if stage.in_run else next


def is_limited_when_repeated(tool: Tool) -> bool:
    """Whether equal calls of a tool are limited: not if it is prebuilt or controls the run."""
    return tool.execution_type != "prebuilt" and not tool.name.startswith(_RUN_CONTROL_PREFIX)


def _is_of_model(call: Call) -> bool:
    """Whether the model made a call of its run, alone or in a batch. The code of a tool may repeat its own calls."""
    parent = call.parent
    return parent is None or parent.run is not call.run or parent.tool.name == BATCH

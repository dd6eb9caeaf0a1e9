"""Stage: checks the arguments against the schema, and coerces what is plain. Knows no types itself."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from toolspace.core.result import ToolResult
from toolspace.core.schema import InvalidArguments
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stage import Handler, Plan, ended


def validate(plan: Plan, next: Handler, /) -> Handler:
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
            return ended(call.fail("invalid_parameters", f"Parameter validation failed: {error}"))
        return next(call)

    return run

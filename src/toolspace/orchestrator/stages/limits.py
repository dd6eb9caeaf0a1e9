"""Stage: how many calls a run may make in one turn, and whether it may still call at all."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stage import Handler, Plan, ended


def limits(plan: Plan, next: Handler, /) -> Handler:
    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        if call.run is not None:
            if call.run.canceled:
                return ended(call.fail("canceled", f"run {call.run.id} was canceled"))
            if refusal := call.run.admit():
                return ended(call.fail("limit_exceeded", refusal))
        return next(call)

    return run if plan.in_run else next

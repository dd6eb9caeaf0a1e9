"""Stage: how many calls a run may make in one turn, and whether it may still call at all."""

from __future__ import annotations

from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stage import Handler, Plan


def limits(plan: Plan, next: Handler, /) -> Handler:
    async def run(call: Call) -> ToolResult:
        if call.run is not None:
            if call.run.canceled:
                return call.fail("canceled", f"run {call.run.id} was canceled")
            if refusal := call.run.admit():
                return call.fail("limit_exceeded", refusal)
        return await next(call)

    return run if plan.in_run else next

"""Stage: books what a result costs the run's context window, and stores what does not fit."""

from __future__ import annotations

from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.outputs import store_result
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.stage import Handler, Plan

EXCEEDED = "context window budget exceeded"
_SHORT = 200
"""A failure up to this length is given as it is: what stands in its place would be no shorter."""


def budget(plan: Plan, next: Handler, /) -> Handler:
    if not plan.in_run:
        return next
    count, outputs = plan.services.count_tokens, plan.services.outputs
    bounds_itself = plan.entry.tool.bounded

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        run = call.run
        if run is None or run.context_window is None:
            return result
        tokens = count(result.text)
        if tokens > run.remaining_tokens and (result.ok or len(result.text) > _SHORT):
            result = await shrink(call, result, run)
            tokens = count(result.text)
            if not result.ok:
                run.tool_budget_exceeded = True
        run.use_tokens(tokens)
        return result

    async def shrink(call: Call, result: ToolResult, run: Run) -> ToolResult:
        if outputs is not None and result.ok and not call.stored and not bounds_itself:
            # Four bytes a token is what text costs at best: a preview of that size surely fits.
            room = int(run.remaining_tokens) * 2
            handle = await store_result(call, result, outputs, reason="token_budget", limit=room)
            # Looked at again: other calls may have used tokens meanwhile.
            if handle.ok and count(handle.text) <= run.remaining_tokens:
                return handle
        return call.fail("limit_exceeded", EXCEEDED, executed=result.executed)

    return run

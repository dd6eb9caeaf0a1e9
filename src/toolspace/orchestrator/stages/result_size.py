"""Stage: books what a result costs the run's context window, and stores what does not fit."""

from __future__ import annotations

from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.large_results import preview, store_result
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.stage import CallHandler, StageContext

EXCEEDED = "context window budget exceeded"
_SHORT = 200
"""A failure up to this length is given as it is: what stands in its place would be no shorter."""


def budget(plan: StageContext, next: CallHandler, /) -> CallHandler:
    if not plan.in_run:
        return next
    count, outputs = plan.services.count_tokens, plan.services.outputs
    bounds_itself = plan.entry.tool.has_small_results

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
        run.add_tokens(tokens)
        return result

    async def shrink(call: Call, result: ToolResult, run: Run) -> ToolResult:
        if outputs is not None and result.ok and not call.is_stored and not bounds_itself:
            # Four bytes a token is what text costs at best: a preview of that size surely fits.
            room = int(run.remaining_tokens) * 2
            handle = await store_result(call, result, outputs, reason="token_budget", limit=room)
            # Looked at again: other calls may have used tokens meanwhile.
            if handle.ok and count(handle.text) <= run.remaining_tokens:
                return handle
        return call.fail("limit_exceeded", EXCEEDED, executed=result.executed)

    return run


# MERGED from cap: Stage: stores a result that is too large, and gives a handle with a preview in its place.


def cap(plan: StageContext, next: CallHandler, /) -> CallHandler:
    limit = plan.settings.max_bytes.value
    outputs = plan.services.outputs
    if plan.entry.tool.has_small_results:
        return next
    surely_fits = limit // 4  # No character is longer than four bytes.

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        text = result.encoded
        if text is None:
            text = result.text
        if len(text) <= surely_fits or call.is_stored or (size := len(text.encode("utf-8", "replace"))) <= limit:
            return result
        if not result.ok:
            result.error, result.encoded = preview(result.error or "", limit), None
            return result
        if outputs is None:
            return call.fail(
                "limit_exceeded",
                f"the result has {size} bytes, more than toolResponseMaxBytes ({limit}), "
                "and no output store is configured to keep it",
                executed=True,
            )
        return await store_result(call, result, outputs, reason="size_limit_exceeded", limit=limit)

    return run

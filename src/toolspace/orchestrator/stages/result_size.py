"""The stages `budget` and `cap`: store a result that is too large, and return a handle with a preview instead.

`cap` limits the bytes of one result. `budget` limits what all results of a run add to its context window.
"""

from __future__ import annotations

from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.large_results import preview, store_result
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.stage import CallHandler, StageContext

EXCEEDED = "context window budget exceeded"
_SHORT_FAILURE = 200
"""Characters up to which a failure is returned unchanged: its replacement would be no shorter."""


def budget(stage: StageContext, next: CallHandler, /) -> CallHandler:
    if not stage.in_run:
        return next
    count, outputs = stage.services.count_tokens, stage.services.outputs
    has_small_results = stage.entry.tool.has_small_results

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        run = call.run
        if run is None or run.context_window is None:
            return result
        tokens = count(result.text)
        if tokens > run.remaining_tokens and (result.ok or len(result.text) > _SHORT_FAILURE):
            result = await shrink(call, result, run)
            tokens = count(result.text)
            if not result.ok:
                run.tool_budget_exceeded = True
        run.add_tokens(tokens)
        return result

    async def shrink(call: Call, result: ToolResult, run: Run) -> ToolResult:
        if outputs is not None and result.ok and not call.is_stored and not has_small_results:
            # A token is at most four bytes of text, so a preview of half that size fits.
            max_bytes = int(run.remaining_tokens) * 2
            handle = await store_result(call, result, outputs, reason="token_budget", limit=max_bytes)
            # Checked again: other calls may have used tokens in the meantime.
            if handle.ok and count(handle.text) <= run.remaining_tokens:
                return handle
        return call.fail("limit_exceeded", EXCEEDED, executed=result.executed)

    return run


def cap(stage: StageContext, next: CallHandler, /) -> CallHandler:
    limit = stage.settings.max_bytes.value
    outputs = stage.services.outputs
    if stage.entry.tool.has_small_results:
        return next
    safe_length = limit // 4  # No character is longer than four bytes.

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        text = result.encoded
        if text is None:
            text = result.text
        if len(text) <= safe_length or call.is_stored or (size := len(text.encode("utf-8", "replace"))) <= limit:
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

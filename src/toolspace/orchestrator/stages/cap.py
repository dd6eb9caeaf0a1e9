"""Stage: stores a result that is too large, and gives a handle with a preview in its place."""

from __future__ import annotations

from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.outputs import preview, store_result
from toolspace.orchestrator.stage import Handler, Plan


def cap(plan: Plan, next: Handler, /) -> Handler:
    limit = plan.settings.max_bytes.value
    outputs = plan.services.outputs
    if plan.entry.tool.bounded:
        return next
    surely_fits = limit // 4  # No character is longer than four bytes.

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        text = result.encoded
        if text is None:
            text = result.text
        if len(text) <= surely_fits or call.stored or (size := len(text.encode("utf-8", "replace"))) <= limit:
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

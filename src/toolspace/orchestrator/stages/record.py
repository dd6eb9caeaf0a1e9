"""Stage: books how a call ended, whatever happened to it, and turns its cancellation into a result."""

from __future__ import annotations

import asyncio
import logging

from toolspace.core.result import ToolResult
from toolspace.errors import ToolError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.call_log import start_call_span
from toolspace.orchestrator.stage import CallHandler, StageContext

_log = logging.getLogger("toolspace.orchestrator")


def record(plan: StageContext, next: CallHandler, /) -> CallHandler:
    add = plan.services.call_log.add
    stats = plan.services.call_log.stats.for_tool(plan.entry.tool.name) if plan.entry.is_registered else None
    in_run = plan.in_run

    async def run(call: Call) -> ToolResult:
        if in_run:
            call.span = start_call_span(call)
        try:
            result = await next(call)
        except asyncio.CancelledError:
            goes_on = _caller_goes_on(call)
            result = _canceled(call, goes_on)
            call.outcome = result
            add(call, result, stats)
            if not goes_on:
                raise  # There is nobody to give a result to.
            return result
        except ToolError as error:
            result = call.fail(error.kind, str(error), executed=error.executed)
        except Exception as error:
            _log.exception("a stage failed on %s", call.entry.tool.name)
            result = call.fail("internal_error", f"{type(error).__name__}: {error}")
        add(call, result, stats)
        return result

    return run


def _caller_goes_on(call: Call) -> bool:
    """Whether the cancellation was meant for this call alone, and is over with it."""
    call.withdraw_cancellation()
    task = call.task or asyncio.current_task()
    if task is not None and task.cancelling() > call.cancel_count_before:
        return False
    above = call.parent
    while above is not None:
        if above.interrupt_requested and not above.is_over:
            return False  # Canceled from inside this very task, and not told yet.
        above = above.parent
    return True


def _canceled(call: Call, goes_on: bool) -> ToolResult:
    if call.cancel_requested:
        return call.fail("canceled", "the call was canceled")
    if not goes_on:
        return call.fail("canceled", "the caller was canceled")
    # Nobody cancelled the call: the tool awaited something that was cancelled elsewhere.
    return call.fail("execution_error", "the tool was cancelled from inside")

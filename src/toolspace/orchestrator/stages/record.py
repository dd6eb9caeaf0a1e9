"""Stage: books how a call ended, whatever happened to it, and turns its cancellation into a result."""

from __future__ import annotations

import asyncio
import logging

from toolspace.core.result import ToolResult
from toolspace.errors import ToolError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.recording import open_operation
from toolspace.orchestrator.stage import Handler, Plan

_log = logging.getLogger("toolspace.orchestrator")


def record(plan: Plan, next: Handler, /) -> Handler:
    add = plan.services.accounting.add
    stats = plan.services.accounting.stats.book(plan.entry.tool.name) if plan.entry.known else None
    in_run = plan.in_run

    async def run(call: Call) -> ToolResult:
        if in_run:
            call.operation = open_operation(call)
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
    call.untell()
    task = call.task or asyncio.current_task()
    if task is not None and task.cancelling() > call.cancels_before:
        return False
    above = call.parent
    while above is not None:
        if above.interrupt and not above.over:
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

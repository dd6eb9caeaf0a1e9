"""The stage `record`: logs how every call ended, and turns the cancellation of a call into a result."""

from __future__ import annotations

import asyncio
import logging

from toolspace.core.result import ToolResult
from toolspace.errors import ToolError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.call_log import start_call_span
from toolspace.orchestrator.stage import CallHandler, StageContext

_log = logging.getLogger("toolspace.orchestrator")


def record(stage: StageContext, next: CallHandler, /) -> CallHandler:
    log_call = stage.services.call_log.add
    stats = stage.services.call_log.stats.for_tool(stage.entry.tool.name) if stage.entry.is_registered else None
    in_run = stage.in_run

    async def run(call: Call) -> ToolResult:
        if in_run:
            call.span = start_call_span(call)
        try:
            result = await next(call)
        except asyncio.CancelledError:
            caller_continues = _caller_continues(call)
            result = _canceled_result(call, caller_continues)
            call.outcome = result
            log_call(call, result, stats)
            if not caller_continues:
                raise  # The caller was cancelled too: nobody is left who could take a result.
            return result
        except ToolError as error:
            result = call.fail(error.kind, str(error), executed=error.executed)
        except Exception as error:
            _log.exception("call %s of %s: a stage failed", call.id, call.entry.tool.name)
            result = call.fail("internal_error", f"{type(error).__name__}: {error}")
        log_call(call, result, stats)
        return result

    return run


def _caller_continues(call: Call) -> bool:
    """Whether only this call was cancelled, so that its caller goes on with a result."""
    call.withdraw_cancellation()
    task = call.task or asyncio.current_task()
    if task is not None and task.cancelling() > call.cancel_count_before:
        return False
    ancestor = call.parent
    while ancestor is not None:
        if ancestor.interrupt_requested and not ancestor.is_over:
            return False  # Canceled from inside this task, and not interrupted yet.
        ancestor = ancestor.parent
    return True


def _canceled_result(call: Call, caller_continues: bool) -> ToolResult:
    if call.cancel_requested:
        return call.fail("canceled", "the call was canceled")
    if not caller_continues:
        return call.fail("canceled", "the caller was canceled")
    # Nobody cancelled the call: the tool awaited something that was cancelled elsewhere.
    return call.fail("execution_error", "an operation that the tool awaited was cancelled")

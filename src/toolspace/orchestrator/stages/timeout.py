"""Stage: gives the provider its time, and really stops what runs longer."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from toolspace.core.result import ToolResult
from toolspace.core.times import format_milliseconds
from toolspace.core.tool import PENDING_EXECUTION_TYPES
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.deadline import DeadlineExpired, finish_within
from toolspace.orchestrator.stage import CallHandler, StageContext, return_result


def timeout(plan: StageContext, next: CallHandler, /) -> CallHandler:
    limit = plan.settings.timeout.value
    services, in_run = plan.services, plan.in_run
    elsewhere = plan.entry.tool.execution_type in PENDING_EXECUTION_TYPES

    def killed() -> None:
        services.killed_count += 1

    def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
        seconds = limit
        if in_run and call.run is not None and call.run.remaining_seconds < seconds:
            seconds = call.run.remaining_seconds
            if seconds <= 0:
                return return_result(call.fail("timeout", "the run's deadline has passed", executed=False))
        if call.cancel_requested:
            return return_result(call.fail("canceled", "the call was canceled"))
        call.allowed_seconds = seconds
        if elsewhere and call.base_context.host is not None:
            call.provider_called = True
            call.register()
            return next(call)  # Who hands it out keeps the time: what comes late is not lost.
        return timed(call, seconds)

    async def timed(call: Call, seconds: float) -> ToolResult:
        coroutine = next(call)
        call.provider_called = True
        # Most fast tools end without suspending once: then no timer is needed.
        try:
            waiting = coroutine.send(None)
        except StopIteration as done:
            return done.value
        try:
            return await finish_within(coroutine, waiting, call, seconds, on_killed=killed)
        except DeadlineExpired:
            return call.fail("timeout", f"Tool execution timed out after {format_milliseconds(round(seconds, 3))}ms")

    return run

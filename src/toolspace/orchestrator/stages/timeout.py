"""The stage `timeout`: gives the provider its time, and stops whatever runs longer."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from toolspace.core.result import ToolResult
from toolspace.core.times import format_milliseconds
from toolspace.core.tool import PENDING_EXECUTION_TYPES
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.deadline import DeadlineExpired, finish_within
from toolspace.orchestrator.stage import CallHandler, StageContext, return_result


def timeout(stage: StageContext, next: CallHandler, /) -> CallHandler:
    limit = stage.settings.timeout.value
    services, in_run = stage.services, stage.in_run
    is_pending_call = stage.entry.tool.execution_type in PENDING_EXECUTION_TYPES

    def count_killed() -> None:
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
        if is_pending_call and call.base_context.host is not None:
            call.provider_called = True
            call.register()
            return next(call)  # The host of the pending call keeps the time: a late result is not lost.
        return run_with_timeout(call, seconds)

    async def run_with_timeout(call: Call, seconds: float) -> ToolResult:
        coroutine = next(call)
        call.provider_called = True
        # Most fast tools end without suspending once: then no timer is needed.
        try:
            awaited = coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        try:
            return await finish_within(coroutine, awaited, call, seconds, on_killed=count_killed)
        except DeadlineExpired:
            return call.fail("timeout", f"Tool execution timed out after {format_milliseconds(round(seconds, 3))}ms")

    return run

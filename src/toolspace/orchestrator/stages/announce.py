"""Stage: says that a call began and how it ended, on the bus and in the log. Never before it is recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from toolspace.core import json_text
from toolspace.core.events import CallCompleted, CallFailed, CallRequested, EventType
from toolspace.core.line_escaping import single_line
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import mask_secrets
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stage import CallHandler, StageContext

VERBOSE = 15
"""Between INFO and DEBUG: every call, in and out."""
logging.addLevelName(VERBOSE, "VERBOSE")
_LONGEST_NAME = 200
calls_log = logging.getLogger("toolspace.calls")
logging.getLogger("toolspace").addHandler(logging.NullHandler())  # Silent until the program sets logging up.


def announce(plan: StageContext, next: CallHandler, /) -> CallHandler:
    began, ended = _announcements(plan)

    async def run(call: Call) -> ToolResult:
        began(call)
        if calls_log.isEnabledFor(VERBOSE):
            log_request(call)
        try:
            result = await next(call)
        except asyncio.CancelledError:
            if call.outcome is not None:
                ended(call, call.outcome)
                log_response(call, call.outcome)
            raise
        except Exception as error:  # Of a stage that someone put around all others: the call has an end all the same.
            calls_log.exception("a stage around %s failed", call.entry.tool.name)
            result = call.fail("internal_error", f"{type(error).__name__}: {error}")
        ended(call, result)
        if not result.ok or calls_log.isEnabledFor(VERBOSE):
            log_response(call, result)
        return result

    return run


def _announcements(plan: StageContext) -> tuple[Callable[[Call], None], Callable[[Call, ToolResult], None]]:
    """How the beginning and the end of a tool's calls are told to subscribers."""
    subscribers, deliver = plan.services.bus.subscribers, plan.services.bus.deliver
    deferred = plan.services.deferred_completions
    name = plan.entry.tool.name
    requested, completed, failed = (
        EventType.TOOL_CALL_REQUESTED,
        EventType.TOOL_CALL_COMPLETED,
        EventType.TOOL_CALL_FAILED,
    )

    def began(call: Call) -> None:
        if (listeners := subscribers.get(requested)) is not None:
            run, parent = call.run, call.parent
            run_id, parent_id = None if run is None else run.id, None if parent is None else parent.id
            deliver(CallRequested(call.started_at, call.id, name, run_id, parent_id, call.arguments), listeners)

    def ended(call: Call, result: ToolResult) -> None:
        listeners = subscribers.get(completed if result.ok else failed)
        if listeners is not None or call.defers_completion:
            event = CallCompleted if result.ok else CallFailed
            run, parent = call.run, call.parent
            run_id, parent_id = None if run is None else run.id, None if parent is None else parent.id
            made = event(result.completed_at, call.id, name, run_id, parent_id, result)
            if call.defers_completion:
                deferred[call.id] = made
            elif listeners is not None:
                deliver(made, listeners)

    return began, ended


def log_request(call: Call) -> None:
    try:
        parameters = json_text.describe(mask_secrets(json_text.parse_arguments(call.arguments)), 2_000)
    except ValueError:
        parameters = "(not a JSON object)"
    calls_log.log(
        VERBOSE,
        "tool request → %s\n    parameters: %s",
        _shown(call.requested_name),
        parameters,
        extra={"event": "tool_started", "callId": call.id, "tool": call.entry.tool.name},
    )


def log_response(call: Call, result: ToolResult) -> None:
    latency = f"{result.duration_ms:.0f}ms"
    facts: dict[str, Any] = {
        "event": "tool_finished",
        "callId": call.id,
        "tool": result.tool,
        "latencyMs": result.duration_ms,
    }
    if result.ok:
        text = f"latency: {latency}, output: {len(result.text)} chars, status: ok"
        calls_log.log(VERBOSE, "tool response ← %s\n    %s", _shown(result.tool), text, extra=facts)
    else:
        reason = "\n    ".join(json_text.valid_text(mask_secrets(result.error or "")).splitlines())
        text = f"latency: {latency}, status: failed, error: {reason}"
        facts["errorKind"] = result.error_kind
        calls_log.warning("tool response ← %s\n    %s", _shown(result.tool), text, extra=facts)


def _shown(name: str) -> str:
    """A name as a log has it: callers name tools that do not exist, with line breaks if they like."""
    return single_line(json_text.valid_text(name), _LONGEST_NAME)

"""The stage `announce`: emits the events of a call's start and end, and logs both.

It is the outermost stage, so a call is recorded before its end is announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toolspace.core import json_text
from toolspace.core.events import CallCompleted, CallFailed, CallRequested, EventType
from toolspace.core.json_text import single_line
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import mask_secrets
from toolspace.orchestrator.call import Call

if TYPE_CHECKING:
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

VERBOSE = 15
"""A log level between INFO and DEBUG, for the request and the response of every call."""
logging.addLevelName(VERBOSE, "VERBOSE")
_REQUESTED, _COMPLETED = EventType.TOOL_CALL_REQUESTED, EventType.TOOL_CALL_COMPLETED
_FAILED = EventType.TOOL_CALL_FAILED
_MAX_NAME = 200
calls_log = logging.getLogger("toolspace.calls")
# Silent until the program configures logging, because results say the same. Python prints the other warnings, such as
# that of a provider that did not start, which nothing else tells a program.
for _name in ("toolspace.calls", "toolspace.agents", "toolspace.mcp"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


def announce(stage: StageContext, next: CallHandler, /) -> CallHandler:
    emit_start, emit_end = _emitters(stage)

    async def run(call: Call) -> ToolResult:
        emit_start(call)
        if calls_log.isEnabledFor(VERBOSE):
            _log_request(call)
        try:
            result = await next(call)
        except asyncio.CancelledError:
            if call.outcome is not None:
                emit_end(call, call.outcome)
                _log_response(call, call.outcome)
            raise
        except Exception as error:  # A stage of an extension raised; the call still needs a result.
            calls_log.exception("call %s of %s: a stage of its pipeline raised", call.id, call.entry.tool.name)
            result = call.fail("internal_error", f"{type(error).__name__}: {error}")
        emit_end(call, result)
        if not result.ok or calls_log.isEnabledFor(VERBOSE):
            _log_response(call, result)
        return result

    return run


def _emitters(stage: StageContext) -> tuple[Callable[[Call], None], Callable[[Call, ToolResult], None]]:
    """Returns the functions that emit the start and the end of this tool's calls."""
    subscribers, deliver = stage.services.bus.subscribers, stage.services.bus.deliver
    deferred_completions = stage.services.deferred_completions
    name = stage.entry.tool.name

    def emit_start(call: Call) -> None:
        if (listeners := subscribers.get(_REQUESTED)) is not None:
            run, parent = call.run, call.parent
            run_id, parent_id = None if run is None else run.id, None if parent is None else parent.id
            deliver(CallRequested(call.started_at, call.id, name, run_id, parent_id, call.arguments), listeners)

    def emit_end(call: Call, result: ToolResult) -> None:
        listeners = subscribers.get(_COMPLETED if result.ok else _FAILED)
        if listeners is not None or call.defers_completion:
            event_class = CallCompleted if result.ok else CallFailed
            run, parent = call.run, call.parent
            run_id, parent_id = None if run is None else run.id, None if parent is None else parent.id
            event = event_class(result.completed_at, call.id, name, run_id, parent_id, result)
            if call.defers_completion:
                deferred_completions[call.id] = event
            elif listeners is not None:
                deliver(event, listeners)

    return emit_start, emit_end


def _log_request(call: Call) -> None:
    try:
        parameters = json_text.describe(mask_secrets(json_text.parse_arguments(call.arguments)), 2_000)
    except ValueError:
        parameters = "(not a JSON object)"
    calls_log.log(
        VERBOSE,
        "tool request → %s\n    parameters: %s",
        _loggable_name(call.requested_name),
        parameters,
        extra={"event": "tool_started", "callId": call.id, "tool": call.entry.tool.name},
    )


def _log_response(call: Call, result: ToolResult) -> None:
    latency = f"{result.duration_ms:.0f}ms"
    fields: dict[str, Any] = {
        "event": "tool_finished",
        "callId": call.id,
        "tool": result.tool,
        "latencyMs": result.duration_ms,
    }
    if result.ok:
        text = f"latency: {latency}, output: {len(result.text)} chars, status: ok"
        calls_log.log(VERBOSE, "tool response ← %s\n    %s", _loggable_name(result.tool), text, extra=fields)
    else:
        reason = "\n    ".join(json_text.valid_text(mask_secrets(result.error or "")).splitlines())
        text = f"latency: {latency}, status: failed, error: {reason}"
        fields["errorKind"] = result.error_kind
        calls_log.warning("tool response ← %s\n    %s", _loggable_name(result.tool), text, extra=fields)


def _loggable_name(name: str) -> str:
    """Returns a tool name in one line. Callers may request names that do not exist, with line breaks in them."""
    return single_line(json_text.valid_text(name), _MAX_NAME)

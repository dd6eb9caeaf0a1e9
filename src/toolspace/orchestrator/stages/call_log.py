"""The stage `record` and the call log: entries of the latest calls, statistics per tool, and the spans of runs.

`record` logs how every call ended, and turns the cancellation of a call into a result.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.core import json_text
from toolspace.core.call_statistics import CallStats, StatsCollector, ToolStats
from toolspace.core.extension_points import TokenCounter
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind, ToolError
from toolspace.orchestrator.run import Span

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Call
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

_log = logging.getLogger("toolspace.orchestrator")

_SHORT_TEXT = 200
"""A text of up to this length is kept instead of its token count; the tokens are counted when someone reads them."""
_COUNTED_TEXT = 1 << 20
"""Characters of a text whose tokens are counted. The number for a longer one is extrapolated."""
_NOT_IN_SPANS = frozenset(("callId", "tool", "startedAt", "status", "runId"))
"""Fields of an entry that its span has already."""


class CallLogEntry(msgspec.Struct, frozen=True, rename="camel", weakref=False, eq=False):
    """A call that has ended."""

    call_id: str
    tool: str
    requested_name: str = msgspec.field(name="requested")
    """The name that the caller used; `tool` is the full name of the tool that ran."""
    namespace: str
    status: str
    error_kind: ErrorKind | None
    executed: bool
    started_at: float
    latency_ms: float
    queue_wait_ms: float
    characters_in: int
    characters_out: int
    tokens_out: int
    cache_hit: bool
    user_id: str | None
    run_id: str | None
    agent_id: str | None
    parent_id: str | None

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


class CallLog:
    """Keeps the latest calls, and statistics of all calls."""

    def __init__(self, *, count_tokens: TokenCounter, stats: StatsCollector | None = None, keep: int = 1_000) -> None:
        self.stats = stats or StatsCollector()
        self.queue_waits = CallStats()
        """How long calls waited for a slot, of those that had to wait."""
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=keep)
        self._count_tokens = count_tokens

    @property
    def recent(self) -> list[CallLogEntry]:
        """The latest calls, oldest first."""
        return [self._entry(row) for row in self._rows]

    def summarize(self, principal: str | None, tools: Iterable[Tool]) -> ToolStats:
        """Returns the statistics of all calls, or of the calls of one principal."""
        stats = self.stats if principal is None else self.stats.of_principal(principal)
        return stats.summary(tools)

    def add(self, call: Call, result: ToolResult, stats: CallStats | None) -> None:
        """Logs a call. `stats` is None for a name that no provider offers: made-up names must not use memory."""
        run, parent, base = call.run, call.parent, call.base_context
        if stats is not None:
            stats.add(result.duration_ms, result.ok, result.error_kind)
            if base.user_id is not None:
                self.stats.add_for_principal(
                    base.user_id, call.entry.tool.name, result.duration_ms, result.ok, result.error_kind
                )
        if call.queue_wait:
            self.queue_waits.add(call.queue_wait * 1000, True)
        arguments = call.arguments
        if type(arguments) is str:
            characters_in = len(arguments)
        else:
            characters_in = len(json_text.encode(arguments)) if arguments else 0
        text = result.encoded
        if text is None:
            text = result.text
        # A plain tuple, which becomes an entry when someone reads it: every call pays for this (benchmark `call`).
        row = (
            call.id,
            result.tool,
            call.requested_name,
            result.namespace,
            result.ok,
            result.error_kind,
            result.executed,
            call.started_at,
            result.duration_ms,
            call.queue_wait,
            characters_in,
            len(text),
            text if len(text) <= _SHORT_TEXT else self._estimate_tokens(text),
            call.cache_hit,
            base.user_id,
            base.run_id if run is None else run.id,
            base.agent_id,
            None if parent is None else parent.id,
        )
        self._rows.append(row)
        if (span := call.span) is not None:
            span.load_attributes = lambda: _span_attributes(self._entry(row))
            span.end("ok" if result.ok else "failed", at=call.started_at + result.duration_ms)

    def _estimate_tokens(self, text: str) -> int:
        """Counts the tokens of a text. Counts only the beginning of a huge one, which would take seconds."""
        tokens = self._count_tokens(text[:_COUNTED_TEXT])
        return tokens if len(text) <= _COUNTED_TEXT else tokens * len(text) // _COUNTED_TEXT

    def _entry(self, row: tuple[Any, ...]) -> CallLogEntry:
        values = dict(zip(CallLogEntry.__struct_fields__, row, strict=True))
        values["status"] = "ok" if values["status"] else "failed"
        values["queue_wait_ms"] *= 1000
        if isinstance(values["tokens_out"], str):
            values["tokens_out"] = self._count_tokens(values["tokens_out"])
        return CallLogEntry(**values)


def _span_attributes(entry: CallLogEntry) -> dict[str, Any]:
    return {key: value for key, value in entry.to_dict().items() if key not in _NOT_IN_SPANS and value is not None}


def record(stage: StageContext, next: CallHandler, /) -> CallHandler:
    log_call = stage.services.call_log.add
    stats = stage.services.call_log.stats.for_tool(stage.entry.tool.name) if stage.entry.is_registered else None
    in_run = stage.in_run

    async def run(call: Call) -> ToolResult:
        if in_run:
            call.span = _start_span(call)
        try:
            result = await next(call)
        except asyncio.CancelledError:
            caller_continues = _caller_continues(call)
            result = _cancelled_result(call, caller_continues)
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


def _start_span(call: Call) -> Span | None:
    """Starts the span of a call, below its parent call or the open turn of its run; None without a run."""
    if call.run is None:
        return None
    parent = call.parent.span if call.parent is not None and call.parent.run is call.run else None
    if parent is None:
        parent = call.run.trace.last_child("turn") or call.run.trace
    span = Span("call", call.entry.tool.name, call.id, call.started_at)
    parent.add_child(span)
    return span


def _caller_continues(call: Call) -> bool:
    """Whether only this call was cancelled, so that its caller goes on with a result."""
    call.withdraw_cancellation()
    task = call.task or asyncio.current_task()
    if task is not None and task.cancelling() > call.cancel_count_before:
        return False
    ancestor = call.parent
    while ancestor is not None:
        if ancestor.interrupt_requested and not ancestor.is_over:
            return False  # Cancelled from inside this task, and not interrupted yet.
        ancestor = ancestor.parent
    return True


def _cancelled_result(call: Call, caller_continues: bool) -> ToolResult:
    if call.cancel_requested:
        return call.fail("canceled", "the call was canceled")
    if not caller_continues:
        return call.fail("canceled", "the caller was canceled")
    # Nobody cancelled the call: the tool awaited something that was cancelled elsewhere.
    return call.fail("execution_error", "an operation that the tool awaited was cancelled")

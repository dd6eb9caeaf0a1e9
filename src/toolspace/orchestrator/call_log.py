"""The books: a record of every call, statistics per tool, and each run's operation tree."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.interfaces import TokenCounter
from toolspace.core.result import ToolResult
from toolspace.core.statistics import CallStats, StatsCollector
from toolspace.errors import ErrorKind
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.trace import Span

_SHORT = 200
"""A text up to this length is kept instead of its tokens, which are counted when someone looks."""


class CallLogEntry(msgspec.Struct, frozen=True, rename="camel", weakref=False, eq=False):
    """What is known of a call once it has ended."""

    call_id: str
    tool: str
    requested: str
    """The name that was called; `tool` is the one that ran."""
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
    """Takes every call's outcome in. Keeps the last records, and counts all of them."""

    def __init__(self, *, count_tokens: TokenCounter, stats: StatsCollector | None = None, keep: int = 1_000) -> None:
        self.stats = stats or StatsCollector()
        self.queue_waits = CallStats()
        """How long calls waited for a slot, of those that had to."""
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=keep)
        self._count_tokens = count_tokens

    @property
    def recent(self) -> list[CallLogEntry]:
        """The last calls, oldest first."""
        return [self._record(row) for row in self._rows]

    def add(self, call: Call, result: ToolResult, stats: CallStats | None) -> None:
        """Books a call. A name that nobody offers has no statistics: made-up names must not make the books grow."""
        if stats is not None:
            stats.add(result.duration_ms, result.ok, result.error_kind)
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
        run, parent, base = call.run, call.parent, call.base_context
        # A plain row, made a record when someone looks: every call pays for this.
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
            text if len(text) <= _SHORT else self._count_tokens(text),
            call.cache_hit,
            base.user_id,
            base.run_id if run is None else run.id,
            base.agent_id,
            None if parent is None else parent.id,
        )
        self._rows.append(row)
        if (node := call.span) is not None:
            node.describe_later(lambda: _attributes(self._record(row)))
            node.end("ok" if result.ok else "failed", at=call.started_at + result.duration_ms)

    def _record(self, row: tuple[Any, ...]) -> CallLogEntry:
        values = dict(zip(CallLogEntry.__struct_fields__, row, strict=True))
        values["status"] = "ok" if values["status"] else "failed"
        values["queue_wait_ms"] *= 1000
        if isinstance(values["tokens_out"], str):
            values["tokens_out"] = self._count_tokens(values["tokens_out"])
        return CallLogEntry(**values)


def _attributes(record: CallLogEntry) -> dict[str, Any]:
    """What a call's node in its run's tree says of it, beside what every node says."""
    left_out = ("callId", "tool", "startedAt", "status", "runId")
    return {key: value for key, value in record.to_dict().items() if key not in left_out and value is not None}


def start_call_span(call: Call) -> Span | None:
    """The call's node, below its parent call or the turn that is open now."""
    if call.run is None:
        return None
    above = call.parent.span if call.parent is not None and call.parent.run is call.run else None
    if above is None:
        above = call.run.trace.last_child("turn") or call.run.trace
    return above.start_child("call", call.entry.tool.name, id=call.id, started_at=call.started_at)

"""A run: the calls of one agent cycle or program, with their own limits, token budget, deadline and trace.

The trace is a tree of spans: run → turn → call → child run. It is exported as JSON and to OpenTelemetry. Agents and
programs create runs through the orchestrator. A run does not call models.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.call_limits import RepeatedCallLimits
from toolspace.core.times import format_milliseconds
from toolspace.orchestrator.call import call_chain
from toolspace.orchestrator.stages.queue import CallQueue, QueueSpec

if TYPE_CHECKING:
    from toolspace.core.extension_points import Policy
    from toolspace.core.result import ToolResult
    from toolspace.core.tool import Tool
    from toolspace.core.tool_context import ToolContext
    from toolspace.orchestrator.call import Arguments, Call
    from toolspace.orchestrator.orchestrator import ToolOrchestrator

SpanKind = Literal["run", "turn", "call"]
_MAX_CHILDREN = 10_000


class Span(msgspec.Struct, eq=False):
    """One node of the trace. Times are Unix milliseconds."""

    kind: SpanKind
    name: str
    id: str
    started_at: float = msgspec.field(default_factory=lambda: time.time() * 1000)
    ended_at: float | None = None
    status: str = "running"
    children: list[Span] = []
    dropped_children: int = 0
    """Children beyond the limit: a run of a million calls must not hold a million spans."""
    on_end: Callable[[Span], None] | None = None
    """Called once, when the span has ended."""
    load_attributes: Callable[[], dict[str, Any]] | None = None
    """Returns further attributes when someone reads them; most are never read."""
    _attributes: dict[str, Any] = {}

    @property
    def attributes(self) -> dict[str, Any]:
        if self.load_attributes is not None:
            self._attributes.update(self.load_attributes())
            self.load_attributes = None
        return self._attributes

    def add_child(self, child: Span) -> None:
        if len(self.children) < _MAX_CHILDREN:
            self.children.append(child)
        else:
            self.dropped_children += 1

    def end(self, status: str = "ok", *, at: float | None = None) -> None:
        if self.ended_at is None:
            self.ended_at = time.time() * 1000 if at is None else at
            self.status = status
            for child in self.children:
                if child.kind == "turn":  # A call that is still running ends by itself.
                    child.end(status)
            if self.on_end is not None:
                self.on_end(self)

    def last_child(self, kind: SpanKind) -> Span | None:
        for child in reversed(self.children):
            if child.kind == kind:
                return child
        return None

    def to_dict(self) -> dict[str, Any]:
        wire: dict[str, Any] = {
            "kind": self.kind,
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "startedAt": round(self.started_at),
            "endedAt": None if self.ended_at is None else round(self.ended_at),
            **self.attributes,
            "children": [child.to_dict() for child in self.children],
        }
        if self.dropped_children:
            wire["droppedChildren"] = self.dropped_children
        return wire


class Run(msgspec.Struct, eq=False, kw_only=True, weakref=True):
    """Limits and traces the calls that are made in it. Whoever runs the model tells it when a turn starts."""

    owner: ToolOrchestrator
    id: str = ""
    """Chosen if it is empty; `session`, too."""
    session: str = ""
    context: ToolContext | None = None
    policy: Policy | None = None
    parent: Call | None = None
    max_tool_calls_per_turn: int | None = None
    max_repeated_calls: RepeatedCallLimits | int | None = None
    """How often the model may make the same call. None for the runs of programs, which decide themselves."""
    max_concurrent_tools: int | None = None
    context_window: int | None = None
    """Tokens; `tokens_used` of them are used."""
    deadline: float | None = None
    """Seconds from its start."""
    report_format: str | None = None
    """The format that the final report must have; None allows any."""
    report_schema: Mapping[str, Any] | None = None
    """The JSON Schema that a report in JSON must match."""
    check_report: Callable[[Any], None] | None = None
    """Raises `ToolValidationError` if it does not accept the JSON of the report. Then a report must be JSON, unless it
    is a report of failure."""
    tokens_used: int = 0
    tool_budget_exceeded: bool = False
    final_report: Mapping[str, Any] | None = None
    task_status: Mapping[str, Any] | None = None
    discovered_tools: dict[str, None] = {}
    """The names of tools that a search found. The model sees their schemas from then on."""
    concurrency_queue: CallQueue | None = None
    trace: Span = msgspec.field(default_factory=lambda: Span("run", "", ""))
    turn: int = 0
    active_calls: dict[Call, None] = {}
    """Those that have waited for something."""
    canceled: bool = False
    _calls_in_turn: int = 0
    _equal_calls: dict[bytes, int] = {}
    """How often each call was made, by the digest of its tool and arguments."""
    _expires: float = math.inf

    def __post_init__(self) -> None:
        self.id = self.id or f"run_{os.urandom(8).hex()}"
        self.session = self.session or f"session-{self.id.removeprefix('run_')}"
        self.trace = Span("run", self.id, self.id)
        if self.max_concurrent_tools is not None:
            spec = QueueSpec(concurrent=self.max_concurrent_tools)
            self.concurrency_queue = CallQueue("maxConcurrentTools", spec)
        if self.deadline is not None:
            self._expires = time.monotonic() + self.deadline
        self.next_turn()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def call(
        self, name: str, arguments: Arguments = None, *, context: ToolContext | None = None, call_id: str | None = None
    ) -> ToolResult:
        """Calls a tool in this run."""
        return await self.owner.execute(name, arguments, context=context, run=self, call_id=call_id)

    def next_turn(self) -> int:
        """Starts the next turn of the model. Limits per turn count from zero again."""
        if (last_turn := self.trace.last_child("turn")) is not None:
            last_turn.end()
        self.turn += 1
        self._calls_in_turn = 0
        self.trace.add_child(Span("turn", str(self.turn), str(self.turn)))
        return self.turn

    def close(self) -> None:
        """Ends the run's trace. Later calls still work."""
        self.trace.end("ok" if not self.canceled else "canceled")

    def cancel(self) -> None:
        """Cancels every call of the run, and refuses new ones."""
        self.canceled = True
        # The calls that this code is part of too: they may not have waited yet, and so are not active.
        for call in (*self.active_calls, *call_chain()):
            if call.run is self:
                call.cancel()

    @property
    def is_finished(self) -> bool:
        """Whether the run has its final report."""
        return self.final_report is not None

    @property
    def final_report_reminder(self) -> str | None:
        """What to tell a model that reports a completed task but does not call the final report tool; else None."""
        status = self.task_status
        if (
            self.final_report is None
            and status is not None
            and status.get("status") == "completed"
            and status.get("ready_for_final_report") is True
            and status.get("need_to_run_more_tools") is False
        ):
            return "You said that the task is completed and no more tools are needed. Call agent__final_report now."
        return None

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the deadline; infinite without one."""
        return self._expires - time.monotonic()

    @property
    def deadline_message(self) -> str:
        """The error of a call that the deadline ended or kept from starting."""
        return f"the run's deadline has passed, {format_milliseconds(self.deadline or 0)}ms after its start"

    @property
    def remaining_tokens(self) -> float:
        """Tokens that still fit the context window; infinite without one."""
        return math.inf if self.context_window is None else self.context_window - self.tokens_used

    def add_tokens(self, count: int) -> None:
        """Adds used tokens. The orchestrator adds those of results; whoever runs the model adds the others."""
        self.tokens_used += count

    def count_call(self) -> str | None:
        """Counts one more call of this turn. Returns why it may not run, or None."""
        if self.final_report is not None:
            return f"run {self.id} has given its final report"
        limit = self.max_tool_calls_per_turn
        if limit is not None and self._calls_in_turn >= limit:
            return f"at most {limit} tool calls are allowed in one turn (maxToolCallsPerTurn)"
        self._calls_in_turn += 1
        return None

    def count_equal_call(self, tool: Tool, values: object) -> str | None:
        """Counts a call of the model with these validated arguments. Returns why it may not run, or None."""
        from hashlib import blake2b  # Imported here: programs that only call tools do not need it.

        limits = self.max_repeated_calls
        if limits is None:
            return None
        digest = blake2b(json_text.encode_canonical((tool.name, values)), digest_size=16).digest()
        count = self._equal_calls.get(digest, 0)
        limit = limits if isinstance(limits, int) else limits.for_tool(tool)
        if count >= limit:
            times = "once" if limit == 1 else f"{limit} times"
            return (
                f"this run has called {tool.name} with exactly these arguments {times} already, which is the limit "
                "(limits.maxRepeatedCalls). Do not repeat it: use the results that you have, change the arguments, "
                "try another tool, or finish and say what you could not do"
            )
        self._equal_calls[digest] = count + 1
        return None

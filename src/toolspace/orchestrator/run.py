"""A run: the calls of one think cycle or program, with limits, a budget, a deadline and a trace of their own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import call_chain
from toolspace.orchestrator.queues import CallQueue, QueueSpec
from toolspace.orchestrator.trace import Span

if TYPE_CHECKING:
    from toolspace.core.interfaces import Policy
    from toolspace.orchestrator.call import Arguments, Call


class RunOwner(Protocol):
    """The orchestrator, as a run sees it."""

    async def execute(
        self,
        name: str,
        parameters: Arguments = None,
        *,
        context: ToolContext | None = None,
        run: Run | None = None,
        call_id: str | None = None,
    ) -> ToolResult: ...


class Run:
    """Bounds and books the calls made in it. Not a model loop: whoever runs one says when a turn begins."""

    def __init__(
        self,
        owner: RunOwner,
        *,
        id: str | None = None,
        context: ToolContext | None = None,
        policy: Policy | None = None,
        max_tool_calls_per_turn: int | None = None,
        max_concurrent_tools: int | None = None,
        context_window: int | None = None,
        deadline: float | None = None,
        report_format: str | None = None,
        report_schema: Mapping[str, Any] | None = None,
        session: str | None = None,
        parent: Call | None = None,
    ) -> None:
        self.id = id or f"run_{os.urandom(8).hex()}"
        self.session = session or f"session-{self.id.removeprefix('run_')}"
        self.context = context
        self.policy = policy
        self.parent = parent
        self.max_tool_calls_per_turn = max_tool_calls_per_turn
        self.context_window = context_window
        self.tokens_used = 0
        self.tool_budget_exceeded = False
        self.final_report: Mapping[str, Any] | None = None
        self.report_format = report_format
        """The format that the final report must have; any where none is asked for."""
        self.report_schema = report_schema
        """What a report in JSON is checked against."""
        self.task_status: Mapping[str, Any] | None = None
        self.discovered_tools: dict[str, None] = {}
        """Tools that a search found: their schemas are shown from then on."""
        self.concurrency_queue = None
        if max_concurrent_tools is not None:
            self.concurrency_queue = CallQueue("maxConcurrentTools", QueueSpec(concurrent=max_concurrent_tools))
        self.trace = Span("run", self.id)
        self.turn = 0
        self._owner = owner
        self._calls_in_turn = 0
        self._expires = math.inf if deadline is None else time.monotonic() + deadline
        self._active: dict[Call, None] = {}
        self._canceled = False
        self.next_turn()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        context: ToolContext | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        """Calls a tool in this run."""
        return await self._owner.execute(name, arguments, context=context, run=self, call_id=call_id)

    def next_turn(self) -> int:
        """Begins the next turn of the model: limits per turn start anew."""
        self.trace.end_last_child("turn")
        self.turn += 1
        self._calls_in_turn = 0
        self.trace.start_child("turn", str(self.turn))
        return self.turn

    def close(self) -> None:
        """Ends the run's trace. Calls after it still work; they open a turn of their own."""
        self.trace.end("ok" if not self._canceled else "canceled")

    def cancel(self) -> None:
        """Stops every call of the run, and refuses new ones."""
        self._canceled = True
        # Those around this very code have to be told too; they may not have waited for anything yet.
        for call in (*self._active, *call_chain()):
            if call.run is self:
                call.cancel()

    @property
    def canceled(self) -> bool:
        return self._canceled

    @property
    def is_finished(self) -> bool:
        """Whether the run gave its final report."""
        return self.final_report is not None

    @property
    def final_report_reminder(self) -> str | None:
        """What to tell a model that says it is ready and has nothing left to run, yet does not finish."""
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
        """Until the deadline; infinite without one."""
        return self._expires - time.monotonic()

    @property
    def remaining_tokens(self) -> float:
        """What still fits the context window; infinite without one."""
        return math.inf if self.context_window is None else self.context_window - self.tokens_used

    def add_tokens(self, count: int) -> None:
        """Books tokens: of results, by the orchestrator; of prompts and answers, by whoever runs the model."""
        self.tokens_used += count

    def count_call(self) -> str | None:
        """Counts one more call of this turn. Why it may not run, or None."""
        if self.final_report is not None:
            return f"run {self.id} has given its final report"
        limit = self.max_tool_calls_per_turn
        if limit is not None and self._calls_in_turn >= limit:
            return f"at most {limit} tool calls are allowed in one turn (maxToolCallsPerTurn)"
        self._calls_in_turn += 1
        return None

    def track(self, call: Call) -> None:
        self._active[call] = None

    def untrack(self, call: Call) -> None:
        self._active.pop(call, None)

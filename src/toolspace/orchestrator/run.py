"""A run: the calls of one agent cycle or program, with their own limits, token budget, deadline and trace.

Agents and programs create runs through the orchestrator. A run does not call models.
"""

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
    """Limits and traces the calls that are made in it. Whoever runs the model tells it when a turn starts."""

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
        """The format that the final report must have; None allows any."""
        self.report_schema = report_schema
        """The JSON Schema that a report in JSON must match."""
        self.task_status: Mapping[str, Any] | None = None
        self.discovered_tools: dict[str, None] = {}
        """The names of tools that a search found. The model sees their schemas from then on."""
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
        """Starts the next turn of the model. Limits per turn count from zero again."""
        self.trace.end_last_child("turn")
        self.turn += 1
        self._calls_in_turn = 0
        self.trace.start_child("turn", str(self.turn))
        return self.turn

    def close(self) -> None:
        """Ends the run's trace. Later calls still work."""
        self.trace.end("ok" if not self._canceled else "canceled")

    def cancel(self) -> None:
        """Cancels every call of the run, and refuses new ones."""
        self._canceled = True
        # The calls that this code is part of too: they may not have waited yet, and so are not active.
        for call in (*self._active, *call_chain()):
            if call.run is self:
                call.cancel()

    @property
    def canceled(self) -> bool:
        return self._canceled

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

    def track(self, call: Call) -> None:
        self._active[call] = None

    def untrack(self, call: Call) -> None:
        self._active.pop(call, None)

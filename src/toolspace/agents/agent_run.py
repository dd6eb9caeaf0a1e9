"""What runs an agent: the opened model and tools (`PreparedAgent`), the state of one run (`AgentRun`) and its budget.

`registry.py` creates prepared agents. Cycles and requests create a run for each piece of work; the run's tools find it
in `ToolContext.agent`. A run's budget limits its tokens, cost and time together with those of the agents that it calls.
Calls no model and no tool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from toolspace.agents.agent import Agent, LoopSettings, RunLimits
from toolspace.agents.failure_review import ModelReviewer, RuleReviewer
from toolspace.agents.offered_tools import AgentToolPolicy, CombinedPolicy
from toolspace.core.defaults import AGENT_CONCURRENT_TOOLS
from toolspace.core.extension_points import Policy
from toolspace.core.language_model import NO_USAGE, Model, Turn, Usage
from toolspace.core.tool_context import TaskHost, ToolContext
from toolspace.errors import ToolLimitError, ToolPermissionError
from toolspace.orchestrator.effective_settings import DEFAULT
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.run import Run


class TaskInstructions(msgspec.Struct, frozen=True, kw_only=True):
    """What a background task, or the reflection on one, has instead of its agent's prompt and inbox."""

    task_id: str
    prompt: str
    """The system prompt."""
    policy: Policy
    """Denies the tools that are not for this kind of work."""


class PreparedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent whose model and tools are open. Valid while it is acquired from the registry."""

    agent: Agent
    model: Model
    tools: ToolOrchestrator
    """All tools that it may use."""
    settings: LoopSettings
    """Those of the agent, or changed for this run."""
    session_dir: Path | None = None
    """Where the archives of its session are."""
    memory_dir: Path | None = None
    """Where the memory files of its session are."""
    task_service: TaskHost | None = None
    task: TaskInstructions | None = None
    """None: a run of the agent itself."""

    def new_reviewer(self) -> RuleReviewer:
        """Creates the reviewer of one run's failed calls."""
        if self.settings.review == "model":
            return ModelReviewer(self.model, self.settings.model_settings)
        return RuleReviewer()

    def open_tool_run(
        self, *, id: str | None, context: ToolContext, policy: Policy | None, session: str | None, seconds: float
    ) -> Run:
        """Opens the orchestrator's run for the calls of one agent run. `seconds`: its time limit, or infinity.

        `policy` decides besides that of the agent's tools; for a task or a reflection instead of it.
        """
        if self.task is None:
            agent_policy = AgentToolPolicy(self.agent, self.tools)
            policy = agent_policy if policy is None else CombinedPolicy((agent_policy, policy))
        max_calls = self.settings.max_tool_calls_per_turn
        options: dict[str, Any] = {} if max_calls is None else {"max_tool_calls_per_turn": max_calls}
        if self.tools.defaults.max_concurrent_tools.source == DEFAULT:
            options["max_concurrent_tools"] = AGENT_CONCURRENT_TOOLS
        deadline = None if seconds == float("inf") else seconds
        run = self.tools.run(
            id=id,
            context=context,
            policy=policy,
            session=session,
            deadline=deadline,
            max_repeated_calls=self.agent.limits.max_repeated_calls,
            **options,
        )
        if run.context_window is None:  # Configuration sets how much of the context window to use; else all of it.
            run.context_window = self.model.context_window
        return run


class Handoff(msgspec.Struct, frozen=True):
    """A request that another agent answers instead."""

    agent: str
    message: str | None


class AgentRecursionError(ToolPermissionError):
    """An agent would wait for its own answer."""

    prefix = ""


class AgentRun:
    """The state of one run: its request, conversation and budget, and what its tools decided."""

    def __init__(
        self,
        agent: Agent,
        *,
        request: str = "",
        parent: AgentRun | None = None,
        previous_agents: tuple[str, ...] = (),
        steps: int = 0,
    ) -> None:
        self.agent = agent
        self.request = request
        """The original request: a handoff passes it on."""
        self.parent = parent
        """The run whose call this run answers."""
        self.previous_agents = previous_agents
        """The agents that had the request before and handed it off."""
        self.budget = RunBudget(agent.name, agent.limits, parent=parent.budget if parent is not None else None)
        self.turns: list[Turn] = []
        """The conversation."""
        self.unsaved_turns: list[Turn] = []
        """The turns since the last saved step: the next step saves them, or the end of the run."""
        self.steps = steps
        """How many turns the model has had in this run."""
        self.is_waiting_for_model = False
        self.handoff: Handoff | None = None
        self.is_skipped = False
        self.conversation: object | None = None
        """The `OpenConversation` that a program's run continues."""

    @property
    def name(self) -> str:
        return self.agent.name

    def add_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.unsaved_turns.append(turn)

    def lineage(self) -> Iterator[AgentRun]:
        """This run, the run that called it, and so on."""
        run: AgentRun | None = self
        while run is not None:
            yield run
            run = run.parent

    def check_call(self, name: str) -> None:
        """Raises `ToolPermissionError` or `ToolLimitError` if this agent may not call that agent now."""
        subagents = self.agent.subagents
        if name not in subagents:
            hint = f"it may call {', '.join(subagents)}" if subagents else "it may call none"
            raise ToolPermissionError(f'the agent "{self.name}" may not call the agent "{name}"; {hint}')
        self.check_depth(name)

    def check_depth(self, name: str) -> None:
        """Raises if that agent would wait for itself, or if the chain of calls would be too long."""
        chain = self.check_recursion(name)
        max_depth = min(run.agent.limits.max_depth for run in self.lineage())
        if len(chain) >= max_depth:
            raise ToolLimitError(
                f'the agent "{name}" would be number {len(chain) + 1} in the chain {" → ".join(chain)}; '
                f"at most {max_depth} agents may call one another (limits.maxDepth)"
            )

    def check_recursion(self, name: str) -> list[str]:
        """Returns the names of the agents in this chain of calls, this one last. Raises if `name` is among them."""
        chain = [run.name for run in self.lineage()][::-1]
        if name in chain:
            raise AgentRecursionError(f"Recursion detected: {' → '.join([*chain[chain.index(name) :], name])}")
        return chain


def find_agent_run(context: ToolContext) -> AgentRun | None:
    """The agent run that a call belongs to. None: no agent makes the call."""
    run = context.agent
    return run if isinstance(run, AgentRun) else None


class RunBudget:
    """What one run has used, and whether it may use more. Usage counts for the calling runs, too."""

    def __init__(self, agent_name: str, limits: RunLimits, *, parent: RunBudget | None = None) -> None:
        self._agent_name = agent_name
        self._limits = limits
        self._parent = parent
        self.usage: Usage = NO_USAGE
        """Of this run and of all runs below it."""
        self.expires_at = time.monotonic() + limits.timeout if limits.timeout is not None else float("inf")
        if parent is not None:
            self.expires_at = min(self.expires_at, parent.expires_at)
        self._active_requests = 0
        """Model requests under way, in this run and in the runs below it."""
        self._largest_request = (0, 0.0)
        """The most tokens, and the highest cost, of one request so far."""
        self._waiters: list[asyncio.Future[None]] = []

    def _lineage(self) -> Iterator[RunBudget]:
        """This budget, the budget of the calling run, and so on."""
        budget: RunBudget | None = self
        while budget is not None:
            yield budget
            budget = budget._parent

    def add_usage(self, usage: Usage) -> None:
        """Adds the usage of one model request to this run and to all calling runs."""
        for budget in self._lineage():
            budget.usage = budget.usage + usage
            tokens, cost = budget._largest_request
            budget._largest_request = (max(tokens, usage.tokens), max(cost, usage.cost))

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[None]:
        """Waits while the requests under way may use up the rest of a budget, and is one of them until its end.

        Without this, agents that are called at the same time would each see the same unspent rest.
        """
        while (full := next((budget for budget in self._lineage() if budget._is_full()), None)) is not None:
            waiter = asyncio.get_running_loop().create_future()
            full._waiters.append(waiter)
            await waiter
        for budget in self._lineage():
            budget._active_requests += 1
        try:
            yield
        finally:
            for budget in self._lineage():
                budget._active_requests -= 1
                waiters, budget._waiters = budget._waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)

    def _is_full(self) -> bool:
        """Whether one more request may exceed a limit. Never if no request is under way: `exhausted_reason` decides."""
        limits, requests = self._limits, self._active_requests + 1
        if requests == 1:
            return False
        tokens, cost = self._largest_request
        if limits.max_tokens is not None and self.usage.tokens + requests * tokens > limits.max_tokens:
            return True
        return limits.max_cost is not None and self.usage.cost + requests * cost > limits.max_cost

    @property
    def remaining_seconds(self) -> float:
        return self.expires_at - time.monotonic()

    def exhausted_reason(self) -> str | None:
        """Why this run may use no more, because of its own limits or those of a calling run. None: it may."""
        for budget in self._lineage():
            limits, name = budget._limits, budget._agent_name
            if limits.max_tokens is not None and budget.usage.tokens >= limits.max_tokens:
                return f'the agent "{name}" has used its {limits.max_tokens} tokens (limits.maxTokens)'
            if limits.max_cost is not None and budget.usage.cost >= limits.max_cost:
                return f'the agent "{name}" has spent its ${limits.max_cost:g} (limits.maxCost)'
        if self.remaining_seconds <= 0:
            return f'the agent "{self._agent_name}" has used up its time (limits.timeout)'
        return None

"""Limits the tokens, cost and time of one run, together with the runs of the agents that it calls.

Every `AgentRun` has a budget, whose parent is the budget of the calling run. Makes no requests itself: the loop asks
it before each one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from toolspace.agents.agent import RunLimits
from toolspace.core.model import NO_USAGE, Usage


class RunBudget:
    """What one run has used, and whether it may use more. Usage counts for the calling runs, too."""

    __slots__ = (
        "_active_requests",
        "_agent_name",
        "_largest_request",
        "_limits",
        "_parent",
        "_waiters",
        "expires_at",
        "is_unlimited",
        "usage",
    )

    def __init__(self, agent_name: str, limits: RunLimits, *, parent: RunBudget | None = None) -> None:
        self._agent_name = agent_name
        self._limits = limits
        self._parent = parent
        self.usage: Usage = NO_USAGE
        """Of this run and of all runs below it."""
        self.expires_at = time.monotonic() + limits.timeout if limits.timeout is not None else float("inf")
        if parent is not None:
            self.expires_at = min(self.expires_at, parent.expires_at)
        has_limit = limits.max_tokens is not None or limits.max_cost is not None or self.expires_at != float("inf")
        self.is_unlimited = not has_limit and (parent is None or parent.is_unlimited)
        """Whether neither this run nor a calling run has a limit."""
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
        budget: RunBudget | None = self
        while budget is not None:
            budget.usage = budget.usage + usage
            tokens, cost = budget._largest_request
            budget._largest_request = (max(tokens, usage.tokens), max(cost, usage.cost))
            budget = budget._parent

    async def begin_request(self) -> None:
        """Waits while the requests under way may use up the rest of a budget. Call `end_request` afterwards.

        Without this, agents that are called at the same time would each see the same unspent rest.
        """
        while (full := next((budget for budget in self._lineage() if budget._is_full()), None)) is not None:
            waiter = asyncio.get_running_loop().create_future()
            full._waiters.append(waiter)
            await waiter
        for budget in self._lineage():
            budget._active_requests += 1

    def end_request(self) -> None:
        """Ends a request whose usage has been added, and wakes the requests that wait."""
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
        if self.is_unlimited:
            return None
        for budget in self._lineage():
            limits, name = budget._limits, budget._agent_name
            if limits.max_tokens is not None and budget.usage.tokens >= limits.max_tokens:
                return f'the agent "{name}" has used its {limits.max_tokens} tokens (limits.maxTokens)'
            if limits.max_cost is not None and budget.usage.cost >= limits.max_cost:
                return f'the agent "{name}" has spent its ${limits.max_cost:g} (limits.maxCost)'
        if self.remaining_seconds <= 0:
            return f'the agent "{self._agent_name}" has used up its time (limits.timeout)'
        return None

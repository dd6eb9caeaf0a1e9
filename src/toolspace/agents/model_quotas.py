"""Counts what the models of a run use: in the budget of the run, and in the daily budgets of `quotas`.

The loop asks before each request and adds what it used, and so does the compaction after the run. Requests that run at
the same time may exceed a quota by what each of them uses.
"""

from __future__ import annotations

from toolspace.agents.agent_run import RunBudget
from toolspace.core.language_model import Usage
from toolspace.core.quotas import QuotaCharge, unique_charges
from toolspace.core.tool_context import ToolContext
from toolspace.orchestrator.orchestrator import ToolOrchestrator


class ModelQuotas:
    """The budget of one run, and the quotas on tokens and costs, by agent and by principal, that hold for it."""

    def __init__(self, tools: ToolOrchestrator, context: ToolContext, budget: RunBudget) -> None:
        self._services = tools.services
        self._context = context
        self.budget = budget

    async def find_exhausted(self) -> QuotaCharge | None:
        """The quota that is used up for today; None: more may be used."""
        charges = self._charge(Usage())
        return await self._services.quota_store.find_exhausted(charges) if charges else None

    async def add(self, usage: Usage) -> None:
        """Counts what a request has used."""
        self.budget.add_usage(usage)
        if charges := self._charge(usage):
            await self._services.quota_store.add(charges)

    def _charge(self, usage: Usage) -> list[QuotaCharge]:
        # Read for each request: a reload may have changed the quotas.
        services = self._services
        if not services.quotas:
            return []
        now = services.quota_store.now_ms()
        return unique_charges(
            charge
            for quota in services.quotas
            for charge in quota.charge_model(self._context, now=now, tokens=usage.tokens, cost=usage.cost)
        )

"""Makes quotas from the section `quotas`, and checks that limits of cost can hold. Used by `from_config`."""

from __future__ import annotations

from collections.abc import Iterator

from toolspace.config.configuration import AgentSpec, Config
from toolspace.core.quotas import Quota
from toolspace.errors import ConfigError


def check_prices(config: Config) -> None:
    """Raises `ConfigError` if an agent has a limit of cost that cannot hold, because its model's price is unknown."""
    if problems := [
        f"{agent.max_cost_source}: {problem}"
        for agent in config.agents.values()
        if agent.limits.max_cost is not None and (problem := _find_price_problem(agent)) is not None
    ]:
        raise ConfigError("\n".join(problems))


def list_unpriced_agents(config: Config) -> Iterator[str]:
    """A warning for each agent whose cost cannot be counted though a quota limits it."""
    if any(quota.cost_per_day is not None for quota in config.quotas):
        for agent in config.agents.values():
            if (problem := _find_price_problem(agent)) is not None:
                yield f'quotas: costPerDay does not count the agent "{agent.name}": {problem.partition(",")[0]}'


def _find_price_problem(agent: AgentSpec) -> str | None:
    """Why the cost of an agent is unknown. None for a model that the environment decides: its first run checks it."""
    model = agent.model
    if model.price is not None or not model.name:
        return None
    from toolspace.models.prices import missing_price_problem  # Imported here: the price data are large.

    return missing_price_problem(f"{model.provider}:{model.name}")


def build_quotas(config: Config) -> list[Quota]:
    """The quotas of the main configuration."""
    return [
        Quota(
            per=quota.per or "all",
            tools=quota.tool,
            agents=quota.agent,
            principals=quota.principal,
            keys=quota.key,
            calls_per_minute=quota.calls_per_minute,
            calls_per_hour=quota.calls_per_hour,
            calls_per_day=quota.calls_per_day,
            tokens_per_day=quota.tokens_per_day,
            cost_per_day=quota.cost_per_day,
            place=f"quotas[{index}]",
            source=config.source("quotas", index),
        )
        for index, quota in enumerate(config.quotas)
    ]

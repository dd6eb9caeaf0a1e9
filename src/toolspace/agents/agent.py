"""An agent as a program or a configuration describes it: who it is, what it thinks with, what it may use. Runs none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from toolspace.agents.loop import LoopSettings
from toolspace.agents.run_budget import RunLimits
from toolspace.config.agent_settings import AgentModelSettings
from toolspace.config.configuration import AgentSpec
from toolspace.core.model import Model, ModelSettings
from toolspace.core.names import agent_name_problem
from toolspace.core.tool import Tool
from toolspace.errors import RegistrationError

_DEFAULT_SETTINGS = LoopSettings()
_DEFAULT_LIMITS = RunLimits()


class Agent:
    """An agent.

        Agent("researcher", system="You find things out.", model="openai:gpt-5", tools=[search])

    `model` is `provider:name`, a `Model`, or nothing: then it is one whose key is in the environment. `tools` are its
    own, beside those of the toolspace that it is in. `agents` are those that it may call, by name or as they are;
    `destinations` those that it may hand what it was asked to.
    """

    __slots__ = (
        "_agents",
        "_destinations",
        "description",
        "destinations",
        "limits",
        "model",
        "name",
        "settings",
        "spec",
        "subagents",
        "system",
        "tools",
    )

    def __init__(
        self,
        name: str,
        *,
        description: str = "",
        system: str = "",
        model: Model | AgentModelSettings | str | None = None,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        agents: Iterable[Agent | str] = (),
        destinations: Iterable[Agent | str] = (),
        settings: LoopSettings = _DEFAULT_SETTINGS,
        limits: RunLimits = _DEFAULT_LIMITS,
        spec: AgentSpec | None = None,
    ) -> None:
        if (fault := agent_name_problem(name)) is not None:
            raise RegistrationError(f'"{name}" {fault}')
        self.name = name
        self.description = description
        """What other agents read about it."""
        self.system = system
        """Its instructions."""
        self.model = model
        self.tools = tuple(tools)
        self._agents = tuple(agents)
        self._destinations = tuple(destinations)
        self.subagents = _names(self._agents)
        """The names of the agents that it may call."""
        self.destinations = _names(self._destinations)
        """The names of the agents that it may hand its request to."""
        self.settings = settings
        self.limits = limits
        self.spec = spec
        """The configuration that describes it, where one does."""

    @classmethod
    def from_spec(cls, spec: AgentSpec) -> Agent:
        """The agent that configuration describes."""
        model, loop, limits = spec.model, spec.loop, spec.limits
        return cls(
            spec.name,
            description=spec.description,
            system=spec.system,
            model=model,
            agents=spec.agents,
            destinations=spec.router.destinations,
            settings=LoopSettings(
                max_steps=loop.max_steps,
                tool_choice=loop.tool_choice,
                max_tool_calls_per_turn=loop.max_tool_calls_per_turn,
                review=loop.review,
                model_settings=ModelSettings(
                    temperature=model.temperature,
                    max_output_tokens=model.max_output_tokens,
                    reasoning=model.reasoning,
                    timeout=model.timeout,
                ),
            ),
            limits=RunLimits(
                max_tokens=limits.max_tokens,
                max_cost=limits.max_cost,
                timeout=limits.timeout,
                max_depth=limits.max_depth,
            ),
            spec=spec,
        )

    @property
    def has_own_tools(self) -> bool:
        """Whether it has tools, or settings of tools, that are its alone."""
        return bool(self.tools) or (self.spec is not None and self.spec.has_own_tools)

    def referenced_agents(self) -> Iterator[Agent]:
        """The agents that were given with it, as agents and not by name."""
        return (one for one in (*self._agents, *self._destinations) if isinstance(one, Agent))

    def __repr__(self) -> str:
        return f"Agent({self.name!r})"


def _names(agents: tuple[Agent | str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one if isinstance(one, str) else one.name for one in agents))

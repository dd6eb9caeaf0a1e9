"""Describes an agent: its instructions, model, tools, settings and limits. Opens nothing and runs nothing.

Programs create an `Agent`; configuration becomes one through `Agent.from_spec`. `registry.py` opens what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from toolspace.config.agent_settings import AgentLimits, AgentModelSettings
from toolspace.config.configuration import AgentSpec
from toolspace.config.find_and_watch import agent_memory_root
from toolspace.core.call_limits import DEFAULT_REPEATED_CALLS, RepeatedCallLimits
from toolspace.core.ids import derived_id
from toolspace.core.language_model import DEFAULT_SETTINGS, Model, ModelSettings, ToolChoice
from toolspace.core.names import agent_name_problem, sanitise
from toolspace.core.stored_records import AgentScope
from toolspace.core.tool import Tool
from toolspace.core.tool_collections import ToolSelection
from toolspace.errors import RegistrationError

DEFAULT_MAX_STEPS = 20
DEFAULT_MAX_DEPTH = 8


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the model and its tools take turns in one run."""

    max_steps: int = DEFAULT_MAX_STEPS
    tool_choice: ToolChoice = "auto"
    max_tool_calls_per_turn: int | None = None
    """None: the limit of the toolspace."""
    review: Literal["rules", "model"] = "rules"
    """Who decides after a failed call whether the run continues."""
    plain_text: Literal["deliver", "private"] = "deliver"
    """Whether the text of the last turn of a cycle is delivered to a person who waits for an answer."""
    model_settings: ModelSettings = DEFAULT_SETTINGS


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one run may use, including the runs of the agents that it calls. None: unlimited."""

    max_tokens: int | None = None
    max_cost: float | None = None
    """US dollars."""
    timeout: float | None = None
    """Seconds."""
    max_repeated_calls: RepeatedCallLimits | int | None = DEFAULT_REPEATED_CALLS
    """How often the model may make the same call: a number for all tools, or one for read-only tools too."""
    max_depth: int = DEFAULT_MAX_DEPTH
    """How many agents a chain of calls may have, this one included."""


def entity_id_for(name: str) -> str:
    """The id of an agent's entity on every gateway."""
    return derived_id("ent", "agent", name)


_DEFAULT_SETTINGS = LoopSettings()
_DEFAULT_LIMITS = RunLimits()
_DEFAULT_CYCLE_LIMITS = AgentLimits()


class Agent:
    """An agent.

        Agent("researcher", system="You find things out.", model="openai:gpt-5", tools=[search])

    `model` is `provider:name`, the name of a well-known model (`gpt-5`), a `Model`, or None: then the provider whose
    API key is in the environment. An unknown model raises `ModelError`. `tools` are private to the agent; it can also
    use the tools of its toolspace, but of the built-in tools only those that read, unless `tools` has their names or
    the name of a collection (`"allTaskTools"`). `task_tools` are the names of the tools of its background tasks.
    `agents` are the agents that it may call, and `destinations` the agents that it may hand a request off to: `Agent`
    objects or names.
    """

    def __init__(
        self,
        name: str,
        *,
        description: str = "",
        system: str = "",
        model: Model | AgentModelSettings | str | None = None,
        tools: Iterable[Tool | Callable[..., Any] | str] = (),
        task_tools: Iterable[str] | None = None,
        agents: Iterable[Agent | str] = (),
        destinations: Iterable[Agent | str] = (),
        settings: LoopSettings = _DEFAULT_SETTINGS,
        limits: RunLimits = _DEFAULT_LIMITS,
        spec: AgentSpec | None = None,
    ) -> None:
        if (problem := agent_name_problem(name)) is not None:
            raise RegistrationError(f'"{name}" {problem}')
        if isinstance(model, str):
            from toolspace.models.registry import check_model_name  # Imported here: a `Model` needs no provider.

            check_model_name(model)
        self.name = name
        self.description = description
        """What other agents read about it."""
        self.system = system
        """Its instructions."""
        self.model = model
        tools = tuple(tools)
        self.tools = tuple(tool for tool in tools if not isinstance(tool, str))
        """Its own tools, which no other agent has."""
        self.named_tools = ToolSelection.from_names(tool for tool in tools if isinstance(tool, str))
        """The built-in tools that it is offered besides those that only read."""
        self.task_tools = tuple(task_tools) if task_tools is not None else None
        """The names, patterns and collections of the tools of its background tasks; None: those of the agent."""
        self._agents = tuple(agents)
        self._destinations = tuple(destinations)
        self.subagents = _names(self._agents)
        """The names of the agents that it may call."""
        self.destinations = _names(self._destinations)
        """The names of the agents that it may hand its request off to."""
        self.settings = settings
        self.limits = limits
        self.spec = spec
        """The configuration that it was created from; None for an agent of a program."""

    @classmethod
    def from_spec(cls, spec: AgentSpec) -> Agent:
        """Creates the agent that configuration describes."""
        return cls(
            spec.name,
            description=spec.description,
            system=spec.system,
            model=spec.model,
            tools=spec.named_tools,
            task_tools=spec.tasks.tools,
            agents=spec.agents,
            destinations=spec.router.destinations,
            settings=msgspec.structs.replace(
                msgspec.convert(spec.loop, LoopSettings, from_attributes=True),
                model_settings=msgspec.convert(spec.model, ModelSettings, from_attributes=True),
            ),
            limits=msgspec.convert(spec.limits, RunLimits, from_attributes=True),
            spec=spec,
        )

    @property
    def has_own_tools(self) -> bool:
        """Whether it has tools, or settings of tools, that no other agent has."""
        return bool(self.tools) or (self.spec is not None and self.spec.has_own_tools)

    @property
    def enters_space(self) -> bool:
        """Whether a cycle that messages of one space triggered begins in that space."""
        return self.spec is not None and self.spec.auto_enter

    @property
    def scope(self) -> AgentScope:
        """How its sessions are separated."""
        spec = self.spec
        return AgentScope(spec.session, spec.memories.shared) if spec is not None else AgentScope()

    @property
    def cycle_limits(self) -> AgentLimits:
        """How often it may run, and how many inbox events one cycle takes."""
        return self.spec.limits if self.spec is not None else _DEFAULT_CYCLE_LIMITS

    def referenced_agents(self) -> Iterator[Agent]:
        """The agents that were passed to it as objects, not by name."""
        return (agent for agent in (*self._agents, *self._destinations) if isinstance(agent, Agent))

    def __repr__(self) -> str:
        return f"Agent({self.name!r})"


def memory_dir_of(agent: Agent, shared_dir: str | Path | None, scope_key: str = "") -> Path:
    """Returns the directory of the memory files of one session of an agent. No other session or agent has the same.

    `shared_dir`: the `memoryDir` of the toolspace; agents that configure none have theirs beside it. An agent with a
    single session uses the directory that it configures as it is.
    """
    own_dir = agent.spec.memory_dir if agent.spec is not None else None
    has_single_session = agent.spec is None or agent.spec.session == "agent"
    if own_dir is not None and has_single_session and not scope_key:
        return own_dir
    if own_dir is None or has_single_session:
        own_dir = agent_memory_root(shared_dir or Path(".toolspace", "memory")) / sanitise(agent.name)
    return own_dir / session_folder(scope_key)


def session_folder(scope_key: str) -> str:
    """The name of the directory of a session: file systems do not accept every id."""
    return derived_id("ses", scope_key) if scope_key else "main"


def _names(agents: tuple[Agent | str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(agent if isinstance(agent, str) else agent.name for agent in agents))

"""All agents by name, and what each works with once it works: its model, and the orchestrator of its tools.

Asks no model and calls no tool. An agent that never works costs nothing but its description.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from toolspace.agents.agent import Agent
from toolspace.agents.failure_review import ModelReviewer, Reviewer, RuleReviewer
from toolspace.agents.loop import LoopHooks
from toolspace.agents.model_usage import ModelUsageCounter
from toolspace.agents.run_budget import AgentRun
from toolspace.config.agent_files import find_reference_cycles
from toolspace.config.agent_settings import AgentModelSettings
from toolspace.core.context import ToolContext
from toolspace.core.model import Model, ModelListener, Usage
from toolspace.core.names import agent_tool_name, did_you_mean
from toolspace.errors import RegistrationError, ToolNotFoundError
from toolspace.orchestrator.call import context_without_call
from toolspace.orchestrator.orchestrator import ToolOrchestrator

if TYPE_CHECKING:
    from toolspace.models.http import ModelHttpClient

FinalRunStatus = Literal["completed", "failed", "canceled"]
_log = logging.getLogger("toolspace.agents")


class AgentToolspace(Protocol):
    """A toolspace that is one agent's alone."""

    @property
    def orchestrator(self) -> ToolOrchestrator: ...

    def __aenter__(self) -> Coroutine[Any, Any, Any]: ...

    async def aclose(self) -> None: ...

    async def renew(self, agent: Agent, /) -> None:
        """The agent is described otherwise now. What has not changed goes on."""
        ...


class RunRecorder(LoopHooks):
    """Where one run of an agent lives that a program or another agent asked for. This one keeps nothing of it."""

    def __init__(self, context: ToolContext, *, run_id: str | None = None, listen: ModelListener | None = None) -> None:
        self.run_id = run_id
        """None: as whoever opens the run likes."""
        self.context = context
        """Of its calls."""
        self.stop_run: Callable[[], None] | None = None
        """Stops the run, where someone else ends it."""
        self._listen = listen

    def new_listener(self) -> ModelListener | None:
        return self._listen

    async def close(self, status: FinalRunStatus, usage: Usage, error: str | None) -> None:
        """The run has ended."""


class RunRecorders(Protocol):
    """Who keeps the runs of agents that are asked for."""

    async def open(
        self, agent_run: AgentRun, caller: ToolContext, context: ToolContext, tools: ToolOrchestrator
    ) -> RunRecorder:
        """Begins a run, asked for by the call of `caller`. The context of its calls is made of `context`."""
        ...


class AgentResources:
    """An agent that works, and what it works with."""

    __slots__ = ("active_runs", "agent", "is_retired", "model", "own_toolspace", "tools")

    def __init__(self, agent: Agent, model: Model, tools: ToolOrchestrator, own: AgentToolspace | None = None) -> None:
        self.own_toolspace = own
        """Its own toolspace; None where it uses the shared one."""
        self.agent = agent
        self.model = model
        self.tools = tools
        """The orchestrator of all tools that it may use."""
        self.active_runs = 0
        """How many runs it is in."""
        self.is_retired = False

    def new_run(self, request: str = "", *, parent: AgentRun | None = None, before: tuple[str, ...] = ()) -> AgentRun:
        """A frame for one run of it. `before` had the request and handed it on."""
        agent = self.agent
        return AgentRun(
            agent.name,
            limits=agent.limits,
            request=request,
            parent=parent,
            subagents=agent.subagents,
            destinations=agent.destinations,
            previous_agents=before,
        )

    def new_reviewer(self) -> Reviewer:
        """Who decides for one run of it whether to go on after a failure."""
        ways = self.agent.settings
        return ModelReviewer(self.model, ways.model_settings) if ways.review == "model" else RuleReviewer()

    def run_options(self) -> dict[str, Any]:
        """What `tools.run` is to be told of its bounds; what it does not say is as the toolspace has it."""
        limit = self.agent.settings.max_tool_calls_per_turn
        return {} if limit is None else {"max_tool_calls_per_turn": limit}


class AgentRegistry:
    """The agents of a toolspace. Opens what they work with when they first work, and closes it."""

    def __init__(
        self,
        shared: ToolOrchestrator,
        *,
        make_tools: Callable[[Agent], AgentToolspace] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.shared_tools = shared
        self.run_recorders: RunRecorders | None = None
        """Who keeps the runs of agents that agents call; None: nobody."""
        self._make_tools = make_tools
        self._environ = environ
        self._agents: dict[str, Agent] = {}
        self._listeners: list[Callable[[], Awaitable[object] | None]] = []
        self._settling: Sequence[Awaitable[object]] = ()
        self._members: dict[str, AgentResources] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._models: dict[object, Model] = {}
        self.model_usage = ModelUsageCounter()
        """What the models that it opens were asked."""
        self._http: ModelHttpClient | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    # Who there is

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)

    def __contains__(self, name: object) -> bool:
        return name in self._agents

    def get(self, name: str) -> Agent:
        """An agent by its name. Raises `ToolNotFoundError` where there is none."""
        found = self._agents.get(name)
        if found is None:
            near = did_you_mean(name, self._agents)
            known = near or (f"; there are {', '.join(self._agents)}" if 0 < len(self._agents) <= 20 else "")
            raise ToolNotFoundError(f'there is no agent "{name}"{known or "; none is configured"}')
        return found

    def add(self, agents: Iterable[Agent]) -> None:
        """Takes agents in, with those that they were given. Raises `RegistrationError`; then none of them is taken."""
        self.replace([*self._agents.values(), *agents])

    def replace(self, agents: Iterable[Agent]) -> None:
        """Puts these in the place of all. Raises as `add` does. Those that work are told by `renew`."""
        self._agents = _checked(agents)
        told = [listener() for listener in self._listeners]
        self._settling = [one for one in told if one is not None]

    def on_change(self, listener: Callable[[], Awaitable[object] | None]) -> None:
        """Asks to be told when there are other agents. What it gives back, `renew` waits for."""
        self._listeners.append(listener)

    async def reload(self) -> None:
        """Has the agents that work go on as they are described now; those that are gone end with their last run."""
        for name, member in list(self._members.items()):
            agent = self._agents.get(name)
            if agent is member.agent:
                continue
            if agent is None or agent.has_own_tools != (member.own_toolspace is not None):
                self._retire(name)
                continue
            try:
                model = self._model_of(agent)
                if member.own_toolspace is not None:
                    await member.own_toolspace.renew(agent)
            except Exception as error:  # Whatever is wrong with it, the others go on; who needs it is told why.
                _log.warning('the agent "%s" cannot go on as it is described now: %s', name, error)
                self._retire(name)
            else:
                member.agent, member.model = agent, model
        await asyncio.gather(*self._settling, return_exceptions=True)

    # At work

    @contextlib.asynccontextmanager
    async def acquire(self, name: str) -> AsyncGenerator[AgentResources]:
        """What an agent works with, for one run. Raises `ToolNotFoundError`, or `ModelError` where it has no model."""
        member = await self._member(name)
        member.model = self._model_of(member.agent)  # A program may have given it another.
        member.active_runs += 1
        try:
            yield member
        finally:
            member.active_runs -= 1
            if member.is_retired and not member.active_runs:
                self._close_behind(member)

    async def _member(self, name: str) -> AgentResources:
        agent = self.get(name)
        member = self._members.get(name)
        if member is not None:
            return member
        if not agent.has_own_tools or self._make_tools is None:
            member = AgentResources(agent, self._model_of(agent), self.shared_tools)
            self._members[name] = member
            return member
        async with self._opening.setdefault(name, asyncio.Lock()):
            if (member := self._members.get(name)) is not None:
                return member
            agent = self.get(name)
            model = self._model_of(agent)
            own = self._make_tools(agent)
            # Outside the call that needs it first: it stays open for others.
            await asyncio.get_running_loop().create_task(own.__aenter__(), context=context_without_call())
            member = AgentResources(agent, model, own.orchestrator, own)
            if self._closed:
                await own.aclose()
                raise ToolNotFoundError(f'the agent "{name}" cannot work: the toolspace is closed')
            self._members[name] = member
        self._opening.pop(name, None)
        return member

    def _model_of(self, agent: Agent) -> Model:
        wanted = agent.model
        if isinstance(wanted, Model):
            return wanted
        key = _key(wanted)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = self.model_usage.wrap(self._open(wanted))
        return found

    def _open(self, wanted: AgentModelSettings | str | None) -> Model:
        from toolspace.models.registry import DEMO, open_model  # Here: scripted agents need no provider.

        if not isinstance(wanted, AgentModelSettings):
            provider, colon, name = (wanted or "").partition(":")
            wanted = AgentModelSettings(provider=provider if colon else None, name=name if colon else provider)
        if self._http is None and wanted.provider != DEMO:
            from toolspace.models.http import ModelHttpClient

            self._http = ModelHttpClient()
        return open_model(
            wanted.provider,
            wanted.name,
            base_url=wanted.base_url,
            api_key=wanted.api_key,
            headers=wanted.headers,
            environ=self._environ,
            retries=wanted.retries,
            http=self._http,
        )

    def _retire(self, name: str) -> None:
        member = self._members.pop(name)
        member.is_retired = True
        if not member.active_runs:
            self._close_behind(member)

    def _close_behind(self, member: AgentResources) -> None:
        if member.own_toolspace is not None:
            self.run_in_background(member.own_toolspace.aclose())

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Does something beside, to its end: whoever wants it done may be canceled, or need not wait."""
        task = asyncio.get_running_loop().create_task(_safely(work), context=context_without_call())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def aclose(self) -> None:
        """Closes the toolspaces and the models that it opened."""
        self._closed = True
        members, self._members = list(self._members.values()), {}
        await asyncio.gather(
            *(_safely(one.own_toolspace.aclose()) for one in members if one.own_toolspace is not None), *self._closing
        )
        models, self._models = list(self._models.values()), {}
        for model in models:
            await _safely(model.aclose())
        if self._http is not None:
            await self._http.aclose()


async def _safely(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:  # Nobody is there to be told.
        _log.exception("what an agent left behind did not end well")


def _checked(agents: Iterable[Agent]) -> dict[str, Agent]:
    """All of them by name, with those that they were given, if they hang together."""
    found: dict[str, Agent] = {}
    by_tool: dict[str, str] = {}
    waiting = list(agents)[::-1]
    while waiting:
        agent = waiting.pop()
        known = found.setdefault(agent.name, agent)
        if known is not agent:
            raise RegistrationError(f'there are two agents "{agent.name}"; rename one')
        tool = agent_tool_name(agent.name)
        other = by_tool.setdefault(tool.casefold(), agent.name)
        if other != agent.name:
            raise RegistrationError(f'the agents "{other}" and "{agent.name}" would be one tool, {tool}; rename one')
        waiting += [one for one in agent.referenced_agents() if found.get(one.name) is not one]
    for agent in found.values():
        for what, names in (("agents", agent.subagents), ("destinations", agent.destinations)):
            for name in names:
                if name not in found:
                    near = did_you_mean(name, found)
                    raise RegistrationError(f'{what} of the agent "{agent.name}": there is no agent "{name}"{near}')
    routes = {name: agent.destinations for name, agent in found.items() if agent.destinations}
    for circle in find_reference_cycles(routes):
        line = " → ".join((*circle, circle[0]))
        raise RegistrationError(f"agents would hand requests round in a circle: {line}; take a destination out")
    return found


def _key(model: AgentModelSettings | str | None) -> object:
    """What agents have to agree in to share one model: settings of a request are not a part of it."""
    if not isinstance(model, AgentModelSettings):
        return model
    headers = tuple(sorted(model.headers.items()))
    return (model.provider, model.name, model.base_url, model.api_key, headers, model.retries)

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

from toolspace.agents.definition import Agent
from toolspace.agents.failure_review import ModelReviewer, Reviewer, RuleReviewer
from toolspace.agents.loop import Keeper
from toolspace.agents.model_usage import Spending
from toolspace.agents.run_budget import Frame
from toolspace.config.model import AgentModel
from toolspace.config.routes import find_circles
from toolspace.core.agent_names import tool_of
from toolspace.core.context import ToolContext
from toolspace.core.conversation import Listener, Usage
from toolspace.core.model import Model
from toolspace.core.names import did_you_mean
from toolspace.errors import RegistrationError, ToolNotFoundError
from toolspace.orchestrator.call import outside
from toolspace.orchestrator.orchestrator import ToolOrchestrator

if TYPE_CHECKING:
    from toolspace.models.http import ModelHttp

RunEnd = Literal["completed", "failed", "canceled"]
_log = logging.getLogger("toolspace.agents")


class OwnTools(Protocol):
    """A toolspace that is one agent's alone."""

    @property
    def orchestrator(self) -> ToolOrchestrator: ...

    def __aenter__(self) -> Coroutine[Any, Any, Any]: ...

    async def aclose(self) -> None: ...

    async def renew(self, agent: Agent, /) -> None:
        """The agent is described otherwise now. What has not changed goes on."""
        ...


class Home(Keeper):
    """Where one run of an agent lives that a program or another agent asked for. This one keeps nothing of it."""

    def __init__(self, context: ToolContext, *, run_id: str | None = None, listen: Listener | None = None) -> None:
        self.run_id = run_id
        """None: as whoever opens the run likes."""
        self.context = context
        """Of its calls."""
        self.on_stop: Callable[[], None] | None = None
        """Stops the run, where someone else ends it."""
        self._listen = listen

    def listener(self) -> Listener | None:
        return self._listen

    async def close(self, status: RunEnd, usage: Usage, error: str | None) -> None:
        """The run has ended."""


class Housing(Protocol):
    """Who keeps the runs of agents that are asked for."""

    async def open(self, frame: Frame, caller: ToolContext, context: ToolContext, tools: ToolOrchestrator) -> Home:
        """Begins a run, asked for by the call of `caller`. The context of its calls is made of `context`."""
        ...


class Member:
    """An agent that works, and what it works with."""

    __slots__ = ("agent", "engaged", "model", "own", "retired", "tools")

    def __init__(self, agent: Agent, model: Model, tools: ToolOrchestrator, own: OwnTools | None = None) -> None:
        self.own = own
        """Its own toolspace; None where it uses the shared one."""
        self.agent = agent
        self.model = model
        self.tools = tools
        """The orchestrator of all tools that it may use."""
        self.engaged = 0
        """How many runs it is in."""
        self.retired = False

    def frame(self, request: str = "", *, parent: Frame | None = None, before: tuple[str, ...] = ()) -> Frame:
        """A frame for one run of it. `before` had the request and handed it on."""
        agent = self.agent
        return Frame(
            agent.name,
            bounds=agent.bounds,
            request=request,
            parent=parent,
            helpers=agent.helpers,
            destinations=agent.destinations,
            before=before,
        )

    def reviewer(self) -> Reviewer:
        """Who decides for one run of it whether to go on after a failure."""
        ways = self.agent.ways
        return ModelReviewer(self.model, ways.settings) if ways.review == "model" else RuleReviewer()

    def run_options(self) -> dict[str, Any]:
        """What `tools.run` is to be told of its bounds; what it does not say is as the toolspace has it."""
        limit = self.agent.ways.max_tool_calls_per_turn
        return {} if limit is None else {"max_tool_calls_per_turn": limit}


class Crew:
    """The agents of a toolspace. Opens what they work with when they first work, and closes it."""

    def __init__(
        self,
        shared: ToolOrchestrator,
        *,
        make_tools: Callable[[Agent], OwnTools] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.shared = shared
        self.housing: Housing | None = None
        """Who keeps the runs of agents that agents call; None: nobody."""
        self._make_tools = make_tools
        self._environ = environ
        self._agents: dict[str, Agent] = {}
        self._listeners: list[Callable[[], Awaitable[object] | None]] = []
        self._settling: Sequence[Awaitable[object]] = ()
        self._members: dict[str, Member] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._models: dict[object, Model] = {}
        self.spending = Spending()
        """What the models that it opens were asked."""
        self._http: ModelHttp | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    # Who there is

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)

    def __contains__(self, name: object) -> bool:
        return name in self._agents

    def find(self, name: str) -> Agent:
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

    async def renew(self) -> None:
        """Has the agents that work go on as they are described now; those that are gone end with their last run."""
        for name, member in list(self._members.items()):
            agent = self._agents.get(name)
            if agent is member.agent:
                continue
            if agent is None or agent.has_own_tools != (member.own is not None):
                self._retire(name)
                continue
            try:
                model = self._model_of(agent)
                if member.own is not None:
                    await member.own.renew(agent)
            except Exception as error:  # Whatever is wrong with it, the others go on; who needs it is told why.
                _log.warning('the agent "%s" cannot go on as it is described now: %s', name, error)
                self._retire(name)
            else:
                member.agent, member.model = agent, model
        await asyncio.gather(*self._settling, return_exceptions=True)

    # At work

    @contextlib.asynccontextmanager
    async def engage(self, name: str) -> AsyncGenerator[Member]:
        """What an agent works with, for one run. Raises `ToolNotFoundError`, or `ModelError` where it has no model."""
        member = await self._member(name)
        member.model = self._model_of(member.agent)  # A program may have given it another.
        member.engaged += 1
        try:
            yield member
        finally:
            member.engaged -= 1
            if member.retired and not member.engaged:
                self._close_behind(member)

    async def _member(self, name: str) -> Member:
        agent = self.find(name)
        member = self._members.get(name)
        if member is not None:
            return member
        if not agent.has_own_tools or self._make_tools is None:
            member = Member(agent, self._model_of(agent), self.shared)
            self._members[name] = member
            return member
        async with self._opening.setdefault(name, asyncio.Lock()):
            if (member := self._members.get(name)) is not None:
                return member
            agent = self.find(name)
            model = self._model_of(agent)
            own = self._make_tools(agent)
            # Outside the call that needs it first: it stays open for others.
            await asyncio.get_running_loop().create_task(own.__aenter__(), context=outside())
            member = Member(agent, model, own.orchestrator, own)
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
            found = self._models[key] = self.spending.counting(self._open(wanted))
        return found

    def _open(self, wanted: AgentModel | str | None) -> Model:
        from toolspace.models.registry import DEMO, open_model  # Here: scripted agents need no provider.

        if not isinstance(wanted, AgentModel):
            provider, colon, name = (wanted or "").partition(":")
            wanted = AgentModel(provider=provider if colon else None, name=name if colon else provider)
        if self._http is None and wanted.provider != DEMO:
            from toolspace.models.http import ModelHttp

            self._http = ModelHttp()
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
        member.retired = True
        if not member.engaged:
            self._close_behind(member)

    def _close_behind(self, member: Member) -> None:
        if member.own is not None:
            self.do_behind(member.own.aclose())

    def do_behind(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Does something beside, to its end: whoever wants it done may be canceled, or need not wait."""
        task = asyncio.get_running_loop().create_task(_safely(work), context=outside())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def aclose(self) -> None:
        """Closes the toolspaces and the models that it opened."""
        self._closed = True
        members, self._members = list(self._members.values()), {}
        await asyncio.gather(*(_safely(one.own.aclose()) for one in members if one.own is not None), *self._closing)
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
        tool = tool_of(agent.name)
        other = by_tool.setdefault(tool.casefold(), agent.name)
        if other != agent.name:
            raise RegistrationError(f'the agents "{other}" and "{agent.name}" would be one tool, {tool}; rename one')
        waiting += [one for one in agent.around() if found.get(one.name) is not one]
    for agent in found.values():
        for what, names in (("agents", agent.helpers), ("destinations", agent.destinations)):
            for name in names:
                if name not in found:
                    near = did_you_mean(name, found)
                    raise RegistrationError(f'{what} of the agent "{agent.name}": there is no agent "{name}"{near}')
    routes = {name: agent.destinations for name, agent in found.items() if agent.destinations}
    for circle in find_circles(routes):
        line = " → ".join((*circle, circle[0]))
        raise RegistrationError(f"agents would hand requests round in a circle: {line}; take a destination out")
    return found


def _key(model: AgentModel | str | None) -> object:
    """What agents have to agree in to share one model: settings of a request are not a part of it."""
    if not isinstance(model, AgentModel):
        return model
    headers = tuple(sorted(model.headers.items()))
    return (model.provider, model.name, model.base_url, model.api_key, headers, model.retries)

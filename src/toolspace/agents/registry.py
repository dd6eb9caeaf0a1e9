"""Holds all agents of a toolspace by name, and opens the model and the tools of an agent when it first runs.

The toolspace owns the registry; requests, cycles and the agents' tools read it. It counts the requests to the models
that it opens, for the metrics endpoint. Runs no agent. An agent that never runs costs only its description.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from toolspace.agents.agent import Agent, entity_id_for
from toolspace.agents.agent_run import AgentRun, PreparedAgent
from toolspace.agents.loop_hooks import LoopHooks
from toolspace.config.agent_settings import AgentModelSettings, ModelPriceSettings
from toolspace.config.load import find_reference_cycles
from toolspace.config.secret_references import load_secrets, resolve_secrets
from toolspace.core.extension_points import ConversationStore
from toolspace.core.language_model import NO_USAGE, Model, ModelListener, ModelRequest, ModelTurn, Usage
from toolspace.core.names import agent_tool_name, did_you_mean
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ConfigError, ModelError, RegistrationError, ToolNotFoundError
from toolspace.orchestrator.call import cancel_all, context_without_call, start_in_background
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.storage.memory_conversations import MemoryConversations

if TYPE_CHECKING:
    from toolspace.models.http import ModelHttpClient

FinalRunStatus = Literal["completed", "failed", "canceled"]
_log = logging.getLogger("toolspace.agents")


class AgentToolspace(Protocol):
    """A toolspace that only one agent uses."""

    @property
    def orchestrator(self) -> ToolOrchestrator: ...

    def __aenter__(self) -> Coroutine[Any, Any, Any]: ...

    async def aclose(self) -> None: ...

    async def renew(self, agent: Agent, /) -> None:
        """Applies the agent's new description. What has not changed stays open."""
        ...


class RunRecorder(LoopHooks):
    """The hooks of a run that answers a request of a program or of another agent. This base class stores nothing."""

    def __init__(self, *, run_id: str | None = None) -> None:
        self.run_id = run_id
        """None: the orchestrator chooses it."""
        self.stop_run: Callable[[], None] | None = None
        """Stops the run; set while the run is under way."""

    async def close(self, status: FinalRunStatus, usage: Usage, error: str | None) -> None:
        """Stores the end of the run."""


OpenRunRecorder = Callable[[AgentRun, ToolContext, ToolContext, ToolOrchestrator], Awaitable[RunRecorder]]
"""Stores the start of a run, for a call with the first context. The second is that of the run's calls; the recorder
completes it."""


class _OpenAgent(msgspec.Struct, eq=False):
    """An agent whose tools are open."""

    agent: Agent
    tools: ToolOrchestrator
    own_toolspace: AgentToolspace | None = None
    """None: it uses the shared tools."""
    active_runs: int = 0
    is_retired: bool = False
    """Whether its toolspace closes after the last active run."""


class AgentRegistry:
    """The agents of a toolspace."""

    def __init__(
        self,
        shared_tools: ToolOrchestrator,
        *,
        make_tools: Callable[[Agent], AgentToolspace] | None = None,
        environ: Mapping[str, str] | None = None,
        conversations: ConversationStore | None = None,
    ) -> None:
        self.shared_tools = shared_tools
        self.conversations = conversations or MemoryConversations()
        """The sessions of programs' runs."""
        self.open_run_recorder: OpenRunRecorder | None = None
        """Stores the runs that answer requests; the gateway sets it. None: they are in memory only."""
        self.model_usage: dict[str, ModelUsage] = {}
        """The requests to the models that the registry opened, by name of the model, such as `openai:gpt-5`."""
        self._make_tools = make_tools
        self._environ = os.environ if environ is None else environ
        self._agents: dict[str, Agent] = {}
        self._change_listeners: list[Callable[[], Awaitable[object] | None]] = []
        self._pending_updates: Sequence[Awaitable[object]] = ()
        """What the listeners of the last change still do."""
        self._open_agents: dict[str, _OpenAgent] = {}
        self._opening_locks: dict[str, asyncio.Lock] = {}
        self._models: dict[object, Model] = {}
        self._http: ModelHttpClient | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._streamed_runs: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    # The agents

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)

    def __contains__(self, name: object) -> bool:
        return name in self._agents

    def find(self, name: str) -> Agent | None:
        return self._agents.get(name)

    def get(self, name: str) -> Agent:
        """Returns an agent by name. Raises `ToolNotFoundError`."""
        agent = self._agents.get(name)
        if agent is None:
            hint = did_you_mean(name, self._agents)
            if not self._agents:
                hint = "; none is configured"
            elif not hint and len(self._agents) <= 20:
                hint = f"; there are {', '.join(self._agents)}"
            raise ToolNotFoundError(f'there is no agent "{name}"{hint}')
        return agent

    def add(self, agents: Iterable[Agent]) -> None:
        """Adds agents, and the agents that they refer to. Raises `RegistrationError`, and then adds none."""
        self.replace([*self._agents.values(), *agents])

    def replace(self, agents: Iterable[Agent]) -> None:
        """Replaces all agents. Raises `RegistrationError`, and then changes nothing. `reload` updates the open ones."""
        self._agents = _validate(agents)
        updates = [listener() for listener in self._change_listeners]
        self._pending_updates = [update for update in updates if update is not None]

    def on_change(self, listener: Callable[[], Awaitable[object] | None]) -> None:
        """Calls `listener` whenever the agents change. `reload` waits for the awaitable that it returns."""
        self._change_listeners.append(listener)

    async def reload(self) -> None:
        """Applies changed descriptions to open agents. The tools of a removed agent close after its last run."""
        for name, open_agent in list(self._open_agents.items()):
            agent = self._agents.get(name)
            if agent is open_agent.agent:
                continue
            own_toolspace = open_agent.own_toolspace
            if agent is None or agent.has_own_tools != (own_toolspace is not None):
                self._retire(name)
                continue
            try:
                self._get_model(agent)
                if own_toolspace is not None:
                    await own_toolspace.renew(agent)
            except Exception as error:  # One faulty agent must not stop the reload; its next run reports the error.
                _log.warning('agent "%s": its new configuration cannot be used: %s', name, error)
                self._retire(name)
            else:
                open_agent.agent = agent
        await asyncio.gather(*self._pending_updates, return_exceptions=True)

    def find_tools(self, entity_id: str | None) -> ToolOrchestrator:
        """Returns the tools of the agent with this entity id, if they are open; else those that all agents share."""
        open_agents = self._open_agents.values()
        matches = (open_agent.tools for open_agent in open_agents if entity_id_for(open_agent.agent.name) == entity_id)
        return next(matches, self.shared_tools)

    # Running agents

    @contextlib.asynccontextmanager
    async def acquire(self, name: str) -> AsyncGenerator[PreparedAgent]:
        """Opens what an agent needs, for one run. Raises `ToolNotFoundError`, or `ModelError` if it has no model."""
        open_agent = await self._get_open_agent(name)
        agent = open_agent.agent
        await _load_model_secrets(agent)
        model = self._get_model(agent)  # Not stored: a program may have set another one.
        open_agent.active_runs += 1
        try:
            yield PreparedAgent(agent=agent, model=model, tools=open_agent.tools, settings=agent.settings)
        finally:
            open_agent.active_runs -= 1
            if open_agent.is_retired and not open_agent.active_runs:
                self._close_toolspace(open_agent)

    @contextlib.asynccontextmanager
    async def open_tools(self, name: str) -> AsyncGenerator[ToolOrchestrator]:
        """Opens the tools of an agent to inspect them, without its model. Raises `ToolNotFoundError`, `ConfigError`."""
        agent = self.get(name)
        if not agent.has_own_tools or self._make_tools is None:
            yield self.shared_tools
            return
        await _load_tool_secrets(agent)
        toolspace = self._make_tools(agent)
        await toolspace.__aenter__()
        try:
            yield toolspace.orchestrator
        finally:
            await toolspace.aclose()

    async def _get_open_agent(self, name: str) -> _OpenAgent:
        agent = self.get(name)
        open_agent = self._open_agents.get(name)
        if open_agent is not None:
            return open_agent
        if not agent.has_own_tools or self._make_tools is None:
            await _load_model_secrets(agent)
            self._get_model(agent)  # Raises before the agent counts as open.
            open_agent = self._open_agents[name] = _OpenAgent(agent, self.shared_tools)
            return open_agent
        async with self._opening_locks.setdefault(name, asyncio.Lock()):
            if (open_agent := self._open_agents.get(name)) is not None:
                return open_agent
            agent = self.get(name)
            await _load_model_secrets(agent)
            self._get_model(agent)
            await _load_tool_secrets(agent)
            toolspace = self._make_tools(agent)
            # Not in the context of the call that needs it first: it stays open for other calls.
            await asyncio.get_running_loop().create_task(toolspace.__aenter__(), context=context_without_call())
            if self._is_closed:
                await toolspace.aclose()
                raise ToolNotFoundError(f'the agent "{name}" cannot run: the toolspace is closed')
            open_agent = self._open_agents[name] = _OpenAgent(agent, toolspace.orchestrator, toolspace)
        self._opening_locks.pop(name, None)
        return open_agent

    def _get_model(self, agent: Agent) -> Model:
        settings = agent.model
        if isinstance(settings, Model):
            return settings
        try:
            settings = resolve_secrets(settings)
        except ConfigError as error:
            raise _model_secret_error(agent, error) from None
        key = _model_key(settings)
        model = self._models.get(key)
        price = settings.price if isinstance(settings, AgentModelSettings) else None
        if model is None:
            model = self._open_model(settings)
            usage = self.model_usage.setdefault(model.name, ModelUsage())
            model = self._models[key] = _CountingModel(model, usage, price)
        if agent.limits.max_cost is not None and price is None:
            from toolspace.models.prices import missing_price_problem

            if (problem := missing_price_problem(model.name)) is not None:
                raise ModelError("invalid", f'the agent "{agent.name}": {problem}')
        return model

    def _open_model(self, settings: AgentModelSettings | str | None) -> Model:
        from toolspace.models.registry import DEMO, open_model  # Imported here: scripted agents need no provider.

        if not isinstance(settings, AgentModelSettings):
            provider, colon, name = (settings or "").partition(":")
            settings = AgentModelSettings(provider=provider if colon else None, name=name if colon else provider)
        if self._http is None and settings.provider != DEMO:
            from toolspace.models.http import ModelHttpClient

            self._http = ModelHttpClient()
        return open_model(
            settings.provider,
            settings.name,
            base_url=settings.base_url,
            api_key=settings.api_key,
            headers=settings.headers,
            environ=self._environ,
            retries=settings.retries,
            http=self._http,
        )

    def _retire(self, name: str) -> None:
        open_agent = self._open_agents.pop(name)
        open_agent.is_retired = True
        if not open_agent.active_runs:
            self._close_toolspace(open_agent)

    def _close_toolspace(self, open_agent: _OpenAgent) -> None:
        if open_agent.own_toolspace is not None:
            self.run_in_background(open_agent.own_toolspace.aclose())

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs work to its end, even if its caller is cancelled. `aclose` waits for it."""
        return start_in_background(self._background, _log_failure(work))

    def own_run(self, task: asyncio.Task[Any]) -> None:
        """Makes the registry the owner of a run that a program streams: `aclose` ends it."""
        self._streamed_runs.add(task)
        task.add_done_callback(self._streamed_runs.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # The stream may be gone.

    async def aclose(self) -> None:
        """Ends the streamed runs, and closes the toolspaces and models that the registry opened."""
        self._is_closed = True
        await cancel_all(self._streamed_runs - {asyncio.current_task()})
        open_agents, self._open_agents = list(self._open_agents.values()), {}
        toolspaces = [agent.own_toolspace for agent in open_agents if agent.own_toolspace is not None]
        await asyncio.gather(*(_log_failure(toolspace.aclose()) for toolspace in toolspaces), *self._background)
        models, self._models = list(self._models.values()), {}
        for model in models:
            await _log_failure(model.aclose())
        if self._http is not None:
            await self._http.aclose()


class ModelUsage(msgspec.Struct):
    """The requests to one model."""

    requests: dict[str, int] = {}
    """Counts by result: `ok`, `canceled`, or the kind of error."""
    usage: Usage = NO_USAGE

    def add(self, result: str, usage: Usage = NO_USAGE) -> None:
        self.requests[result] = self.requests.get(result, 0) + 1
        self.usage = self.usage + usage


class _CountingModel(Model):
    """The same model, with its requests counted, and with the configured price if there is one."""

    def __init__(self, model: Model, usage: ModelUsage, price: ModelPriceSettings | None) -> None:
        self.name = model.name
        self.context_window = model.context_window
        self._model = model
        self._usage = usage
        self._price = price

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        try:
            turn = await self._model.respond(request, listen)
        except ModelError as error:
            self._usage.add(error.kind)
            raise
        except asyncio.CancelledError:
            self._usage.add("canceled")
            raise
        if self._price is not None:
            usage = msgspec.structs.replace(turn.usage, cost=_calculate_cost(self._price, turn.usage))
            turn = msgspec.structs.replace(turn, usage=usage)
        self._usage.add("ok", turn.usage)
        return turn

    async def aclose(self) -> None:
        await self._model.aclose()


def _calculate_cost(price: ModelPriceSettings, usage: Usage) -> float:
    cached_price = price.input if price.cached_input is None else price.cached_input
    uncached_tokens = max(0, usage.input_tokens - usage.cached_tokens)
    dollars = uncached_tokens * price.input + usage.cached_tokens * cached_price + usage.output_tokens * price.output
    return dollars / 1_000_000


async def _log_failure(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:  # No caller is left to receive it.
        _log.exception("cleaning up after an agent failed")


def _validate(agents: Iterable[Agent]) -> dict[str, Agent]:
    """Returns all agents by name, with those that they refer to. Raises `RegistrationError` if they contradict."""
    by_name: dict[str, Agent] = {}
    names_by_tool: dict[str, str] = {}
    queue = list(agents)[::-1]
    while queue:
        agent = queue.pop()
        if by_name.setdefault(agent.name, agent) is not agent:
            raise RegistrationError(f'there are two agents "{agent.name}"; rename one')
        tool_name = agent_tool_name(agent.name)
        other_name = names_by_tool.setdefault(tool_name.casefold(), agent.name)
        if other_name != agent.name:
            raise RegistrationError(
                f'the agents "{other_name}" and "{agent.name}" would be one tool, {tool_name}; rename one'
            )
        queue += [item for item in agent.referenced_agents() if by_name.get(item.name) is not item]
    for agent in by_name.values():
        for setting, names in (("agents", agent.subagents), ("destinations", agent.destinations)):
            for name in names:
                if name not in by_name:
                    hint = did_you_mean(name, by_name)
                    raise RegistrationError(f'{setting} of the agent "{agent.name}": there is no agent "{name}"{hint}')
    destinations = {name: agent.destinations for name, agent in by_name.items() if agent.destinations}
    for cycle in find_reference_cycles(destinations):
        path = " → ".join((*cycle, cycle[0]))
        raise RegistrationError(f"requests could be handed off in a circle: {path}; remove a destination")
    return by_name


async def _load_model_secrets(agent: Agent) -> None:
    """Reads the secrets of an agent's model without blocking the event loop. Raises `ModelError`."""
    if isinstance(agent.model, AgentModelSettings):
        try:
            await load_secrets(agent.model)
        except ConfigError as error:
            raise _model_secret_error(agent, error) from None


async def _load_tool_secrets(agent: Agent) -> None:
    """Reads the secrets of an agent's own tools without blocking the event loop. Raises `ConfigError`."""
    config = agent.spec.config if agent.spec is not None else None
    if config is not None:
        await load_secrets(*config.list_secret_holders())


def _model_secret_error(agent: Agent, error: ConfigError) -> ModelError:
    return ModelError("no_key", f'the model of the agent "{agent.name}" has no credentials: {error}')


def _model_key(settings: AgentModelSettings | str | None) -> object:
    """Agents with the same key share one model. The settings of single requests are not part of it."""
    if not isinstance(settings, AgentModelSettings):
        return settings
    headers = tuple(sorted(settings.headers.items()))
    access = (settings.base_url, settings.api_key, headers)
    return (settings.provider, settings.name, *access, settings.retries, settings.price)

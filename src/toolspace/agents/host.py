"""The agents of a gateway: each an entity with an inbox and a session of its own, for as long as it is configured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toolspace.agents import compaction, handoff, reflection, tasks
from toolspace.agents.agent import Agent
from toolspace.agents.cycle import Cycle, PreparedAgent
from toolspace.agents.cycle_transactions import SessionLease, WriteProgram
from toolspace.agents.loop import LoopSettings, RunOutcome
from toolspace.agents.prompt_builder import load_prompt_context
from toolspace.agents.registry import AgentRegistry, AgentResources
from toolspace.agents.scheduler import RETRY_DELAYS_MS, CycleLimits, Scheduler
from toolspace.agents.task_tools import TaskService
from toolspace.config.agent_settings import AgentLimits, ConsciousnessSettings
from toolspace.core.context import ToolContext
from toolspace.core.ids import derived_id
from toolspace.core.names import sanitise
from toolspace.core.records import TaskRecord
from toolspace.errors import StorageError, ToolspaceError
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.database import Program
from toolspace.storage.queries import entities, sessions
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import tasks as rows
from toolspace.storage.queries.sessions import SessionRecord

# MERGED from task_sessions: What sessions do besides an agent's own life: its tasks, and looking back on them. Pre…

_KINDS_OF_CHOICE = ("auto", "required", "none")


async def prepare(ledger: Ledger, thinker: PreparedAgent, session: SessionRecord) -> PreparedAgent:
    """The thinker of a task, or of looking back on one: the agent's model and limits, tools and instructions of its
    own."""
    context = ToolContext(agent_id=thinker.name, agent_entity_id=session.agent_entity_id)
    task_id = rows.task_id_of(session.id)
    if session.kind == "reflection":
        return msgspec.structs.replace(
            thinker,
            task_prompt=await reflection.build_prompt(thinker.name, thinker.tools, context),
            tool_filter=reflection.is_allowed_tool,
            settings=msgspec.structs.replace(thinker.settings, tool_choice="auto"),
            task_id=task_id,
        )
    task = await ledger.read(tasks.get_task, session.agent_entity_id, task_id)
    known = await ledger.read(load_prompt_context, session.agent_entity_id)
    run = await ledger.read(run_rows.find, task.run_id)
    is_somewhere = run is not None and run.space_id is not None
    instructions = thinker.tools.instructions(context=context)
    return msgspec.structs.replace(
        thinker,
        task_prompt=tasks.build_prompt(task, thinker.name, thinker.system, known, tools=instructions),
        tool_filter=tasks.is_allowed_tool if is_somewhere else tasks.is_allowed_outside_spaces,
        settings=_task_settings(thinker.settings),
        task_id=task_id,
    )


def after(session: SessionRecord, outcome: RunOutcome | None, cycle: Cycle | None) -> WriteProgram:
    """What else happens in the moment that such a session's run ends."""
    if session.kind == "reflection":
        return reflection.completion(session.id, outcome)
    reflects = cycle is not None and reflection.is_possible(cycle.prepared.tools)
    return tasks.completion(session.id, outcome, reflection.start if reflects else _leave)


def _leave(effects: Effects, task: TaskRecord) -> Program[None]:
    """Nobody looks back: what was learned could not be kept anywhere."""
    return
    yield  # A program, though it asks for nothing itself.


def _task_settings(ways: LoopSettings) -> LoopSettings:
    """As the agent's; but the one tool that the agent has to call is not the task's."""
    return ways if ways.tool_choice in _KINDS_OF_CHOICE else msgspec.structs.replace(ways, tool_choice="auto")


_log = logging.getLogger("toolspace.agents")
_AFTER_TROUBLE_SECONDS = 1.0


def entity_id_for(name: str) -> str:
    """The id of the entity that an agent is."""
    return derived_id("ent", "agent", name)


class AgentHost:
    """Knows the agents of this process, and what each may do. `async with` lets them think."""

    def __init__(
        self,
        desk: PendingCalls,
        agents: AgentRegistry,
        *,
        session_dir: Path,
        library: DocumentLibrary | None = None,
        max_active: int = 32,
        retry_delays: Sequence[int] = RETRY_DELAYS_MS,
    ) -> None:
        self._ledger = desk.ledger
        self._library = library
        self._agents = agents
        self._session_dir = session_dir
        """Where archives of sessions are kept, unless an agent says otherwise."""
        self._names: dict[str, str] = {}
        """Names by entity."""
        self._settling = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.scheduler = Scheduler(desk, self, max_active=max_active, retry_delays=retry_delays)

    async def __aenter__(self) -> AgentHost:
        await self.register_agents()
        await self.scheduler.__aenter__()
        self._agents.on_change(self._changed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        await self.scheduler.__aexit__()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def register_agents(self) -> None:
        """Gives every agent that is configured its entity, its session and its spaces. Again after a reload."""
        async with self._settling:  # One after the other: the last one to end knows who there is now.
            agents = list(self._agents)
            for agent in agents:
                entity_id = entity_id_for(agent.name)
                await self._ledger.commit(_settle, entity_id, agent)
                self._names[entity_id] = agent.name
                self.scheduler.watch(entity_id, entity_id)
            for gone in self._names.keys() - {entity_id_for(agent.name) for agent in agents}:
                self.scheduler.unwatch(gone)
                del self._names[gone]
        if self._library is not None:
            self._own(self._read_folders(self._library, agents))

    def _changed(self) -> asyncio.Task[None] | None:
        """The configuration of agents was read anew."""
        return None if self._closed else self._own(self._settle_again())

    async def _settle_again(self) -> None:
        before = frozenset(self._names)
        while True:
            try:
                await self.register_agents()
                break
            except StorageError as error:
                _log.warning("agents that are new have to wait: %s", error)
                await asyncio.sleep(_AFTER_TROUBLE_SECONDS)
        for entity_id in self._names.keys() - before:
            self.scheduler.wake(entity_id)  # It may have been here before, and have something in its inbox.

    async def _read_folders(self, library: DocumentLibrary, agents: Sequence[Agent]) -> None:
        """Reads what the agents are to know. Also of those with nothing to read: they may have had something before."""
        async with self._reading:
            for agent in agents:
                paths = agent.spec.knowledge if agent.spec is not None else ()
                try:
                    await library.sync_folders(entity_id_for(agent.name), paths)
                except (OSError, ToolspaceError) as error:
                    _log.warning('the documents of the agent "%s" could not be read: %s', agent.name, error)

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @property
    def agent_names(self) -> Mapping[str, str]:
        """The names of the agents by their entities."""
        return self._names

    # What the dispatcher asks

    def find_limits(self, session: SessionRecord) -> CycleLimits | None:
        name = self._names.get(session.agent_entity_id)
        if name is None or name not in self._agents:
            return None
        agent = self._agents.get(name)
        said = agent.spec.limits if agent.spec is not None else AgentLimits()
        return CycleLimits(
            max_agent_turns=said.max_agent_turns,
            cycles_per_minute=said.cycles_per_minute,
            inbox_batch=said.inbox_batch,
            is_router=bool(agent.destinations),
        )

    @contextlib.asynccontextmanager
    async def prepare(self, session: SessionRecord) -> AsyncGenerator[PreparedAgent]:
        async with self._agents.acquire(self._names[session.agent_entity_id]) as member:
            thinker = self._thinker(member, session)
            yield thinker if session.kind == "agent" else await prepare(self._ledger, thinker, session)

    def completion(
        self, session: SessionRecord, outcome: RunOutcome | None, cycle: Cycle | None
    ) -> WriteProgram | None:
        if session.kind != "agent":
            return after(session, outcome, cycle)
        if outcome is None or outcome.handoff is None or cycle is None:
            return None
        return handoff.build_handoff(cycle, outcome.handoff, entity_id_for(outcome.handoff.agent))

    async def compact(self, session: SessionRecord, thinker: PreparedAgent, hold: SessionLease) -> None:
        """Between cycles: what an agent has in mind is brought within its bounds."""
        if session.kind != "agent" or thinker.name not in self._agents:
            return  # It stays as it is, for whoever looks back on it.
        spec = self._agents.get(thinker.name).spec
        said = spec.consciousness if spec is not None else ConsciousnessSettings()
        await compaction.compact(
            self._ledger,
            hold,
            thinker.model,
            max_tokens=said.max_tokens,
            min_recent_cycles=said.min_recent_cycles,
            folder=self.archive_dir(thinker.name),
            settings=thinker.settings.model_settings,
        )

    def archive_dir(self, name: str) -> Path:
        """The folder of an agent's archives, in the one that it names itself, if it does."""
        spec = self._agents.get(name).spec if name in self._agents else None
        own = spec.config.tools.session_dir if spec is not None and spec.config is not None else None
        return (own or self._session_dir) / sanitise(name)

    def _thinker(self, member: AgentResources, session: SessionRecord) -> PreparedAgent:
        agent = member.agent
        return PreparedAgent(
            name=agent.name,
            entity_id=session.agent_entity_id,
            system=agent.system,
            model=member.model,
            tools=member.tools,
            settings=agent.settings,
            limits=agent.limits,
            subagents=agent.subagents,
            destinations=agent.destinations,
            session_dir=self.archive_dir(agent.name),
            task_service=TaskService(self._ledger, session.agent_entity_id, is_task=session.kind != "agent"),
        )


def _settle(effects: Effects, entity_id: str, agent: Agent) -> Program[None]:
    if (yield from entities.find_entity(entity_id)) is None:
        yield from entities.create_entity(entity_id, "agent", agent.name, {"description": agent.description})
    yield from sessions.create(entity_id, entity_id, "agent")
    for name in agent.spec.spaces if agent.spec is not None else ():
        space_id = derived_id("spc", "named", name)
        if (yield from entities.find_space(space_id)) is None:
            yield from entities.create_space(space_id, name, {})
        yield from entities.add_member(space_id, entity_id)

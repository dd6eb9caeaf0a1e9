"""The agents of a gateway: each an entity with an inbox and a session of its own, for as long as it is configured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolspace.agents import compaction, handoff, task_sessions
from toolspace.agents.cycle import Cycle, Thinker
from toolspace.agents.cycle_transactions import Hold, Write
from toolspace.agents.definition import Agent
from toolspace.agents.loop import Outcome
from toolspace.agents.registry import Crew, Member
from toolspace.agents.scheduler import RETRY_DELAYS_MS, Dispatcher, Limits
from toolspace.agents.task_service import TaskDesk
from toolspace.config.model import AgentLimits, Consciousness
from toolspace.core.ids import derived_id
from toolspace.core.names import sanitise
from toolspace.errors import StorageError, ToolspaceError
from toolspace.spaces.knowledge import Library
from toolspace.spaces.ledger import Effects
from toolspace.spaces.pending_calls import CallDesk
from toolspace.storage.database import Program
from toolspace.storage.queries import entities, sessions
from toolspace.storage.queries.sessions import Session

_log = logging.getLogger("toolspace.agents")
_AFTER_TROUBLE_SECONDS = 1.0


def entity_of(name: str) -> str:
    """The id of the entity that an agent is."""
    return derived_id("ent", "agent", name)


class Residents:
    """Knows the agents of this process, and what each may do. `async with` lets them think."""

    def __init__(
        self,
        desk: CallDesk,
        crew: Crew,
        *,
        folder: Path,
        library: Library | None = None,
        max_active: int = 32,
        retry_delays: Sequence[int] = RETRY_DELAYS_MS,
    ) -> None:
        self._ledger = desk.ledger
        self._library = library
        self._crew = crew
        self._folder = folder
        """Where archives of sessions are kept, unless an agent says otherwise."""
        self._names: dict[str, str] = {}
        """Names by entity."""
        self._settling = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.dispatcher = Dispatcher(desk, self, max_active=max_active, retry_delays=retry_delays)

    async def __aenter__(self) -> Residents:
        await self.settle_in()
        await self.dispatcher.__aenter__()
        self._crew.on_change(self._changed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        await self.dispatcher.__aexit__()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def settle_in(self) -> None:
        """Gives every agent that is configured its entity, its session and its spaces. Again after a reload."""
        async with self._settling:  # One after the other: the last one to end knows who there is now.
            agents = list(self._crew)
            for agent in agents:
                entity_id = entity_of(agent.name)
                await self._ledger.commit(_settle, entity_id, agent)
                self._names[entity_id] = agent.name
                self.dispatcher.attend(entity_id, entity_id)
            for gone in self._names.keys() - {entity_of(agent.name) for agent in agents}:
                self.dispatcher.ignore(gone)
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
                await self.settle_in()
                break
            except StorageError as error:
                _log.warning("agents that are new have to wait: %s", error)
                await asyncio.sleep(_AFTER_TROUBLE_SECONDS)
        for entity_id in self._names.keys() - before:
            self.dispatcher.wake(entity_id)  # It may have been here before, and have something in its inbox.

    async def _read_folders(self, library: Library, agents: Sequence[Agent]) -> None:
        """Reads what the agents are to know. Also of those with nothing to read: they may have had something before."""
        async with self._reading:
            for agent in agents:
                paths = agent.spec.knowledge if agent.spec is not None else ()
                try:
                    await library.sync(entity_of(agent.name), paths)
                except (OSError, ToolspaceError) as error:
                    _log.warning('the documents of the agent "%s" could not be read: %s', agent.name, error)

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the agents by their entities."""
        return self._names

    # What the dispatcher asks

    def limits(self, session: Session) -> Limits | None:
        name = self._names.get(session.agent_entity_id)
        if name is None or name not in self._crew:
            return None
        agent = self._crew.find(name)
        said = agent.spec.limits if agent.spec is not None else AgentLimits()
        return Limits(
            max_agent_turns=said.max_agent_turns,
            cycles_per_minute=said.cycles_per_minute,
            inbox_batch=said.inbox_batch,
            hands_on=bool(agent.destinations),
        )

    @contextlib.asynccontextmanager
    async def thinking(self, session: Session) -> AsyncGenerator[Thinker]:
        async with self._crew.engage(self._names[session.agent_entity_id]) as member:
            thinker = self._thinker(member, session)
            yield thinker if session.kind == "agent" else await task_sessions.prepare(self._ledger, thinker, session)

    def after(self, session: Session, outcome: Outcome | None, cycle: Cycle | None) -> Write | None:
        if session.kind != "agent":
            return task_sessions.after(session, outcome, cycle)
        if outcome is None or outcome.handoff is None or cycle is None:
            return None
        return handoff.program(cycle, outcome.handoff, entity_of(outcome.handoff.agent))

    async def rest(self, session: Session, thinker: Thinker, hold: Hold) -> None:
        """Between cycles: what an agent has in mind is brought within its bounds."""
        if session.kind != "agent" or thinker.name not in self._crew:
            return  # It stays as it is, for whoever looks back on it.
        spec = self._crew.find(thinker.name).spec
        said = spec.consciousness if spec is not None else Consciousness()
        await compaction.settle(
            self._ledger,
            hold,
            thinker.model,
            max_tokens=said.max_tokens,
            min_recent_cycles=said.min_recent_cycles,
            folder=self.archive_of(thinker.name),
            settings=thinker.ways.settings,
        )

    def archive_of(self, name: str) -> Path:
        """The folder of an agent's archives, in the one that it names itself, if it does."""
        spec = self._crew.find(name).spec if name in self._crew else None
        own = spec.config.tools.session_dir if spec is not None and spec.config is not None else None
        return (own or self._folder) / sanitise(name)

    def _thinker(self, member: Member, session: Session) -> Thinker:
        agent = member.agent
        return Thinker(
            name=agent.name,
            entity_id=session.agent_entity_id,
            system=agent.system,
            model=member.model,
            tools=member.tools,
            ways=agent.ways,
            bounds=agent.bounds,
            helpers=agent.helpers,
            destinations=agent.destinations,
            session_dir=self.archive_of(agent.name),
            tasks=TaskDesk(self._ledger, session.agent_entity_id, is_task=session.kind != "agent"),
        )


def _settle(effects: Effects, entity_id: str, agent: Agent) -> Program[None]:
    if (yield from entities.entity(entity_id)) is None:
        yield from entities.add_entity(entity_id, "agent", agent.name, {"description": agent.description})
    yield from sessions.add(entity_id, entity_id, "agent")
    for name in agent.spec.spaces if agent.spec is not None else ():
        space_id = derived_id("spc", "named", name)
        if (yield from entities.space(space_id)) is None:
            yield from entities.add_space(space_id, name, {})
        yield from entities.add_member(space_id, entity_id)

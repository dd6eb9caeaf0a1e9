"""Hosts the agents of a gateway: registers each configured agent as an entity with an inbox and a session.

The gateway opens it. The host follows configuration changes; its scheduler runs the sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolspace.agents.agent import Agent, entity_id_for
from toolspace.agents.cycle_runner import RETRY_DELAYS_MS, CycleRunner
from toolspace.agents.registry import AgentRegistry
from toolspace.agents.scheduler import Scheduler
from toolspace.core.defaults import MAX_ACTIVE_AGENTS
from toolspace.core.ids import derived_id
from toolspace.errors import StorageError, ToolspaceError
from toolspace.orchestrator.call import cancel_all, start_in_background
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.spaces.ledger import Effects
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, sessions

_log = logging.getLogger("toolspace.agents")
_RETRY_SECONDS = 1.0


class AgentHost:
    """The agents of this process. They run while it is open (`async with`)."""

    def __init__(
        self,
        pending_calls: PendingCalls,
        agents: AgentRegistry,
        *,
        session_dir: Path,
        library: DocumentLibrary | None = None,
        max_active: int = MAX_ACTIVE_AGENTS,
        retry_delays: Sequence[int] = RETRY_DELAYS_MS,
    ) -> None:
        """`session_dir`: where archives of sessions are stored, unless an agent's configuration names another place."""
        self._ledger = pending_calls.ledger
        self._library = library
        self._agents = agents
        self._names: dict[str, str] = {}
        """The names of the registered agents by entity id."""
        self._registration_lock = asyncio.Lock()
        self._documents_lock = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        runner = CycleRunner(pending_calls, agents, self._names, session_dir=session_dir, retry_delays=retry_delays)
        self.scheduler = Scheduler(self._ledger, runner, max_active=max_active)

    async def __aenter__(self) -> AgentHost:
        await self.register_agents()
        await self.scheduler.__aenter__()
        self._agents.on_change(self._on_agents_changed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        await self.scheduler.__aexit__()
        await cancel_all(self._background)

    async def register_agents(self) -> None:
        """Gives every configured agent its entity, session and spaces, and stops watching removed agents."""
        async with self._registration_lock:  # One after the other: the last one sees the current agents.
            agents = list(self._agents)
            for agent in agents:
                entity_id = entity_id_for(agent.name)
                await self._ledger.commit(_register, entity_id, agent)
                self._names[entity_id] = agent.name
                self.scheduler.watch(entity_id)
            for removed_id in self._names.keys() - {entity_id_for(agent.name) for agent in agents}:
                self.scheduler.unwatch(removed_id)
                del self._names[removed_id]
        if self._library is not None:
            start_in_background(self._background, self._read_documents(self._library, agents))

    def _on_agents_changed(self) -> asyncio.Task[None] | None:
        return None if self._is_closed else start_in_background(self._background, self._register_again())

    async def _register_again(self) -> None:
        previous_ids = frozenset(self._names)
        while True:
            try:
                await self.register_agents()
                break
            except StorageError as error:
                _log.warning("changed agents could not be registered, retrying in %g s: %s", _RETRY_SECONDS, error)
                await asyncio.sleep(_RETRY_SECONDS)
        for entity_id in self._names.keys() - previous_ids:
            # It may have been configured before, and have events in its inbox. Polling finds those of other sessions.
            self.scheduler.wake(entity_id)

    async def _read_documents(self, library: DocumentLibrary, agents: Sequence[Agent]) -> None:
        """Reads the configured documents of the agents. Removes those of agents that have none any more."""
        async with self._documents_lock:
            for agent in agents:
                paths = agent.spec.knowledge if agent.spec is not None else ()
                try:
                    await library.sync_folders(entity_id_for(agent.name), paths)
                except (OSError, ToolspaceError) as error:
                    _log.warning('agent "%s": its documents could not be read: %s', agent.name, error)


def _register(effects: Effects, entity_id: str, agent: Agent) -> Program[None]:
    if (yield from entities_and_spaces.find_entity(entity_id)) is None:
        yield from entities_and_spaces.create_entity(entity_id, "agent", agent.name, {"description": agent.description})
    yield from sessions.create(entity_id, entity_id, "agent")
    yield from sessions.set_scope(entity_id, agent.scope)
    for name in agent.spec.spaces if agent.spec is not None else ():
        space_id = derived_id("spc", "named", name)
        if (yield from entities_and_spaces.find_space(space_id)) is None:
            yield from entities_and_spaces.create_space(space_id, name, {})
        yield from entities_and_spaces.add_member(space_id, entity_id)

"""What is a caller's own: which spaces, agents, runs and calls it may see. 404 for what is not there, 403 for the rest.

A secret key sees everything that exists. An entity sees the spaces that it is a member of, and through them the
others there, the runs that are active there and the calls that show there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from toolspace.core.records import CallRecord, Entity, RunRecord, Space
from toolspace.server.callers import Caller, Public, Secret
from toolspace.server.problems import Problem
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import calls, entities, runs

_FRESH_SECONDS: Final = 1.0
_MOST_SPACES: Final = 10_000


async def member_of(ledger: Ledger, caller: Caller, space_id: str) -> Space:
    """The space, if the caller may see it."""
    space, own = await ledger.read(_space, space_id, _entity_of(caller))
    if space is None:
        raise _missing("space", space_id)
    if not own:
        raise Problem(403, f'you are not a member of the space "{space_id}"')
    return space


async def sees_entity(ledger: Ledger, caller: Caller, entity_id: str) -> Entity:
    """The entity, if it is the caller or shares a space with it."""
    entity, own = await ledger.read(_entity, entity_id, _entity_of(caller))
    if entity is None:
        raise _missing("entity", entity_id)
    if not own:
        raise Problem(403, f'you share no space with the entity "{entity_id}"')
    return entity


async def sees_agent(ledger: Ledger, caller: Caller, agent_id: str) -> Entity:
    """The agent, if it shares a space with the caller."""
    agent, own = await ledger.read(_entity, agent_id, _entity_of(caller))
    if agent is None or agent.type != "agent":
        raise _missing("agent", agent_id)
    if not own:
        raise Problem(403, f'you share no space with the agent "{agent_id}"')
    return agent


async def sees_run(ledger: Ledger, caller: Caller, run_id: str) -> RunRecord:
    """The run, if it is active in a space of the caller, and was never active in one that is not."""
    run, own = await ledger.read(_run, run_id, _entity_of(caller))
    if run is None:
        raise _missing("run", run_id)
    if not own:
        raise Problem(403, f'the run "{run_id}" is in no space of yours')
    return run


async def sees_call(ledger: Ledger, caller: Caller, call_id: str) -> CallRecord:
    """The call, if it shows in a space of the caller."""
    call, own = await ledger.read(_call, call_id, _entity_of(caller))
    if call is None:
        raise _missing("call", call_id)
    if not own:
        raise Problem(403, f'the call "{call_id}" shows in no space of yours')
    return call


class Members:
    """Who is in which space, for streams: they ask before they write, many of them about one space.

    Looked up once a second for each space; forgotten at once where it changes here.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[str, tuple[frozenset[str], float]] = {}
        self._changes = 0
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Whom to tell that someone may not be a member any more."""
        self._listeners.append(listener)

    async def has(self, space_id: str, entity_id: str) -> bool:
        known = self._known.get(space_id)
        if known is None or time.monotonic() > known[1]:
            known = await self._look_up(space_id)
        return entity_id in known[0]

    def forget(self, space_id: str) -> None:
        """Its members changed."""
        self._changes += 1
        self._known.pop(space_id, None)
        for listener in self._listeners:
            listener()

    async def _look_up(self, space_id: str) -> tuple[frozenset[str], float]:
        changes = self._changes
        members = await self._ledger.read(entities.members, space_id)
        found = frozenset(member.entity_id for member in members), time.monotonic() + _FRESH_SECONDS
        if changes == self._changes:  # Else it may be from before the change.
            if len(self._known) >= _MOST_SPACES:
                self._known.clear()
            self._known[space_id] = found
        return found


def _entity_of(caller: Caller) -> str | None:
    """Whose things to look for; None: everyone's."""
    if isinstance(caller, Secret):
        return None
    if isinstance(caller, Public):
        return caller.entity_id
    raise Problem(403, f"{caller.kind} credentials are not for this; use a secret key, or a public key with a token")


def _space(space_id: str, entity_id: str | None) -> Program[tuple[Space | None, bool]]:
    space = yield from entities.space(space_id)
    if space is None or entity_id is None:
        return space, True
    return space, (yield from entities.is_member(space_id, entity_id))


def _entity(wanted: str, entity_id: str | None) -> Program[tuple[Entity | None, bool]]:
    entity = yield from entities.entity(wanted)
    if entity is None or entity_id is None or wanted == entity_id:
        return entity, True
    return entity, (yield from entities.share_a_space(wanted, entity_id))


def _run(run_id: str, entity_id: str | None) -> Program[tuple[RunRecord | None, bool]]:
    run = yield from runs.one(run_id)
    if run is None or entity_id is None:
        return run, True
    if run.space_id is None or not (yield from entities.is_member(run.space_id, entity_id)):
        return run, False
    # A run may have been elsewhere before; what it did there is not for everyone who is where it is now.
    elsewhere = yield (
        "SELECT 1 FROM calls WHERE run_id = ? AND space_id IS NOT NULL AND space_id NOT IN "
        "(SELECT space_id FROM members WHERE entity_id = ?) LIMIT 1",
        (run_id, entity_id),
    )
    return run, not elsewhere


def _call(call_id: str, entity_id: str | None) -> Program[tuple[CallRecord | None, bool]]:
    call = yield from calls.one(call_id)
    if call is None or entity_id is None:
        return call, True
    if call.space_id is None or not call.visible:
        return call, False
    return call, (yield from entities.is_member(call.space_id, entity_id))


def _missing(kind: str, id: str) -> Problem:
    return Problem(404, f'there is no {kind} "{id}"')

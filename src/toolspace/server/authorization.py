"""What is a caller's own: which spaces, agents, runs and calls it may see. 404 for what is not there, 403 for the rest.

A secret key sees everything that exists. An entity sees the spaces that it is a member of, and through them the
others there, the runs that are active there and the calls that show there.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import ClassVar, Final

import msgspec

from toolspace.core.records import CallRecord, Entity, RunRecord, Space
from toolspace.server.problems import Problem
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import calls, entities, runs

# MERGED from callers: Who calls, as data, and who a route is for. Verifies nothing.

CONFIGURED_KEY_ID = "key_configured"
"""The id of a key that is written in the configuration: it has no row."""


class Access(enum.Enum):
    """Who may use a route. Which spaces, agents and calls of it are someone's own, its handler looks up."""

    OPEN = "open"
    """Anyone; credentials are not looked at."""
    ANY = "any"
    """Whoever has valid credentials of any kind."""
    SECRET = "secret"
    """Secret keys alone."""
    MEMBER = "member"
    """Secret keys, and entities with a public key and a token."""
    TOOLS = "tools"
    """Secret keys and tool keys."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever makes a request."""

    kind: ClassVar[str] = ""

    @property
    def subject(self) -> str:
        """One text for one caller: limits, repeated requests and what is stored for it go by this."""
        raise NotImplementedError


class AnonymousCaller(Caller, frozen=True, kw_only=True):
    """Someone of whom nothing is known, on an open route."""

    kind = "anonymous"

    @property
    def subject(self) -> str:
        return "anonymous"


class SecretKeyCaller(Caller, frozen=True, kw_only=True):
    """The holder of a secret key: a backend, an operator. May do everything."""

    kind = "secret"

    key_id: str

    @property
    def subject(self) -> str:
        return self.key_id


class EntityCaller(Caller, frozen=True, kw_only=True):
    """An entity, proved by a token beside a public key: sees its own spaces, and nothing else."""

    kind = "public"

    entity_id: str
    key_id: str = CONFIGURED_KEY_ID
    expires_at: int
    """Unix milliseconds: when the token ends. A stream that was opened with it ends then too."""

    @property
    def subject(self) -> str:
        return f"entity:{self.entity_id}"


class ToolKeyCaller(Caller, frozen=True, kw_only=True):
    """The holder of a key for tools alone: lists and calls those that it allows."""

    kind = "tools"

    key_id: str
    tools_allowed: tuple[str, ...] | None = None
    """Patterns of names; None: all that are not denied."""
    tools_denied: tuple[str, ...] = ()
    agent_entity_id: str | None = None
    """The agent in whose name it calls."""

    @property
    def subject(self) -> str:
        return self.key_id


_KINDS: dict[Access, tuple[type[Caller], ...]] = {
    Access.OPEN: (AnonymousCaller, SecretKeyCaller, EntityCaller, ToolKeyCaller),
    Access.ANY: (SecretKeyCaller, EntityCaller, ToolKeyCaller),
    Access.SECRET: (SecretKeyCaller,),
    Access.MEMBER: (SecretKeyCaller, EntityCaller),
    Access.TOOLS: (SecretKeyCaller, ToolKeyCaller),
}


def is_admitted(access: Access, caller: Caller) -> bool:
    """Whether a route of this access is for this kind of caller."""
    return isinstance(caller, _KINDS[access])


_FRESH_SECONDS: Final = 1.0
_MOST_SPACES: Final = 10_000


async def get_visible_space(ledger: Ledger, caller: Caller, space_id: str) -> Space:
    """The space, if the caller may see it."""
    space, own = await ledger.read(_space, space_id, _entity_of(caller))
    if space is None:
        raise _missing("space", space_id)
    if not own:
        raise Problem(403, f'you are not a member of the space "{space_id}"')
    return space


async def get_visible_entity(ledger: Ledger, caller: Caller, entity_id: str) -> Entity:
    """The entity, if it is the caller or shares a space with it."""
    entity, own = await ledger.read(_entity, entity_id, _entity_of(caller))
    if entity is None:
        raise _missing("entity", entity_id)
    if not own:
        raise Problem(403, f'you share no space with the entity "{entity_id}"')
    return entity


async def get_visible_agent(ledger: Ledger, caller: Caller, agent_id: str) -> Entity:
    """The agent, if it shares a space with the caller."""
    agent, own = await ledger.read(_entity, agent_id, _entity_of(caller))
    if agent is None or agent.type != "agent":
        raise _missing("agent", agent_id)
    if not own:
        raise Problem(403, f'you share no space with the agent "{agent_id}"')
    return agent


async def get_visible_run(ledger: Ledger, caller: Caller, run_id: str) -> RunRecord:
    """The run, if it is active in a space of the caller, and was never active in one that is not."""
    run, own = await ledger.read(_run, run_id, _entity_of(caller))
    if run is None:
        raise _missing("run", run_id)
    if not own:
        raise Problem(403, f'the run "{run_id}" is in no space of yours')
    return run


async def get_visible_call(ledger: Ledger, caller: Caller, call_id: str) -> CallRecord:
    """The call, if it shows in a space of the caller."""
    call, own = await ledger.read(_call, call_id, _entity_of(caller))
    if call is None:
        raise _missing("call", call_id)
    if not own:
        raise Problem(403, f'the call "{call_id}" shows in no space of yours')
    return call


class MembershipCache:
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

    async def is_member(self, space_id: str, entity_id: str) -> bool:
        known = self._known.get(space_id)
        if known is None or time.monotonic() > known[1]:
            known = await self._look_up(space_id)
        return entity_id in known[0]

    def invalidate(self, space_id: str) -> None:
        """Its members changed."""
        self._changes += 1
        self._known.pop(space_id, None)
        for listener in self._listeners:
            listener()

    async def _look_up(self, space_id: str) -> tuple[frozenset[str], float]:
        changes = self._changes
        members = await self._ledger.read(entities.list_members, space_id)
        found = frozenset(member.entity_id for member in members), time.monotonic() + _FRESH_SECONDS
        if changes == self._changes:  # Else it may be from before the change.
            if len(self._known) >= _MOST_SPACES:
                self._known.clear()
            self._known[space_id] = found
        return found


def _entity_of(caller: Caller) -> str | None:
    """Whose things to look for; None: everyone's."""
    if isinstance(caller, SecretKeyCaller):
        return None
    if isinstance(caller, EntityCaller):
        return caller.entity_id
    raise Problem(403, f"{caller.kind} credentials are not for this; use a secret key, or a public key with a token")


def _space(space_id: str, entity_id: str | None) -> Program[tuple[Space | None, bool]]:
    space = yield from entities.find_space(space_id)
    if space is None or entity_id is None:
        return space, True
    return space, (yield from entities.is_member(space_id, entity_id))


def _entity(wanted: str, entity_id: str | None) -> Program[tuple[Entity | None, bool]]:
    entity = yield from entities.find_entity(wanted)
    if entity is None or entity_id is None or wanted == entity_id:
        return entity, True
    return entity, (yield from entities.share_space(wanted, entity_id))


def _run(run_id: str, entity_id: str | None) -> Program[tuple[RunRecord | None, bool]]:
    run = yield from runs.find(run_id)
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
    call = yield from calls.find(call_id)
    if call is None or entity_id is None:
        return call, True
    if call.space_id is None or not call.visible:
        return call, False
    return call, (yield from entities.is_member(call.space_id, entity_id))


def _missing(kind: str, id: str) -> Problem:
    return Problem(404, f'there is no {kind} "{id}"')

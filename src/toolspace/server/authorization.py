"""Decides what a caller may do: the kinds of callers, the access level of a route, and who may see which resource.

`authentication` creates the callers; `tool_permissions` says which tools they may call. A secret key sees everything.
An entity sees the spaces of which it is a member, and through them the other members, the runs that are active there
and the visible calls. A missing resource is 404, one that the caller may not see is 403.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

import msgspec

from toolspace.core.stored_records import CallRecord, Entity, RunRecord, Space
from toolspace.server.responses import Problem, not_found
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import call_lists, calls, entities_and_spaces, runs

if TYPE_CHECKING:
    from toolspace.server.requests import Request

T = TypeVar("T")

CONFIGURED_KEY_ID: Final = "key_configured"
"""The id of a key from the configuration, which has no database row."""
_CACHE_SECONDS: Final = 1.0
_MAX_CACHED_SPACES: Final = 10_000


class Access(enum.Enum):
    """Which callers may use a route. Its handler checks whether they may see the resource."""

    OPEN = "open"
    """Everyone; credentials are ignored."""
    ANY = "any"
    """All valid credentials."""
    SECRET = "secret"
    """Secret keys."""
    MEMBER = "member"
    """Secret keys, and entities with a public key and a token."""
    TOOLS = "tools"
    """Secret keys and tool keys."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request."""

    kind: ClassVar[str] = ""

    @property
    def subject(self) -> str:
        """Identifies the caller for rate limits, idempotency keys and stored data."""
        return self.kind


class AnonymousCaller(Caller, frozen=True, kw_only=True):
    """A caller without credentials, on an open route."""

    kind = "anonymous"


class SecretKeyCaller(Caller, frozen=True, kw_only=True):
    """A backend or an operator with a secret key. May do everything."""

    kind = "secret"

    key_id: str

    @property
    def subject(self) -> str:
        return self.key_id


class EntityCaller(Caller, frozen=True, kw_only=True):
    """An entity with a public key and a token. Sees its own spaces and nothing else."""

    kind = "public"

    entity_id: str
    key_id: str = CONFIGURED_KEY_ID
    expires_at: int
    """Unix milliseconds: when the token expires. Streams that were opened with it end then."""

    @property
    def subject(self) -> str:
        return f"entity:{self.entity_id}"


class ToolKeyCaller(Caller, frozen=True, kw_only=True):
    """A program with a tool key. Lists and calls the tools that the key allows."""

    kind = "tools"

    key_id: str
    tools_allowed: tuple[str, ...] | None = None
    """Name patterns; None allows all tools that are not denied."""
    tools_denied: tuple[str, ...] = ()
    agent_entity_id: str | None = None
    """The agent on whose behalf the key calls tools."""

    @property
    def subject(self) -> str:
        return self.key_id


_ADMITTED: Final[dict[Access, tuple[type[Caller], ...]]] = {
    Access.OPEN: (AnonymousCaller, SecretKeyCaller, EntityCaller, ToolKeyCaller),
    Access.ANY: (SecretKeyCaller, EntityCaller, ToolKeyCaller),
    Access.SECRET: (SecretKeyCaller,),
    Access.MEMBER: (SecretKeyCaller, EntityCaller),
    Access.TOOLS: (SecretKeyCaller, ToolKeyCaller),
}


def is_admitted(access: Access, caller: Caller) -> bool:
    """Whether a route with this access level admits this kind of caller."""
    return isinstance(caller, _ADMITTED[access])


class Resource(msgspec.Struct, Generic[T], frozen=True):
    """A kind of resource that a path names: how to find it, and whether an entity may see it."""

    noun: str
    parameter: str
    """The path parameter with its id."""
    find: Callable[[str, str | None], Program[tuple[T | None, bool]]]
    """Returns the resource, and whether the entity may see it; without an entity, everything is visible."""
    refusal: str
    """What a caller is told that may not see it."""


def entity_id_of(caller: Caller) -> str | None:
    """Returns the entity whose resources are visible; None if all are."""
    if isinstance(caller, SecretKeyCaller):
        return None
    if isinstance(caller, EntityCaller):
        return caller.entity_id
    raise Problem(403, f"{caller.kind} credentials are not accepted; use a secret key, or a public key with a token")


async def get_visible(request: Request, resource: Resource[T]) -> T:
    """Returns the resource that the path names. Raises `Problem` 404, or 403 if the caller may not see it."""
    id = request.params[resource.parameter]
    record, is_visible = await request.read(resource.find, id, entity_id_of(request.caller))
    if record is None:
        raise not_found(resource.noun, id)
    if not is_visible:
        raise Problem(403, resource.refusal.format(id=id))
    return record


class MembershipCache:
    """Caches the members of spaces. Streams check the membership of their subscribers before they send.

    Entries are valid for a second. A change in this process invalidates them at once.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._cache: dict[str, tuple[frozenset[str], float]] = {}
        """Space id → the members, and until when the entry is valid."""
        self._changes = 0
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Registers a function that is called when a membership may have ended."""
        self._listeners.append(listener)

    async def is_member(self, space_id: str, entity_id: str) -> bool:
        entry = self._cache.get(space_id)
        if entry is None or time.monotonic() > entry[1]:
            entry = await self._load(space_id)
        return entity_id in entry[0]

    def invalidate(self, space_id: str) -> None:
        """Drops the entry of a space whose members changed."""
        self._changes += 1
        self._cache.pop(space_id, None)
        for listener in self._listeners:
            listener()

    async def _load(self, space_id: str) -> tuple[frozenset[str], float]:
        changes = self._changes
        members = await self._ledger.read(entities_and_spaces.list_members, space_id)
        entry = frozenset(member.entity_id for member in members), time.monotonic() + _CACHE_SECONDS
        if changes == self._changes:  # Else the members may have been read before the change.
            if len(self._cache) >= _MAX_CACHED_SPACES:
                self._cache.clear()
            self._cache[space_id] = entry
        return entry


def _find_space(space_id: str, entity_id: str | None) -> Program[tuple[Space | None, bool]]:
    space = yield from entities_and_spaces.find_space(space_id)
    if space is None or entity_id is None:
        return space, True
    return space, (yield from entities_and_spaces.is_member(space_id, entity_id))


def _find_entity(id: str, entity_id: str | None) -> Program[tuple[Entity | None, bool]]:
    entity = yield from entities_and_spaces.find_entity(id)
    if entity is None or entity_id is None or id == entity_id:
        return entity, True
    return entity, (yield from entities_and_spaces.share_space(id, entity_id))


def _find_agent(id: str, entity_id: str | None) -> Program[tuple[Entity | None, bool]]:
    agent, is_visible = yield from _find_entity(id, entity_id)
    return agent if agent is not None and agent.type == "agent" else None, is_visible


def _find_run(run_id: str, entity_id: str | None) -> Program[tuple[RunRecord | None, bool]]:
    run = yield from runs.find(run_id)
    if run is None or entity_id is None:
        return run, True
    if run.space_id is None or not (yield from entities_and_spaces.is_member(run.space_id, entity_id)):
        return run, False
    # A run can move between spaces. The members of its present space may not see what it did in another one.
    return run, not (yield from call_lists.has_foreign_calls(run_id, entity_id))


def _find_call(call_id: str, entity_id: str | None) -> Program[tuple[CallRecord | None, bool]]:
    call = yield from calls.find(call_id)
    if call is None or entity_id is None:
        return call, True
    if call.space_id is None or not call.visible:
        return call, False
    return call, (yield from entities_and_spaces.is_member(call.space_id, entity_id))


SPACE: Final = Resource("Space", "spaceId", _find_space, 'You are not a member of space "{id}"')
ENTITY: Final = Resource("Entity", "entityId", _find_entity, 'You share no space with entity "{id}"')
AGENT: Final = Resource("Agent", "agentId", _find_agent, 'You share no space with agent "{id}"')
RUN: Final = Resource("Run", "runId", _find_run, 'Run "{id}" is not in one of your spaces')
CALL: Final = Resource("Call", "callId", _find_call, 'Call "{id}" is not visible in one of your spaces')

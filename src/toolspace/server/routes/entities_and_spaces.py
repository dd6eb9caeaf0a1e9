"""Routes of spaces and their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from toolspace.core.ids import new_id
from toolspace.core.records import Entity, EntityType, Member, Space, space_stream
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    MAX_METADATA,
    Id,
    JsonRequestBody,
    Metadata,
    Name,
    NewId,
    PageQuery,
    ResultPage,
    build_page,
    check_json_size,
    unset_to_none,
)
from toolspace.server.authorization import Access, EntityCaller, get_visible_entity, get_visible_space
from toolspace.server.idempotency import run_once
from toolspace.server.redaction import redact_entity
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Problem, Response, not_found
from toolspace.server.routing import Route
from toolspace.spaces import call_transactions, runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries import calls, entities_and_spaces, events, inbox
from toolspace.storage.queries import runs as run_queries

# MERGED from deletion: The transactions that delete a space, a member or an entity, and end everything that nobody cou


@long_running
def delete_space_transaction(effects: Effects, space_id: str) -> Program[bool]:
    """Deletes a space with its members, messages and events. Runs leave it; its open calls are canceled."""
    if not (yield from entities_and_spaces.lock_space(space_id)):
        return False
    yield from run_queries.clear_space(space_id)
    for call_id in (yield from calls.remove_from_space(space_id)):
        yield from call_transactions.end_call(
            effects, call_id, "canceled", "the space in which it was asked was removed"
        )
    yield from events.delete_events_of_stream(space_stream(space_id))
    return (yield from entities_and_spaces.delete_space(space_id))


@long_running
def remove_member_transaction(effects: Effects, space_id: str, entity_id: str) -> Program[bool]:
    """Removes a member from a space; the runs of an agent leave it, too."""
    removed = yield from entities_and_spaces.remove_member(space_id, entity_id)
    yield from run_queries.clear_space(space_id, agent_entity_id=entity_id)
    return removed


@long_running
def delete_entity_transaction(effects: Effects, entity_id: str) -> Program[bool]:
    """Deletes an entity with its memberships, and an agent with its runs, its inbox and its open calls.

    Its messages stay.
    """
    for run_id in (yield from run_queries.list_open_of_agent(entity_id)):
        yield from runs.cancel_run(effects, run_id)
    for call_id in (yield from calls.list_open_of_agent(entity_id)):
        yield from call_transactions.end_call(effects, call_id, "canceled", "its agent was removed", notify_agent=False)
    yield from inbox.delete_all(entity_id)
    return (yield from entities_and_spaces.delete_entity(entity_id))


MAX_INITIAL_MEMBERS = 100


class NewSpace(JsonRequestBody, frozen=True, kw_only=True):
    """A space to create."""

    name: Name
    """The name of the space."""
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])
    members: Annotated[list[Id], Meta(max_length=MAX_INITIAL_MEMBERS)] = msgspec.field(default_factory=list[str])
    """The ids of the first members."""
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class SpaceChange(JsonRequestBody, frozen=True, kw_only=True):
    """New values for a space. Missing fields stay unchanged; the metadata is replaced as a whole."""

    name: Name | msgspec.UnsetType = msgspec.UNSET
    """The name of the space."""
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class NewMember(JsonRequestBody, frozen=True, kw_only=True):
    """A member to add."""

    entity_id: Id
    """The entity to add."""


async def list_spaces(request: Request) -> ResultPage[Space]:
    query = request.query(PageQuery)
    caller = request.caller
    records = await request.gateway.ledger.read(
        entities_and_spaces.list_spaces,
        member=caller.entity_id if isinstance(caller, EntityCaller) else None,
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return build_page(records, query.limit, lambda space: space.id)


async def create_space(request: Request) -> Response:
    body = await request.json(NewSpace)
    space_id = body.id or new_id("spc")
    return await run_once(request, lambda _: _create_space(space_id, body))


async def get_space(request: Request) -> Space:
    return await get_visible_space(request.gateway.ledger, request.caller, request.params["spaceId"])


async def update_space(request: Request) -> Space:
    body = await request.json(SpaceChange)
    space_id = request.params["spaceId"]
    space = await request.gateway.ledger.write(
        entities_and_spaces.update_space, space_id, name=unset_to_none(body.name), metadata=unset_to_none(body.metadata)
    )
    if space is None:
        raise not_found("Space", space_id)
    return space


async def delete_space(request: Request) -> Response:
    space_id = request.params["spaceId"]
    if not await request.gateway.ledger.commit(delete_space_transaction, space_id):
        raise not_found("Space", space_id)
    request.gateway.memberships.invalidate(space_id)
    request.gateway.hub.close_stream(space_stream(space_id))
    return NO_CONTENT


async def list_members(request: Request) -> ResultPage[Member]:
    space = await get_visible_space(request.gateway.ledger, request.caller, request.params["spaceId"])
    return ResultPage(items=await request.gateway.ledger.read(entities_and_spaces.list_members, space.id), next=None)


async def put_member(request: Request) -> Member:
    return await _add_to_space(request, request.params["entityId"])


async def post_member(request: Request) -> Member:
    body = await request.json(NewMember)
    return await _add_to_space(request, body.entity_id)


async def remove_member(request: Request) -> Response:
    space_id, entity_id = request.params["spaceId"], request.params["entityId"]
    await get_visible_space(request.gateway.ledger, request.caller, space_id)
    was_member = await request.gateway.ledger.commit(remove_member_transaction, space_id, entity_id)
    request.gateway.memberships.invalidate(space_id)
    if not was_member:
        raise Problem(404, f'Entity "{entity_id}" is not a member of space "{space_id}"')
    return NO_CONTENT


async def _add_to_space(request: Request, entity_id: str) -> Member:
    space_id = request.params["spaceId"]
    member = await request.gateway.ledger.write(_add_member, space_id, entity_id)
    request.gateway.memberships.invalidate(space_id)
    return member


def _create_space(space_id: str, body: NewSpace) -> Program[Space]:
    space = yield from entities_and_spaces.create_space(space_id, body.name, body.metadata)
    if space is None:
        raise RefusedError("conflict", f'Space "{space_id}" exists already; omit the id or choose another')
    yield from _add_members(space_id, body.members)
    return space


def _add_members(space_id: str, entity_ids: Sequence[str]) -> Program[None]:
    for entity_id in entity_ids:
        if (yield from entities_and_spaces.find_entity(entity_id)) is None:
            raise RefusedError("invalid", f'Entity "{entity_id}" not found; it cannot be a member')
        yield from entities_and_spaces.add_member(space_id, entity_id)


def _add_member(space_id: str, entity_id: str) -> Program[Member]:
    if (yield from entities_and_spaces.find_space(space_id)) is None:
        raise RefusedError("not_found", f'Space "{space_id}" not found')
    if (yield from entities_and_spaces.find_entity(entity_id)) is None:
        raise RefusedError("not_found", f'Entity "{entity_id}" not found')
    yield from entities_and_spaces.add_member(space_id, entity_id)
    members = yield from entities_and_spaces.list_members(space_id)
    return next(member for member in members if member.entity_id == entity_id)


ROUTES = [
    Route(
        method="GET",
        path="/api/spaces",
        handler=list_spaces,
        access=Access.MEMBER,
        tag="spaces",
        summary="List spaces, ordered by id",
        description="With a token: the spaces of which the entity is a member.",
        query=PageQuery,
        response=ResultPage[Space],
    ),
    Route(
        method="POST",
        path="/api/spaces",
        handler=create_space,
        access=Access.SECRET,
        tag="spaces",
        summary="Create a space with its first members",
        body=NewSpace,
        response=Space,
        status=201,
        accepts_idempotency_key=True,
    ),
    Route(
        method="GET",
        path="/api/spaces/{spaceId}",
        handler=get_space,
        access=Access.MEMBER,
        tag="spaces",
        summary="Get a space",
        response=Space,
    ),
    Route(
        method="PATCH",
        path="/api/spaces/{spaceId}",
        handler=update_space,
        access=Access.SECRET,
        tag="spaces",
        summary="Update the name or metadata of a space",
        body=SpaceChange,
        response=Space,
    ),
    Route(
        method="DELETE",
        path="/api/spaces/{spaceId}",
        handler=delete_space,
        access=Access.SECRET,
        tag="spaces",
        summary="Delete a space, its memberships and its messages",
        description="Its streams end. Calls that were visible there are visible in no space.",
        status=204,
    ),
    Route(
        method="GET",
        path="/api/spaces/{spaceId}/members",
        handler=list_members,
        access=Access.MEMBER,
        tag="spaces",
        summary="List the members of a space",
        response=ResultPage[Member],
    ),
    Route(
        method="POST",
        path="/api/spaces/{spaceId}/members",
        handler=post_member,
        access=Access.SECRET,
        tag="spaces",
        summary="Add a member to a space, if it is not a member yet",
        body=NewMember,
        response=Member,
    ),
    Route(
        method="PUT",
        path="/api/spaces/{spaceId}/members/{entityId}",
        handler=put_member,
        access=Access.SECRET,
        tag="spaces",
        summary="Add a member to a space, if it is not a member yet",
        response=Member,
    ),
    Route(
        method="DELETE",
        path="/api/spaces/{spaceId}/members/{entityId}",
        handler=remove_member,
        access=Access.SECRET,
        tag="spaces",
        summary="Remove a member from a space",
        description="The streams that the member has of this space end.",
        status=204,
    ),
]


# MERGED from entities: Routes of entities: the people, agents and services that can be members of a space.


class NewEntity(JsonRequestBody, frozen=True, kw_only=True):
    """A person, an agent or a service to create."""

    type: EntityType
    """The type of the entity."""
    name: Name
    """The display name."""
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class EntityChange(JsonRequestBody, frozen=True, kw_only=True):
    """New values for an entity. Missing fields stay unchanged; the metadata is replaced as a whole."""

    name: Name | msgspec.UnsetType = msgspec.UNSET
    """The display name."""
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class EntityListQuery(PageQuery, frozen=True, kw_only=True):
    type: EntityType | None = None
    """Only entities of this type."""


async def list_entities(request: Request) -> ResultPage[Entity]:
    query = request.query(EntityListQuery)
    records = await request.gateway.ledger.read(
        entities_and_spaces.list_entities, type=query.type, after=query.cursor or "", limit=query.limit + 1
    )
    return build_page(records, query.limit, lambda entity: entity.id)


async def create_entity(request: Request) -> Response:
    body = await request.json(NewEntity)
    entity_id = body.id or new_id("ent")
    return await run_once(request, lambda _: _create_entity(entity_id, body))


async def get_entity(request: Request) -> Entity:
    entity = await get_visible_entity(request.gateway.ledger, request.caller, request.params["entityId"])
    return redact_entity(entity, request.caller)


async def update_entity(request: Request) -> Entity:
    body = await request.json(EntityChange)
    entity_id = request.params["entityId"]
    entity = await request.gateway.ledger.write(
        entities_and_spaces.update_entity,
        entity_id,
        name=unset_to_none(body.name),
        metadata=unset_to_none(body.metadata),
    )
    if entity is None:
        raise not_found("Entity", entity_id)
    return entity


async def delete_entity(request: Request) -> Response:
    entity_id = request.params["entityId"]
    if not await request.gateway.ledger.commit(delete_entity_transaction, entity_id):
        raise not_found("Entity", entity_id)
    request.gateway.authenticator.invalidate()  # Its tokens are no longer valid.
    return NO_CONTENT


def _create_entity(entity_id: str, body: NewEntity) -> Program[Entity]:
    entity = yield from entities_and_spaces.create_entity(entity_id, body.type, body.name, body.metadata)
    if entity is None:
        raise RefusedError("conflict", f'Entity "{entity_id}" exists already; omit the id or choose another')
    return entity


ENTITY_ROUTES = [
    Route(
        method="GET",
        path="/api/entities",
        handler=list_entities,
        access=Access.SECRET,
        tag="entities",
        summary="List entities, ordered by id",
        query=EntityListQuery,
        response=ResultPage[Entity],
    ),
    Route(
        method="POST",
        path="/api/entities",
        handler=create_entity,
        access=Access.SECRET,
        tag="entities",
        summary="Create a person, an agent or a service",
        body=NewEntity,
        response=Entity,
        status=201,
        accepts_idempotency_key=True,
    ),
    Route(
        method="GET",
        path="/api/entities/{entityId}",
        handler=get_entity,
        access=Access.MEMBER,
        tag="entities",
        summary="Get an entity",
        description="With a token: the entity itself, and entities that share a space with it, without their metadata.",
        response=Entity,
    ),
    Route(
        method="PATCH",
        path="/api/entities/{entityId}",
        handler=update_entity,
        access=Access.SECRET,
        tag="entities",
        summary="Update the name or metadata of an entity",
        body=EntityChange,
        response=Entity,
    ),
    Route(
        method="DELETE",
        path="/api/entities/{entityId}",
        handler=delete_entity,
        access=Access.SECRET,
        tag="entities",
        summary="Delete an entity, its memberships and its runs",
        description="Its messages stay.",
        status=204,
    ),
]

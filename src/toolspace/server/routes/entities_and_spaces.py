"""Routes of entities, spaces and members, and the transactions that create and delete them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from msgspec import UNSET, Meta, UnsetType, field

from toolspace.core.ids import new_id
from toolspace.core.stored_records import Entity, EntityType, Member, Space, space_stream
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    MAX_METADATA,
    BodyWithMetadata,
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
from toolspace.server.authorization import ENTITY, SPACE, Access, Resource, entity_id_of, get_visible
from toolspace.server.idempotency import run_once
from toolspace.server.redaction import redact_entity
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Problem, Response, not_found
from toolspace.server.routing import RouteTable
from toolspace.spaces import call_transactions, runs, space_deletion
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries import calls, entities_and_spaces, inbox, sessions
from toolspace.storage.queries import runs as run_queries
from toolspace.storage.queries import space_deletion as deletion_rows

T = TypeVar("T")

entity_routes = RouteTable("entities")
space_routes = RouteTable("spaces")


class _NameChange(JsonRequestBody, frozen=True, kw_only=True):
    name: Name | UnsetType = UNSET
    """The new name."""
    metadata: Metadata | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class NewEntity(BodyWithMetadata, frozen=True, kw_only=True):
    """A person, an agent or a service to create."""

    type: EntityType
    """The type of the entity."""
    name: Name
    """The display name."""
    id: NewId | None = None


class EntityChange(_NameChange, frozen=True, kw_only=True):
    """New values for an entity. Missing fields stay unchanged; the metadata is replaced as a whole."""


class EntityListQuery(PageQuery, frozen=True, kw_only=True):
    type: EntityType | None = None
    """Only entities of this type."""


@entity_routes.add("GET", "/api/entities", "List entities, ordered by id", query=EntityListQuery)
async def list_entities(request: Request) -> ResultPage[Entity]:
    query = request.query(EntityListQuery)
    records = await request.read(
        entities_and_spaces.list_entities, type=query.type, after=query.cursor or "", limit=query.limit + 1
    )
    return build_page(records, query.limit)


@entity_routes.add("POST", "/api/entities", "Create a person, an agent or a service", body=NewEntity, creates=Entity)
async def create_entity(request: Request) -> Response:
    body = await request.json(NewEntity)
    entity_id = body.id or new_id("ent")
    return await run_once(request, lambda _: _create_entity(entity_id, body))


@entity_routes.add(
    "GET",
    "/api/entities/{entityId}",
    "Get an entity",
    access=Access.MEMBER,
    description="With a token: the entity itself, and entities that share a space with it, without their metadata.",
)
async def get_entity(request: Request) -> Entity:
    return redact_entity(await get_visible(request, ENTITY), request.caller)


@entity_routes.add("PATCH", "/api/entities/{entityId}", "Update the name or metadata of an entity", body=EntityChange)
async def update_entity(request: Request) -> Entity:
    return await _update(request, ENTITY, EntityChange, entities_and_spaces.update_entity)


@entity_routes.add(
    "DELETE",
    "/api/entities/{entityId}",
    "Delete an entity, its memberships and its runs",
    description="Its messages stay.",
    status=204,
)
async def delete_entity(request: Request) -> Response:
    entity_id = request.params["entityId"]
    if not await request.ledger.commit(delete_entity_transaction, entity_id):
        raise not_found("Entity", entity_id)
    request.gateway.authenticator.invalidate()  # Its tokens are no longer valid.
    return NO_CONTENT


# Spaces and members


class NewSpace(BodyWithMetadata, frozen=True, kw_only=True):
    """A space to create."""

    name: Name
    """The name of the space."""
    members: Annotated[tuple[Id, ...], Meta(max_length=100)] = field(default_factory=tuple[Id, ...])
    """The ids of the first members."""
    id: NewId | None = None


class SpaceChange(_NameChange, frozen=True, kw_only=True):
    """New values for a space. Missing fields stay unchanged; the metadata is replaced as a whole."""


class NewMember(JsonRequestBody, frozen=True, kw_only=True):
    """A member to add."""

    entity_id: Id
    """The entity to add."""


@space_routes.add(
    "GET",
    "/api/spaces",
    "List spaces, ordered by id",
    access=Access.MEMBER,
    description="With a token: the spaces of which the entity is a member.",
    query=PageQuery,
)
async def list_spaces(request: Request) -> ResultPage[Space]:
    query = request.query(PageQuery)
    records = await request.read(
        entities_and_spaces.list_spaces,
        member=entity_id_of(request.caller),
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return build_page(records, query.limit)


@space_routes.add("POST", "/api/spaces", "Create a space with its first members", body=NewSpace, creates=Space)
async def create_space(request: Request) -> Response:
    body = await request.json(NewSpace)
    space_id = body.id or new_id("spc")
    return await run_once(request, lambda _: _create_space(space_id, body))


@space_routes.add("GET", "/api/spaces/{spaceId}", "Get a space", access=Access.MEMBER)
async def get_space(request: Request) -> Space:
    return await get_visible(request, SPACE)


@space_routes.add("PATCH", "/api/spaces/{spaceId}", "Update the name or metadata of a space", body=SpaceChange)
async def update_space(request: Request) -> Space:
    return await _update(request, SPACE, SpaceChange, entities_and_spaces.update_space)


@space_routes.add(
    "DELETE",
    "/api/spaces/{spaceId}",
    "Delete a space, its memberships and its messages",
    description="Its streams end. Calls that were visible there are visible in no space. It is gone at once, but if it "
    "has many messages, its id can be used again only when all of them are deleted.",
    status=204,
)
async def delete_space(request: Request) -> Response:
    space_id = request.params["spaceId"]
    if not await request.ledger.commit(space_deletion.delete_space, space_id):
        raise not_found("Space", space_id)
    request.gateway.memberships.invalidate(space_id)
    request.gateway.hub.close_stream(space_stream(space_id))
    return NO_CONTENT


@space_routes.add("GET", "/api/spaces/{spaceId}/members", "List the members of a space", access=Access.MEMBER)
async def list_members(request: Request) -> ResultPage[Member]:
    space = await get_visible(request, SPACE)
    return ResultPage(items=await request.read(entities_and_spaces.list_members, space.id), next=None)


@space_routes.add(
    "PUT", "/api/spaces/{spaceId}/members/{entityId}", "Add a member to a space, if it is not a member yet"
)
async def put_member(request: Request) -> Member:
    return await _add_to_space(request, request.params["entityId"])


@space_routes.add(
    "POST", "/api/spaces/{spaceId}/members", "Add a member to a space, if it is not a member yet", body=NewMember
)
async def post_member(request: Request) -> Member:
    body = await request.json(NewMember)
    return await _add_to_space(request, body.entity_id)


@space_routes.add(
    "DELETE",
    "/api/spaces/{spaceId}/members/{entityId}",
    "Remove a member from a space",
    description="The streams that the member has of this space end.",
    status=204,
)
async def remove_member(request: Request) -> Response:
    space, entity_id = await get_visible(request, SPACE), request.params["entityId"]
    was_member = await request.ledger.commit(remove_member_transaction, space.id, entity_id)
    request.gateway.memberships.invalidate(space.id)
    if not was_member:
        raise Problem(404, f'Entity "{entity_id}" is not a member of space "{space.id}"')
    return NO_CONTENT


async def _update(
    request: Request, resource: Resource[T], change: type[_NameChange], update: Callable[..., Program[T | None]]
) -> T:
    body, id = await request.json(change), request.params[resource.parameter]
    name, metadata = unset_to_none(body.name), unset_to_none(body.metadata)
    record = await request.ledger.write(update, id, name=name, metadata=metadata)
    if record is None:
        raise not_found(resource.noun, id)
    return record


async def _add_to_space(request: Request, entity_id: str) -> Member:
    space_id = request.params["spaceId"]
    member = await request.ledger.write(_add_member, space_id, entity_id)
    request.gateway.memberships.invalidate(space_id)
    return member


# Transactions


def _create_entity(entity_id: str, body: NewEntity) -> Program[Entity]:
    entity = yield from entities_and_spaces.create_entity(entity_id, body.type, body.name, body.metadata)
    if entity is None:
        raise RefusedError("conflict", f'Entity "{entity_id}" exists already; omit the id or choose another')
    return entity


def _create_space(space_id: str, body: NewSpace) -> Program[Space]:
    space = yield from entities_and_spaces.create_space(space_id, body.name, body.metadata)
    if space is None and (yield from deletion_rows.is_started(space_id)):
        raise RefusedError("conflict", f'Space "{space_id}" is being deleted; use its id again in a minute, or another')
    if space is None:
        raise RefusedError("conflict", f'Space "{space_id}" exists already; omit the id or choose another')
    for entity_id in body.members:
        if (yield from entities_and_spaces.find_entity(entity_id)) is None:
            raise RefusedError("invalid", f'Entity "{entity_id}" not found; it cannot be a member')
        yield from entities_and_spaces.add_member(space_id, entity_id)
    return space


def _add_member(space_id: str, entity_id: str) -> Program[Member]:
    if (yield from entities_and_spaces.find_space(space_id)) is None:
        raise RefusedError("not_found", f'Space "{space_id}" not found')
    if (yield from entities_and_spaces.find_entity(entity_id)) is None:
        raise RefusedError("not_found", f'Entity "{entity_id}" not found')
    yield from entities_and_spaces.add_member(space_id, entity_id)
    members = yield from entities_and_spaces.list_members(space_id)
    return next(member for member in members if member.entity_id == entity_id)


@long_running
def remove_member_transaction(effects: Effects, space_id: str, entity_id: str) -> Program[bool]:
    """Removes a member from a space; the runs of an agent leave it, too."""
    was_member = yield from entities_and_spaces.remove_member(space_id, entity_id)
    yield from run_queries.clear_space(space_id, agent_entity_id=entity_id)
    return was_member


@long_running
def delete_entity_transaction(effects: Effects, entity_id: str) -> Program[bool]:
    """Deletes an entity with its memberships, an agent with its runs, its inbox and its open calls, and a person with
    the sessions that agents have for this person alone.

    Its messages stay.
    """
    for run_id in (yield from run_queries.list_open_of_agent(entity_id)):
        yield from runs.cancel_run(effects, run_id)
    for call_id in (yield from calls.list_open_of_agent(entity_id)):
        yield from call_transactions.end_call(effects, call_id, "canceled", "its agent was removed", notify_agent=False)
    yield from inbox.delete_all(entity_id)
    yield from sessions.delete_scope(f"user:{entity_id}")
    return (yield from entities_and_spaces.delete_entity(entity_id))

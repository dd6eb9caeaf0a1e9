"""Routes of entities: the people, agents and services that can be members of a space."""

from __future__ import annotations

from typing import Any

import msgspec

from toolspace.core.ids import new_id
from toolspace.core.records import Entity, EntityType
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    MAX_METADATA,
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
from toolspace.server.authorization import Access, get_visible_entity
from toolspace.server.idempotency import run_once
from toolspace.server.problems import not_found
from toolspace.server.redaction import redact_entity
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Response
from toolspace.server.routing import Route
from toolspace.spaces import deletion
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces


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
    return await run_once(request, lambda _: _create(entity_id, body))


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
    if not await request.gateway.ledger.commit(deletion.delete_entity, entity_id):
        raise not_found("Entity", entity_id)
    request.gateway.authenticator.invalidate()  # Its tokens are no longer valid.
    return NO_CONTENT


def _create(entity_id: str, body: NewEntity) -> Program[Entity]:
    entity = yield from entities_and_spaces.create_entity(entity_id, body.type, body.name, body.metadata)
    if entity is None:
        raise RefusedError("conflict", f'Entity "{entity_id}" exists already; omit the id or choose another')
    return entity


ROUTES = [
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

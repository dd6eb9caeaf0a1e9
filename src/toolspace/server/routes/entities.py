"""Routes for entities: the people, agents and services that can be in a space."""

from __future__ import annotations

from collections.abc import Mapping
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
from toolspace.server.authorization import Access, Caller, EntityCaller, get_visible_entity
from toolspace.server.idempotency import run_once
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Response
from toolspace.server.routing import Route
from toolspace.spaces import deletion
from toolspace.storage.database import Program
from toolspace.storage.queries import entities


class NewEntity(JsonRequestBody, frozen=True, kw_only=True):
    """Someone who can be in a space."""

    type: EntityType
    name: Name
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class EntityChange(JsonRequestBody, frozen=True, kw_only=True):
    """What is to be different; what is left out stays. The metadata is replaced as a whole."""

    name: Name | msgspec.UnsetType = msgspec.UNSET
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class EntityListQuery(PageQuery, frozen=True, kw_only=True):
    type: EntityType | None = None


def redact_entity(caller: Caller, entity: Entity) -> Entity:
    """An entity as others see it: what is noted about it is its own, and the operator's."""
    if isinstance(caller, EntityCaller) and caller.entity_id != entity.id:
        return msgspec.structs.replace(entity, metadata={})
    return entity


async def list_entities(request: Request) -> ResultPage[Entity]:
    query = request.query(EntityListQuery)
    found = await request.gateway.ledger.read(
        entities.list_entities, type=query.type, after=query.cursor or "", limit=query.limit + 1
    )
    return build_page(found, query.limit, lambda entity: entity.id)


async def create_entity(request: Request) -> Response:
    body = await request.json(NewEntity)
    entity_id = body.id or new_id("ent")
    return await run_once(request, lambda _: _add(entity_id, body.type, body.name, body.metadata))


async def get_entity(request: Request) -> Entity:
    entity = await get_visible_entity(request.gateway.ledger, request.caller, request.params["entityId"])
    return redact_entity(request.caller, entity)


async def change_entity(request: Request) -> Entity:
    body = await request.json(EntityChange)
    entity_id = request.params["entityId"]
    changed = await request.gateway.ledger.write(
        entities.update_entity, entity_id, name=unset_to_none(body.name), metadata=unset_to_none(body.metadata)
    )
    if changed is None:
        raise Problem(404, f'there is no entity "{entity_id}"')
    return changed


async def remove_entity(request: Request) -> Response:
    entity_id = request.params["entityId"]
    if not await request.gateway.ledger.commit(deletion.delete_entity, entity_id):
        raise Problem(404, f'there is no entity "{entity_id}"')
    request.gateway.authenticator.invalidate()  # Its tokens are nobody's from now on.
    request.gateway.streams.recheck_permissions()
    return NO_CONTENT


def _add(entity_id: str, type: EntityType, name: str, metadata: Mapping[str, Any]) -> Program[Entity]:
    entity = yield from entities.create_entity(entity_id, type, name, metadata)
    if entity is None:
        raise RefusedError("conflict", f'there is an entity "{entity_id}" already; leave the id out, or take another')
    return entity


ROUTES = [
    Route(
        method="GET",
        path="/api/entities",
        handler=list_entities,
        access=Access.SECRET,
        tag="entities",
        summary="List entities, by id",
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
        summary="One entity",
        description="With a token: oneself, and whoever shares a space; the metadata of others is left out.",
        response=Entity,
    ),
    Route(
        method="PATCH",
        path="/api/entities/{entityId}",
        handler=change_entity,
        access=Access.SECRET,
        tag="entities",
        summary="Change an entity's name or metadata",
        body=EntityChange,
        response=Entity,
    ),
    Route(
        method="DELETE",
        path="/api/entities/{entityId}",
        handler=remove_entity,
        access=Access.SECRET,
        tag="entities",
        summary="Remove an entity, its memberships and its runs",
        description="What it said stays.",
        status=204,
    ),
]

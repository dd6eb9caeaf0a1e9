"""Routes for spaces and who is in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from toolspace.core.ids import new_id
from toolspace.core.records import Member, Space, space_stream
from toolspace.errors import RefusedError
from toolspace.server.authorization import member_of
from toolspace.server.body_types import (
    MAX_METADATA,
    Body,
    Id,
    Metadata,
    Name,
    NewId,
    Page,
    Paging,
    check_size,
    given,
    page,
)
from toolspace.server.callers import Access, Public
from toolspace.server.idempotency import once
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Answer
from toolspace.server.routing import Route
from toolspace.spaces import deletion
from toolspace.storage.database import Program
from toolspace.storage.queries import entities

MAX_FIRST_MEMBERS = 100


class NewSpace(Body, frozen=True, kw_only=True):
    """A place for people and agents."""

    name: Name
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])
    members: Annotated[list[Id], Meta(max_length=MAX_FIRST_MEMBERS, description="Ids of entities.")] = msgspec.field(
        default_factory=list[str]
    )
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_size("metadata", self.metadata, MAX_METADATA)


class SpaceChange(Body, frozen=True, kw_only=True):
    """What is to be different; what is left out stays. The metadata is replaced as a whole."""

    name: Name | msgspec.UnsetType = msgspec.UNSET
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_size("metadata", self.metadata, MAX_METADATA)


class NewMember(Body, frozen=True, kw_only=True):
    """Who comes into a space."""

    entity_id: Id


async def list_spaces(request: Request) -> Page[Space]:
    query = request.query(Paging)
    caller = request.caller
    found = await request.gateway.ledger.read(
        entities.spaces,
        member=caller.entity_id if isinstance(caller, Public) else None,
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return page(found, query.limit, lambda space: space.id)


async def create_space(request: Request) -> Answer:
    body = await request.json(NewSpace)
    space_id = body.id or new_id("spc")
    return await once(request, lambda _: _add(space_id, body))


async def get_space(request: Request) -> Space:
    return await member_of(request.gateway.ledger, request.caller, request.params["spaceId"])


async def change_space(request: Request) -> Space:
    body = await request.json(SpaceChange)
    space_id = request.params["spaceId"]
    changed = await request.gateway.ledger.write(
        entities.change_space, space_id, name=given(body.name), metadata=given(body.metadata)
    )
    if changed is None:
        raise Problem(404, f'there is no space "{space_id}"')
    return changed


async def remove_space(request: Request) -> Answer:
    space_id = request.params["spaceId"]
    if not await request.gateway.ledger.commit(deletion.remove_space, space_id):
        raise Problem(404, f'there is no space "{space_id}"')
    _forget_members(request, space_id)
    request.gateway.hub.end(space_stream(space_id))
    return NO_CONTENT


async def list_members(request: Request) -> Page[Member]:
    space = await member_of(request.gateway.ledger, request.caller, request.params["spaceId"])
    return Page(items=await request.gateway.ledger.read(entities.members, space.id), next=None)


async def put_member(request: Request) -> Member:
    return await _join(request, request.params["entityId"])


async def post_member(request: Request) -> Member:
    body = await request.json(NewMember)
    return await _join(request, body.entity_id)


async def remove_member(request: Request) -> Answer:
    space_id, entity_id = request.params["spaceId"], request.params["entityId"]
    await member_of(request.gateway.ledger, request.caller, space_id)
    removed = await request.gateway.ledger.commit(deletion.remove_member, space_id, entity_id)
    _forget_members(request, space_id)
    if not removed:
        raise Problem(404, f'"{entity_id}" is not a member of the space "{space_id}"')
    return NO_CONTENT


def _forget_members(request: Request, space_id: str) -> None:
    """Someone is out: whoever reads the space is asked for their right before they read on."""
    request.gateway.members.forget(space_id)
    request.gateway.readers.recheck()


async def _join(request: Request, entity_id: str) -> Member:
    space_id = request.params["spaceId"]
    member = await request.gateway.ledger.write(_add_member, space_id, entity_id)
    request.gateway.members.forget(space_id)
    return member


def _add(space_id: str, new: NewSpace) -> Program[Space]:
    space = yield from entities.add_space(space_id, new.name, new.metadata)
    if space is None:
        raise RefusedError("conflict", f'there is a space "{space_id}" already; leave the id out, or take another')
    yield from _add_members(space_id, new.members)
    return space


def _add_members(space_id: str, entity_ids: Sequence[str]) -> Program[None]:
    for entity_id in entity_ids:
        if (yield from entities.entity(entity_id)) is None:
            raise RefusedError("invalid", f'there is no entity "{entity_id}" that could be a member')
        yield from entities.add_member(space_id, entity_id)


def _add_member(space_id: str, entity_id: str) -> Program[Member]:
    if (yield from entities.space(space_id)) is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if (yield from entities.entity(entity_id)) is None:
        raise RefusedError("not_found", f'there is no entity "{entity_id}"')
    yield from entities.add_member(space_id, entity_id)
    members = yield from entities.members(space_id)
    return next(member for member in members if member.entity_id == entity_id)


ROUTES = [
    Route(
        method="GET",
        path="/api/spaces",
        handler=list_spaces,
        access=Access.MEMBER,
        tag="spaces",
        summary="List spaces, by id",
        description="With a token: those that the entity is a member of.",
        query=Paging,
        answer=Page[Space],
    ),
    Route(
        method="POST",
        path="/api/spaces",
        handler=create_space,
        access=Access.SECRET,
        tag="spaces",
        summary="Create a space, with its first members",
        body=NewSpace,
        answer=Space,
        status=201,
        creates=True,
    ),
    Route(
        method="GET",
        path="/api/spaces/{spaceId}",
        handler=get_space,
        access=Access.MEMBER,
        tag="spaces",
        summary="One space",
        answer=Space,
    ),
    Route(
        method="PATCH",
        path="/api/spaces/{spaceId}",
        handler=change_space,
        access=Access.SECRET,
        tag="spaces",
        summary="Change a space's name or metadata",
        body=SpaceChange,
        answer=Space,
    ),
    Route(
        method="DELETE",
        path="/api/spaces/{spaceId}",
        handler=remove_space,
        access=Access.SECRET,
        tag="spaces",
        summary="Remove a space, its members and its messages",
        description="Its streams end. Calls that showed there are shown nowhere any more.",
        status=204,
    ),
    Route(
        method="GET",
        path="/api/spaces/{spaceId}/members",
        handler=list_members,
        access=Access.MEMBER,
        tag="spaces",
        summary="Who is in a space",
        answer=Page[Member],
    ),
    Route(
        method="POST",
        path="/api/spaces/{spaceId}/members",
        handler=post_member,
        access=Access.SECRET,
        tag="spaces",
        summary="Add a member; one who is there already stays",
        body=NewMember,
        answer=Member,
    ),
    Route(
        method="PUT",
        path="/api/spaces/{spaceId}/members/{entityId}",
        handler=put_member,
        access=Access.SECRET,
        tag="spaces",
        summary="Add a member; one who is there already stays",
        answer=Member,
    ),
    Route(
        method="DELETE",
        path="/api/spaces/{spaceId}/members/{entityId}",
        handler=remove_member,
        access=Access.SECRET,
        tag="spaces",
        summary="Remove a member",
        description="Its streams of the space end.",
        status=204,
    ),
]

"""The routes for keys and tokens, and for asking who one is."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from toolspace.core.records import Entity
from toolspace.server import keys
from toolspace.server.api_types import (
    ONE_LINE,
    Id,
    JsonRequestBody,
    Milliseconds,
    Name,
    PageQuery,
    ResponseBody,
    ResultPage,
    build_page,
)
from toolspace.server.authorization import Access, EntityCaller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Response
from toolspace.server.routing import Route
from toolspace.server.tokens import MAX_TOKEN_SECONDS
from toolspace.storage.queries import entities
from toolspace.storage.queries import keys as rows
from toolspace.storage.queries.keys import KeyKind, KeyRecord, KeyScope

Pattern = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        pattern=ONE_LINE,
        description="A tool's name, `*` and `?` in it stand for any characters.",
        examples=["notes__*"],
    ),
]
Patterns = Annotated[tuple[Pattern, ...], Meta(max_length=500)]


class NewKeyBody(JsonRequestBody, frozen=True, kw_only=True):
    """A key to make."""

    kind: KeyKind
    name: Name = "unnamed"
    tools_allowed: Patterns | None = None
    """Of a tool key: the tools that it may use; all where it is left out."""
    tools_denied: Patterns = ()
    agent_entity_id: Id | None = None
    """Of a tool key: the agent in whose name its calls run."""


class KeyShape(ResponseBody, frozen=True, kw_only=True):
    """A key, without what opens doors."""

    id: str
    kind: KeyKind
    name: str
    hint: Annotated[str, Meta(examples=["sk_…a1b2"])]
    tools_allowed: tuple[str, ...] | None
    tools_denied: tuple[str, ...]
    agent_entity_id: str | None
    created_at: Milliseconds
    revoked_at: Milliseconds | None
    last_used_at: Milliseconds | None
    calls: int
    failed: int
    key: str | UnsetType = UNSET
    """The key itself: in the answer that makes it, and never again."""


class TokenBody(JsonRequestBody, frozen=True, kw_only=True):
    """How long a token is to be good."""

    expires_in: Annotated[int, Meta(ge=1, le=MAX_TOKEN_SECONDS, description="Seconds.")] = 3600


class TokenShape(ResponseBody, frozen=True, kw_only=True):
    token: str
    entity_id: str
    expires_at: Milliseconds


class CallerResponse(ResponseBody, frozen=True, kw_only=True):
    """Who asks."""

    kind: Literal["secret", "public", "tools"]
    key_id: str
    entity: Entity | None = None
    expires_at: Milliseconds | None = None
    """When the token ends."""
    tools_allowed: tuple[str, ...] | None = None
    tools_denied: tuple[str, ...] = ()
    agent_entity_id: str | None = None


async def list_keys(request: Request) -> ResultPage[KeyShape]:
    asked = request.query(PageQuery)
    found = await request.gateway.ledger.read(rows.list_keys, after=asked.cursor or "", limit=asked.limit + 1)
    return build_page([_shown(one) for one in found], asked.limit, lambda one: one.id)


async def create_key(request: Request) -> Response:
    asked = await request.json(NewKeyBody)
    scope = KeyScope(
        tools_allowed=asked.tools_allowed,
        tools_denied=asked.tools_denied,
        agent_entity_id=asked.agent_entity_id,
    )
    if asked.kind != "tools" and (asked.tools_allowed is not None or asked.tools_denied or asked.agent_entity_id):
        raise Problem(400, f"toolsAllowed, toolsDenied and agentEntityId are for tool keys; this one is {asked.kind}")
    if asked.agent_entity_id is not None:
        agent = await request.gateway.ledger.read(entities.find_entity, asked.agent_entity_id)
        if agent is None or agent.type != "agent":
            raise Problem(400, f'agentEntityId "{asked.agent_entity_id}" is no agent here', path="$.agentEntityId")
    made, text = await keys.create_key(request.gateway.ledger, asked.kind, asked.name, scope)
    return Response(_shown(made, key=text), status=201)


async def revoke_key(request: Request) -> Response:
    gateway = request.gateway
    key_id = request.params["keyId"]
    outcome = await keys.revoke_key(
        gateway.ledger, key_id, another_way_in=gateway.authenticator.has_configured_secret_key
    )
    if outcome == "unknown":
        raise Problem(404, f'there is no key "{key_id}"')
    if outcome == "last":
        raise Problem(409, f'"{key_id}" is the last secret key; make another one first (POST /api/keys)')
    gateway.authenticator.invalidate()
    return NO_CONTENT


async def create_token(request: Request) -> Response:
    gateway = request.gateway
    entity_id = request.params["entityId"]
    asked = await request.json(TokenBody)
    if await gateway.ledger.read(entities.find_entity, entity_id) is None:
        raise Problem(404, f'there is no entity "{entity_id}"')
    tokens = gateway.authenticator.tokens
    if not tokens.can_create:
        raise Problem(409, "tokens are made by the issuer that is configured (server.jwksUrl), not here")
    token, expires_at = tokens.create(entity_id, asked.expires_in)
    return Response(TokenShape(token=token, entity_id=entity_id, expires_at=expires_at), status=201)


async def get_me(request: Request) -> CallerResponse:
    caller = request.caller
    if isinstance(caller, EntityCaller):
        entity = await request.gateway.ledger.read(entities.find_entity, caller.entity_id)
        return CallerResponse(kind="public", key_id=caller.key_id, entity=entity, expires_at=caller.expires_at)
    if isinstance(caller, ToolKeyCaller):
        return CallerResponse(
            kind="tools",
            key_id=caller.key_id,
            tools_allowed=caller.tools_allowed,
            tools_denied=caller.tools_denied,
            agent_entity_id=caller.agent_entity_id,
        )
    assert isinstance(caller, SecretKeyCaller)
    return CallerResponse(kind="secret", key_id=caller.key_id)


def _shown(record: KeyRecord, *, key: str | UnsetType = UNSET) -> KeyShape:
    return KeyShape(
        id=record.id,
        kind=record.kind,
        name=record.name,
        hint=record.hint,
        tools_allowed=record.scope.tools_allowed,
        tools_denied=record.scope.tools_denied,
        agent_entity_id=record.scope.agent_entity_id,
        created_at=record.created_at,
        revoked_at=record.revoked_at,
        last_used_at=record.last_used_at,
        calls=record.calls,
        failed=record.failed,
        key=key,
    )


ROUTES = [
    Route(
        method="GET",
        path="/api/me",
        handler=get_me,
        access=Access.ANY,
        tag="access",
        summary="Who you are, by your credentials",
        response=CallerResponse,
    ),
    Route(
        method="GET",
        path="/api/keys",
        handler=list_keys,
        access=Access.SECRET,
        tag="access",
        summary="The keys that there are, revoked ones too",
        query=PageQuery,
        response=ResultPage[KeyShape],
    ),
    Route(
        method="POST",
        path="/api/keys",
        handler=create_key,
        access=Access.SECRET,
        tag="access",
        summary="Make a key",
        description="The answer has the key itself, once: only its hash is kept. So a repeated request makes another.",
        body=NewKeyBody,
        response=KeyShape,
        status=201,
    ),
    Route(
        method="DELETE",
        path="/api/keys/{keyId}",
        handler=revoke_key,
        access=Access.SECRET,
        tag="access",
        summary="Revoke a key",
        description="It ends at once here, and within seconds in other processes. The last secret key stays.",
        status=204,
        error_statuses=(409,),
    ),
    Route(
        method="POST",
        path="/api/entities/{entityId}/token",
        handler=create_token,
        access=Access.SECRET,
        tag="access",
        summary="Make a token that names an entity",
        description="For a backend without an issuer of its own: give it to the entity, beside a public key.",
        body=TokenBody,
        response=TokenShape,
        status=201,
        error_statuses=(409,),
    ),
]

"""Routes of keys and tokens, and of the caller's own identity."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from toolspace.core.stored_records import Entity
from toolspace.core.tool_collections import expand_collections, unknown_collection_problem
from toolspace.server import api_keys
from toolspace.server.access_tokens import MAX_TOKEN_SECONDS
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
from toolspace.server.authorization import Access, EntityCaller, ToolKeyCaller
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Problem, Response, not_found
from toolspace.server.routing import RouteTable
from toolspace.server.tool_permissions import is_allowed_by, is_denied_by
from toolspace.storage.queries import entities_and_spaces
from toolspace.storage.queries import keys as key_queries
from toolspace.storage.queries.keys import KeyKind, KeyRecord, KeyScope

if TYPE_CHECKING:
    from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.server")
_MAX_COMPARISONS: Final = 100_000
"""Above it, the patterns of a new key are not compared with all tools: that would block other requests."""

Pattern = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        pattern=ONE_LINE,
        description="The name of a tool; `*` and `?` match any characters.",
        examples=["notes__*"],
    ),
]
Patterns = Annotated[tuple[Pattern, ...], Meta(max_length=500)]

routes = RouteTable("access")


class NewKeyBody(JsonRequestBody, frozen=True, kw_only=True):
    """A key to create."""

    kind: KeyKind
    """The kind of the key."""
    name: Name = "unnamed"
    """What the key is for."""
    tools_allowed: Patterns | None = None
    """The tools that a tool key may use; all if it is missing."""
    tools_denied: Patterns = ()
    """The tools that a tool key may not use, even if they are allowed."""
    agent_entity_id: Id | None = None
    """The agent on whose behalf a tool key calls tools."""


class KeyShape(ResponseBody, frozen=True, kw_only=True):
    """A key. Only the response that creates it has the key itself."""

    id: str
    """The id of the key."""
    kind: KeyKind
    """The kind of the key."""
    name: str
    """What the key is for."""
    hint: Annotated[str, Meta(examples=["sk_…a1b2"])]
    """The prefix and the last characters of the key."""
    tools_allowed: tuple[str, ...] | None
    """The tools that a tool key may use; null for all."""
    tools_denied: tuple[str, ...]
    """The tools that a tool key may not use, even if they are allowed."""
    agent_entity_id: str | None
    """The agent on whose behalf a tool key calls tools."""
    created_at: Milliseconds
    """When the key was created, in Unix milliseconds."""
    revoked_at: Milliseconds | None
    """When the key was revoked, in Unix milliseconds; null if it is valid."""
    last_used_at: Milliseconds | None
    """When the key was last used, in Unix milliseconds; null for never."""
    calls: int
    """How many tool calls were made with the key."""
    failed: int
    """How many of these calls failed."""
    key: str | UnsetType = UNSET
    """The key itself, only in the response that creates it."""


class TokenBody(JsonRequestBody, frozen=True, kw_only=True):
    """A token to create."""

    expires_in: Annotated[int, Meta(ge=1, le=MAX_TOKEN_SECONDS)] = 3600
    """How many seconds the token is valid."""


class TokenShape(ResponseBody, frozen=True, kw_only=True):
    """A token of an entity."""

    token: str
    """The token, for `Authorization: Bearer` together with a public key."""
    entity_id: str
    """The entity that the token names."""
    expires_at: Milliseconds
    """When the token expires, in Unix milliseconds."""


class CallerResponse(ResponseBody, frozen=True, kw_only=True):
    """The caller, as its credentials identify it."""

    kind: Literal["secret", "public", "tools"]
    """The kind of the key."""
    key_id: str
    """The id of the key."""
    entity: Entity | None = None
    """The entity that the token names."""
    expires_at: Milliseconds | None = None
    """When the token expires, in Unix milliseconds."""
    tools_allowed: tuple[str, ...] | None = None
    """The tools that a tool key may use; null for all."""
    tools_denied: tuple[str, ...] = ()
    """The tools that a tool key may not use, even if they are allowed."""
    agent_entity_id: str | None = None
    """The agent on whose behalf a tool key calls tools."""


@routes.add("GET", "/api/keys", "List keys, including revoked ones", query=PageQuery)
async def list_keys(request: Request) -> ResultPage[KeyShape]:
    query = request.query(PageQuery)
    records = await request.read(key_queries.list_keys, after=query.cursor or "", limit=query.limit + 1)
    return build_page([_to_response(record) for record in records], query.limit)


@routes.add(
    "POST",
    "/api/keys",
    "Create a key",
    description="Only this response has the key itself. A repeated request creates another key.",
    body=NewKeyBody,
    status=201,
)
async def create_key(request: Request) -> KeyShape:
    body = await request.json(NewKeyBody)
    scope = KeyScope(body.tools_allowed, body.tools_denied, body.agent_entity_id)
    if body.kind != "tools" and (body.tools_allowed is not None or body.tools_denied or body.agent_entity_id):
        raise Problem(
            400, f"toolsAllowed, toolsDenied and agentEntityId are only for tool keys, not for a {body.kind} key"
        )
    for field, patterns in (("toolsAllowed", body.tools_allowed or ()), ("toolsDenied", body.tools_denied)):
        for pattern in patterns:
            if (problem := unknown_collection_problem(pattern, is_strict=False)) is not None:
                raise Problem(400, problem, path=f"$.{field}")
    if body.agent_entity_id is not None:
        agent = await request.read(entities_and_spaces.find_entity, body.agent_entity_id)
        if agent is None or agent.type != "agent":
            raise Problem(400, f'Agent "{body.agent_entity_id}" not found', path="$.agentEntityId")
    record, key = await api_keys.create_key(request.gateway.ledger, body.kind, body.name, scope)
    _report_unmatched(request.gateway.toolspace, record.id, scope)
    return _to_response(record, key=key)


def _report_unmatched(toolspace: Toolspace, key_id: str, scope: KeyScope) -> None:
    """Logs each pattern of a key that fits no tool of now: most likely it is misspelt."""
    spellings = [entry.spellings for entry in toolspace.orchestrator.entries()]
    if len(spellings) * (len(scope.tools_allowed or ()) + len(scope.tools_denied)) > _MAX_COMPARISONS:
        return
    for pattern in expand_collections(scope.tools_allowed or ()):
        if not any(is_allowed_by(pattern, item) for item in spellings):
            _log.warning('key %s: toolsAllowed: "%s" matches no tool', key_id, pattern)
    for pattern in expand_collections(scope.tools_denied):
        if not any(is_denied_by(pattern, item) for item in spellings):
            _log.warning('key %s: toolsDenied: "%s" matches no tool', key_id, pattern)


@routes.add(
    "DELETE",
    "/api/keys/{keyId}",
    "Revoke a key",
    description="It stops working within seconds. The last secret key cannot be revoked.",
    status=204,
    error_statuses=(409,),
)
async def revoke_key(request: Request) -> Response:
    gateway = request.gateway
    key_id = request.params["keyId"]
    outcome = await api_keys.revoke_key(
        gateway.ledger, key_id, has_other_access=gateway.authenticator.has_configured_secret_key
    )
    if outcome == "unknown":
        raise not_found("Key", key_id)
    if outcome == "last":
        raise Problem(409, f'"{key_id}" is the last secret key; create another one first (POST /api/keys)')
    gateway.authenticator.invalidate()
    return NO_CONTENT


@routes.add(
    "POST",
    "/api/entities/{entityId}/token",
    "Create a token of an entity",
    description="For backends without their own token issuer. The entity sends it together with a public key.",
    body=TokenBody,
    status=201,
    error_statuses=(409,),
)
async def create_token(request: Request) -> TokenShape:
    gateway = request.gateway
    entity_id = request.params["entityId"]
    body = await request.json(TokenBody)
    if await gateway.ledger.read(entities_and_spaces.find_entity, entity_id) is None:
        raise not_found("Entity", entity_id)
    tokens = gateway.authenticator.tokens
    if not tokens.can_create:
        raise Problem(409, "Tokens are created by the configured issuer (server.jwksUrl), not by this server")
    token, expires_at = tokens.create(entity_id, body.expires_in)
    return TokenShape(token=token, entity_id=entity_id, expires_at=expires_at)


@routes.add("GET", "/api/me", "Get the caller's identity", access=Access.ANY)
async def get_me(request: Request) -> CallerResponse:
    caller = request.caller
    if isinstance(caller, EntityCaller):
        entity = await request.read(entities_and_spaces.find_entity, caller.entity_id)
        return CallerResponse(kind="public", key_id=caller.key_id, entity=entity, expires_at=caller.expires_at)
    kind = "tools" if isinstance(caller, ToolKeyCaller) else "secret"
    return CallerResponse(kind=kind, **msgspec.structs.asdict(caller))


def _to_response(record: KeyRecord, *, key: str | UnsetType = UNSET) -> KeyShape:
    fields = msgspec.structs.asdict(record)
    return KeyShape(**msgspec.structs.asdict(fields.pop("scope")), **fields, key=key)

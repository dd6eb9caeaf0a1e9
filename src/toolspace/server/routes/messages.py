"""Routes for what is said in spaces."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.core.records import Message
from toolspace.server.api_types import (
    MAX_METADATA,
    Id,
    JsonRequestBody,
    Limit,
    Metadata,
    NewId,
    QueryParameters,
    ResultPage,
    Text,
    check_json_size,
    check_no_nul,
)
from toolspace.server.authorization import Access, EntityCaller, get_visible_space
from toolspace.server.idempotency import run_once
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.server.routing import Route
from toolspace.spaces.messaging import send_message
from toolspace.storage.database import Program, read_page
from toolspace.storage.queries import messages

_MOST = 2**53


class NewMessage(JsonRequestBody, frozen=True, kw_only=True):
    """Something to say."""

    content: Text
    entity_id: Annotated[Id, Meta(description="Who says it; with a token always oneself.")] | None = None
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])
    reply_to: Annotated[Id, Meta(description="The message that this answers; tool calls cannot be.")] | None = None
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_no_nul("content", self.content)
        check_json_size("metadata", self.metadata, MAX_METADATA)


class MessageListQuery(QueryParameters, frozen=True, kw_only=True):
    limit: Limit = 50
    after: Annotated[int, Meta(ge=0, le=_MOST, description="Only messages with a greater `seq`.")] | None = None
    before: Annotated[int, Meta(ge=0, le=_MOST, description="The last ones with a smaller `seq`.")] | None = None
    cursor: Annotated[str, Meta(pattern="^(after|before)[.][0-9]{1,16}$", description="`next` of a page.")] | None = (
        None
    )


async def list_messages(request: Request) -> ResultPage[Message]:
    """The newest ones, and page by page those before; or from one on, and page by page those behind. Oldest first."""
    query = request.query(MessageListQuery)
    after, before = query.after, query.before
    if query.cursor is not None:
        if after is not None or before is not None:
            raise Problem(400, "a cursor says where to go on; leave out after and before")
        kind, _, number = query.cursor.partition(".")
        after, before = (int(number), None) if kind == "after" else (None, int(number))
    if after is not None and before is not None:
        raise Problem(400, "give either after or before")
    ledger = request.gateway.ledger
    space = await get_visible_space(ledger, request.caller, request.params["spaceId"])
    if after is not None:
        shown, more = await ledger.read(read_page, partial(_behind, space.id, after), _size, query.limit)
        return ResultPage(items=shown, next=f"after.{shown[-1].seq}" if more else None)
    last = _MOST if before is None else before
    shown, more = await ledger.read(read_page, partial(_in_front, space.id, last), _size, query.limit)
    return ResultPage(items=shown[::-1], next=f"before.{shown[-1].seq}" if more else None)


def _behind(space_id: str, after: int, last: Message | None, limit: int) -> Program[list[Message]]:
    return messages.list_between(space_id, after=after if last is None else last.seq, limit=limit)


def _in_front(space_id: str, before: int, last: Message | None, limit: int) -> Program[list[Message]]:
    found = yield from messages.list_between(space_id, before=before if last is None else last.seq, limit=limit)
    return found[::-1]


def _size(message: Message) -> int:
    return json_text.encoded_size(message.content) + json_text.encoded_size(message.metadata)


async def post_message(request: Request) -> Response:
    body = await request.json(NewMessage)
    space_id = request.params["spaceId"]
    await get_visible_space(request.gateway.ledger, request.caller, space_id)
    sender = body.entity_id
    if isinstance(request.caller, EntityCaller):
        if sender not in (None, request.caller.entity_id):
            raise Problem(403, f'you cannot speak for "{sender}"; leave entityId out')
        sender = request.caller.entity_id
    if sender is None:
        raise Problem(400, "entityId is needed: it says who speaks", path="$.entityId")
    message_id = body.id or new_id("msg")
    reply_to = _reply_to(body)
    return await run_once(
        request,
        lambda effects: send_message(
            effects, space_id, sender, body.content, message_id=message_id, metadata=body.metadata, reply_to=reply_to
        ),
    )


async def get_message(request: Request) -> Message:
    space = await get_visible_space(request.gateway.ledger, request.caller, request.params["spaceId"])
    message_id = request.params["messageId"]
    message = await request.gateway.ledger.read(messages.find, message_id)
    if message is None or message.space_id != space.id:
        raise Problem(404, f'there is no message "{message_id}" in the space "{space.id}"')
    return message


def _reply_to(body: NewMessage) -> str | None:
    noted: Any = body.metadata.get("replyTo")
    if noted is None or noted == body.reply_to:
        return body.reply_to
    if body.reply_to is not None:
        raise Problem(400, "replyTo and metadata.replyTo name two messages; leave one out", path="$.metadata.replyTo")
    if not isinstance(noted, str):
        raise Problem(400, "metadata.replyTo is the id of a message", path="$.metadata.replyTo")
    return noted


ROUTES = [
    Route(
        method="GET",
        path="/api/spaces/{spaceId}/messages",
        handler=list_messages,
        access=Access.MEMBER,
        tag="messages",
        summary="What was said in a space, oldest first",
        description="The newest messages, and with `next` those before them. "
        "With `after`: those behind a `seq`, and with `next` those behind them.",
        query=MessageListQuery,
        response=ResultPage[Message],
    ),
    Route(
        method="POST",
        path="/api/spaces/{spaceId}/messages",
        handler=post_message,
        access=Access.MEMBER,
        tag="messages",
        summary="Say something in a space",
        description="It is streamed to whoever reads the space, and reaches the inbox of every other agent there. "
        "A visible tool call shows as a message too; it cannot be replied to.",
        body=NewMessage,
        response=Message,
        status=201,
        accepts_idempotency_key=True,
    ),
    Route(
        method="GET",
        path="/api/spaces/{spaceId}/messages/{messageId}",
        handler=get_message,
        access=Access.MEMBER,
        tag="messages",
        summary="One message",
        response=Message,
    ),
]

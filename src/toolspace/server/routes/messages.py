"""Routes of the messages in a space."""

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
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, Response
from toolspace.server.routing import Route
from toolspace.spaces.messaging import send_message
from toolspace.storage.database import Program, read_page
from toolspace.storage.queries import messages

_MAX_SEQ = 2**53


class NewMessage(JsonRequestBody, frozen=True, kw_only=True):
    """A message to post."""

    content: Text
    entity_id: Id | None = None
    """The sender. With a token it is always the token's entity."""
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])
    reply_to: Id | None = None
    """The message to which this is a reply; not a tool call."""
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_no_nul("content", self.content)
        check_json_size("metadata", self.metadata, MAX_METADATA)


class MessageListQuery(QueryParameters, frozen=True, kw_only=True):
    limit: Limit = 50
    after: Annotated[int, Meta(ge=0, le=_MAX_SEQ)] | None = None
    """Only messages with a greater `seq`, the first ones."""
    before: Annotated[int, Meta(ge=0, le=_MAX_SEQ)] | None = None
    """Only messages with a smaller `seq`, the last ones."""
    cursor: Annotated[str, Meta(pattern="^(after|before)[.][0-9]{1,16}$")] | None = None
    """Where to continue: `next` of the previous page."""


async def list_messages(request: Request) -> ResultPage[Message]:
    """Pages go from the newest messages to older ones; with `after`, from there to newer ones."""
    query = request.query(MessageListQuery)
    after, before = query.after, query.before
    if query.cursor is not None:
        if after is not None or before is not None:
            raise Problem(400, "Send either cursor, or after or before")
        kind, _, number = query.cursor.partition(".")
        after, before = (int(number), None) if kind == "after" else (None, int(number))
    if after is not None and before is not None:
        raise Problem(400, "Send either after or before")
    ledger = request.gateway.ledger
    space = await get_visible_space(ledger, request.caller, request.params["spaceId"])
    if after is not None:
        items, has_more = await ledger.read(read_page, partial(_read_after, space.id, after), _size, query.limit)
        return ResultPage(items=items, next=f"after.{items[-1].seq}" if has_more else None)
    end = _MAX_SEQ if before is None else before
    items, has_more = await ledger.read(read_page, partial(_read_before, space.id, end), _size, query.limit)
    return ResultPage(items=items[::-1], next=f"before.{items[-1].seq}" if has_more else None)


def _read_after(space_id: str, after: int, last: Message | None, limit: int) -> Program[list[Message]]:
    return messages.list_between(space_id, after=after if last is None else last.seq, limit=limit)


def _read_before(space_id: str, before: int, last: Message | None, limit: int) -> Program[list[Message]]:
    page = yield from messages.list_between(space_id, before=before if last is None else last.seq, limit=limit)
    return page[::-1]


def _size(message: Message) -> int:
    return json_text.encoded_size(message.content) + json_text.encoded_size(message.metadata)


async def post_message(request: Request) -> Response:
    body = await request.json(NewMessage)
    space_id = request.params["spaceId"]
    await get_visible_space(request.gateway.ledger, request.caller, space_id)
    sender = body.entity_id
    if isinstance(request.caller, EntityCaller):
        if sender not in (None, request.caller.entity_id):
            raise Problem(403, f'You cannot post as "{sender}"; omit entityId')
        sender = request.caller.entity_id
    if sender is None:
        raise Problem(400, "entityId is required: the sender of the message", path="$.entityId")
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
        raise Problem(404, f'Message "{message_id}" not found in space "{space.id}"')
    return message


def _reply_to(body: NewMessage) -> str | None:
    metadata_reply_to: Any = body.metadata.get("replyTo")
    if metadata_reply_to is None or metadata_reply_to == body.reply_to:
        return body.reply_to
    if body.reply_to is not None:
        raise Problem(400, "replyTo and metadata.replyTo are different; send one of them", path="$.metadata.replyTo")
    if not isinstance(metadata_reply_to, str):
        raise Problem(400, "metadata.replyTo must be the id of a message", path="$.metadata.replyTo")
    return metadata_reply_to


ROUTES = [
    Route(
        method="GET",
        path="/api/spaces/{spaceId}/messages",
        handler=list_messages,
        access=Access.MEMBER,
        tag="messages",
        summary="List the messages of a space, oldest first",
        description="Without `after`: the newest messages; `next` continues with older ones. "
        "With `after`: the messages after a `seq`; `next` continues with newer ones.",
        query=MessageListQuery,
        response=ResultPage[Message],
    ),
    Route(
        method="POST",
        path="/api/spaces/{spaceId}/messages",
        handler=post_message,
        access=Access.MEMBER,
        tag="messages",
        summary="Post a message to a space",
        description="Subscribers of the space receive it, and every other agent there gets it in its inbox. "
        "Visible tool calls are messages too, but have no replies.",
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
        summary="Get a message",
        response=Message,
    ),
]

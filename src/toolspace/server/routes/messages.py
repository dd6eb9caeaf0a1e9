"""Routes of the messages in a space."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from toolspace.core import json_text
from toolspace.core.ids import derived_id, new_id
from toolspace.core.stored_records import Message
from toolspace.server.api_types import (
    BodyWithMetadata,
    Cursor,
    Id,
    Limit,
    NewId,
    QueryParameters,
    ResultPage,
    Text,
    check_cursor,
    check_no_nul,
)
from toolspace.server.authorization import SPACE, Access, EntityCaller, get_visible
from toolspace.server.idempotency import run_once
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, Response
from toolspace.server.routing import RouteTable
from toolspace.spaces.messaging import send_message
from toolspace.storage.database import Program, read_page
from toolspace.storage.queries import messages

_MAX_SEQ = 2**53

routes = RouteTable("messages")


class NewMessage(BodyWithMetadata, frozen=True, kw_only=True):
    """A message to post."""

    content: Text
    entity_id: Id | None = None
    """The sender. With a token it is always the token's entity."""
    reply_to: Id | None = None
    """The message to which this is a reply; not a tool call."""
    id: NewId | None = None
    """An id of your choice; the server creates one if it is missing. With a token it becomes an id of the token's
    entity; the response has the resulting id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_no_nul("content", self.content)


class MessageListQuery(QueryParameters, frozen=True, kw_only=True):
    limit: Limit = 50
    after: Annotated[int, Meta(ge=0, le=_MAX_SEQ)] | None = None
    """Only messages with a greater `seq`, the first ones."""
    before: Annotated[int, Meta(ge=0, le=_MAX_SEQ)] | None = None
    """Only messages with a smaller `seq`, the last ones."""
    cursor: Cursor | None = None

    def __post_init__(self) -> None:
        check_cursor(self.cursor, "(after|before)[.][0-9]{1,16}")


@routes.add(
    "GET",
    "/api/spaces/{spaceId}/messages",
    "List the messages of a space, oldest first",
    access=Access.MEMBER,
    description="Without `after`: the newest messages; `next` continues with older ones. "
    "With `after`: the messages after a `seq`; `next` continues with newer ones.",
    query=MessageListQuery,
)
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
    space = await get_visible(request, SPACE)
    start = after if after is not None else _MAX_SEQ if before is None else before

    def read(last: Message | None, limit: int) -> Program[list[Message]]:
        position = start if last is None else last.seq
        if after is not None:
            return (yield from messages.list_between(space.id, after=position, limit=limit))
        return (yield from messages.list_between(space.id, before=position, limit=limit))[::-1]

    items, has_more = await request.read(read_page, read, _size, query.limit)
    if after is not None:
        return ResultPage(items=items, next=f"after.{items[-1].seq}" if has_more else None)
    return ResultPage(items=items[::-1], next=f"before.{items[-1].seq}" if has_more else None)


@routes.add(
    "POST",
    "/api/spaces/{spaceId}/messages",
    "Post a message to a space",
    access=Access.MEMBER,
    description="Subscribers of the space receive it, and every other agent there gets it in its inbox. "
    "Visible tool calls are messages too, but have no replies.",
    body=NewMessage,
    creates=Message,
)
async def post_message(request: Request) -> Response:
    body = await request.json(NewMessage)
    space = await get_visible(request, SPACE)
    sender = body.entity_id
    if isinstance(request.caller, EntityCaller):
        if sender not in (None, request.caller.entity_id):
            raise Problem(403, f'You cannot post as "{sender}"; omit entityId')
        sender = request.caller.entity_id
    if sender is None:
        raise Problem(400, "entityId is required: the sender of the message", path="$.entityId")
    message_id = body.id or new_id("msg")
    if isinstance(request.caller, EntityCaller) and body.id is not None:
        # Each entity has its own message ids, so that no member can occupy the id of another's message.
        message_id = derived_id("msg", request.caller.entity_id, body.id)
    reply_to = _reply_to(body)
    return await run_once(
        request,
        lambda effects: send_message(
            effects, space.id, sender, body.content, message_id=message_id, metadata=body.metadata, reply_to=reply_to
        ),
    )


@routes.add("GET", "/api/spaces/{spaceId}/messages/{messageId}", "Get a message", access=Access.MEMBER)
async def get_message(request: Request) -> Message:
    space = await get_visible(request, SPACE)
    message_id = request.params["messageId"]
    message = await request.read(messages.find, message_id)
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


def _size(message: Message) -> int:
    return json_text.encoded_size(message.content) + json_text.encoded_size(message.metadata)

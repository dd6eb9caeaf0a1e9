"""What is said in spaces: stored, streamed, and put into the inboxes of the agents that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from toolspace.abc.database import Program
from toolspace.core.ids import new_id
from toolspace.core.records import Entity, EntityType, Message, NewEvent, space_stream
from toolspace.errors import RefusedError
from toolspace.spaces.ledger import Effects
from toolspace.stores.sql import entities, inbox, messages


def say(
    effects: Effects,
    space_id: str,
    sender_id: str,
    content: Any,
    *,
    message_id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    reply_to: str | None = None,
    run_id: str | None = None,
) -> Program[Message]:
    """Says something in a space. It reaches the inbox of every other agent there, once."""
    sender = yield from entities.entity(sender_id)
    if sender is None:
        raise RefusedError("not_found", f'there is no entity "{sender_id}"')
    if (yield from entities.space(space_id)) is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities.is_member(space_id, sender_id)):
        raise RefusedError("forbidden", f'"{sender_id}" is not a member of the space "{space_id}"')
    if reply_to is not None:
        metadata = {**(metadata or {}), "replyTo": reply_to}
        yield from _check_reply(space_id, reply_to)
    message = yield from messages.add(
        message_id or new_id("msg"), space_id, sender_id, content, metadata=metadata, run_id=run_id
    )
    if message is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    yield from _deliver(effects, message, sender)
    tell(effects, message)
    return message


def tell(effects: Effects, message: Message) -> None:
    """Streams a message that is said in one piece."""
    started = {
        "messageId": message.id,
        "spaceId": message.space_id,
        "senderId": message.sender_id,
        "seq": message.seq,
        "runId": message.run_id,
    }
    stream = space_stream(message.space_id)
    effects.emit(stream, NewEvent("message.started", started))
    effects.emit(stream, NewEvent("message.done", {"message": msgspec.to_builtins(message)}))


def _check_reply(space_id: str, reply_to: str) -> Program[None]:
    answered = yield from messages.one(reply_to)
    if answered is None or answered.space_id != space_id:
        raise RefusedError("not_found", f'there is no message "{reply_to}" in the space "{space_id}" to reply to')
    if answered.kind == "tool":
        raise RefusedError("invalid", f'"{reply_to}" is a tool call, which cannot be replied to')


_PRIORITY: Mapping[EntityType, int] = {
    "human": inbox.HUMAN_MESSAGE,
    "service": inbox.PLAN_OR_SERVICE,
    "agent": inbox.AGENT_MESSAGE,
}


def _deliver(effects: Effects, message: Message, sender: Entity) -> Program[None]:
    data = {
        "messageId": message.id,
        "spaceId": message.space_id,
        "senderId": message.sender_id,
        "senderName": sender.name,
        "senderType": sender.type,
        "content": message.content,
        "metadata": message.metadata,
        "seq": message.seq,
    }
    for agent in (yield from entities.agents_in(message.space_id, besides=message.sender_id)):
        yield from inbox.push(
            agent,
            f"space_message:{message.id}",
            "space_message",
            data,
            priority=_PRIORITY[sender.type],
            at=message.created_at,
            seq=message.seq,
        )
        effects.inbox.add(agent)

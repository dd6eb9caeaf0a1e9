"""What is said in spaces: stored, streamed, and put into the inboxes of the agents that are there.

A message is said in one piece, or begun, continued while its writer goes on, and then said or abandoned. Only what is
said reaches anyone's inbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import derived_id, new_id
from toolspace.core.records import Entity, EntityType, InboxEvent, Message, NewEvent, space_stream
from toolspace.errors import RefusedError
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities, inbox, messages

MAX_TEXT_LENGTH = 100_000
"""Characters of what an agent says at once."""


def message_id_for_call(call_id: str) -> str:
    """The id of the message that a call of `send_message` says, also if the call is made again."""
    return derived_id("msg", call_id)


def send_message(
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
    """Says something in a space. It reaches the inbox of every other agent there, once.

    The id of a message that was begun by the same sender, in the same run, says that one.
    """
    sender = yield from _speaker(space_id, sender_id)
    if reply_to is not None:
        metadata = {**(metadata or {}), "replyTo": reply_to}
        yield from _check_reply(space_id, reply_to)
    if message_id is not None:
        begun = yield from _begun(message_id, sender_id, run_id)
        if begun is not None and begun.space_id == space_id:
            said = yield from messages.complete(message_id, content, metadata)
            if said is not None:
                yield from _deliver(effects, said, sender)
                _done(effects, said)
                return said
        elif begun is not None:  # The sender has moved on while it was written.
            yield from abandon_message(effects, message_id, "it is said in another space")
            message_id = derived_id("msg", message_id, space_id)
    message = yield from messages.create(
        message_id or new_id("msg"), space_id, sender_id, content, metadata=metadata, run_id=run_id
    )
    if message is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    yield from _deliver(effects, message, sender)
    _started(effects, message)
    _done(effects, message)
    return message


def start_message(
    effects: Effects, space_id: str, sender_id: str, message_id: str, run_id: str | None = None
) -> Program[Message]:
    """Someone begins to say something: readers of the space see that, and nobody's inbox.

    One that was begun or abandoned under this id is begun anew; what was streamed of it is void.
    """
    yield from _speaker(space_id, sender_id)
    known = yield from _begun(message_id, sender_id, run_id)
    if known is not None and known.space_id == space_id:
        if known.status == "running":
            _delta(effects, known, "", restart=True)
            return known
        resumed = yield from messages.restart(message_id)
        if resumed is not None:
            _started(effects, resumed)
            return resumed
    begun = yield from messages.create(message_id, space_id, sender_id, "", status="running", run_id=run_id)
    if begun is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    _started(effects, begun)
    return begun


def append_to_message(effects: Effects, message_id: str, delta: str, *, restart: bool = False) -> Program[bool]:
    """Streams more of a message that was begun. `restart`: all of it so far is void, and `delta` its new beginning.

    False, and nothing is told, where it is not being said any more or its sender has left.
    """
    message = yield from messages.find_in_progress(message_id)
    if message is None:
        return False
    if delta or restart:
        _delta(effects, message, json_text.valid_text(delta), restart=restart)
    return True


def abandon_message(effects: Effects, message_id: str, reason: str) -> Program[Message | None]:
    """Ends a message that was begun and will not be said. None where it is not being said."""
    message = yield from messages.abandon(message_id, json_text.valid_text(reason))
    if message is not None:
        _done(effects, message)
    return message


def abandon_messages_of_run(effects: Effects, run_id: str, reason: str = "its run was interrupted") -> Program[int]:
    """Ends every message that a run has begun; says how many."""
    begun = yield from messages.list_unfinished_of_run(run_id)
    for message_id in begun:
        yield from abandon_message(effects, message_id, reason)
    return len(begun)


def _speaker(space_id: str, sender_id: str) -> Program[Entity]:
    """Who speaks, if they may."""
    sender = yield from entities.find_entity(sender_id)
    if sender is None:
        raise RefusedError("not_found", f'there is no entity "{sender_id}"')
    if (yield from entities.find_space(space_id)) is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities.is_member(space_id, sender_id)):
        raise RefusedError("forbidden", f'"{sender_id}" is not a member of the space "{space_id}"')
    return sender


def _begun(message_id: str, sender_id: str, run_id: str | None) -> Program[Message | None]:
    """A message that the same sender began in the same run, and has not said yet. None also where the id is another's,
    who keeps it."""
    known = yield from messages.find(message_id)
    if known is None or known.kind != "message" or known.status == "complete":
        return None
    return known if (known.sender_id, known.run_id) == (sender_id, run_id) else None


def _check_reply(space_id: str, reply_to: str) -> Program[None]:
    answered = yield from messages.find(reply_to)
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
    for agent in (yield from entities.list_agents(message.space_id, besides=message.sender_id)):
        yield from inbox.add(
            agent,
            f"space_message:{message.id}",
            "space_message",
            data,
            priority=_PRIORITY[sender.type],
            at=message.updated_at,  # When it was said, not when it was begun.
            seq=message.seq,
        )
        effects.notify_inbox(agent)


# What readers of the space are told


def _started(effects: Effects, message: Message) -> None:
    started = {
        "messageId": message.id,
        "spaceId": message.space_id,
        "senderId": message.sender_id,
        "seq": message.seq,
        "runId": message.run_id,
    }
    effects.emit(space_stream(message.space_id), NewEvent("message.started", started))


def _delta(effects: Effects, message: Message, delta: str, *, restart: bool) -> None:
    data: dict[str, Any] = {"messageId": message.id, "delta": delta}
    if restart:
        data["restart"] = True
    effects.emit(space_stream(message.space_id), NewEvent("message.delta", data))


def _done(effects: Effects, message: Message) -> None:
    effects.emit(space_stream(message.space_id), NewEvent("message.done", {"message": msgspec.to_builtins(message)}))


# MERGED from space_names: Says where inbox events come from, by the names that people know spaces by. Changes noth…


def add_space_names(events: Sequence[InboxEvent]) -> Program[Sequence[InboxEvent]]:
    """The same events, with the `spaceName` of their spaces. Of today: a space may have been renamed since."""
    ids = {space_id for event in events if (space_id := _space_of(event)) is not None}
    if not ids:
        return events
    names = yield from entities.list_space_names(sorted(ids))
    return [_named(event, names) for event in events]


def _space_of(event: InboxEvent) -> str | None:
    data: Any = event.data
    space_id = cast("dict[str, Any]", data).get("spaceId") if isinstance(data, dict) else None
    return space_id if isinstance(space_id, str) and "\0" not in space_id else None


def _named(event: InboxEvent, names: dict[str, str]) -> InboxEvent:
    name = names.get(_space_of(event) or "")
    return event if name is None else msgspec.structs.replace(event, data={**event.data, "spaceName": name})

"""The transactions of messages: stored, streamed, and delivered to the inboxes of the agents in the space.

A message is sent at once, or started, appended to while its sender writes, and then completed or abandoned. Only a
complete message reaches an inbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import derived_id, new_id
from toolspace.core.stored_records import Entity, EntityType, InboxEvent, Message, NewEvent, space_stream
from toolspace.errors import RefusedError
from toolspace.spaces import session_scope
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, inbox, messages

MAX_TEXT_LENGTH = 100_000
"""Characters of one message of an agent."""
_PROVISIONAL = "provisional"
"""The key in the metadata and the events of a started message that may still be withdrawn."""


def message_id_for_call(call_id: str) -> str:
    """The id of the message that a call of `send_message` sends; the same if the call is made again."""
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
    """Sends a message to a space. It reaches the inbox of every other agent there, once.

    With the id of a message that the same sender started in the same run, completes that one.
    """
    sender = yield from _get_sender(space_id, sender_id)
    if reply_to is not None:
        metadata = {**(metadata or {}), "replyTo": reply_to}
        yield from _check_reply(space_id, reply_to)
    if message_id is not None:
        started_message = yield from _find_started(message_id, sender_id, run_id)
        if started_message is not None and started_message.space_id == space_id:
            message = yield from messages.complete(message_id, content, metadata)
            if message is not None:
                yield from _deliver(effects, message, sender)
                _emit_done(effects, message)
                return message
        elif started_message is not None:  # The run has entered another space since.
            yield from abandon_message(effects, message_id, "it is sent in another space")
            message_id = derived_id("msg", message_id, space_id)
    message = yield from messages.create(
        message_id or new_id("msg"), space_id, sender_id, content, metadata=metadata, run_id=run_id
    )
    if message is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    yield from _deliver(effects, message, sender)
    _emit_started(effects, message)
    _emit_done(effects, message)
    return message


def start_message(
    effects: Effects,
    space_id: str,
    sender_id: str,
    message_id: str,
    run_id: str | None = None,
    *,
    is_provisional: bool = False,
) -> Program[Message]:
    """Starts a message: subscribers of the space see it, inboxes do not get it.

    `is_provisional`: if it is abandoned, it is deleted, as if it had never been started.
    A message of this id that was started or abandoned starts anew; what was streamed of it is void.
    """
    yield from _get_sender(space_id, sender_id)
    earlier_message = yield from _find_started(message_id, sender_id, run_id)
    if earlier_message is not None and earlier_message.space_id == space_id:
        if earlier_message.status == "running":
            _emit_delta(effects, earlier_message, "", restart=True)
            return earlier_message
        restarted_message = yield from messages.restart(message_id)
        if restarted_message is not None:
            _emit_started(effects, restarted_message)
            return restarted_message
    metadata = {_PROVISIONAL: True} if is_provisional else None
    message = yield from messages.create(
        message_id, space_id, sender_id, "", status="running", metadata=metadata, run_id=run_id
    )
    if message is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    _emit_started(effects, message)
    return message


def append_to_message(effects: Effects, message_id: str, delta: str, *, restart: bool = False) -> Program[bool]:
    """Streams more of a started message. `restart`: everything so far is void, and `delta` is the new beginning.

    Returns False, and streams nothing, if the message is not in progress or its sender has left the space.
    """
    message = yield from messages.find_in_progress(message_id)
    if message is None:
        return False
    if delta or restart:
        _emit_delta(effects, message, json_text.valid_text(delta), restart=restart)
    return True


def abandon_message(effects: Effects, message_id: str, reason: str) -> Program[Message | None]:
    """Ends a started message that will not be completed; deletes a provisional one. None if it is not in progress."""
    reason = json_text.valid_text(reason)
    message = yield from messages.find(message_id)
    if message is not None and _PROVISIONAL in message.metadata:
        message = yield from messages.delete_in_progress(message_id)
        if message is not None:
            withdrawal = {"error": reason, "withdrawn": True}
            message = msgspec.structs.replace(message, status="error", metadata=withdrawal)
    else:
        message = yield from messages.abandon(message_id, reason)
    if message is not None:
        _emit_done(effects, message)
    return message


def abandon_messages_of_run(effects: Effects, run_id: str, reason: str = "its run was interrupted") -> Program[int]:
    """Ends every message that a run has started; returns how many."""
    message_ids = yield from messages.list_unfinished_of_run(run_id)
    for message_id in message_ids:
        yield from abandon_message(effects, message_id, reason)
    return len(message_ids)


def add_space_names(events: Sequence[InboxEvent]) -> Program[Sequence[InboxEvent]]:
    """The same events, with the current name of their space as `spaceName` in the data."""
    space_ids = {space_id for event in events if (space_id := _find_space_id(event)) is not None}
    if not space_ids:
        return events
    names = yield from entities_and_spaces.list_space_names(sorted(space_ids))
    return [_with_space_name(event, names) for event in events]


def _find_space_id(event: InboxEvent) -> str | None:
    data: Any = event.data
    space_id = cast("dict[str, Any]", data).get("spaceId") if isinstance(data, dict) else None
    return space_id if isinstance(space_id, str) and "\0" not in space_id else None


def _with_space_name(event: InboxEvent, names: dict[str, str]) -> InboxEvent:
    name = names.get(_find_space_id(event) or "")
    return event if name is None else msgspec.structs.replace(event, data={**event.data, "spaceName": name})


def _get_sender(space_id: str, sender_id: str) -> Program[Entity]:
    """Raises `RefusedError` if the sender is not a member of the space."""
    sender = yield from entities_and_spaces.find_entity(sender_id)
    if sender is None:
        raise RefusedError("not_found", f'there is no entity "{sender_id}"')
    if (yield from entities_and_spaces.find_space(space_id)) is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities_and_spaces.is_member(space_id, sender_id)):
        raise RefusedError("forbidden", f'"{sender_id}" is not a member of the space "{space_id}"')
    return sender


def _find_started(message_id: str, sender_id: str, run_id: str | None) -> Program[Message | None]:
    """A message that this sender started in this run and has not completed."""
    message = yield from messages.find(message_id)
    if message is None or message.kind != "message" or message.status == "complete":
        return None
    return message if (message.sender_id, message.run_id) == (sender_id, run_id) else None


def _check_reply(space_id: str, reply_to: str) -> Program[None]:
    message = yield from messages.find(reply_to)
    if message is None or message.space_id != space_id:
        raise RefusedError("not_found", f'there is no message "{reply_to}" in the space "{space_id}" to reply to')
    if message.kind == "tool":
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
    person_id: str | None = None
    agents = yield from entities_and_spaces.list_agents(message.space_id, except_entity=message.sender_id)
    if any(scope == "user" for _, scope in agents):
        person_id = yield from _find_person(message, sender)
    for agent_id, scope in agents:
        session_id = agent_id
        if scope != "agent":
            session_id = yield from session_scope.open_session(
                agent_id, scope, space_id=message.space_id, person_id=person_id
            )
        yield from inbox.add(
            session_id,
            f"space_message:{message.id}",
            "space_message",
            data,
            priority=_PRIORITY[sender.type],
            at=message.updated_at,  # When it was completed, not when it was started.
            seq=message.seq,
        )
        effects.notify_inbox(session_id)


def _find_person(message: Message, sender: Entity) -> Program[str | None]:
    """The person behind a message: its sender, or the principal of the run in which an agent sent it."""
    if sender.type == "human":
        return sender.id
    return (yield from session_scope.find_principal_of_run(message.run_id))


def _emit_started(effects: Effects, message: Message) -> None:
    data: dict[str, Any] = {
        "messageId": message.id,
        "spaceId": message.space_id,
        "senderId": message.sender_id,
        "seq": message.seq,
        "runId": message.run_id,
    }
    if _PROVISIONAL in message.metadata:
        data[_PROVISIONAL] = True
    effects.emit(space_stream(message.space_id), NewEvent("message.started", data))


def _emit_delta(effects: Effects, message: Message, delta: str, *, restart: bool) -> None:
    data: dict[str, Any] = {"messageId": message.id, "delta": delta}
    if restart:
        data["restart"] = True
    effects.emit(space_stream(message.space_id), NewEvent("message.delta", data))


def _emit_done(effects: Effects, message: Message) -> None:
    effects.emit(space_stream(message.space_id), NewEvent("message.done", {"message": msgspec.to_builtins(message)}))

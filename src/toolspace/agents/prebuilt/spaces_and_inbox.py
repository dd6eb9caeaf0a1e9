"""The actions for spaces, messages and the inbox: enter and leave a space, send and read messages, take events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

from toolspace.agents.prebuilt.action import (
    ADDS,
    CHANGES,
    DELETES,
    ID_SCHEMA,
    NO_NUL,
    READ_ONLY,
    ActionCaller,
    action,
    text_schema,
)
from toolspace.core import json_text
from toolspace.core.ids import agent_of_session, new_id
from toolspace.core.stored_records import InboxEvent, InboxType, Member, Message, Space
from toolspace.core.times import format_iso
from toolspace.core.tool import ToolCategory
from toolspace.errors import RefusedError, ToolExecutionError
from toolspace.spaces import messaging, runs, session_scope
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, idempotency, inbox, messages

_MAX_METADATA = 64 * 1024
_MAX_MESSAGES = 200
_MAX_OFFSET = 1_000_000_000

_limit = {
    "type": "integer",
    "minimum": 1,
    "maximum": _MAX_MESSAGES,
    "default": 50,
    "description": "How many of the latest messages to load.",
}
_space_action = partial(action, category=ToolCategory.SPACE)
_MessagePage = Program[tuple[Space, list[dict[str, Any]], int]]
"""Reads a space, some of its messages, and the number of all of them."""


@_space_action(
    "Enter a space: what you send and your visible tool calls show there from now on. Gives its latest messages.",
    {"spaceId": ID_SCHEMA, "limit": _limit},
    "spaceId",
    annotations=ADDS,
)
async def enter_space(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    space_id = arguments["spaceId"]
    await _move(caller, space_id)
    limit = int(arguments.get("limit", 50))
    space, history, total = await caller.ledger.read(load_messages, caller.session_id, space_id, limit=limit)
    return {
        "success": True,
        "spaceId": space_id,
        "spaceName": space.name,
        "history": history,
        "totalMessages": total,
    }


@_space_action("Leave the active space. You stay a member of it.", annotations=ADDS)
async def leave_space(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    return {"success": True, "spaceId": await _move(caller, None)}


async def _move(caller: ActionCaller, space_id: str | None) -> str | None:
    """Moves the run into a space, or out of it. Returns the space that it was in before.

    A repeated call does not move a run again that has entered another space since.
    """
    run_id = caller.call_host.run_id
    if run_id is None:
        raise ToolExecutionError("there is no run that could enter a space", executed=False)
    previous_id, current_id = await caller.ledger.commit(_move_once, caller.agent_id, caller.call_id, run_id, space_id)
    caller.call_host.space_id = current_id
    return previous_id


def _move_once(
    effects: Effects, agent_id: str, call_id: str | None, run_id: str, space_id: str | None
) -> Program[tuple[str | None, str | None]]:
    previous_id = yield from idempotency.run_once(agent_id, call_id, _enter(effects, run_id, space_id))
    return previous_id, (yield from runs.get_run(run_id)).space_id


def _enter(effects: Effects, run_id: str, space_id: str | None) -> Program[str | None]:
    previous_id = (yield from runs.get_run(run_id)).space_id
    yield from runs.enter_space(effects, run_id, space_id)
    return previous_id


@_space_action(
    "Say something in the active space. Everyone there reads it. It is delivered once; do not send it again.",
    {"text": text_schema(messaging.MAX_TEXT_LENGTH)},
    "text",
    annotations=ADDS,
)
async def send_message(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    message_id = messaging.message_id_for_call(caller.call_id) if caller.call_id is not None else None
    return await caller.commit_once(_send, caller, json_text.valid_text(arguments["text"]), message_id)


def _send(effects: Effects, caller: ActionCaller, text: str, message_id: str | None) -> Program[dict[str, Any]]:
    space_id = caller.get_space_id()
    yield from session_scope.check_space(caller.session_id, space_id)
    message = yield from messaging.send_message(
        effects, space_id, caller.agent_id, text, message_id=message_id, run_id=caller.call_host.run_id
    )
    return {"success": True, "messageId": message.id, "status": "delivered"}


@_space_action(
    "Read messages of a space that you are a member of, by default the active one.",
    {
        "spaceId": ID_SCHEMA,
        "limit": _limit,
        "offset": {
            "type": "integer",
            "minimum": 0,
            "maximum": _MAX_OFFSET,
            "description": "How many of the latest messages to skip, to read older ones.",
        },
    },
    annotations=READ_ONLY,
)
async def read_messages(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    _, history, total = await caller.ledger.read(
        load_messages,
        caller.session_id,
        caller.get_space_id(arguments.get("spaceId")),
        limit=int(arguments.get("limit", 50)),
        offset=int(arguments.get("offset", 0)),
    )
    return {"messages": history, "total": total}


@_space_action(
    "Get the name, metadata and members of a space, by default the active one.",
    {"spaceId": ID_SCHEMA},
    annotations=READ_ONLY,
)
async def get_space_context(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    space, members = await caller.ledger.read(
        _load_context, caller.session_id, caller.get_space_id(arguments.get("spaceId"))
    )
    return {
        "spaceId": space.id,
        "spaceName": space.name,
        "metadata": space.metadata,
        "members": [{"entityId": member.entity_id, "name": member.name, "type": member.type} for member in members],
    }


@_space_action(
    "Change metadata of a space, by default the active one. Other keys stay; null removes one.",
    {"metadata": {"type": "object"}, "spaceId": ID_SCHEMA},
    "metadata",
    annotations=CHANGES,
)
async def update_space_metadata(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    return await caller.write_once(_merge_metadata, caller, arguments.get("spaceId"), arguments["metadata"])


def _get_space(session_id: str, space_id: str) -> Program[Space]:
    """Returns a space that the agent is a member of and the session reaches. Raises `RefusedError`."""
    space = yield from entities_and_spaces.find_space(space_id)
    if space is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities_and_spaces.is_member(space_id, agent_of_session(session_id))):
        raise RefusedError("forbidden", f'you are not a member of the space "{space_id}"')
    yield from session_scope.check_space(session_id, space_id)
    return space


def load_messages(session_id: str, space_id: str, *, limit: int, offset: int = 0) -> _MessagePage:
    """Reads messages of a space as a session of the agent sees them, the latest ones last. Raises `RefusedError`."""
    space = yield from _get_space(session_id, space_id)
    records, total = yield from messages.list_latest(space_id, limit=limit, offset=offset, complete_only=True)
    formatted_messages: list[dict[str, Any]] = []
    senders: dict[str, dict[str, str]] = {}
    for message in records:
        sender_id = message.sender_id
        if sender_id not in senders:
            entity = yield from entities_and_spaces.find_entity(sender_id)
            senders[sender_id] = {"senderName": entity.name, "senderType": entity.type} if entity is not None else {}
        formatted_messages.append(_format_message(message, senders[sender_id]))
    return space, formatted_messages, total


def _format_message(message: Message, sender: Mapping[str, str]) -> dict[str, Any]:
    data: dict[str, Any] = {"id": message.id, "senderId": message.sender_id, **sender, "content": message.content}
    if message.kind == "tool":
        data |= {"kind": message.kind, "status": message.status}
    return {**data, "timestamp": format_iso(message.created_at)}


def _load_context(session_id: str, space_id: str) -> Program[tuple[Space, list[Member]]]:
    space = yield from _get_space(session_id, space_id)
    return space, (yield from entities_and_spaces.list_members(space_id))


def _merge_metadata(caller: ActionCaller, space_id: str | None, changes: Mapping[str, Any]) -> Program[dict[str, Any]]:
    space_id = caller.get_space_id(space_id)
    yield from _get_space(caller.session_id, space_id)
    new_metadata = {**(yield from entities_and_spaces.lock_metadata(space_id)), **changes}
    new_metadata = {key: value for key, value in new_metadata.items() if value is not None}
    if (size := json_text.encoded_size(new_metadata)) > _MAX_METADATA:
        raise RefusedError("invalid", f"the metadata would have {size} bytes; a space has at most {_MAX_METADATA}")
    yield from entities_and_spaces.update_space(space_id, metadata=new_metadata)
    return {"success": True, "spaceId": space_id, "metadata": new_metadata}


# The inbox

_MAX_EVENTS = 50
_LEASE_MS = 60_000


@action(
    "Take events out of your inbox now, instead of in your next run: the most important first. "
    "They are gone from it then.",
    {
        "count": {"type": "integer", "minimum": 1, "maximum": _MAX_EVENTS, "default": 1},
        "filter": {"enum": list(get_args(InboxType)), "description": "Only events of this type."},
    },
    annotations=DELETES,
)
async def peek_inbox(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    types = (arguments["filter"],) if arguments.get("filter") else ()
    claim_result = await caller.write_once(_take_events, caller.session_id, int(arguments.get("count", 1)), types)
    # Read, not stored with the call: events may be large.
    events = await caller.ledger.read(_read_events, caller.agent_id, claim_result["eventIds"])
    return {
        "events": [
            {
                "eventId": event.event_id,
                "type": event.type,
                "timestamp": format_iso(event.timestamp),
                "data": event.data,
            }
            for event in events
        ],
        "remaining": claim_result["remaining"],
    }


def _take_events(session_id: str, count: int, types: Sequence[str]) -> Program[dict[str, Any]]:
    """Claims and acknowledges events of a session: the next cycle does not get them."""
    claim, agent_id = new_id("clm"), agent_of_session(session_id)
    events = yield from inbox.claim(
        agent_id,
        claim,
        count=count,
        lease_ms=_LEASE_MS,
        types=types,
        include_awaited=False,
        session_id=session_id,
    )
    event_ids = [event.event_id for event in events]
    yield from inbox.acknowledge(agent_id, claim, event_ids)
    return {"eventIds": event_ids, "remaining": (yield from inbox.count_pending(session_id))}


def _read_events(agent_id: str, event_ids: Sequence[str]) -> Program[Sequence[InboxEvent]]:
    """Reads events. Those of a space have its current name as `spaceName`."""
    events: list[InboxEvent] = []
    for event_id in event_ids:
        event = yield from inbox.find(agent_id, event_id)
        if event is not None:
            events.append(event)
    return (yield from messaging.add_space_names(events))


@action(
    "Do nothing about what woke you, and end this run.",
    {"reason": {"type": "string", "maxLength": 2_000, "pattern": NO_NUL}},
    annotations=READ_ONLY,
)
async def skip(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    return {"success": True, "skipped": True, "reason": arguments.get("reason")}


SPACE_ACTIONS = (enter_space, leave_space, send_message, read_messages, get_space_context, update_space_metadata)
INBOX_ACTIONS = (skip, peek_inbox)

"""The actions for spaces, messages and the inbox: enter and leave a space, send and read messages, take events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from toolspace.agents.prebuilt.action import (
    ADDS,
    CHANGES,
    DELETES,
    NO_NUL,
    READ_ONLY,
    Action,
    ActionCaller,
    object_schema,
)
from toolspace.core import json_text
from toolspace.core.ids import ID_PATTERN, new_id
from toolspace.core.records import InboxEvent, InboxType, Member, Message, Space
from toolspace.core.tool import ToolCategory
from toolspace.errors import RefusedError
from toolspace.spaces import messaging, runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, idempotency, inbox, messages

_MAX_METADATA = 64 * 1024
_MAX_MESSAGES = 200
_MAX_OFFSET = 1_000_000_000

_space_id = {"type": "string", "pattern": ID_PATTERN}
_limit = {
    "type": "integer",
    "minimum": 1,
    "maximum": _MAX_MESSAGES,
    "default": 50,
    "description": "How many of the latest messages to load.",
}


class _MessagePage(msgspec.Struct, frozen=True):
    space: Space
    messages: list[dict[str, Any]]
    total: int


async def _enter_space(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    space_id = arguments["spaceId"]
    await _move(caller, space_id)
    page = await caller.ledger.read(_load_messages, caller.agent_id, space_id, limit=int(arguments.get("limit", 50)))
    return {
        "success": True,
        "spaceId": space_id,
        "spaceName": page.space.name,
        "history": page.messages,
        "totalMessages": page.total,
    }


async def _leave_space(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    return {"success": True, "spaceId": await _move(caller, None)}


async def _move(caller: ActionCaller, space_id: str | None) -> str | None:
    """Moves the run into a space, or out of it. Returns the space that it was in before.

    A repeated call does not move a run again that has entered another space since.
    """
    previous_id, current_id = await caller.ledger.commit(
        _move_once, caller.agent_id, caller.call_id, caller.get_run_id(), space_id
    )
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


async def _send_message(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    message_id = messaging.message_id_for_call(caller.call_id) if caller.call_id is not None else None
    return await caller.commit_once(_send, caller, json_text.valid_text(arguments["text"]), message_id)


def _send(effects: Effects, caller: ActionCaller, text: str, message_id: str | None) -> Program[dict[str, Any]]:
    message = yield from messaging.send_message(
        effects, caller.get_space_id(), caller.agent_id, text, message_id=message_id, run_id=caller.call_host.run_id
    )
    return {"success": True, "messageId": message.id, "status": "delivered"}


async def _read_messages(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    page = await caller.ledger.read(
        _load_messages,
        caller.agent_id,
        caller.get_space_id(arguments.get("spaceId")),
        limit=int(arguments.get("limit", 50)),
        offset=int(arguments.get("offset", 0)),
    )
    return {"messages": page.messages, "total": page.total}


async def _get_space_context(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    space, members = await caller.ledger.read(
        _load_context, caller.agent_id, caller.get_space_id(arguments.get("spaceId"))
    )
    return {
        "spaceId": space.id,
        "spaceName": space.name,
        "metadata": space.metadata,
        "members": [{"entityId": member.entity_id, "name": member.name, "type": member.type} for member in members],
    }


async def _update_space_metadata(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    return await caller.write_once(_merge_metadata, caller, arguments.get("spaceId"), arguments["metadata"])


def _get_space(agent_id: str, space_id: str) -> Program[Space]:
    """Returns a space that the agent is a member of. Raises `RefusedError`."""
    space = yield from entities_and_spaces.find_space(space_id)
    if space is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities_and_spaces.is_member(space_id, agent_id)):
        raise RefusedError("forbidden", f'you are not a member of the space "{space_id}"')
    return space


def _load_messages(agent_id: str, space_id: str, *, limit: int, offset: int = 0) -> Program[_MessagePage]:
    space = yield from _get_space(agent_id, space_id)
    records, total = yield from messages.list_latest(space_id, limit=limit, offset=offset, complete_only=True)
    formatted: list[dict[str, Any]] = []
    senders: dict[str, dict[str, str]] = {}
    for message in records:
        sender_id = message.sender_id
        if sender_id not in senders:
            entity = yield from entities_and_spaces.find_entity(sender_id)
            senders[sender_id] = {"senderName": entity.name, "senderType": entity.type} if entity is not None else {}
        formatted.append(_format_message(message, senders[sender_id]))
    return _MessagePage(space, formatted, total)


def _format_message(message: Message, sender: Mapping[str, str]) -> dict[str, Any]:
    data: dict[str, Any] = {"id": message.id, "senderId": message.sender_id, **sender, "content": message.content}
    if message.kind == "tool":
        data |= {"kind": message.kind, "status": message.status}
    return {**data, "timestamp": message.created_at}


def _load_context(agent_id: str, space_id: str) -> Program[tuple[Space, list[Member]]]:
    space = yield from _get_space(agent_id, space_id)
    return space, (yield from entities_and_spaces.list_members(space_id))


def _merge_metadata(caller: ActionCaller, space_id: str | None, changes: Mapping[str, Any]) -> Program[dict[str, Any]]:
    space_id = caller.get_space_id(space_id)
    yield from _get_space(caller.agent_id, space_id)
    # Locks the row before it is read: no other transaction changes it in between.
    rows = yield "UPDATE spaces SET metadata = metadata WHERE id = ? RETURNING metadata", (space_id,)
    merged = {**json_text.decode(rows[0][0]), **changes} if rows else dict(changes)
    merged = {key: value for key, value in merged.items() if value is not None}
    if (size := json_text.encoded_size(merged)) > _MAX_METADATA:
        raise RefusedError("invalid", f"the metadata would have {size} bytes; a space has at most {_MAX_METADATA}")
    yield from entities_and_spaces.update_space(space_id, metadata=merged)
    return {"success": True, "spaceId": space_id, "metadata": merged}


SPACE_ACTIONS = (
    Action(
        name="enter_space",
        description=(
            "Enter a space: what you send and your visible tool calls show there from now on. "
            "Gives its latest messages."
        ),
        input_schema=object_schema({"spaceId": _space_id, "limit": _limit}, "spaceId"),
        run=_enter_space,
        category=ToolCategory.SPACE,
        annotations=ADDS,
    ),
    Action(
        name="leave_space",
        description="Leave the active space. You stay a member of it.",
        input_schema=object_schema(),
        run=_leave_space,
        category=ToolCategory.SPACE,
        annotations=ADDS,
    ),
    Action(
        name="send_message",
        description=(
            "Say something in the active space. Everyone there reads it. It is delivered once; do not send it again."
        ),
        input_schema=object_schema(
            {"text": {"type": "string", "minLength": 1, "maxLength": messaging.MAX_TEXT_LENGTH, "pattern": NO_NUL}},
            "text",
        ),
        run=_send_message,
        category=ToolCategory.SPACE,
        annotations=ADDS,
    ),
    Action(
        name="read_messages",
        description="Read messages of a space that you are a member of, by default the active one.",
        input_schema=object_schema(
            {
                "spaceId": _space_id,
                "limit": _limit,
                "offset": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": _MAX_OFFSET,
                    "description": "How many of the latest messages to skip, to read older ones.",
                },
            }
        ),
        run=_read_messages,
        category=ToolCategory.SPACE,
        annotations=READ_ONLY,
    ),
    Action(
        name="get_space_context",
        description="Get the name, metadata and members of a space, by default the active one.",
        input_schema=object_schema({"spaceId": _space_id}),
        run=_get_space_context,
        category=ToolCategory.SPACE,
        annotations=READ_ONLY,
    ),
    Action(
        name="update_space_metadata",
        description="Change metadata of a space, by default the active one. Other keys stay; null removes one.",
        input_schema=object_schema({"metadata": {"type": "object"}, "spaceId": _space_id}, "metadata"),
        run=_update_space_metadata,
        category=ToolCategory.SPACE,
        annotations=CHANGES,
    ),
)


# The inbox

_MAX_EVENTS = 50
_LEASE_MS = 60_000


async def _peek_inbox(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    types = (arguments["filter"],) if arguments.get("filter") else ()
    claimed = await caller.write_once(_take_events, caller.agent_id, int(arguments.get("count", 1)), types)
    # Read, not stored with the call: events may be large.
    events = await caller.ledger.read(_read_events, caller.agent_id, claimed["eventIds"])
    return {
        "events": [
            {"eventId": event.event_id, "type": event.type, "timestamp": event.timestamp, "data": event.data}
            for event in events
        ],
        "remaining": claimed["remaining"],
    }


def _take_events(agent_id: str, count: int, types: Sequence[str]) -> Program[dict[str, Any]]:
    """Claims and acknowledges events: the next cycle does not get them."""
    claim = new_id("clm")
    events = yield from inbox.claim(
        agent_id, claim, count=count, lease_ms=_LEASE_MS, types=types, include_awaited=False
    )
    event_ids = [event.event_id for event in events]
    yield from inbox.acknowledge(agent_id, claim, event_ids)
    return {"eventIds": event_ids, "remaining": (yield from inbox.count_pending(agent_id))}


def _read_events(agent_id: str, event_ids: Sequence[str]) -> Program[list[InboxEvent]]:
    events: list[InboxEvent] = []
    for event_id in event_ids:
        event = yield from inbox.find(agent_id, event_id)
        if event is not None:
            events.append(event)
    return events


async def _skip(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    return {"success": True, "skipped": True, "reason": arguments.get("reason")}


INBOX_ACTIONS = (
    Action(
        name="skip",
        description="Do nothing about what woke you, and end this run.",
        input_schema=object_schema({"reason": {"type": "string", "maxLength": 2_000, "pattern": NO_NUL}}),
        run=_skip,
        category=ToolCategory.AGENT,
        annotations=READ_ONLY,
    ),
    Action(
        name="peek_inbox",
        description=(
            "Take events out of your inbox now, instead of in your next run: the most important first. "
            "They are gone from it then."
        ),
        input_schema=object_schema(
            {
                "count": {"type": "integer", "minimum": 1, "maximum": _MAX_EVENTS, "default": 1},
                "filter": {"enum": list(get_args(InboxType)), "description": "Only events of this type."},
            }
        ),
        run=_peek_inbox,
        category=ToolCategory.AGENT,
        annotations=DELETES,
    ),
)

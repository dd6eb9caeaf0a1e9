"""Being in spaces: entering, speaking, reading, and what a space says of itself."""

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
from toolspace.storage.queries import entities, idempotency, inbox, messages

_MOST_METADATA = 64 * 1024
_MOST_MESSAGES = 200
_FARTHEST = 1_000_000_000

_space_id = {"type": "string", "pattern": ID_PATTERN}
_limit = {
    "type": "integer",
    "minimum": 1,
    "maximum": _MOST_MESSAGES,
    "default": 50,
    "description": "How many of the latest messages to load.",
}


class _History(msgspec.Struct, frozen=True):
    space: Space
    messages: list[dict[str, Any]]
    total: int


async def _enter_space(actor: ActionCaller, given: dict[str, Any]) -> Any:
    space_id = given["spaceId"]
    await _move(actor, space_id)
    found = await actor.ledger.read(_history, actor.agent_id, space_id, limit=int(given.get("limit", 50)))
    return {
        "success": True,
        "spaceId": space_id,
        "spaceName": found.space.name,
        "history": found.messages,
        "totalMessages": found.total,
    }


async def _leave_space(actor: ActionCaller, given: dict[str, Any]) -> Any:
    return {"success": True, "spaceId": await _move(actor, None)}


async def _move(actor: ActionCaller, space_id: str | None) -> str | None:
    """Moves the run into a space, or out of it: the space that it was in. Not again where it went on since."""
    before, now = await actor.ledger.commit(_moved, actor.agent_id, actor.call_id, actor.get_run_id(), space_id)
    actor.room.space_id = now
    return before


def _moved(
    effects: Effects, agent_id: str, call_id: str | None, run_id: str, space_id: str | None
) -> Program[tuple[str | None, str | None]]:
    before = yield from idempotency.run_once(agent_id, call_id, _enter(effects, run_id, space_id))
    return before, (yield from runs.get_run(run_id)).space_id


def _enter(effects: Effects, run_id: str, space_id: str | None) -> Program[str | None]:
    before = (yield from runs.get_run(run_id)).space_id
    yield from runs.enter_space(effects, run_id, space_id)
    return before


async def _send_message(actor: ActionCaller, given: dict[str, Any]) -> Any:
    message_id = messaging.message_id_for_call(actor.call_id) if actor.call_id is not None else None
    return await actor.commit_once(_say, actor, json_text.valid_text(given["text"]), message_id)


def _say(effects: Effects, actor: ActionCaller, text: str, message_id: str | None) -> Program[dict[str, Any]]:
    message = yield from messaging.send_message(
        effects, actor.get_space_id(), actor.agent_id, text, message_id=message_id, run_id=actor.room.run_id
    )
    return {"success": True, "messageId": message.id, "status": "delivered"}


async def _read_messages(actor: ActionCaller, given: dict[str, Any]) -> Any:
    found = await actor.ledger.read(
        _history,
        actor.agent_id,
        actor.get_space_id(given.get("spaceId")),
        limit=int(given.get("limit", 50)),
        offset=int(given.get("offset", 0)),
    )
    return {"messages": found.messages, "total": found.total}


async def _get_space_context(actor: ActionCaller, given: dict[str, Any]) -> Any:
    space, members = await actor.ledger.read(_context, actor.agent_id, actor.get_space_id(given.get("spaceId")))
    return {
        "spaceId": space.id,
        "spaceName": space.name,
        "metadata": space.metadata,
        "members": [{"entityId": one.entity_id, "name": one.name, "type": one.type} for one in members],
    }


async def _update_space_metadata(actor: ActionCaller, given: dict[str, Any]) -> Any:
    return await actor.write_once(_merge_metadata, actor, given.get("spaceId"), given["metadata"])


def _the_space(agent_id: str, space_id: str) -> Program[Space]:
    """A space that the agent is in."""
    space = yield from entities.find_space(space_id)
    if space is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities.is_member(space_id, agent_id)):
        raise RefusedError("forbidden", f'you are not a member of the space "{space_id}"')
    return space


def _history(agent_id: str, space_id: str, *, limit: int, offset: int = 0) -> Program[_History]:
    space = yield from _the_space(agent_id, space_id)
    found, total = yield from messages.list_latest(space_id, limit=limit, offset=offset, complete_only=True)
    shown: list[dict[str, Any]] = []
    names: dict[str, dict[str, str]] = {}
    for message in found:
        sender = message.sender_id
        if sender not in names:
            entity = yield from entities.find_entity(sender)
            names[sender] = {"senderName": entity.name, "senderType": entity.type} if entity is not None else {}
        shown.append(_shown(message, names[sender]))
    return _History(space, shown, total)


def _shown(message: Message, sender: Mapping[str, str]) -> dict[str, Any]:
    data: dict[str, Any] = {"id": message.id, "senderId": message.sender_id, **sender, "content": message.content}
    if message.kind == "tool":
        data |= {"kind": message.kind, "status": message.status}
    return {**data, "timestamp": message.created_at}


def _context(agent_id: str, space_id: str) -> Program[tuple[Space, list[Member]]]:
    space = yield from _the_space(agent_id, space_id)
    return space, (yield from entities.list_members(space_id))


def _merge_metadata(actor: ActionCaller, named: str | None, changes: Mapping[str, Any]) -> Program[dict[str, Any]]:
    space_id = actor.get_space_id(named)
    yield from _the_space(actor.agent_id, space_id)
    # Written before it is read: nobody else changes it in between.
    rows = yield "UPDATE spaces SET metadata = metadata WHERE id = ? RETURNING metadata", (space_id,)
    merged = {**json_text.decode(rows[0][0]), **changes} if rows else dict(changes)
    merged = {key: value for key, value in merged.items() if value is not None}
    if (size := json_text.encoded_size(merged)) > _MOST_METADATA:
        raise RefusedError("invalid", f"the metadata would have {size} bytes; a space has at most {_MOST_METADATA}")
    yield from entities.update_space(space_id, metadata=merged)
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
                    "maximum": _FARTHEST,
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
        description="What a space is, by default the active one: its name, its metadata, who is in it.",
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


# MERGED from inbox: The inbox of an agent: taking events out of it before the next run, and letting one pass.

_MOST_EVENTS = 50
_LEASE_MS = 60_000


async def _peek_inbox(actor: ActionCaller, given: dict[str, Any]) -> Any:
    types = (given["filter"],) if given.get("filter") else ()
    taken = await actor.write_once(_take_events, actor.agent_id, int(given.get("count", 1)), types)
    # Read again rather than kept with the receipt: they are as large as their senders liked.
    events = await actor.ledger.read(_read_events, actor.agent_id, taken["eventIds"])
    return {
        "events": [
            {"eventId": event.event_id, "type": event.type, "timestamp": event.timestamp, "data": event.data}
            for event in events
        ],
        "remaining": taken["remaining"],
    }


def _take_events(agent_id: str, count: int, types: Sequence[str]) -> Program[dict[str, Any]]:
    """Takes events for good: whoever reads the inbox next does not see them again."""
    claim = new_id("clm")
    events = yield from inbox.claim(
        agent_id, claim, count=count, lease_ms=_LEASE_MS, types=types, include_awaited=False
    )
    taken = [event.event_id for event in events]
    yield from inbox.acknowledge(agent_id, claim, taken)
    return {"eventIds": taken, "remaining": (yield from inbox.count_pending(agent_id))}


def _read_events(agent_id: str, event_ids: Sequence[str]) -> Program[list[InboxEvent]]:
    events: list[InboxEvent] = []
    for event_id in event_ids:
        event = yield from inbox.find(agent_id, event_id)
        if event is not None:
            events.append(event)
    return events


async def _skip(actor: ActionCaller, given: dict[str, Any]) -> Any:
    return {"success": True, "skipped": True, "reason": given.get("reason")}


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
                "count": {"type": "integer", "minimum": 1, "maximum": _MOST_EVENTS, "default": 1},
                "filter": {"enum": list(get_args(InboxType)), "description": "Only events of this type."},
            }
        ),
        run=_peek_inbox,
        category=ToolCategory.AGENT,
        annotations=DELETES,
    ),
)

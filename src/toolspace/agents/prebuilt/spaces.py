"""Being in spaces: entering, speaking, reading, and what a space says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from toolspace.agents.prebuilt.action import ADDS, CHANGES, NO_NUL, READ_ONLY, Action, Actor, takes
from toolspace.core import json_text
from toolspace.core.ids import ID_PATTERN
from toolspace.core.records import Member, Message, Space
from toolspace.core.tool import ToolCategory
from toolspace.errors import RefusedError
from toolspace.spaces import messaging, runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities, messages, receipts

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


async def _enter_space(actor: Actor, given: dict[str, Any]) -> Any:
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


async def _leave_space(actor: Actor, given: dict[str, Any]) -> Any:
    return {"success": True, "spaceId": await _move(actor, None)}


async def _move(actor: Actor, space_id: str | None) -> str | None:
    """Moves the run into a space, or out of it: the space that it was in. Not again where it went on since."""
    before, now = await actor.ledger.commit(_moved, actor.agent_id, actor.call_id, actor.run_id(), space_id)
    actor.room.space_id = now
    return before


def _moved(
    effects: Effects, agent_id: str, call_id: str | None, run_id: str, space_id: str | None
) -> Program[tuple[str | None, str | None]]:
    before = yield from receipts.once(agent_id, call_id, _enter(effects, run_id, space_id))
    return before, (yield from runs.the_run(run_id)).space_id


def _enter(effects: Effects, run_id: str, space_id: str | None) -> Program[str | None]:
    before = (yield from runs.the_run(run_id)).space_id
    yield from runs.enter_space(effects, run_id, space_id)
    return before


async def _send_message(actor: Actor, given: dict[str, Any]) -> Any:
    message_id = messaging.message_id_of(actor.call_id) if actor.call_id is not None else None
    return await actor.commit_once(_say, actor, json_text.valid_text(given["text"]), message_id)


def _say(effects: Effects, actor: Actor, text: str, message_id: str | None) -> Program[dict[str, Any]]:
    message = yield from messaging.say(
        effects, actor.space(), actor.agent_id, text, message_id=message_id, run_id=actor.room.run_id
    )
    return {"success": True, "messageId": message.id, "status": "delivered"}


async def _read_messages(actor: Actor, given: dict[str, Any]) -> Any:
    found = await actor.ledger.read(
        _history,
        actor.agent_id,
        actor.space(given.get("spaceId")),
        limit=int(given.get("limit", 50)),
        offset=int(given.get("offset", 0)),
    )
    return {"messages": found.messages, "total": found.total}


async def _get_space_context(actor: Actor, given: dict[str, Any]) -> Any:
    space, members = await actor.ledger.read(_context, actor.agent_id, actor.space(given.get("spaceId")))
    return {
        "spaceId": space.id,
        "spaceName": space.name,
        "metadata": space.metadata,
        "members": [{"entityId": one.entity_id, "name": one.name, "type": one.type} for one in members],
    }


async def _update_space_metadata(actor: Actor, given: dict[str, Any]) -> Any:
    return await actor.once(_merge_metadata, actor, given.get("spaceId"), given["metadata"])


def _the_space(agent_id: str, space_id: str) -> Program[Space]:
    """A space that the agent is in."""
    space = yield from entities.space(space_id)
    if space is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities.is_member(space_id, agent_id)):
        raise RefusedError("forbidden", f'you are not a member of the space "{space_id}"')
    return space


def _history(agent_id: str, space_id: str, *, limit: int, offset: int = 0) -> Program[_History]:
    space = yield from _the_space(agent_id, space_id)
    found, total = yield from messages.latest(space_id, limit=limit, offset=offset, said=True)
    shown: list[dict[str, Any]] = []
    names: dict[str, dict[str, str]] = {}
    for message in found:
        sender = message.sender_id
        if sender not in names:
            entity = yield from entities.entity(sender)
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
    return space, (yield from entities.members(space_id))


def _merge_metadata(actor: Actor, named: str | None, changes: Mapping[str, Any]) -> Program[dict[str, Any]]:
    space_id = actor.space(named)
    yield from _the_space(actor.agent_id, space_id)
    # Written before it is read: nobody else changes it in between.
    rows = yield "UPDATE spaces SET metadata = metadata WHERE id = ? RETURNING metadata", (space_id,)
    merged = {**json_text.decode(rows[0][0]), **changes} if rows else dict(changes)
    merged = {key: value for key, value in merged.items() if value is not None}
    if (size := json_text.size(merged)) > _MOST_METADATA:
        raise RefusedError("invalid", f"the metadata would have {size} bytes; a space has at most {_MOST_METADATA}")
    yield from entities.change_space(space_id, metadata=merged)
    return {"success": True, "spaceId": space_id, "metadata": merged}


ACTIONS = (
    Action(
        name="enter_space",
        description=(
            "Enter a space: what you send and your visible tool calls show there from now on. "
            "Gives its latest messages."
        ),
        input_schema=takes({"spaceId": _space_id, "limit": _limit}, "spaceId"),
        run=_enter_space,
        category=ToolCategory.SPACE,
        annotations=ADDS,
    ),
    Action(
        name="leave_space",
        description="Leave the active space. You stay a member of it.",
        input_schema=takes(),
        run=_leave_space,
        category=ToolCategory.SPACE,
        annotations=ADDS,
    ),
    Action(
        name="send_message",
        description=(
            "Say something in the active space. Everyone there reads it. It is delivered once; do not send it again."
        ),
        input_schema=takes(
            {"text": {"type": "string", "minLength": 1, "maxLength": messaging.MOST_TEXT, "pattern": NO_NUL}}, "text"
        ),
        run=_send_message,
        category=ToolCategory.SPACE,
        annotations=ADDS,
    ),
    Action(
        name="read_messages",
        description="Read messages of a space that you are a member of, by default the active one.",
        input_schema=takes(
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
        input_schema=takes({"spaceId": _space_id}),
        run=_get_space_context,
        category=ToolCategory.SPACE,
        annotations=READ_ONLY,
    ),
    Action(
        name="update_space_metadata",
        description="Change metadata of a space, by default the active one. Other keys stay; null removes one.",
        input_schema=takes({"metadata": {"type": "object"}, "spaceId": _space_id}, "metadata"),
        run=_update_space_metadata,
        category=ToolCategory.SPACE,
        annotations=CHANGES,
    ),
)

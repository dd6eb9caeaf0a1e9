"""The inbox of an agent: taking events out of it before the next run, and letting one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from toolspace.agents.prebuilt.action import DELETES, NO_NUL, READ_ONLY, Action, Actor, takes
from toolspace.core.ids import new_id
from toolspace.core.records import InboxEvent, InboxType
from toolspace.core.tool import ToolCategory
from toolspace.storage.database import Program
from toolspace.storage.queries import inbox

_MOST_EVENTS = 50
_LEASE_MS = 60_000


async def _peek_inbox(actor: Actor, given: dict[str, Any]) -> Any:
    types = (given["filter"],) if given.get("filter") else ()
    taken = await actor.once(_take, actor.agent_id, int(given.get("count", 1)), types)
    # Read again rather than kept with the receipt: they are as large as their senders liked.
    events = await actor.ledger.read(_events, actor.agent_id, taken["eventIds"])
    return {
        "events": [
            {"eventId": event.event_id, "type": event.type, "timestamp": event.timestamp, "data": event.data}
            for event in events
        ],
        "remaining": taken["remaining"],
    }


def _take(agent_id: str, count: int, types: Sequence[str]) -> Program[dict[str, Any]]:
    """Takes events for good: whoever reads the inbox next does not see them again."""
    claim = new_id("clm")
    events = yield from inbox.claim(agent_id, claim, count=count, lease_ms=_LEASE_MS, types=types, awaited=False)
    taken = [event.event_id for event in events]
    yield from inbox.finish(agent_id, claim, taken)
    return {"eventIds": taken, "remaining": (yield from inbox.count(agent_id))}


def _events(agent_id: str, event_ids: Sequence[str]) -> Program[list[InboxEvent]]:
    events: list[InboxEvent] = []
    for event_id in event_ids:
        event = yield from inbox.one(agent_id, event_id)
        if event is not None:
            events.append(event)
    return events


async def _skip(actor: Actor, given: dict[str, Any]) -> Any:
    return {"success": True, "skipped": True, "reason": given.get("reason")}


ACTIONS = (
    Action(
        name="skip",
        description="Do nothing about what woke you, and end this run.",
        input_schema=takes({"reason": {"type": "string", "maxLength": 2_000, "pattern": NO_NUL}}),
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
        input_schema=takes(
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

"""The inbox of an agent: taking events out of it before the next run, and letting one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from toolspace.abc.database import Program
from toolspace.core.ids import new_id
from toolspace.core.records import InboxEvent, InboxType
from toolspace.core.tool import Annotations, ToolCategory
from toolspace.prebuilt.action import NO_NUL, Action, Actor, takes
from toolspace.stores.sql import inbox

_MOST_EVENTS = 50
_LEASE_MS = 60_000


async def _peek_inbox(actor: Actor, given: dict[str, Any]) -> Any:
    types = (given["filter"],) if given.get("filter") else ()
    events, remaining = await actor.ledger.write(_take, actor.agent_id, int(given.get("count", 1)), types)
    return {
        "events": [
            {"eventId": event.event_id, "type": event.type, "timestamp": event.timestamp, "data": event.data}
            for event in events
        ],
        "remaining": remaining,
    }


def _take(agent_id: str, count: int, types: Sequence[str]) -> Program[tuple[list[InboxEvent], int]]:
    """Takes events for good: whoever reads the inbox next does not see them again."""
    claim = new_id("clm")
    events = yield from inbox.claim(agent_id, claim, count=count, lease_ms=_LEASE_MS, types=types)
    yield from inbox.finish(agent_id, claim, [event.event_id for event in events])
    return events, (yield from inbox.count(agent_id))


async def _skip(actor: Actor, given: dict[str, Any]) -> Any:
    return {"success": True, "skipped": True, "reason": given.get("reason")}


ACTIONS = (
    Action(
        name="skip",
        description="Do nothing about what woke you, and end this run.",
        input_schema=takes({"reason": {"type": "string", "maxLength": 2_000, "pattern": NO_NUL}}),
        run=_skip,
        category=ToolCategory.AGENT,
        annotations=Annotations(read_only=True),
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
        annotations=Annotations(destructive=True),
    ),
)

"""A request goes on to another agent's inbox, in the moment that the run of the one before ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from toolspace.agents.run_budget import Handoff
from toolspace.core.inbox_text import HANDOFF_PREFIX
from toolspace.core.records import InboxEvent, RunRecord
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities, inbox, messages
from toolspace.storage.queries import runs as run_rows

if TYPE_CHECKING:
    from toolspace.agents.cycle import Cycle

_LONGEST_WAY = 16
"""Agents that a request may have gone through; routers that lead in a circle are refused."""


def build_handoff(cycle: Cycle, handoff: Handoff, destination: str) -> Callable[[Effects], Program[None]]:
    """Gives the destination what the agent was asked, with its advice, and lets it into the space of the request."""

    def hand_on(effects: Effects) -> Program[None]:
        run = yield from run_rows.find(cycle.run_id)
        event_ids = trigger_event_ids(run) if run is not None else []
        space_id = run.space_id if run is not None else None
        priority = inbox.PLAN_OR_SERVICE
        asked: list[dict[str, Any]] = []
        heard: list[str] = []
        """What the destination has in its own inbox, being in the space: told in full, it would be answered twice."""
        for event_id in event_ids:
            event = yield from inbox.find(cycle.agent_entity_id, event_id)
            if event is None:
                continue
            priority = min(priority, event.priority)
            if (yield from inbox.find(destination, event_id)) is None:
                asked.append({"eventId": event.event_id, "type": event.type, "data": event.data})
            else:
                heard.append(event_id)
            space_id = _space_of(event.data) or space_id
        if space_id is not None and not (yield from entities.is_member(space_id, cycle.agent_entity_id)):
            space_id = None  # Whatever an event says of itself: nobody lets another in where it is not itself.
        if space_id is not None:
            # It answers in the place of the one that was asked, so it has to be where that was.
            yield from entities.add_member(space_id, destination)
        data = {
            "handoff": {"from": cycle.agent_run.name, "message": handoff.message},
            "spaceId": space_id,
            "request": asked or (None if heard else cycle.agent_run.request),
            "heard": heard,
            "path": [*cycle.agent_run.previous_agents, cycle.agent_run.name],
        }
        yield from inbox.add(destination, f"{HANDOFF_PREFIX}{cycle.run_id}", "service", data, priority=priority)
        effects.notify_inbox(destination)

    return hand_on


def trigger_event_ids(run: RunRecord) -> list[str]:
    """The inbox events that a run is about."""
    trigger: Any = run.trigger
    events = cast("dict[str, Any]", trigger).get("events") if isinstance(trigger, dict) else None
    return [str(one) for one in cast("list[Any]", events)] if isinstance(events, list) else []


def handoff_path(run: RunRecord) -> Program[tuple[str, ...]]:
    """The agents that had the request of a run before it was handed on to this one."""
    for event_id in trigger_event_ids(run):
        if event_id.startswith(HANDOFF_PREFIX):
            event = yield from inbox.find(run.agent_entity_id, event_id)
            path: Any = cast("dict[str, Any]", event.data).get("path") if event is not None else None
            return tuple(map(str, path or ()))
    return ()


def is_answer_to_handoff(agent_entity_id: str, event: InboxEvent) -> Program[bool]:
    """Whether an event is what someone says about a request that this agent has handed on, be it over others."""
    data: Any = event.data
    said = str(cast("dict[str, Any]", data).get("messageId")) if isinstance(data, dict) else ""
    message = (yield from messages.find(said)) if event.type == "space_message" else None
    run_id = message.run_id if message is not None else None
    for _ in range(_LONGEST_WAY):
        run = (yield from run_rows.find(run_id)) if run_id is not None else None
        if run is None:
            return False
        handed = [one.removeprefix(HANDOFF_PREFIX) for one in trigger_event_ids(run) if one.startswith(HANDOFF_PREFIX)]
        before = (yield from run_rows.find(handed[0])) if handed else None
        if before is None:
            return False
        if before.agent_entity_id == agent_entity_id:
            return True
        run_id = before.id
    return False


def _space_of(data: Any) -> str | None:
    space_id = cast("dict[str, Any]", data).get("spaceId") if isinstance(data, dict) else None
    return space_id if isinstance(space_id, str) else None

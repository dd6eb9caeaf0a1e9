"""Stores a handoff on the gateway: the request goes to another agent's inbox in the commit that ends the run.

Cycle transactions and the cycle runner use it. The tool that starts a handoff is in `subagents.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from toolspace.agents.run_state import AgentRun, Handoff
from toolspace.core.inbox_text import HANDOFF_PREFIX
from toolspace.core.records import InboxEvent, RunRecord
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, inbox, messages
from toolspace.storage.queries import runs as run_rows

_MAX_HANDOFFS = 16
"""How many handoffs `is_answer_to_handoff` follows back. Configuration rejects routers that form a circle."""


def build_handoff(
    agent_run: AgentRun, handoff: Handoff, *, run_id: str, agent_id: str, destination_id: str
) -> Callable[[Effects], Program[None]]:
    """Builds the writes that give the destination the request and the advice, and add it to the request's space.

    `agent_id` and `destination_id` are the entities of the two agents.
    """

    def write(effects: Effects) -> Program[None]:
        run = yield from run_rows.find(run_id)
        event_ids = trigger_event_ids(run) if run is not None else []
        space_id = run.space_id if run is not None else None
        priority = inbox.PLAN_OR_SERVICE
        events: list[dict[str, Any]] = []
        shared_ids: list[str] = []
        """Events that are in the destination's own inbox, too: sent in full, they would be answered twice."""
        for event_id in event_ids:
            event = yield from inbox.find(agent_id, event_id)
            if event is None:
                continue
            priority = min(priority, event.priority)
            if (yield from inbox.find(destination_id, event_id)) is None:
                events.append({"eventId": event.event_id, "type": event.type, "data": event.data})
            else:
                shared_ids.append(event_id)
            space_id = _space_id_of(event.data) or space_id
        if space_id is not None and not (yield from entities_and_spaces.is_member(space_id, agent_id)):
            space_id = None  # An agent cannot add another agent to a space that it is not a member of itself.
        if space_id is not None:
            yield from entities_and_spaces.add_member(
                space_id, destination_id
            )  # The destination answers in that space.
        data = {
            "handoff": {"from": agent_run.name, "message": handoff.message},
            "spaceId": space_id,
            "request": events or (None if shared_ids else agent_run.request),
            "heard": shared_ids,
            "path": [*agent_run.previous_agents, agent_run.name],
        }
        yield from inbox.add(destination_id, f"{HANDOFF_PREFIX}{run_id}", "service", data, priority=priority)
        effects.notify_inbox(destination_id)

    return write


def trigger_event_ids(run: RunRecord) -> list[str]:
    """The ids of the inbox events that triggered a run."""
    trigger: Any = run.trigger
    ids = cast("dict[str, Any]", trigger).get("events") if isinstance(trigger, dict) else None
    return [str(event_id) for event_id in cast("list[Any]", ids)] if isinstance(ids, list) else []


def handoff_path(run: RunRecord) -> Program[tuple[str, ...]]:
    """The agents that had the request of a run before and handed it off."""
    for event_id in trigger_event_ids(run):
        if event_id.startswith(HANDOFF_PREFIX):
            event = yield from inbox.find(run.agent_entity_id, event_id)
            path: Any = cast("dict[str, Any]", event.data).get("path") if event is not None else None
            return tuple(map(str, path or ()))
    return ()


def is_answer_to_handoff(agent_entity_id: str, event: InboxEvent) -> Program[bool]:
    """Whether an event is a message about a request that this agent has handed off, directly or through others."""
    data: Any = event.data
    message_id = str(cast("dict[str, Any]", data).get("messageId")) if isinstance(data, dict) else ""
    message = (yield from messages.find(message_id)) if event.type == "space_message" else None
    run_id = message.run_id if message is not None else None
    for _ in range(_MAX_HANDOFFS):
        run = (yield from run_rows.find(run_id)) if run_id is not None else None
        if run is None:
            return False
        handoff_ids = [event_id for event_id in trigger_event_ids(run) if event_id.startswith(HANDOFF_PREFIX)]
        previous_id = handoff_ids[0].removeprefix(HANDOFF_PREFIX) if handoff_ids else None
        previous_run = (yield from run_rows.find(previous_id)) if previous_id is not None else None
        if previous_run is None:
            return False
        if previous_run.agent_entity_id == agent_entity_id:
            return True
        run_id = previous_run.id
    return False


def _space_id_of(data: Any) -> str | None:
    space_id = cast("dict[str, Any]", data).get("spaceId") if isinstance(data, dict) else None
    return space_id if isinstance(space_id, str) else None

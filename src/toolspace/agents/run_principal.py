"""Decides for whom a run works: its principal, from the inbox events that trigger it. Changes nothing.

`session_transactions.begin` stores the principal with the run; the calls of the run have it as `ToolContext.user_id`.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.agents.handoff import event_data
from toolspace.core.inbox_text import HANDOFF_PREFIX
from toolspace.core.stored_records import InboxEvent
from toolspace.spaces.session_scope import find_principal_of_run
from toolspace.storage.database import Program
from toolspace.storage.queries import messages, plans, tasks


def find_principal(agent_entity_id: str, events: Sequence[InboxEvent]) -> Program[str]:
    """Returns the person or key behind the events; the agent itself if there are several, or none."""
    principals: set[str] = set()
    for event in events:
        principal = yield from _find_principal_of_event(event)
        if principal is not None:
            principals.add(principal)
    return principals.pop() if len(principals) == 1 else agent_entity_id


def _find_principal_of_event(event: InboxEvent) -> Program[str | None]:
    """The person or key that caused an event; None if that is an agent or a service."""
    data = event_data(event)
    if event.type == "space_message":
        if data.get("senderType") == "human":
            return str(data["senderId"])
        message = yield from messages.find(str(data.get("messageId")))
        return (yield from find_principal_of_run(message.run_id if message is not None else None))
    if event.type == "plan":
        plan = yield from plans.find(str(data.get("planId")))
        return plan.principal if plan is not None and plan.principal != plan.entity_id else None
    if event.type == "task":
        return (yield from find_principal_of_run(tasks.run_id_of(str(data.get("taskId")))))
    if event.type == "tool_result":
        return (yield from find_principal_of_run(data.get("runId")))
    if event.event_id.startswith(HANDOFF_PREFIX):
        return (yield from find_principal_of_run(event.event_id.removeprefix(HANDOFF_PREFIX)))
    return None

"""The transactions that delete a space, a member or an entity, and end everything that nobody could end afterwards."""

from __future__ import annotations

from toolspace.core.records import space_stream
from toolspace.spaces import call_transactions, runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries import calls, entities_and_spaces, events, inbox
from toolspace.storage.queries import runs as run_queries


@long_running
def delete_space(effects: Effects, space_id: str) -> Program[bool]:
    """Deletes a space with its members, messages and events. Runs leave it; its open calls are canceled."""
    if not (yield from entities_and_spaces.lock_space(space_id)):
        return False
    yield from run_queries.clear_space(space_id)
    for call_id in (yield from calls.remove_from_space(space_id)):
        yield from call_transactions.end_call(
            effects, call_id, "canceled", "the space in which it was asked was removed"
        )
    yield from events.delete_events_of_stream(space_stream(space_id))
    return (yield from entities_and_spaces.delete_space(space_id))


@long_running
def remove_member(effects: Effects, space_id: str, entity_id: str) -> Program[bool]:
    """Removes a member from a space; the runs of an agent leave it, too."""
    removed = yield from entities_and_spaces.remove_member(space_id, entity_id)
    yield from run_queries.clear_space(space_id, agent_entity_id=entity_id)
    return removed


@long_running
def delete_entity(effects: Effects, entity_id: str) -> Program[bool]:
    """Deletes an entity with its memberships, and an agent with its runs, its inbox and its open calls.

    Its messages stay.
    """
    for run_id in (yield from run_queries.list_open_of_agent(entity_id)):
        yield from runs.cancel_run(effects, run_id)
    for call_id in (yield from calls.list_open_of_agent(entity_id)):
        yield from call_transactions.end_call(effects, call_id, "canceled", "its agent was removed", notify_agent=False)
    yield from inbox.delete_all(entity_id)
    return (yield from entities_and_spaces.delete_entity(entity_id))

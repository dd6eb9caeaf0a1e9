"""SQL programs that store how the result of a call reaches whoever made it.

The column `delivery` says which way the result went: `inline` to the caller that waited, or `inbox`; or that the caller
has `acknowledged` it, so that it goes nowhere any more. `delivered_at` says that an inline result was sent: if the
process dies before that is stored, the result goes to the inbox.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toolspace.core.stored_records import CallStatus
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries import inbox
from toolspace.storage.queries.calls import CallTransition, transition
from toolspace.storage.queries.statement_builder import has_changed, placeholders


class CallDelivery(msgspec.Struct, frozen=True):
    """Whose a call is, and who gets its result."""

    status: CallStatus
    principal: str | None
    agent_entity_id: str | None
    is_of_own_agent: bool
    """Whether an agent of the gateway made the call, in a run of its own."""


def mark_delivered(call_ids: Sequence[str]) -> Program[None]:
    """The inline results were sent to their callers."""
    if call_ids:
        now = yield from current_time()
        yield (
            f"UPDATE calls SET delivered_at = ? WHERE call_id IN ({placeholders(call_ids)}) AND delivery = 'inline' "
            "AND delivered_at IS NULL",
            (now, *call_ids),
        )


def claim_result(call_id: str) -> Program[bool]:
    """The caller of a call asks for its result again. Whether it may have it: if not, the inbox gets it."""
    update = "UPDATE calls SET delivered_at = COALESCE(delivered_at, ?)"
    condition = "call_id = ? AND (delivery IN ('inline', 'acknowledged') OR agent_entity_id IS NULL)"
    now = yield from current_time()
    return (yield from has_changed(f"{update} WHERE {condition}", now, call_id))


def redirect_to_inbox(call_id: str) -> Program[CallTransition | None]:
    """An inline result that was perhaps not received goes to the inbox. None if it was sent or acknowledged."""
    update = "UPDATE calls SET delivery = 'inbox' WHERE call_id = ? AND delivery = 'inline' AND delivered_at IS NULL"
    return transition(update, call_id)


def find_delivery(call_id: str) -> Program[CallDelivery | None]:
    rows = yield (
        "SELECT status, principal, agent_entity_id, EXISTS (SELECT 1 FROM history WHERE history.run_id = calls.run_id) "
        "FROM calls WHERE call_id = ?",
        (call_id,),
    )
    if not rows:
        return None
    status, principal, agent_entity_id, is_of_own_agent = rows[0]
    return CallDelivery(status, principal, agent_entity_id, bool(is_of_own_agent))


def acknowledge(call_id: str, agent_entity_id: str | None) -> Program[None]:
    """The caller has the result of a call that has ended. It is not delivered again: its inbox event is processed."""
    now = yield from current_time()
    yield (
        "UPDATE calls SET delivery = 'acknowledged', delivered_at = COALESCE(delivered_at, ?) "
        "WHERE call_id = ? AND delivery IN ('inline', 'inbox')",
        (now, call_id),
    )
    if agent_entity_id is not None:
        yield from inbox.withdraw(agent_entity_id, inbox.result_event_id(call_id))

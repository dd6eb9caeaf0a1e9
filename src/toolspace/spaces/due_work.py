"""What is due by time: plans, timers and time-outs of calls, and claims of workers and agents that have ended.

The sweeper runs each kind in a task of its own. Several processes may try the same piece of work; one of them does it.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from toolspace.core.ids import now_ms
from toolspace.errors import RefusedError, StorageUnavailable
from toolspace.spaces import call_transactions, plans
from toolspace.spaces.ledger import Effects, Transactions
from toolspace.spaces.workers import release_departed
from toolspace.storage.database import Program
from toolspace.storage.queries import calls, inbox
from toolspace.storage.queries import plans as plan_queries

_log = logging.getLogger("toolspace.sweeper")

LONGEST_SLEEP: Final = 1.0
_SHORTEST_SLEEP: Final = 0.002
_OVERDUE_MS: Final = 5_000
"""If a caller still waits so long after its timeout, the sweeper makes its call pending."""
_BATCH: Final = 200


async def fire_plans(ledger: Transactions) -> float:
    """Fires the plans that are due. Returns how many seconds to wait for the next one."""
    due_plans = await ledger.read(plan_queries.list_due, limit=_BATCH)
    if not await complete_all(ledger.commit(plans.fire, plan) for plan in due_plans):
        return LONGEST_SLEEP
    return _seconds_until(await ledger.read(plan_queries.find_next_due))


async def end_timers_and_expired_calls(ledger: Transactions) -> float:
    """Ends timers and expired calls, and lets nobody wait beyond its time-out. Returns the seconds until the next."""
    due_calls = await ledger.read(calls.list_due, limit=_BATCH)
    are_resolved = await complete_all(
        ledger.commit(call_transactions.resolve_timer, call.call_id, {"waited": now_ms() - call.created_at})
        for call in due_calls
    )
    expired_ids = await ledger.read(calls.list_expired, limit=_BATCH)
    reason = "nobody answered before the call expired"
    are_expired = await complete_all(
        ledger.commit(call_transactions.end_call, call_id, "expired", reason) for call_id in expired_ids
    )
    overdue_ids = await ledger.read(calls.list_overdue, before=now_ms() - _OVERDUE_MS, limit=_BATCH)
    are_pending = await complete_all(ledger.commit(call_transactions.make_pending, call_id) for call_id in overdue_ids)
    if not (are_resolved and are_expired and are_pending):
        return LONGEST_SLEEP
    return _seconds_until(await ledger.read(calls.find_next_due))


async def release_ended_claims(ledger: Transactions, *, worker_grace: float) -> float:
    """Releases calls of departed workers, and inbox events whose lease has ended. Returns the seconds to wait."""
    await ledger.commit(release_departed, grace=worker_grace)
    await ledger.commit(_release_expired_events)
    return LONGEST_SLEEP


async def complete_all(transactions: Iterable[Coroutine[Any, Any, Any]]) -> bool:
    """Awaits transactions one after the other: the failure of one must not prevent the others.

    Returns False if one failed, which is logged. Raises `StorageUnavailable`.
    """
    are_complete = True
    for transaction in transactions:
        try:
            await transaction
        except RefusedError:
            pass  # Another process was faster.
        except StorageUnavailable:
            raise
        except Exception:
            are_complete = False
            _log.exception("a due call or plan failed; the next round tries again")
    return are_complete


def _seconds_until(due: int | None) -> float:
    if due is None:
        return LONGEST_SLEEP
    return min(max((due - now_ms()) / 1000, _SHORTEST_SLEEP), LONGEST_SLEEP)


def _release_expired_events(effects: Effects) -> Program[None]:
    for event in (yield from inbox.release_expired()):
        effects.notify_inbox(event.session_id)

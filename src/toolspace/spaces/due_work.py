"""What is due by time: plans, and claims of workers and agents that have ended. `due_calls` ends calls by time.

The sweeper runs each kind in a task of its own. Several processes may try the same piece of work; one of them does it.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from toolspace.errors import RefusedError, StorageUnavailable
from toolspace.spaces import plans
from toolspace.spaces.ledger import Effects, Transactions
from toolspace.spaces.workers import release_departed
from toolspace.storage.database import Program
from toolspace.storage.queries import inbox
from toolspace.storage.queries import plans as plan_queries

_log = logging.getLogger("toolspace.sweeper")

LONGEST_SLEEP: Final = 1.0
_SHORTEST_SLEEP: Final = 0.002
BATCH: Final = 200


async def fire_plans(ledger: Transactions) -> float:
    """Fires the plans that are due. Returns how many seconds to wait for the next one."""
    due_plans = await ledger.read(plan_queries.list_due, limit=BATCH)
    if not await complete_all(ledger.commit(plans.fire, plan) for plan in due_plans):
        return LONGEST_SLEEP
    return seconds_until(ledger, await ledger.read(plan_queries.find_next_due))


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


def seconds_until(ledger: Transactions, due: int | None) -> float:
    """Returns how long to sleep until a time of the database."""
    if due is None:
        return LONGEST_SLEEP
    return min(max((due - ledger.now_ms()) / 1000, _SHORTEST_SLEEP), LONGEST_SLEEP)


def _release_expired_events(effects: Effects) -> Program[None]:
    for event in (yield from inbox.release_expired()):
        effects.notify_inbox(event.session_id)

"""Deletes spaces. A large one disappears at once, and its rows are deleted in slices, by the sweeper of any process.

If a process dies in between, another one continues: what is left to delete is in the database.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from toolspace.spaces import call_transactions
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries import calls, runs, sessions
from toolspace.storage.queries import space_deletion as rows

WAKE_KEY: Final = "space-deletions"
"""The waiter that a deletion wakes if it left rows for the sweeper."""
_ROWS_AT_ONCE: Final = 200
_SPACES_AT_ONCE: Final = 100
_SHORTEST_PAUSE: Final = 0.002
"""Seconds between two slices. After a slow slice the pause is as long as the slice."""
_NEXT_CHECK: Final = 60.0


@long_running
def delete_space(effects: Effects, space_id: str) -> Program[bool]:
    """Deletes a space with its members, messages, events and sessions. Runs leave it; its open calls are cancelled.

    Returns False if there is no such space. Of a space with many messages, the sweeper deletes the rest.
    """
    if not (yield from rows.start(space_id)):
        return False
    yield from runs.clear_space(space_id)
    for call_id in (yield from calls.remove_from_space(space_id)):
        yield from call_transactions.end_call(
            effects, call_id, "canceled", "the space in which it was asked was removed"
        )
    yield from sessions.delete_scope(f"space:{space_id}")
    if not (yield from _delete_small(space_id)):
        effects.wake_keys.append(WAKE_KEY)
    return True


def _delete_small(space_id: str) -> Program[bool]:
    """Deletes the rows of a small space. False if there are more."""
    for _ in range(4):  # Its messages, its events, its runs, and the space itself.
        if (yield from rows.delete_rows(space_id, _ROWS_AT_ONCE)):
            return True
    return False


async def finish_deletions(ledger: Ledger) -> float:
    """Deletes the rows that deleted spaces have left; returns the seconds until the next check."""
    while space_ids := await ledger.read(rows.list_unfinished, limit=_SPACES_AT_ONCE):
        for space_id in space_ids:
            is_finished = False
            while not is_finished:
                started_at = time.monotonic()
                is_finished = await ledger.write(rows.delete_rows, space_id, _ROWS_AT_ONCE)
                await asyncio.sleep(max(_SHORTEST_PAUSE, time.monotonic() - started_at))
    return _NEXT_CHECK

"""Deletes old records, in slices: few rows in one transaction, and a pause after each, in which others can write.

The sweeper runs it in a task of its own.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from toolspace.core import defaults
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import approvals, calls, events, idempotency, inbox, quotas, runs, tasks

DELETE_EVERY_SECONDS: Final = 300.0
QUOTA_RETENTION_MS: Final = 3_600_000
"""How long the counter of an ended window stays: calls that started in the window may still be charged to it."""
_RESPONSE_RETENTION_MS: Final = 25 * 3_600_000
"""How long the response of an `Idempotency-Key` is stored: a day, and some time until the next deletion."""
_ROWS_AT_ONCE: Final = 200
_SHORTEST_PAUSE: Final = 0.002
"""Seconds between two slices. After a slow slice the pause is as long as the slice: the other half of the time, the
database works for others."""


class Retention:
    """Deletes what is older than its retention. Seconds, both."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        event_retention: float = defaults.EVENT_RETENTION_SECONDS,
        retention: float = defaults.RETENTION_SECONDS,
    ) -> None:
        self._ledger = ledger
        self._event_retention = event_retention
        self._retention = retention

    async def delete_old_records(self) -> None:
        """Returns when no old record is left."""
        now = self._ledger.now_ms()
        ended_before = now - round(self._retention * 1000)
        for delete, before in (
            (events.delete_old, now - round(self._event_retention * 1000)),
            (idempotency.delete_old_responses, now - _RESPONSE_RETENTION_MS),
            (quotas.delete_old, now - QUOTA_RETENTION_MS),
            (calls.delete_old, ended_before),
            (runs.delete_old, ended_before),  # After their calls.
            (inbox.delete_old, ended_before),
            (idempotency.delete_old_receipts, ended_before),
            (tasks.delete_old, ended_before),
            (approvals.delete_old_rules, ended_before),
        ):
            while True:
                started_at = time.monotonic()
                if not await self._ledger.write(delete, before, _ROWS_AT_ONCE):
                    break
                await asyncio.sleep(max(_SHORTEST_PAUSE, time.monotonic() - started_at))

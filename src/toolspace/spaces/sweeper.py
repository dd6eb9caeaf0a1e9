"""The sweeper: the background work of one process on the database, each kind in a task of its own.

It sends heartbeats, cleans up after dead processes, fires plans, ends timers and expired calls, releases ended claims,
deletes old records and the rows of deleted spaces, and measures the clock of the database. Every process runs one;
several at once do no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from toolspace.core import defaults
from toolspace.errors import StorageError
from toolspace.spaces import due_work, space_deletion
from toolspace.spaces.clock_monitor import ClockMonitor
from toolspace.spaces.due_calls import DueCalls
from toolspace.spaces.heartbeats import HEARTBEAT_SECONDS, Heartbeats, ProcessMonitor, clean_up_after
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.repeated_work import RepeatedWork
from toolspace.spaces.retention import DELETE_EVERY_SECONDS, Retention
from toolspace.storage.queries import inbox

_log = logging.getLogger("toolspace.sweeper")


class Sweeper:
    """Owns the tasks. `async with` runs them."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        worker_grace: float = defaults.WORKER_GRACE_SECONDS,
        event_retention: float = defaults.EVENT_RETENTION_SECONDS,
        retention: float = defaults.RETENTION_SECONDS,
    ) -> None:
        self.heartbeats = Heartbeats(ledger)
        self._ledger = ledger
        self._monitor = ProcessMonitor(ledger, worker_grace=worker_grace)
        self._clock_monitor = ClockMonitor(ledger)
        self._retention = Retention(ledger, event_retention=event_retention, retention=retention)
        self._fire_plans = partial(due_work.fire_plans, ledger.urgent_access)
        self.due_calls = DueCalls(ledger)
        self.due_calls.on_end = self.wake
        self._release_claims = partial(due_work.release_ended_claims, ledger, worker_grace=worker_grace)
        self._work = RepeatedWork()
        self._wakers: list[Callable[[], None]] = []
        """Each starts the next round of one task."""
        self._stop_listening: list[Callable[[], object]] = []

    async def __aenter__(self) -> Sweeper:
        await self.heartbeats.register()
        start = self._work.start
        start("measuring the clock of the database", self._clock_monitor.check)
        if self._ledger.database.is_shared:
            start("sending heartbeats", self._send_heartbeat)
            await self._ledger.announce()
            start("cleaning up after dead processes", self._monitor.check)
        else:
            # Only one process at a time may use the database: all others are dead.
            await self._monitor.clean_up_all_others()
            await self._ledger.write(inbox.end_impossible_delays)
        self._wakers = [
            start("firing plans", self._fire_plans),
            start("ending timers and expired calls", self.due_calls.end_all),
            start("releasing ended claims", self._release_claims),
        ]
        wake_deletion = start(
            "deleting the rows of deleted spaces", partial(space_deletion.finish_deletions, self._ledger)
        )
        start("deleting old records", self._delete_old_records, retry_seconds=DELETE_EVERY_SECONDS)
        listen = self._ledger.waiters.listen
        self._stop_listening = [
            listen("plans", lambda _: self.wake()),
            listen(space_deletion.WAKE_KEY, lambda _: wake_deletion()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for stop_listening in self._stop_listening:
            stop_listening()
        await self._work.aclose()
        await self.due_calls.aclose()
        await self.heartbeats.aclose()
        try:
            # Ends calls whose end could not be stored. No other process does it after a normal exit.
            await clean_up_after(self._ledger, self._ledger.node_id)
        except StorageError as error:
            _log.warning("process %s: removing it from the database failed: %s", self._ledger.node_id, error)

    def wake(self) -> None:
        """Does at once what is due, because something is due sooner than expected."""
        for wake in self._wakers:
            wake()

    async def sweep(self) -> None:
        """Does everything that is due now."""
        await self.due_calls.end_all()
        await self._fire_plans()
        await self._release_claims()

    async def _send_heartbeat(self) -> float:
        await self.heartbeats.send()
        return HEARTBEAT_SECONDS

    async def _delete_old_records(self) -> float:
        await self._retention.delete_old_records()
        return DELETE_EVERY_SECONDS

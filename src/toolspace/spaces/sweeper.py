"""The sweeper: resolves timers, expires calls and inbox claims, fires plans, cleans up for dead processes, and deletes
old records.

Every process runs one; several at once do no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from toolspace.core import defaults
from toolspace.core.ids import now_ms
from toolspace.errors import RefusedError, StorageError, StorageUnavailable
from toolspace.spaces import approvals, call_transactions, plans, runs
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.workers import release_departed
from toolspace.storage.database import Program
from toolspace.storage.queries import approvals as approval_queries
from toolspace.storage.queries import calls, events, idempotency, inbox, quotas, tasks
from toolspace.storage.queries import plans as plan_queries
from toolspace.storage.queries import runs as run_queries
from toolspace.storage.queries import workers_and_presence as presence

_log = logging.getLogger("toolspace.sweeper")

HEARTBEAT_SECONDS: Final = 2.0
DEAD_SECONDS: Final = 10.0
"""A process without a heartbeat for so long counts as dead. Longer than any pause of a healthy process."""
_MAX_CHECK_GAP: Final = DEAD_SECONDS / 2
"""After a longer gap between two checks, missing heartbeats prove nothing: the database may have been down."""
_OVERDUE_MS: Final = 5_000
"""If a caller still waits so long after its timeout, the sweeper makes its call pending."""
_QUOTA_RETENTION_MS: Final = 3_600_000
"""How long the counter of an ended window stays: the clocks of other processes may be behind."""
_LONGEST_SLEEP, _SHORTEST_SLEEP = 1.0, 0.002
_BATCH: Final = 200
_DELETE_EVERY: Final = 300.0
_DELETED_AT_ONCE: Final = 200
"""Rows that one transaction deletes: few, so that other writers do not wait long."""
_RESPONSE_RETENTION_MS: Final = 25 * 3_600_000
"""How long the response of an `Idempotency-Key` is stored: a day, and some time until the next deletion."""


class Sweeper:
    """One task for each process. `async with` runs it."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        worker_grace: float = defaults.WORKER_GRACE_SECONDS,
        event_retention: float = defaults.EVENT_RETENTION_SECONDS,
        retention: float = defaults.RETENTION_SECONDS,
    ) -> None:
        self._ledger = ledger
        self._node_id = ledger.node_id
        self._worker_grace = worker_grace
        self._event_retention = event_retention
        self._retention = retention
        self.on_declared_dead: Callable[[], Awaitable[None]] = _do_nothing_async
        """Called when other processes declared this one dead, and deleted the rows of its connections."""
        self._started_at = now_ms()
        self._last_check = float("-inf")
        self._heartbeats: dict[str, tuple[int, float]] = {}
        """The last heartbeat of each other process, and when this process first saw it, by its own clock."""
        self._task: asyncio.Task[None] | None = None
        self._heartbeat_tasks: set[asyncio.Task[None]] = set()
        self._awake = asyncio.Event()
        self._has_failed = False
        """Whether something of the last round failed, and is still due."""
        self._next_heartbeat = 0.0
        self._next_deletion = 0.0
        self._stop_listening: Callable[[], object] = lambda: None

    async def __aenter__(self) -> Sweeper:
        await self._ledger.write(presence.record_heartbeat, self._node_id, started_at=self._started_at)
        if not self._ledger.database.is_shared:
            # Only one process at a time may use the database: all others are dead.
            await self.clean_up_dead_nodes(now_ms() + 1)
        self._task = asyncio.create_task(self._run())
        self._stop_listening = self._ledger.waiters.listen("plans", lambda _: self.wake())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._stop_listening()
            self._task.cancel()
            # Also waits for a heartbeat in progress: it must not come after the deletion of this process.
            await asyncio.gather(self._task, *self._heartbeat_tasks, return_exceptions=True)
        try:
            # Ends calls whose end could not be stored. No other process does it after a normal exit.
            await self._clean_up_after(self._node_id)
        except StorageError as error:
            _log.warning("Process %s: removing it from the database failed: %s", self._node_id, error)

    def wake(self) -> None:
        """Starts the next round at once, because something is due sooner than expected."""
        self._awake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._awake.clear()
            delay = _LONGEST_SLEEP
            try:
                if self._ledger.database.is_shared and loop.time() >= self._next_heartbeat:
                    self._next_heartbeat = loop.time() + HEARTBEAT_SECONDS
                    await self.send_heartbeat()
                    await self.clean_up_silent_nodes(loop.time())
                await self.sweep()
                if loop.time() >= self._next_deletion:
                    self._next_deletion = loop.time() + _DELETE_EVERY
                    await self.delete_old_records()
                due = await self._ledger.read(_find_next_due)
                if due is not None and not self._has_failed:
                    delay = min(max((due - now_ms()) / 1000, _SHORTEST_SLEEP), _LONGEST_SLEEP)
            except StorageError as error:
                _log.warning("Sweeping failed, retrying in %s s: %s", delay, error)
            except Exception:
                _log.exception("Sweeping failed, retrying in %s s", delay)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._awake.wait()

    async def sweep(self) -> None:
        """Does everything that is due now."""
        self._has_failed = False
        for call in await self._ledger.read(calls.list_due, limit=_BATCH):
            result = {"waited": now_ms() - call.created_at}
            await self._try(self._ledger.commit(call_transactions.resolve_timer, call.call_id, result))
        for plan in await self._ledger.read(plan_queries.list_due, limit=_BATCH):
            await self._try(self._ledger.commit(plans.fire, plan))
        for call_id in await self._ledger.read(calls.list_expired, limit=_BATCH):
            reason = "nobody answered before the call expired"
            await self._try(self._ledger.commit(call_transactions.end_call, call_id, "expired", reason))
        for call_id in await self._ledger.read(calls.list_overdue, before=now_ms() - _OVERDUE_MS, limit=_BATCH):
            await self._try(self._ledger.commit(call_transactions.make_pending, call_id))
        await self._ledger.commit(release_departed, grace=self._worker_grace)
        await self._ledger.commit(_release_expired_events)

    async def send_heartbeat(self) -> None:
        """Stores that this process is alive. Runs to its end even if the caller is cancelled."""
        task = asyncio.create_task(self._send_heartbeat())
        self._heartbeat_tasks.add(task)
        task.add_done_callback(self._heartbeat_tasks.discard)
        await asyncio.shield(task)

    async def _send_heartbeat(self) -> None:
        if await self._ledger.write(presence.record_heartbeat, self._node_id, started_at=self._started_at):
            _log.warning("Other processes declared this one dead; registering its connections again")
            await self.on_declared_dead()

    async def clean_up_silent_nodes(self, now: float) -> None:
        """Cleans up after processes that sent no heartbeat while this process was watching.

        Heartbeats are compared with earlier ones of the same process, not with the clock of this one: clocks may
        differ, and while the database was down nobody could send any.
        """
        if now - self._last_check > _MAX_CHECK_GAP:
            self._heartbeats.clear()
        before, self._heartbeats = self._heartbeats, {}
        heartbeats = await self._ledger.read(presence.list_heartbeats, except_node=self._node_id)
        for node_id, heartbeat in heartbeats.items():
            last_heartbeat, since = before.get(node_id, (None, now))
            self._heartbeats[node_id] = (heartbeat, since if heartbeat == last_heartbeat else now)
        self._last_check = now
        for node_id, (_, since) in self._heartbeats.items():
            if now - since >= DEAD_SECONDS:
                _log.info("Process %s is dead; cleaning up after it", node_id)
                await self._clean_up_after(node_id)

    async def clean_up_dead_nodes(self, before: int) -> None:
        """Cleans up after processes whose last heartbeat is older than `before` (Unix milliseconds)."""
        node_ids = await self._ledger.read(presence.list_dead_nodes, before=before, except_node=self._node_id)
        for node_id in node_ids:
            _log.info("Process %s is dead; cleaning up after it", node_id)
            await self._clean_up_after(node_id)

    async def _clean_up_after(self, node_id: str) -> None:
        for approval_id in await self._ledger.read(approval_queries.list_executing, node_id, limit=_BATCH):
            await self._try(self._ledger.commit(approvals.interrupt, approval_id))
        before: list[tuple[str, str]] = []
        while calls_of_node := await self._ledger.read(calls.list_orphaned, [node_id], limit=_BATCH):
            if calls_of_node == before:
                return  # They failed, and were logged. The next check tries again.
            for call_id, status in calls_of_node:
                await self._try(self._ledger.commit(_take_over, call_id, status))
            before = calls_of_node
        await self._ledger.commit(_delete_node, node_id)

    async def delete_old_records(self) -> None:
        now = now_ms()
        ended_before = now - round(self._retention * 1000)
        for delete, before in (
            (events.delete_old, now - round(self._event_retention * 1000)),
            (idempotency.delete_old_responses, now - _RESPONSE_RETENTION_MS),
            (quotas.delete_old, now - _QUOTA_RETENTION_MS),
            (calls.delete_old, ended_before),
            (run_queries.delete_old, ended_before),  # After their calls.
            (inbox.delete_old, ended_before),
            (idempotency.delete_old_receipts, ended_before),
            (tasks.delete_old, ended_before),
            (approval_queries.delete_old_rules, ended_before),
        ):
            while await self._ledger.write(delete, before, _DELETED_AT_ONCE):
                pass

    async def _try(self, work: Awaitable[Any]) -> None:
        """Awaits one of several pieces of work: its failure must not prevent the others."""
        try:
            await work
        except RefusedError:
            pass  # Another process was faster.
        except StorageUnavailable:
            raise
        except Exception:
            self._has_failed = True
            _log.exception("a due call or plan failed; the next round tries again")


async def _do_nothing_async() -> None: ...


def _find_next_due() -> Program[int | None]:
    """The time when the next call or plan is due; None if there is none."""
    times = ((yield from calls.find_next_due()), (yield from plan_queries.find_next_due()))
    return min((at for at in times if at is not None), default=None)


def _take_over(effects: Effects, call_id: str, status: str) -> Program[None]:
    """Handles a call whose process is dead."""
    if status == "running":
        yield from runs.interrupt_call(effects, call_id)
    elif status == "waiting":
        yield from call_transactions.make_pending(effects, call_id)
    else:
        yield from call_transactions.redirect_to_inbox(effects, call_id)


def _delete_node(effects: Effects, node_id: str) -> Program[None]:
    # Its workers may be alive, and come back through another process before their grace ends.
    yield from presence.disconnect_workers_of_node(node_id)
    for holder in (yield from presence.delete_node(node_id)):
        effects.notify_workers(*(yield from calls.release_claims(holder)))


def _release_expired_events(effects: Effects) -> Program[None]:
    for event in (yield from inbox.release_expired()):
        effects.notify_inbox(event.session_id)

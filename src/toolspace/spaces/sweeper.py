"""Sees to what nobody else will: calls whose time has come, leases that ended, and what dead processes left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from toolspace.core import defaults
from toolspace.core.ids import now_ms
from toolspace.errors import RefusedError, StorageError, StorageUnavailable
from toolspace.spaces import call_transactions, plans, runs
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import events as event_rows
from toolspace.storage.queries import idempotency, presence, tasks, workers
from toolspace.storage.queries import inbox as inbox_rows
from toolspace.storage.queries import plans as plan_rows
from toolspace.storage.queries import runs as run_rows

_log = logging.getLogger("toolspace.sweeper")

HEARTBEAT_SECONDS = 2.0
DEAD_SECONDS = 10.0
"""A process that was silent for so long is taken for dead. Longer than any pause of a healthy one."""
_BLIND_SECONDS = DEAD_SECONDS / 2
"""Who could not look for so long knows nothing of the others: they may have had no way to be heard."""
_LATE_MS = 5_000
"""By how much a caller may overstay before its call is parked for it."""
_LONGEST_SLEEP, _SHORTEST_SLEEP = 1.0, 0.002
_BATCH = 200
_FORGET_EVERY = 300.0
_FORGOTTEN_AT_ONCE = 200
"""Not all: others write too."""
_KEPT_ANSWERS_MS = 25 * 3_600_000
"""How long a repeated request finds the first one's answer: a day, and what passes until someone looks."""


class Sweeper:
    """One task for each process; what it does is safe to do in several at once. `async with` runs it."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        worker_grace: float = defaults.WORKER_GRACE_SECONDS,
        event_retention: float = defaults.EVENT_RETENTION_SECONDS,
        retention: float = defaults.RETENTION_SECONDS,
    ) -> None:
        self._ledger = ledger
        self._worker_grace = worker_grace
        self._event_retention = event_retention
        self._retention = retention
        self.on_declared_dead: Callable[[], Awaitable[None]] = _forgotten
        """Told that the others took this process for dead, and forgot who is connected to it."""
        self._started_at = now_ms()
        self._looked_at = float("-inf")
        self._silent: dict[str, tuple[int, float]] = {}
        """The last sign of each other process, and since when there was no other, by the clock of this one."""
        self._task: asyncio.Task[None] | None = None
        self._beating: set[asyncio.Task[None]] = set()
        self._poked = asyncio.Event()
        self._failed = False
        """Whether something of the last round could not be done, and is due still."""
        self._next_beat = 0.0
        self._next_forget = 0.0
        self._forget: Callable[[], None] = _nothing

    async def __aenter__(self) -> Sweeper:
        # Where the database is this process's alone, every other process that used it is dead.
        await self._ledger.write(presence.record_heartbeat, self._ledger.node_id, started_at=self._started_at)
        if not self._ledger.database.is_shared:
            await self.clean_up_dead_nodes(now_ms() + 1)
        self._task = asyncio.create_task(self._run())
        self._forget = self._ledger.waiters.listen("plans", lambda _: self.wake())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._forget()
            self._task.cancel()
            # With its last sign of life, if that is on its way: it must not come after the goodbye.
            await asyncio.gather(self._task, *self._beating, return_exceptions=True)
        try:
            # Whatever could not be written down while the database was away: nobody looks for it under this name again.
            await self._clear_up_after(self._ledger.node_id)
        except StorageError as error:
            _log.warning("this process could not say goodbye: %s", error)

    def wake(self) -> None:
        """Something is due sooner than was known."""
        self._poked.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._poked.clear()
            delay = _LONGEST_SLEEP
            try:
                if self._ledger.database.is_shared and loop.time() >= self._next_beat:
                    self._next_beat = loop.time() + HEARTBEAT_SECONDS
                    await self.send_heartbeat()
                    await self.clean_up_silent_nodes(loop.time())
                await self.sweep()
                if loop.time() >= self._next_forget:
                    self._next_forget = loop.time() + _FORGET_EVERY
                    await self.delete_old_records()
                due = await self._ledger.read(_next_due)
                if due is not None and not self._failed:
                    delay = min(max((due - now_ms()) / 1000, _SHORTEST_SLEEP), _LONGEST_SLEEP)
            except StorageError as error:
                _log.warning("sweeping has to wait: %s", error)
            except Exception:
                _log.exception("sweeping failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._poked.wait()

    async def sweep(self) -> None:
        """Does once what is due now."""
        self._failed = False
        for call in await self._ledger.read(call_rows.list_due, limit=_BATCH):
            waited = {"waited": now_ms() - call.created_at}
            await self._try(self._ledger.commit(call_transactions.resolve_timer, call.call_id, waited))
        for plan in await self._ledger.read(plan_rows.list_due, limit=_BATCH):
            await self._try(self._ledger.commit(plans.fire, plan))
        for call_id in await self._ledger.read(call_rows.list_expired, limit=_BATCH):
            reason = "nobody answered before the call expired"
            await self._try(self._ledger.commit(call_transactions.end_call, call_id, "expired", reason))
        for call_id in await self._ledger.read(call_rows.list_overdue, before=now_ms() - _LATE_MS, limit=_BATCH):
            await self._try(self._ledger.commit(call_transactions.make_pending, call_id))
        gone_before = now_ms() - round(self._worker_grace * 1000)
        await self._ledger.commit(_release_gone, gone_before)
        await self._ledger.commit(_take_back_inbox)

    async def send_heartbeat(self) -> None:
        """Says that this process is alive. Whoever asks may stop waiting for it: what it finds out is heard of."""
        beat = asyncio.create_task(self._beat())
        self._beating.add(beat)
        beat.add_done_callback(self._beating.discard)
        await asyncio.shield(beat)

    async def _beat(self) -> None:
        if await self._ledger.write(presence.record_heartbeat, self._ledger.node_id, started_at=self._started_at):
            _log.warning("other processes took this one for dead; it tells them who is connected to it")
            await self.on_declared_dead()

    async def clean_up_silent_nodes(self, now: float) -> None:
        """Sees to what processes left that gave no sign while this one was looking for it.

        Their signs are compared with each other, never with a clock of here: theirs may be another, and while the
        database was away nobody could give one.
        """
        if now - self._looked_at > _BLIND_SECONDS:
            self._silent.clear()
        before, self._silent = self._silent, {}
        for node_id, sign in (await self._ledger.read(presence.list_heartbeats, besides=self._ledger.node_id)).items():
            last, since = before.get(node_id, (None, now))
            self._silent[node_id] = (sign, since if sign == last else now)
        self._looked_at = now
        for node_id, (_, since) in self._silent.items():
            if now - since >= DEAD_SECONDS:
                _log.info("process %s is gone; clearing up after it", node_id)
                await self._clear_up_after(node_id)

    async def clean_up_dead_nodes(self, before: int) -> None:
        """Sees to what processes left that were not heard of since a time."""
        for node_id in await self._ledger.read(presence.list_dead_nodes, before=before, besides=self._ledger.node_id):
            _log.info("process %s is gone; clearing up after it", node_id)
            await self._clear_up_after(node_id)

    async def _clear_up_after(self, node_id: str) -> None:
        before: list[tuple[str, str]] = []
        while left := await self._ledger.read(call_rows.list_orphaned, [node_id], limit=_BATCH):
            if left == before:
                return  # What could not be done, and was logged, is tried again at the next look.
            for call_id, status in left:
                await self._try(self._ledger.commit(_inherit, call_id, status))
            before = left
        await self._ledger.commit(_bury, node_id)

    async def delete_old_records(self) -> None:
        now = now_ms()
        ended_before = now - round(self._retention * 1000)
        for forget, before in (
            (event_rows.delete_old, now - round(self._event_retention * 1000)),
            (idempotency.delete_old_responses, now - _KEPT_ANSWERS_MS),
            (call_rows.delete_old, ended_before),
            (run_rows.delete_old, ended_before),  # After their calls.
            (inbox_rows.delete_old, ended_before),
            (idempotency.delete_old_receipts, ended_before),
            (tasks.delete_old, ended_before),
        ):
            while await self._ledger.write(forget, before, _FORGOTTEN_AT_ONCE):
                pass

    async def _try(self, work: Awaitable[Any]) -> None:
        """Does one thing of many: what is wrong with it must not keep the others from being done."""
        try:
            await work
        except RefusedError:
            pass  # Someone else was faster.
        except StorageUnavailable:
            raise
        except Exception:
            self._failed = True
            _log.exception("something that was due could not be done")


def _nothing() -> None: ...


async def _forgotten() -> None: ...


def _next_due() -> Program[int | None]:
    """When the next call or plan is due."""
    times = ((yield from call_rows.find_next_due()), (yield from plan_rows.find_next_due()))
    return min((at for at in times if at is not None), default=None)


def _inherit(effects: Effects, call_id: str, status: str) -> Program[None]:
    """What becomes of a call whose process is dead."""
    if status == "running":
        yield from runs.interrupt_call(effects, call_id)
    elif status == "waiting":
        yield from call_transactions.make_pending(effects, call_id)
    else:
        yield from call_transactions.redirect_to_inbox(effects, call_id)


def _bury(effects: Effects, node_id: str) -> Program[None]:
    yield from workers.disconnect_workers_of_node(
        node_id
    )  # Workers live on: they have their grace to come back through another process.
    for holder in (yield from presence.delete_node(node_id)):
        effects.notify_workers(*(yield from call_rows.release_claims(holder)))


def _release_gone(effects: Effects, before: int) -> Program[None]:
    effects.notify_workers(*(yield from workers.release_departed(before=before)))


def _take_back_inbox(effects: Effects) -> Program[None]:
    for event in (yield from inbox_rows.release_expired()):
        effects.notify_inbox(event.agent_entity_id)

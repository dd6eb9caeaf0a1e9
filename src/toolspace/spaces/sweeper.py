"""Sees to what nobody else will: calls whose time has come, leases that ended, and what dead processes left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from toolspace.abc.database import Program
from toolspace.core.ids import now_ms
from toolspace.errors import RefusedError, StorageError
from toolspace.spaces import calls, plans
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.stores.sql import answers, claims, presence
from toolspace.stores.sql import calls as call_rows
from toolspace.stores.sql import events as event_rows
from toolspace.stores.sql import inbox as inbox_rows
from toolspace.stores.sql import plans as plan_rows

_log = logging.getLogger("toolspace.sweeper")

BEAT_SECONDS = 2.0
DEAD_SECONDS = 10.0
"""A process that was silent for so long is taken for dead. Longer than any pause of a healthy one."""
_LATE_MS = 5_000
"""By how much a caller may overstay before its call is parked for it."""
_LONGEST_SLEEP, _SHORTEST_SLEEP = 1.0, 0.002
_BATCH = 200
_FORGET_EVERY = 300.0
_KEPT_ANSWERS_MS = 25 * 3_600_000
"""How long a repeated request finds the first one's answer: a day, and what passes until someone looks."""


class Sweeper:
    """One task for each process; what it does is safe to do in several at once. `async with` runs it."""

    def __init__(self, ledger: Ledger, *, worker_grace: float = 3.0, event_retention: float = 7 * 86_400.0) -> None:
        self._ledger = ledger
        self._worker_grace = worker_grace
        self._event_retention = event_retention
        self._started_at = now_ms()
        self._task: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        self._next_beat = 0.0
        self._next_forget = 0.0
        self._forget: Callable[[], None] = _nothing

    async def __aenter__(self) -> Sweeper:
        # Where the database is this process's alone, every other process that used it is dead.
        await self._ledger.write(presence.beat, self._ledger.node_id, started_at=self._started_at)
        if not self._ledger.database.shared:
            await self.clear_up(now_ms() + 1)
        self._task = asyncio.create_task(self._run())
        self._forget = self._ledger.waiters.listen("plans", lambda _: self.poke())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._forget()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._ledger.commit(_bury, self._ledger.node_id)
        except StorageError as error:
            _log.warning("this process could not say goodbye: %s", error)

    def poke(self) -> None:
        """Something is due sooner than was known."""
        self._poked.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._poked.clear()
            delay = _LONGEST_SLEEP
            try:
                if self._ledger.database.shared and loop.time() >= self._next_beat:
                    self._next_beat = loop.time() + BEAT_SECONDS
                    await self._ledger.write(presence.beat, self._ledger.node_id, started_at=self._started_at)
                    await self.clear_up(now_ms() - round(DEAD_SECONDS * 1000))
                await self.sweep()
                if loop.time() >= self._next_forget:
                    self._next_forget = loop.time() + _FORGET_EVERY
                    await self._forget_old_events()
                due = await self._ledger.read(_next_due)
                if due is not None:
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
        for call in await self._ledger.read(call_rows.due, limit=_BATCH):
            waited = {"waited": now_ms() - call.created_at}
            await self._try(self._ledger.commit(calls.answer_itself, call.call_id, waited))
        for plan in await self._ledger.read(plan_rows.due, limit=_BATCH):
            await self._try(self._ledger.commit(plans.fire, plan))
        for call_id in await self._ledger.read(call_rows.expired, limit=_BATCH):
            reason = "nobody answered before the call expired"
            await self._try(self._ledger.commit(calls.end_call, call_id, "expired", reason))
        for call_id in await self._ledger.read(call_rows.overdue, before=now_ms() - _LATE_MS, limit=_BATCH):
            await self._try(self._ledger.commit(calls.park, call_id))
        gone_before = now_ms() - round(self._worker_grace * 1000)
        await self._ledger.commit(_release_gone, gone_before)
        await self._ledger.commit(_take_back_inbox)

    async def clear_up(self, before: int) -> None:
        """Sees to what processes left that were not heard of since a time."""
        for node_id in await self._ledger.read(presence.dead_nodes, before=before, besides=self._ledger.node_id):
            _log.info("process %s is gone; clearing up after it", node_id)
            while True:
                left = await self._ledger.read(call_rows.left_behind, [node_id], limit=_BATCH)
                for call_id, status in left:
                    await self._try(self._ledger.commit(_inherit, call_id, status))
                if not left:
                    break
            await self._ledger.commit(_bury, node_id)

    async def _forget_old_events(self) -> None:
        before = now_ms() - round(self._event_retention * 1000)
        while await self._ledger.write(event_rows.forget, before, 1_000):  # Some at once: others write too.
            pass
        while await self._ledger.write(answers.forget, now_ms() - _KEPT_ANSWERS_MS, 1_000):
            pass

    async def _try(self, work: Awaitable[Any]) -> None:
        with suppress(RefusedError):  # Someone else was faster.
            await work


def _nothing() -> None: ...


def _next_due() -> Program[int | None]:
    """When the next call or plan is due."""
    times = ((yield from call_rows.next_due()), (yield from plan_rows.next_due()))
    return min((at for at in times if at is not None), default=None)


def _inherit(effects: Effects, call_id: str, status: str) -> Program[None]:
    """What becomes of a call whose process is dead."""
    if status == "running":
        yield from calls.interrupt(effects, call_id)
    elif status == "waiting":
        yield from calls.park(effects, call_id)
    else:
        yield from calls.redirect(effects, call_id)


def _bury(effects: Effects, node_id: str) -> Program[None]:
    yield from claims.strand(node_id)  # Workers live on: they have their grace to come back through another process.
    for holder in (yield from presence.bury(node_id)):
        effects.offers.update((yield from call_rows.release(holder)))


def _release_gone(effects: Effects, before: int) -> Program[None]:
    for holder in (yield from presence.gone(before=before)):
        effects.offers.update((yield from call_rows.release(holder)))


def _take_back_inbox(effects: Effects) -> Program[None]:
    for event in (yield from inbox_rows.take_back()):
        effects.inbox.add(event.agent_entity_id)

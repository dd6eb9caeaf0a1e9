"""Heartbeats of the processes that share a database, and the clean-up after a process that sends none.

The sweeper runs both, each in a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from toolspace.core.ids import now_ms
from toolspace.spaces import approvals, call_transactions, runs
from toolspace.spaces.due_work import complete_all
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import approvals as approval_queries
from toolspace.storage.queries import calls
from toolspace.storage.queries import workers_and_presence as presence

_log = logging.getLogger("toolspace.sweeper")

HEARTBEAT_SECONDS: Final = 2.0
DEAD_SECONDS: Final = 10.0
"""A process without a heartbeat for so long counts as dead. Longer than any pause of a healthy process."""
_MAX_CHECK_GAP: Final = DEAD_SECONDS / 2
"""After a longer gap between two checks, missing heartbeats prove nothing: the database may have been down."""
_BATCH: Final = 200


class Heartbeats:
    """Stores that this process is alive."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._node_id = ledger.node_id
        self._started_at = now_ms()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_declared_dead: Callable[[], Awaitable[None]] = _do_nothing
        """Called when other processes declared this one dead, and deleted the rows of its connections."""

    async def register(self) -> None:
        """Sends the first heartbeat."""
        await self._write()

    async def send(self) -> None:
        """Sends a heartbeat. Runs to its end even if the caller is cancelled."""
        task = asyncio.create_task(self._send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def aclose(self) -> None:
        """Waits for a heartbeat in progress: it must not come after the deletion of this process."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self) -> None:
        if await self._write():
            _log.warning("other processes declared this one dead; registering its connections again")
            await self.on_declared_dead()

    async def _write(self) -> bool:
        record = presence.record_heartbeat
        return await self._ledger.urgent_access.write(record, self._node_id, started_at=self._started_at)


class ProcessMonitor:
    """Cleans up after other processes that are dead."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._node_id = ledger.node_id
        self._last_check = float("-inf")
        self._heartbeats: dict[str, tuple[int, float]] = {}
        """The last heartbeat of each other process, and when this process first saw it, by its own clock."""

    async def clean_up_silent(self, now: float) -> None:
        """Cleans up after processes that sent no heartbeat while this process was watching. `now`: monotonic seconds.

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
                await self._clean_up(node_id)

    async def clean_up_all_others(self) -> None:
        """Cleans up after all other processes. The caller knows that they are dead."""
        for node_id in await self._ledger.read(presence.list_heartbeats, except_node=self._node_id):
            await self._clean_up(node_id)

    async def _clean_up(self, node_id: str) -> None:
        _log.info("process %s is dead; cleaning up after it", node_id)
        await clean_up_after(self._ledger, node_id)


async def clean_up_after(ledger: Ledger, node_id: str) -> None:
    """Ends or takes over the calls of a process that is dead or stopping, and deletes the process."""
    approval_ids = await ledger.read(approval_queries.list_executing, node_id, limit=_BATCH)
    await complete_all(ledger.commit(approvals.interrupt, approval_id) for approval_id in approval_ids)
    before: list[tuple[str, str]] = []
    while calls_of_node := await ledger.read(calls.list_orphaned, [node_id], limit=_BATCH):
        if calls_of_node == before:
            return  # They failed, and were logged. The next check tries again.
        await complete_all(ledger.commit(_take_over, call_id, status) for call_id, status in calls_of_node)
        before = calls_of_node
    await ledger.commit(_delete_node, node_id)


async def _do_nothing() -> None: ...


def _take_over(effects: Effects, call_id: str, status: str) -> Program[None]:
    """Handles a call whose process is dead."""
    if status == "running":
        yield from runs.interrupt_call(effects, call_id)
    elif status == "waiting":
        yield from call_transactions.make_pending(effects, call_id)
    else:
        # Nobody knows whether the dead process has sent the result to its caller.
        yield from call_transactions.redirect_to_inbox(effects, call_id, may_be_known=True)


def _delete_node(effects: Effects, node_id: str) -> Program[None]:
    # Its workers may be alive, and come back through another process before their grace ends.
    yield from presence.disconnect_workers_of_node(node_id)
    for holder in (yield from presence.delete_node(node_id)):
        effects.notify_workers(*(yield from calls.release_claims(holder)))

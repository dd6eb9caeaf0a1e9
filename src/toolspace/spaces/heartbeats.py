"""Heartbeats of the processes that share a database, and the clean-up after a process that is dead.

A process is dead if its connection to the database has ended and it sends no heartbeat, or if it sends none for longer.
The sweeper runs both, each in a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from toolspace.core import defaults
from toolspace.spaces import approvals, call_transactions, runs
from toolspace.spaces.due_work import complete_all
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.workers import release_departed
from toolspace.storage.database import ConnectedProcesses, Program
from toolspace.storage.queries import approvals as approval_queries
from toolspace.storage.queries import calls
from toolspace.storage.queries import workers_and_presence as presence

_log = logging.getLogger("toolspace.sweeper")

HEARTBEAT_SECONDS: Final = 2.0
DEAD_SECONDS: Final = 10.0
"""A process without a heartbeat for so long counts as dead. Longer than any pause of a healthy process."""
_BUSY_SECONDS: Final = 30.0
"""The same for a process that is still connected: it may only be busy."""
_DISCONNECTED_SECONDS: Final = HEARTBEAT_SECONDS + 0.1
"""A process that is disconnected and sends no heartbeat for so long is dead. If only its connection was lost, it sends
one in this time. With the intervals below less than `server.workerGrace`, after which other workers get its calls."""
_OFFER_SECONDS: Final = 0.15
"""The grace of workers of a dead process ends so much earlier: offering their calls to others takes a moment, too."""
_CHECK_SECONDS: Final = 0.5
_RECHECK_SECONDS: Final = 0.1
"""How often to check the other processes, and while one is disconnected."""
_MAX_CHECK_GAP: Final = DEAD_SECONDS / 2
"""After a longer gap between two checks, missing heartbeats prove nothing: the database may have been down."""
_BATCH: Final = 200


class Heartbeats:
    """Stores that this process is alive."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._node_id = ledger.node_id
        self._started_at = ledger.now_ms()
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

    def __init__(self, ledger: Ledger, *, worker_grace: float = defaults.WORKER_GRACE_SECONDS) -> None:
        self._ledger = ledger
        self._node_id = ledger.node_id
        self._worker_grace = worker_grace
        self._last_check = float("-inf")
        self._heartbeats: dict[str, tuple[int, float]] = {}
        """The last heartbeat of each other process, and when this process first saw it, by its own clock."""
        self._connections = _Connections()
        self._grace_ends: list[float] = []
        """When the calls of workers of dead processes are released."""

    async def check(self) -> float:
        """Cleans up after dead processes. Returns how many seconds to wait for the next check."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        await self.clean_up_silent(now)
        if any(at <= now for at in self._grace_ends):
            self._grace_ends = [at for at in self._grace_ends if at > now]
            await self._ledger.commit(release_departed, grace=self._worker_grace)
        seconds = _RECHECK_SECONDS if self._connections.has_lost_one else _CHECK_SECONDS
        return max(0.0, min([seconds, *(at - loop.time() for at in self._grace_ends)]))

    async def clean_up_silent(self, now: float) -> None:
        """Cleans up after processes that were disconnected, or sent no heartbeat, while this process was watching.

        `now`: monotonic seconds. Heartbeats are compared with earlier ones of the same process, not with the clock of
        this one: clocks may differ, and while the database was down nobody could send any.
        """
        if now - self._last_check > _MAX_CHECK_GAP:
            self._heartbeats.clear()
            self._connections.clear()
        before, self._heartbeats = self._heartbeats, {}
        # Before the heartbeats: one that is read later shows that a process without a connection is alive.
        connected_processes = await self._ledger.find_connected_processes()
        heartbeats = await self._ledger.read(presence.list_heartbeats, except_node=self._node_id)
        for node_id, heartbeat in heartbeats.items():
            last_heartbeat, since = before.get(node_id, (None, now))
            self._heartbeats[node_id] = (heartbeat, since if heartbeat == last_heartbeat else now)
        self._connections.update(connected_processes, heartbeats, now)
        self._last_check = now
        for node_id, (_, since) in self._heartbeats.items():
            seconds = self._connections.seconds_since_loss(node_id, now)
            longest_silence = _BUSY_SECONDS if self._connections.is_connected(node_id) else DEAD_SECONDS
            if seconds is not None:
                seconds += _OFFER_SECONDS
                await self._clean_up(node_id, "its connection to the database has ended", seconds)
                # A little later than the grace: rows have the time in whole milliseconds.
                self._grace_ends.append(now - seconds + self._worker_grace + 0.005)
            elif now - since >= longest_silence:
                await self._clean_up(node_id, "it sends no heartbeats")

    async def clean_up_all_others(self) -> None:
        """Cleans up after all other processes. The caller knows that they are dead."""
        for node_id in await self._ledger.read(presence.list_heartbeats, except_node=self._node_id):
            await self._clean_up(node_id, "the database belongs to this process now")

    async def _clean_up(self, node_id: str, reason: str, seconds_ago: float = 0.0) -> None:
        _log.info("process %s is dead: %s; cleaning up after it", node_id, reason)
        await clean_up_after(self._ledger, node_id, seconds_ago=seconds_ago)


class _Connections:
    """Which of the other processes are connected to the database, and which were before."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._last_seen: dict[str, float] = {}
        """When a process was last connected, or sent a heartbeat without a connection."""
        self._losses: dict[str, tuple[float, int]] = {}
        """The processes that were connected and are not: since when, and their heartbeat then."""

    @property
    def has_lost_one(self) -> bool:
        return bool(self._losses)

    def clear(self) -> None:
        self._last_seen.clear()
        self._losses.clear()

    def update(self, connected: ConnectedProcesses | None, heartbeats: Mapping[str, int], now: float) -> None:
        epoch = connected.epoch if connected is not None else None
        if epoch is None or epoch != self._epoch:
            self.clear()
            self._epoch = epoch
        for node_id in self._last_seen.keys() - heartbeats.keys():
            del self._last_seen[node_id]
            self._losses.pop(node_id, None)
        for node_id, heartbeat in heartbeats.items():
            if connected is not None and node_id in connected:
                self._last_seen[node_id] = now
                self._losses.pop(node_id, None)
            elif node_id in self._last_seen and self._losses.get(node_id, (0.0, None))[1] != heartbeat:
                if node_id in self._losses:
                    self._last_seen[node_id] = now  # It sends heartbeats, so it is alive.
                self._losses[node_id] = (now, heartbeat)

    def is_connected(self, node_id: str) -> bool:
        return node_id in self._last_seen and node_id not in self._losses

    def seconds_since_loss(self, node_id: str, now: float) -> float | None:
        """How long ago a process was last alive; None if it may be alive still."""
        since, _ = self._losses.get(node_id, (now, None))
        return now - self._last_seen[node_id] if now - since >= _DISCONNECTED_SECONDS else None


async def clean_up_after(ledger: Ledger, node_id: str, *, seconds_ago: float = 0.0) -> None:
    """Ends or takes over the calls of a process that is dead or stopping, and deletes the process.

    `seconds_ago`: for how long it has been dead. The grace of its workers counts from then.
    """
    # First: other workers get their calls, however many calls the process had itself.
    await ledger.write(presence.disconnect_workers_of_node, node_id, seconds_ago=seconds_ago)
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
    yield from presence.disconnect_workers_of_node(node_id)  # Those that connected meanwhile, if it is stopping.
    for holder in (yield from presence.delete_node(node_id)):
        effects.notify_workers(*(yield from calls.release_claims(holder)))

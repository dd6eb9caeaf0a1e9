"""Processes that share a PostgreSQL: a killed one is noticed by its connection, a busy or disconnected one is alive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from toolspace.core.ids import now_ms
from toolspace.spaces.heartbeats import Heartbeats, ProcessMonitor
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.postgres.wakeups import PostgresWakeUps
from toolspace.storage.queries import workers_and_presence as presence

pytestmark = pytest.mark.spec("6.7")


class Process:
    """What a gateway process has in common with the others."""

    def __init__(self, url: str, database: PostgresDatabase, wakeups: PostgresWakeUps) -> None:
        self._url = url
        self.wakeups = wakeups
        self.ledger = Ledger(database, wakeups)
        self.id = self.ledger.node_id
        self.heartbeats = Heartbeats(self.ledger)
        self.monitor = ProcessMonitor(self.ledger, worker_grace=3.0)

    async def lose_connection(self) -> None:
        """Its connection ends, as if it were killed. It does not connect again."""
        await self.wakeups.aclose()

    async def reconnect(self) -> None:
        """The server ends its connection, and it connects again."""
        connection = await asyncpg.connect(self._url)
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND pid IN "
            "(SELECT pid FROM pg_stat_activity WHERE application_name = 'toolspace wake-ups')"
        )
        await connection.close()
        while await self.ledger.find_connected_processes() is not None:
            pass
        while await self.ledger.find_connected_processes() is None:
            await self.ledger.read(presence.list_workers)

    async def list_others(self) -> list[str]:
        return list(await self.ledger.read(presence.list_heartbeats, except_node=self.id))

    async def check(self, *seconds: float) -> None:
        """Checks the other processes at these times."""
        for now in seconds:
            await self.monitor.clean_up_silent(now)


@pytest.fixture
async def processes(postgres_url: str) -> AsyncIterator[tuple[Process, Process]]:
    """A process that watches another one."""
    async with AsyncExitStack() as stack:
        opened_processes: list[Process] = []
        for _ in range(2):
            database = await PostgresDatabase.open(postgres_url)
            stack.push_async_callback(database.aclose)
            wakeups = await PostgresWakeUps.open(postgres_url)
            stack.push_async_callback(wakeups.aclose)
            process = Process(postgres_url, database, wakeups)
            await process.heartbeats.register()
            await process.ledger.announce()
            opened_processes.append(process)
        yield opened_processes[0], opened_processes[1]


async def test_a_process_whose_connection_ended_and_that_is_silent_is_dead(processes: tuple[Process, Process]) -> None:
    watcher, peer = processes
    await watcher.check(0.0)
    await peer.lose_connection()
    await watcher.check(0.5, 1.0, 2.0, 2.5)
    assert await watcher.list_others() == [peer.id]
    await watcher.check(2.6)
    assert await watcher.list_others() == []


async def test_calls_of_workers_of_a_dead_process_are_released_when_their_grace_ends(
    processes: tuple[Process, Process],
) -> None:
    watcher, peer = processes
    await peer.ledger.write(presence.register_worker, "wrk_1", ["race"], node_id=peer.id)
    await watcher.check(0.0)
    await peer.lose_connection()
    await watcher.check(0.5, 2.7)
    # The grace counts from the moment in which the process was last connected, 2.7 s ago.
    assert await watcher.ledger.read(_list_workers_that_left, 2.69) == ["wrk_1"]
    assert await watcher.ledger.read(_list_workers_that_left, 60.0) == []


def _list_workers_that_left(seconds: float) -> Program[list[str]]:
    """The workers that left at least so many seconds ago."""
    rows = yield "SELECT DISTINCT holder FROM presence WHERE left_at <= ?", (now_ms() - round(seconds * 1000),)
    return [row[0] for row in rows]


async def test_a_busy_process_that_is_connected_is_not_dead(processes: tuple[Process, Process]) -> None:
    watcher, peer = processes
    await watcher.check(*range(0, 29, 4))  # It sends no heartbeat for 28 seconds.
    assert await watcher.list_others() == [peer.id]
    await watcher.check(32.0)
    assert await watcher.list_others() == []


async def test_a_process_that_lost_only_its_connection_is_not_dead(processes: tuple[Process, Process]) -> None:
    watcher, peer = processes
    await watcher.check(0.0)
    await peer.lose_connection()
    await watcher.check(0.5)
    await peer.heartbeats.send()
    await watcher.check(2.5, 4.5)
    assert await watcher.list_others() == [peer.id]
    await watcher.check(4.7)  # Silent since 2.5.
    assert await watcher.list_others() == []


async def test_after_a_lost_connection_of_its_own_a_process_declares_nobody_dead(
    processes: tuple[Process, Process],
) -> None:
    watcher, peer = processes
    await watcher.check(0.0)
    await peer.lose_connection()
    await watcher.reconnect()
    await watcher.check(0.5, 3.0, 5.0, 7.0, 9.0)
    assert await watcher.list_others() == [peer.id]
    await watcher.check(11.0)  # By its missing heartbeats.
    assert await watcher.list_others() == []


async def test_a_process_counts_the_connected_ones(processes: tuple[Process, Process]) -> None:
    watcher, peer = processes
    connected = await watcher.ledger.find_connected_processes()
    assert connected is not None
    assert (connected.count, watcher.id in connected, peer.id in connected) == (2, True, True)
    await peer.lose_connection()
    connected = await watcher.ledger.find_connected_processes()
    assert connected is not None
    assert (connected.count, peer.id in connected) == (1, False)

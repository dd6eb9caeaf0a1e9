"""Deleting many old records delays nothing else: plans fire, heartbeats are sent, and time-outs end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace.spaces import plans
from toolspace.spaces.plans import NewPlan
from toolspace.spaces.repeated_work import RepeatedWork
from toolspace.spaces.runs import close_run
from toolspace.storage.database import Database, Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import runs
from toolspace.storage.queries.statement_builder import first_value


def add_old_events(count: int) -> Program[None]:
    yield (
        "WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < ?) "
        "INSERT INTO events (stream, id, type, data, exposure, at) "
        "SELECT 'run:old', number, 'message.created', '{}', 'public', number FROM numbers",
        (count,),
    )


def count_events() -> Program[int]:
    return first_value("SELECT COUNT(*) FROM events WHERE stream = 'run:old'")


async def save_plan(harness: ServiceHarness, run_after: str) -> None:
    plan = NewPlan(name="Report", instruction="Write it", run_after=run_after)
    await harness.ledger.commit(plans.set_plans, harness.agent, [plan], principal=None)


@asynccontextmanager
async def open_connection(url: str) -> AsyncGenerator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.spec("15.2")
async def test_a_due_plan_fires_before_all_old_events_are_deleted(database: Database) -> None:
    await database.run(lambda: add_old_events(200_000))
    async with service_harness(database) as harness:
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        await save_plan(harness, "0.1 seconds")
        await notification
        assert await database.read(count_events) > 0


async def test_old_events_are_deleted_in_the_background(database: Database) -> None:
    await database.run(lambda: add_old_events(1_000))
    async with service_harness(database), asyncio.timeout(30):
        while await database.read(count_events):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


@pytest.mark.spec("15.3")
async def test_heartbeats_and_plans_go_on_while_the_deletion_of_old_events_waits(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url)
    await database.run(lambda: add_old_events(1_000))
    async with open_connection(postgres_url) as other_connection, asyncio.timeout(30), other_connection.transaction():
        # The deletion waits for this lock.
        await other_connection.execute("SELECT 1 FROM events WHERE stream = 'run:old' AND id = 500 FOR UPDATE")
        async with service_harness(database, owns=False) as harness:
            await _wait_until_blocked(other_connection, 1)
            notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
            await save_plan(harness, "0.1 seconds")
            await notification
            await _wait_for_heartbeats(harness, other_connection, 2)
            assert await database.read(count_events) >= 501
    await database.aclose()


@pytest.mark.spec("15.3")
async def test_heartbeats_and_plans_need_no_connection_of_the_pool(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url, connections=2)

    def write_goal() -> Program[None]:
        yield "UPDATE goals SET updated_at = 1", ()

    async with open_connection(postgres_url) as other_connection, service_harness(database, owns=False) as harness:
        await save_plan(harness, "1 second")
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        async with asyncio.timeout(30):
            async with other_connection.transaction():
                await other_connection.execute("LOCK TABLE goals IN ACCESS EXCLUSIVE MODE")
                blocked_writes = [asyncio.create_task(harness.ledger.write(write_goal)) for _ in range(2)]
                await _wait_until_blocked(other_connection, 2)
                await notification
                await _wait_for_heartbeats(harness, other_connection, 2)
                assert not any(task.done() for task in blocked_writes)
            await asyncio.gather(*blocked_writes)
    await database.aclose()


async def test_work_that_fails_is_logged_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    rounds: asyncio.Queue[int] = asyncio.Queue()
    count = 0

    async def work() -> float:
        nonlocal count
        count += 1
        rounds.put_nowait(count)
        if count == 1:
            raise ValueError("the first round fails")
        return 3600.0

    repeated_work = RepeatedWork()
    with caplog.at_level(logging.ERROR):
        wake = repeated_work.start("counting rounds", work, retry_seconds=0.001)
        assert [await rounds.get(), await rounds.get()] == [1, 2]
    assert "counting rounds. Retrying in 0.001 s" in caplog.text
    wake()
    assert await rounds.get() == 3
    await repeated_work.aclose()


async def test_the_events_of_an_old_run_are_deleted_in_several_transactions(database: Database) -> None:
    async with service_harness(database) as harness:
        run_id = await harness.open_run()
        await harness.ledger.commit(close_run, run_id)
        stored_events = len(await harness.events(f"run:{run_id}"))
        await harness.ledger.write(_add_run_events, f"run:{run_id}", 25)
        counts = [await database.run(lambda: runs.delete_old(1 << 50, 10)) for _ in range(4)]
        assert counts == [10, 10, 6 + stored_events, 0]
        assert await harness.ledger.read(runs.find, run_id) is None


def _add_run_events(stream: str, count: int) -> Program[None]:
    for number in range(count):
        yield (
            "INSERT INTO events (stream, id, type, data, exposure, at) VALUES (?, ?, 'step', '{}', 'public', ?)",
            (stream, 1_000 + number, 1 << 50),
        )


async def _wait_until_blocked(connection: Any, count: int) -> None:
    """Waits until so many connections to this database wait for a lock."""
    select = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while await connection.fetchval(select) < count:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)


async def _wait_for_heartbeats(harness: ServiceHarness, connection: Any, count: int) -> None:
    """Waits until the process of the harness has sent so many heartbeats more."""
    select = "SELECT seen_at FROM nodes WHERE id = $1"
    last = await connection.fetchval(select, harness.ledger.node_id)
    while count:
        await asyncio.sleep(0.01)
        heartbeat = await connection.fetchval(select, harness.ledger.node_id)
        count, last = count - (heartbeat != last), heartbeat

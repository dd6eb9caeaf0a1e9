"""When a gateway is ready."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from toolspace.server.routes.health_and_metrics import DATABASE_DOWN, DATABASE_READ_ONLY, STARTING, STOPPING, Readiness
from toolspace.storage.database import Program
from toolspace.storage.queries import runs, workers_and_presence
from toolspace.storage.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.spec("12.4")


def _empty_program() -> Program[None]:
    yield from workers_and_presence.record_heartbeat("node_1", started_at=1)


async def test_it_is_ready_from_start_to_stop(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    readiness = Readiness(lambda: database.read(runs.count_open_work), lambda: database.run(_empty_program))

    assert await readiness.list_reasons() == [STARTING]
    readiness.is_started = True
    assert await readiness.list_reasons() == []
    readiness.is_stopping = True
    assert await readiness.list_reasons() == [STOPPING]

    await readiness.aclose()
    await database.aclose()


@pytest.mark.spec("15.3")
async def test_it_is_not_ready_without_the_database(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    readiness = Readiness(lambda: database.read(runs.count_open_work), lambda: database.run(_empty_program))
    readiness.is_started = True
    await database.aclose()

    assert await readiness.list_reasons() == [DATABASE_DOWN]


@pytest.mark.spec("15.3")
async def test_it_is_not_ready_if_the_database_cannot_be_written(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    readiness = Readiness(
        lambda: database.read(runs.count_open_work), lambda: database.run(_empty_program), timeout=0.2
    )
    readiness.is_started = True
    with closing(sqlite3.connect(tmp_path / "toolspace.db")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert await readiness.list_reasons() == [DATABASE_READ_ONLY]
        connection.rollback()
    async with asyncio.timeout(30):
        while await readiness.list_reasons():  # noqa: ASYNC110 - an answer holds for a while
            await asyncio.sleep(0.05)
    await readiness.aclose()
    await database.aclose()


async def test_a_hanging_database_is_checked_once_for_many_requests_with_a_timeout() -> None:
    attempts = 0

    async def hang() -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.Event().wait()

    readiness = Readiness(hang, hang, timeout=0.05)
    readiness.is_started = True
    first = asyncio.create_task(readiness.list_reasons())
    tasks = [asyncio.create_task(readiness.list_reasons()) for _ in range(50)]
    await asyncio.sleep(0)
    first.cancel()

    assert await asyncio.gather(*tasks) == [[DATABASE_DOWN]] * 50
    assert attempts == 1
    await readiness.aclose()

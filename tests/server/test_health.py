"""When a gateway says that it can take requests, and when not."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from toolspace.server.routes.health_and_metrics import NO_DATABASE, NO_WRITES, STARTING, STOPPING, Readiness
from toolspace.storage.database import Program
from toolspace.storage.queries import presence, statistics
from toolspace.storage.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.spec("12.4")


def _keep() -> Program[None]:
    yield from presence.record_heartbeat("node_1", started_at=1)


async def test_it_is_ready_from_its_start_to_its_end(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    readiness = Readiness(lambda: database.read(statistics.count_open_work), lambda: database.run(_keep))

    assert await readiness.reasons() == [STARTING]
    readiness.started = True
    assert await readiness.reasons() == []
    readiness.stopping = True
    assert await readiness.reasons() == [STOPPING]

    await readiness.aclose()
    await database.aclose()


@pytest.mark.spec("15.3")
async def test_without_its_database_it_is_not_ready(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    readiness = Readiness(lambda: database.read(statistics.count_open_work), lambda: database.run(_keep))
    readiness.started = True
    await database.aclose()

    assert await readiness.reasons() == [NO_DATABASE]


@pytest.mark.spec("15.3")
async def test_where_nothing_can_be_written_it_is_not_ready(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    readiness = Readiness(lambda: database.read(statistics.count_open_work), lambda: database.run(_keep), seconds=0.2)
    readiness.started = True
    with closing(sqlite3.connect(tmp_path / "toolspace.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await readiness.reasons() == [NO_WRITES]
        other.rollback()
    async with asyncio.timeout(30):
        while await readiness.reasons():  # noqa: ASYNC110 - an answer holds for a while
            await asyncio.sleep(0.05)
    await readiness.aclose()
    await database.aclose()


async def test_a_database_that_hangs_keeps_nobody_waiting_and_is_asked_once_by_many() -> None:
    asked = 0

    async def hang() -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    readiness = Readiness(hang, hang, seconds=0.05)
    readiness.started = True
    first = asyncio.create_task(readiness.reasons())
    others = [asyncio.create_task(readiness.reasons()) for _ in range(50)]
    await asyncio.sleep(0)
    first.cancel()

    assert await asyncio.gather(*others) == [[NO_DATABASE]] * 50
    assert asked == 1
    await readiness.aclose()

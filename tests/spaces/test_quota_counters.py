"""The counters of quotas in the database: exact with many callers and processes, and kept over restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from toolspace.core.ids import now_ms
from toolspace.core.quotas import MemoryQuotas, QuotaCharge, QuotaStore
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.quota_counters import StoredQuotas
from toolspace.spaces.retention import QUOTA_RETENTION_MS, Retention
from toolspace.storage.database import Database
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.spec("22.1")
START = 1_772_359_200_000


def charge(key: str = "k", *, limit: int = 3, amount: int = 1, start: int = START) -> QuotaCharge:
    return QuotaCharge(key=key, window_start=start, reset_at=start + 60_000, limit=limit, amount=amount, name=key)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        yield MemoryQuotas(clock=lambda: START)  # The windows have not ended.
        return
    if request.param == "sqlite":
        database: Database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    else:
        database = await PostgresDatabase.open(request.getfixturevalue("postgres_url"))
    yield StoredQuotas(Ledger(database))
    await database.aclose()


async def test_charges_are_taken_up_to_the_limit(store: QuotaStore) -> None:
    results = [await store.take([charge()]) for _ in range(5)]
    assert [result is None for result in results] == [True, True, True, False, False]
    assert results[-1] == charge()
    assert await store.take([charge("other")]) is None
    assert await store.take([charge(start=START + 60_000)]) is None


async def test_of_several_charges_all_are_taken_or_none(store: QuotaStore) -> None:
    assert await store.take([charge("a", limit=5), charge("b", limit=1)]) is None
    assert await store.take([charge("a", limit=5), charge("b", limit=1)]) == charge("b", limit=1)
    results = [await store.take([charge("a", limit=5)]) for _ in range(5)]
    assert [result is None for result in results] == [True] * 4 + [False]


async def test_a_charge_above_the_limit_is_never_taken(store: QuotaStore) -> None:
    assert await store.take([charge(limit=3, amount=4)]) is not None
    assert await store.take([charge(limit=3, amount=3)]) is None


async def test_used_amounts_are_added_beyond_the_limit_and_found(store: QuotaStore) -> None:
    assert await store.find_exhausted([charge("a"), charge("b")]) is None
    await store.add([charge("b", amount=2), charge("a", amount=2)])
    assert await store.find_exhausted([charge("a"), charge("b")]) is None
    await store.add([charge("b", amount=20)])
    assert await store.find_exhausted([charge("a"), charge("b")]) == charge("b")


async def test_many_callers_at_once_take_exactly_the_limit(store: QuotaStore) -> None:
    async def take_several() -> int:
        results = [await store.take([charge("a", limit=40), charge("b", limit=60)]) for _ in range(10)]
        return results.count(None)

    assert sum(await asyncio.gather(*(take_several() for _ in range(10)))) == 40


async def test_two_processes_share_the_counters_of_one_database(postgres_url: str) -> None:
    databases = [await PostgresDatabase.open(postgres_url) for _ in range(2)]
    stores = [StoredQuotas(Ledger(database)) for database in databases]
    results = await asyncio.gather(*(stores[number % 2].take([charge(limit=15)]) for number in range(40)))
    assert results.count(None) == 15
    for database in databases:
        await database.aclose()


async def test_a_restart_keeps_the_counters(tmp_path: Path) -> None:
    for expected in (True, True, True, False):
        database = await SqliteDatabase.open(tmp_path / "toolspace.db")
        assert (await StoredQuotas(Ledger(database)).take([charge()]) is None) == expected
        await database.aclose()


async def test_retention_deletes_the_counters_of_ended_windows(database: Database) -> None:
    ledger = Ledger(database)
    store = StoredQuotas(ledger)
    current_start = now_ms() // 60_000 * 60_000
    await store.add([charge("old", start=current_start - QUOTA_RETENTION_MS - 120_000)])
    await store.add([charge("current", start=current_start)])
    await Retention(ledger).delete_old_records()
    rows = await database.read(_list_keys)
    assert rows == ["current"]


def _list_keys() -> Any:
    rows = yield "SELECT key FROM quota_counters", ()
    return [row[0] for row in rows]

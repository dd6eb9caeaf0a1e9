"""The cache in a file: the contract, several processes, and a corrupt file."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.storage.cache_contract import Clock, LocalCacheContract
from toolspace.core.extension_points import CachedResult
from toolspace.errors import ToolspaceError
from toolspace.storage.sqlite_cache import SqliteCache

RESULT = CachedResult(text=b'"kept"', parts=b"[]")


class TestSqliteCache(LocalCacheContract):
    @pytest.fixture
    async def cache(self, clock: Clock, tmp_path: Path):
        cache = SqliteCache(tmp_path / "cache" / "results.db", clock=clock)
        yield cache
        await cache.aclose()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "results.db"


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def rows(path: Path) -> int:
    database = sqlite3.connect(path)
    try:
        return database.execute("SELECT count(*) FROM results").fetchone()[0]
    finally:
        database.close()


async def cached_value(cache: SqliteCache, key: str = "a") -> CachedResult | None:
    try:
        return await cache.get(key)
    finally:
        await cache.aclose()


async def test_file_is_not_created_before_the_first_use(path: Path) -> None:
    cache = SqliteCache(path)
    assert not path.parent.exists()
    await cache.aclose()
    assert not path.parent.exists()


@pytest.mark.spec("4.2")
async def test_results_survive_the_process(path: Path) -> None:
    cache = SqliteCache(path)
    await cache.set("a", RESULT, 60)
    await cache.aclose()
    assert await cached_value(SqliteCache(path)) == RESULT


@pytest.mark.spec("4.2")
async def test_files_are_for_their_owner_only_whatever_the_umask(path: Path, no_umask: None) -> None:
    cache = SqliteCache(path)
    await cache.set("a", RESULT, 60)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert set(modes) == {"results.db", "results.db-wal", "results.db-shm"}
    assert set(modes.values()) == {0o600}
    await cache.aclose()


async def test_closing_the_cache_ends_its_thread(path: Path) -> None:
    cache = SqliteCache(path)
    await cache.set("a", RESULT, 60)
    assert any(thread.name.startswith("toolspace-cache") for thread in threading.enumerate())
    await cache.aclose()
    await cache.aclose()
    assert not any(thread.name.startswith("toolspace-cache") for thread in threading.enumerate())
    with pytest.raises(ToolspaceError, match="closed"):
        await cache.get("a")


async def test_cache_works_after_a_cancelled_call(path: Path) -> None:
    cache = SqliteCache(path)
    set_task = asyncio.create_task(cache.set("a", RESULT, 60))
    await asyncio.sleep(0)
    set_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await set_task
    assert await cached_value(cache) == RESULT


@pytest.mark.spec("4.2")
async def test_file_size_is_bounded_and_the_oldest_results_go(path: Path) -> None:
    limit = 2_000_000
    cache = SqliteCache(path, max_bytes=limit)
    for number in range(300):
        await cache.set(str(number), CachedResult(text=os.urandom(50_000)), 60)
    assert await cache.get("0") is None
    assert await cache.get("299") is not None
    assert await cache.get("280") is not None
    await cache.set("huge", CachedResult(text=b"x" * (limit // 8 + 1)), 60)
    assert await cache.get("huge") is None
    await cache.aclose()
    assert path.stat().st_size < limit * 1.2


@pytest.mark.spec("4.2")
async def test_expired_results_are_deleted(path: Path) -> None:
    clock = Clock()
    cache = SqliteCache(path, clock=clock)
    for number in range(20):
        await cache.set(str(number), RESULT, 10)
    clock.now += 120
    await cache.set("new", RESULT, 10)
    assert rows(path) == 1
    await cache.aclose()


@pytest.mark.spec("4.2")
@pytest.mark.parametrize("damage", [b"", b"not a database at all" * 500, b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_file_that_is_not_a_database_is_replaced(path: Path, damage: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    cache = SqliteCache(path)
    assert await cache.get("a") is None
    await cache.set("a", RESULT, 60)
    assert await cached_value(cache) == RESULT


async def test_corrupt_file_loses_results_and_fails_no_call(path: Path) -> None:
    cache = SqliteCache(path)
    for number in range(200):
        await cache.set(str(number), CachedResult(text=os.urandom(2_000)), 60)
    await cache.aclose()
    with path.open("r+b") as file:
        for page in range(1, 60):
            file.seek(page * 4096)
            file.write(b"\xff" * 4096)
    cache = SqliteCache(path)
    for number in range(200):
        await cache.get(str(number))
    await cache.set("a", RESULT, 60)
    assert await cached_value(cache) == RESULT


async def test_cache_of_another_release_is_replaced(path: Path) -> None:
    cache = SqliteCache(path)
    await cache.set("a", RESULT, 60)
    await cache.aclose()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    cache = SqliteCache(path)
    assert await cache.get("a") is None
    await cache.set("a", RESULT, 60)
    assert await cached_value(cache) == RESULT


async def test_database_of_another_program_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "mail.db"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE results (mine)")
    database.commit()
    database.close()
    before = path.read_bytes()
    cache = SqliteCache(path)
    with pytest.raises(ToolspaceError, match="another program"):
        await cache.set("a", RESULT, 60)
    await cache.aclose()
    assert path.read_bytes() == before


async def test_arguments_are_not_in_the_file(path: Path) -> None:
    cache = SqliteCache(path)
    await cache.set("token=s3cret-argument", RESULT, 60)
    assert not any(b"s3cret-argument" in file.read_bytes() for file in path.parent.iterdir())
    await cache.aclose()


WRITER = """
import asyncio, sys
from toolspace.core.extension_points import CachedResult
from toolspace.storage.sqlite_cache import SqliteCache

async def main(path, name):
    cache = SqliteCache(path)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(100):
        await cache.set(f"{name}-{number}", CachedResult(text=f"{name}{number}".encode()), 600)
        await cache.set("shared", CachedResult(text=name.encode()), 600)
        assert (await cache.get(f"{name}-{number}")).text == f"{name}{number}".encode()
    await cache.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.spec("4.2")
async def test_processes_that_start_at_once_share_one_file(path: Path) -> None:
    names = ["one", "two", "three"]
    writers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(path), name, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name in names
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert await writer.stdout.readline() == b"ready\n"
    await asyncio.gather(*(writer.communicate(b"go\n") for writer in writers))
    assert [writer.returncode for writer in writers] == [0] * len(names)
    cache = SqliteCache(path)
    for name in names:
        for number in range(100):
            assert await cache.get(f"{name}-{number}") == CachedResult(text=f"{name}{number}".encode())
    await cache.aclose()
    assert rows(path) == len(names) * 100 + 1

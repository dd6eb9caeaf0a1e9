"""Only SQLite: the lock, the write-ahead log, file permissions, and recovery after `kill -9`."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toolspace.errors import StorageError, StorageUnavailable
from toolspace.storage import migrations as schema
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities_and_spaces, inbox
from toolspace.storage.sqlite.database import SqliteDatabase

_WRITER = """
import asyncio, sys
from toolspace.storage.queries import inbox
from toolspace.storage.sqlite.database import SqliteDatabase

async def main():
    database = await SqliteDatabase.open(sys.argv[1])
    async def write(name):
        number = 0
        while True:
            number += 1
            event = f"{name}-{number}"
            await database.run(lambda: inbox.add(name, event, "service", {"x": "y" * 200}, priority=1))
            sys.stdout.write(event + "\\n")
            sys.stdout.flush()
    await asyncio.gather(*(write(f"{sys.argv[2]}-{n}") for n in range(10)))

asyncio.run(main())
"""


@pytest.mark.spec("15.2")
def test_no_acknowledged_write_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    acknowledged_ids: set[str] = set()
    for turn in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(turn)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for line in writer.stdout:
            acknowledged_ids.add(line.strip())
            if len(acknowledged_ids) % 400 == 0:
                writer.send_signal(signal.SIGKILL)
                break
        # Every complete line was printed after its commit. The last one may be incomplete.
        acknowledged_ids.update(line.strip() for line in writer.stdout if line.endswith("\n"))
        writer.wait()
        writer.stdout.close()

    async def read_ids() -> set[str]:
        database = await SqliteDatabase.open(path)

        def every() -> Program[set[str]]:
            rows = yield "SELECT event_id FROM inbox", ()
            return {row[0] for row in rows}

        try:
            return await database.read(every)
        finally:
            await database.aclose()

    assert len(acknowledged_ids) >= 1600
    assert acknowledged_ids <= asyncio.run(read_ids())


@pytest.mark.spec("15.1")
async def test_second_process_is_refused_and_told_which_process_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    database = await SqliteDatabase.open(path)
    program = (
        "import asyncio; from toolspace.storage.sqlite.database import *;"
        f" asyncio.run(SqliteDatabase.open({str(path)!r}))"
    )
    second = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=subprocess.PIPE)
    _, message = await second.communicate()
    assert second.returncode
    assert f"{path} is in use by process {os.getpid()}; stop it first" in message.decode()
    with pytest.raises(StorageError, match="in use by process"):
        await SqliteDatabase.open(path)

    await database.aclose()
    second_database = await SqliteDatabase.open(path)
    await second_database.aclose()


async def test_only_the_owner_may_read_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "deep"
    database = await SqliteDatabase.open(folder / "toolspace.db")
    await database.run(lambda: entities_and_spaces.create_entity("ent_1", "human", "Ann", {}))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.glob("toolspace.db*"):
        if not file.name.endswith(".lock"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    await database.aclose()


@pytest.mark.spec("15.2")
async def test_current_database_is_opened_unchanged_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    database = await SqliteDatabase.open(path)
    await database.run(lambda: entities_and_spaces.create_entity("ent_1", "human", "Ann", {}))
    await database.aclose()
    database = await SqliteDatabase.open(path)
    assert await database.read(lambda: entities_and_spaces.find_entity("ent_1")) is not None

    def age() -> Program[None]:
        yield "INSERT INTO migrations (version, applied_at) VALUES (?, 0)", (len(schema.MIGRATIONS) + 1,)

    await database.run(age)
    await database.aclose()
    with pytest.raises(StorageError, match=rf"{path}: the database is at version {len(schema.MIGRATIONS) + 1}"):
        await SqliteDatabase.open(path)


@pytest.mark.spec("15.2")
async def test_failed_migration_leaves_the_database_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "toolspace.db"
    migrations = schema.MIGRATIONS
    monkeypatch.setattr(
        schema, "MIGRATIONS", (*migrations, ("CREATE TABLE extra (id TEXT)", "CREATE TABLE spaces (id TEXT)"))
    )
    with pytest.raises(StorageError, match="cannot be opened"):
        await SqliteDatabase.open(path)
    monkeypatch.setattr(schema, "MIGRATIONS", (*migrations, ("CREATE TABLE extra (id TEXT)",)))
    database = await SqliteDatabase.open(path)

    def versions() -> Program[list[int]]:
        yield "SELECT id FROM extra", ()
        rows = yield "SELECT version FROM migrations ORDER BY version", ()
        return [row[0] for row in rows]

    assert await database.read(versions) == list(range(1, len(migrations) + 2))
    await database.aclose()


async def test_file_of_another_program_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    other_database = sqlite3.connect(path)
    other_database.execute("CREATE TABLE theirs (id TEXT)")
    other_database.close()
    before = path.read_bytes()
    with pytest.raises(StorageError, match="database of another program"):
        await SqliteDatabase.open(path)
    assert path.read_bytes() == before


async def test_error_names_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("not a database, but long enough to be looked at as one " * 20)
    with pytest.raises(StorageError, match=r"text\.db cannot be opened"):
        await SqliteDatabase.open(text)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"below\.db cannot be opened"):
        await SqliteDatabase.open(tmp_path / "file" / "below.db")
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(StorageError, match=r"folder\.db cannot be opened"):
        await SqliteDatabase.open(tmp_path / "folder.db")


async def test_cancelled_opening_releases_the_file(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    opening_task = asyncio.create_task(SqliteDatabase.open(path))
    await asyncio.sleep(0)
    opening_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening_task
    async with asyncio.timeout(30):
        while True:
            try:
                database = await SqliteDatabase.open(path)
            except StorageError:
                continue  # The first is still opening or closing it.
            break
    await database.aclose()


async def test_write_ahead_log_stays_bounded_under_constant_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolspace.storage.sqlite.database_file.LONGEST_LOG", 1 << 20)
    monkeypatch.setattr("toolspace.storage.sqlite.database_file.CHECKPOINT_BYTES", 1 << 18)
    monkeypatch.setattr("toolspace.storage.sqlite.database_file.LOG_BYTES", 1 << 18)
    path = tmp_path / "toolspace.db"
    database = await SqliteDatabase.open(path)
    text = "x" * 4000

    async def write(name: str) -> None:
        for number in range(250):
            await database.run(lambda number=number: inbox.add(name, f"{number}", "service", text, priority=1))

    await asyncio.gather(*(write(str(number)) for number in range(8)))
    written_bytes, log = 8 * 250 * len(text), (tmp_path / "toolspace.db-wal").stat().st_size
    assert log < written_bytes
    await database.aclose()


async def test_commit_does_not_extend_the_write_ahead_log(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    log = tmp_path / "toolspace.db-wal"
    length = log.stat().st_size
    for number in range(50):
        await database.run(lambda number=number: inbox.add("ada", str(number), "service", "x" * 400, priority=1))
    assert log.stat().st_size == length
    await database.aclose()


async def test_writes_are_recovered_from_a_preallocated_log(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    database = await SqliteDatabase.open(first / "toolspace.db")
    await database.run(lambda: inbox.add("ada", "1", "service", {}, priority=1))
    second.mkdir()
    for name in ("toolspace.db", "toolspace.db-wal"):  # As if the machine had crashed here.
        (second / name).write_bytes((first / name).read_bytes())
    await database.aclose()
    database = await SqliteDatabase.open(second / "toolspace.db")
    assert [event.event_id for event in await database.read(lambda: inbox.list_events("ada"))] == ["1"]
    await database.aclose()


async def test_full_disk_fails_only_the_write(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")

    def limit(pages: int) -> Program[None]:
        yield f"PRAGMA max_page_count = {pages}", ()

    def fill(name: str) -> Program[None]:
        yield "INSERT INTO secrets (name, value, created_at) VALUES (?, ?, 0)", (name, "x" * 1_000_000)

    await database.run(lambda: limit(1))  # SQLite raises it to the current size.
    ends = await asyncio.gather(*(database.run(lambda n=n: fill(n)) for n in "abc"), return_exceptions=True)
    assert [type(end) for end in ends] == [StorageUnavailable] * 3
    await database.run(lambda: limit(1_000_000))
    await database.run(lambda: fill("a"))
    await database.aclose()


async def test_exclusive_program_runs_in_a_thread(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "a.db")
    ran: list[str] = []

    def write(name: str) -> Program[None]:
        ran.append(f"{name} {threading.current_thread() is threading.main_thread()}")
        yield "INSERT INTO secrets (name, value, created_at) VALUES (?, 'v', 1)", (name,)

    await asyncio.gather(
        database.run(lambda: write("a")),
        database.run(lambda: write("b"), exclusive=True),
        database.run(lambda: write("c")),
    )
    assert ran == ["a True", "b False", "c True"]
    await database.aclose()


def _count_to(number: int) -> Program[int]:
    rows = yield (
        "WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < ?) "
        "SELECT COUNT(*) FROM numbers",
        (number,),
    )
    return rows[0][0]


async def test_urgent_programs_wait_neither_for_slow_reads_nor_for_the_queue_of_writes(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    slow_reads = [asyncio.ensure_future(database.read(lambda: _count_to(400_000))) for _ in range(4)]
    assert await database.urgent_access.read(lambda: _count_to(3)) == 3
    assert not any(read.done() for read in slow_reads)
    order: list[str] = []

    async def write(name: str, database: Database) -> None:
        await database.run(lambda: inbox.add("agent", name, "service", {}, priority=1))
        order.append(name)

    writes = [asyncio.create_task(write(f"write {number}", database)) for number in range(3_000)]
    await asyncio.sleep(0)  # They are all in the queue.
    await write("urgent", database.urgent_access)
    await asyncio.gather(*writes)
    assert order.index("urgent") < 1_500
    await asyncio.gather(*slow_reads)
    await database.aclose()

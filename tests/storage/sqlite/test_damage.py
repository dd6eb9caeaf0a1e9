"""Damaged files of an SQLite database are reported; a gateway never starts with less than was stored."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from toolspace.errors import StorageDamaged
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, inbox
from toolspace.storage.sqlite.database import SqliteDatabase

_FRAME_BYTES = 24 + 4096
_LOG_HEADER_BYTES = 32


async def write_rows(path: Path, count: int) -> None:
    """Writes entities, one commit each, and leaves the files as a killed process does."""
    database = await SqliteDatabase.open(path)
    for number in range(count):
        await database.run(lambda number=number: entities_and_spaces.create_entity(f"p{number}", "human", "Ann", {}))
    for suffix in ("", "-wal", "-shm"):
        shutil.copyfile(f"{path}{suffix}", f"{path.parent}/copy.db{suffix}")
    await database.aclose()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
        Path(f"{path.parent}/copy.db{suffix}").rename(f"{path}{suffix}")
    Path(f"{path}-shm").unlink()  # SQLite makes it anew.


def count_entities() -> Program[int]:
    rows = yield "SELECT COUNT(*) FROM entities", ()
    return rows[0][0]


def overwrite(path: Path | str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def count_frames(path: Path) -> int:
    """How many frames of the log have been written."""
    data = Path(f"{path}-wal").read_bytes()
    starts = range(_LOG_HEADER_BYTES, len(data) - _FRAME_BYTES + 1, _FRAME_BYTES)
    return sum(data[start + 8 : start + 16] == data[16:24] for start in starts)


async def test_a_whole_log_of_a_killed_process_is_read(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    await write_rows(path, 20)
    database = await SqliteDatabase.open(path)
    assert await database.read(count_entities) == 20
    assert database.damage is None
    await database.aclose()


@pytest.mark.parametrize("frame", [0, 10])
async def test_a_damaged_log_is_reported_and_stays_as_it_is(tmp_path: Path, frame: int) -> None:
    path = tmp_path / "toolspace.db"
    await write_rows(path, 20)
    overwrite(f"{path}-wal", _LOG_HEADER_BYTES + frame * _FRAME_BYTES + 100, b"damage")
    before = Path(f"{path}-wal").read_bytes()
    for _ in range(2):  # The first attempt must not make the second one succeed.
        with pytest.raises(StorageDamaged, match=r"toolspace\.db-wal is damaged: \d+ or more commits"):
            await SqliteDatabase.open(path)
    assert Path(f"{path}-wal").read_bytes() == before


async def test_a_log_with_a_damaged_header_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    await write_rows(path, 20)
    overwrite(f"{path}-wal", 0, b"\x00" * 8)
    with pytest.raises(StorageDamaged, match="commits in it cannot be read"):
        await SqliteDatabase.open(path)


async def test_an_unfinished_last_commit_is_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    await write_rows(path, 20)
    overwrite(f"{path}-wal", _LOG_HEADER_BYTES + (count_frames(path) - 1) * _FRAME_BYTES + 100, b"damage")
    database = await SqliteDatabase.open(path)
    assert await database.read(count_entities) == 19
    await database.aclose()


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_an_empty_or_missing_database_is_not_started_without_a_word(tmp_path: Path, is_deleted: bool) -> None:
    path = tmp_path / "toolspace.db"
    database = await SqliteDatabase.open(path)
    await database.aclose()
    if is_deleted:
        path.unlink()
    else:
        os.truncate(path, 0)
    with pytest.raises(StorageDamaged, match=r"although it was created before; .*delete .*\.lock"):
        await SqliteDatabase.open(path)

    Path(f"{path}.lock").unlink()
    database = await SqliteDatabase.open(path)
    assert await database.read(count_entities) == 0
    await database.aclose()


async def test_a_start_that_was_killed_before_it_created_tables_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    path.touch()
    Path(f"{path}.lock").write_text("process 1\n")
    database = await SqliteDatabase.open(path)
    await database.aclose()


async def test_a_damaged_page_is_reported_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    database = await SqliteDatabase.open(path)
    for number in range(200):
        await database.run(lambda number=number: inbox.add("a", f"e{number}", "service", {"x": "y" * 500}, priority=1))
    await database.aclose()
    size = path.stat().st_size
    for page in range(20, size // 4096):
        overwrite(path, page * 4096, random.Random(page).randbytes(64))
    with pytest.raises(StorageDamaged, match="toolspace restore"):
        await SqliteDatabase.open(path)


async def test_damage_that_a_statement_finds_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    database = await SqliteDatabase.open(path)
    for number in range(3000):
        await database.run(lambda number=number: inbox.add("a", f"e{number}", "service", {"x": "y" * 500}, priority=1))
    await database.aclose()
    database = await SqliteDatabase.open(path)
    try:
        for page in range(20, path.stat().st_size // 4096):
            overwrite(path, page * 4096, random.Random(page).randbytes(64))

        def read_all() -> Program[int]:
            rows = yield "SELECT COUNT(data) FROM inbox WHERE data LIKE '%zzz%'", ()
            return rows[0][0]

        with pytest.raises(StorageDamaged):
            await database.read(read_all)
        assert database.damage is not None
    finally:
        await database.aclose()

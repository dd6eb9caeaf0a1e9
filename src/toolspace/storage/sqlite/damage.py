"""Finds damage in the files of an SQLite database: commits in the log that cannot be read, and broken pages.

SQLite reads its write-ahead log up to the first frame whose checksum is wrong, and takes that for the end of the log.
After a crash in the middle of a commit that is right. If later commits follow, they were acknowledged and are lost, and
a gateway must not start as if nothing had happened. Used by the database of the gateway, `toolspace doctor` and
`toolspace backup`.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from toolspace.errors import StorageDamaged

_LOG_HEADER, _FRAME_HEADER = struct.Struct(">8I"), struct.Struct(">6I")
_LOG_MAGIC: Final = (0x377F0682, 0x377F0683)
_INDEX_FRAMES: Final = struct.Struct("=I")
_INDEX_FRAMES_OFFSET: Final = 16
"""Where the index of the log (the file `-shm`) says how many frames are valid."""
_INTERRUPT_STEPS: Final = 10_000
"""How many steps of SQLite pass between two looks at the clock."""
ADVICE: Final = (
    "restore a backup with toolspace restore, or save what can be read with toolspace backup --skip-damaged "
    "and restore that"
)


def check_files(path: Path, *, was_created: bool) -> None:
    """Raises `StorageDamaged` if the database cannot be what was stored last. Changes neither database nor log.

    `was_created`: whether a process has created the database before. No process may write meanwhile.
    """
    is_empty = not path.exists() or path.stat().st_size == 0
    commits = list(_list_commits(path))
    if is_empty and (was_created or commits):
        state = "empty" if path.exists() else "missing"
        raise StorageDamaged(
            f"the database {path} is {state}, although it was created before; restore a backup with toolspace restore, "
            f"or delete {path}.lock and {path}-wal to start without data"
        )
    if not is_empty and (count := _count_lost_commits(path, commits)) > 0:
        raise StorageDamaged(f"the log {path}-wal is damaged: {count} or more commits in it cannot be read; {ADVICE}")


def find_page_damage(connection: sqlite3.Connection, seconds: float | None = None) -> tuple[str | None, bool]:
    """The first broken page or index, None if there is none; and whether the check came to its end in that time."""
    deadline = None if seconds is None else time.monotonic() + seconds

    def is_late() -> bool:
        return deadline is not None and time.monotonic() > deadline

    connection.set_progress_handler(is_late, _INTERRUPT_STEPS)
    try:
        (report,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        if is_late():
            return None, False
        raise
    except sqlite3.DatabaseError as error:
        return str(error), True
    finally:
        connection.set_progress_handler(None, 0)
    # The first line of a report only names the database.
    return (None if report == "ok" else report.replace("*** in database main ***\n", "")), True


def _list_commits(path: Path) -> Iterator[int]:
    """The numbers of the frames in the log that end a commit, as far as they were written since its last restart."""
    with suppress(FileNotFoundError), open(f"{path}-wal", "rb") as log:
        header = log.read(_LOG_HEADER.size)
        if len(header) < _LOG_HEADER.size:
            return
        magic, _, page_size, _, *salts, _, _ = _LOG_HEADER.unpack(header)
        if magic not in _LOG_MAGIC:
            page_size, salts = _read_page_size(path), None
        frame_size = _FRAME_HEADER.size + page_size
        frames = (os.fstat(log.fileno()).st_size - _LOG_HEADER.size) // frame_size
        for number in range(frames):
            log.seek(_LOG_HEADER.size + number * frame_size)
            page, size_after_commit, *frame_salts, _, _ = _FRAME_HEADER.unpack(log.read(_FRAME_HEADER.size))
            if page == 0:
                continue
            salts = salts or frame_salts  # The header is broken: the first frame has the same salts.
            if size_after_commit and frame_salts == salts:
                yield number + 1


def _read_page_size(path: Path) -> int:
    with suppress(OSError), path.open("rb") as file:
        size = int.from_bytes(file.read(18)[16:18], "big")
        return 65_536 if size == 1 else max(size, 512)
    return 4096


def _count_lost_commits(path: Path, commits: list[int]) -> int:
    """How many acknowledged commits SQLite does not read. A single one may be unfinished: a crash interrupted it."""
    if not commits:
        return 0
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as connection:
        # Reading makes SQLite check the log and write its index.
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        valid_frames = _read_valid_frames(path)
    lost_commits = [number for number in commits if number > valid_frames]
    return len(lost_commits) if len(lost_commits) > 1 else 0


def _read_valid_frames(path: Path) -> int:
    with open(f"{path}-shm", "rb") as index:
        index.seek(_INDEX_FRAMES_OFFSET)
        (frames,) = _INDEX_FRAMES.unpack(index.read(_INDEX_FRAMES.size))
        return frames

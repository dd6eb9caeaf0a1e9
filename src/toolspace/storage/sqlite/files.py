"""The files beside an SQLite database: the write-ahead log, and the lock of the process that has it open."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from toolspace.errors import StorageError

_log = logging.getLogger("toolspace.storage")

CHECKPOINT_BYTES = 16 << 20
"""How long the log may become before it is copied into the database."""
LOG_BYTES, LONGEST_LOG = 8 << 20, 32 << 20
"""How long the log's file is made beforehand, and how long it may stay."""
LEAST_ROOM = 8 << 20
"""Bytes that should be free on the disk: for one more large write, and for the copy of the log after it."""
_LOG_HEADER, _FRAME_HEADER = 32, 24
"""Bytes at the beginning of the log, and of each page in it."""


class WriteAheadLog:
    """The file of the log. It is made long beforehand, and can tell whether it is due for a checkpoint.

    A commit that extends a file also waits for the file system's metadata, which takes longer than the rest of the
    commit. SQLite ignores what is behind the last page that it wrote.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        self._mark = _LOG_HEADER + CHECKPOINT_BYTES // page_size * (_FRAME_HEADER + page_size)
        self._file = open(f"{path}-wal", "r+b", buffering=0)  # noqa: SIM115 - it stays open
        with contextlib.suppress(OSError):  # The disk is full: the next write reports it.
            missing_bytes = LOG_BYTES - self._file.seek(0, os.SEEK_END)
            if missing_bytes > 0:
                self._file.write(bytes(missing_bytes))

    def is_long(self) -> bool:
        """Whether it is due: the page at the mark has the log's current salts, so it is not from an earlier round."""
        try:
            return os.pread(self._file.fileno(), 8, self._mark + 8) == os.pread(self._file.fileno(), 8, 16)
        except OSError:
            return False

    def close(self) -> None:
        self._file.close()


def run_checkpoint(connection: sqlite3.Connection, path: Path) -> int:
    """Copies as much of the log into the database as is possible without waiting. Returns the log's length in bytes."""
    try:
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        _, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        _log.warning("Checkpoint of %s failed: %s", path, error)
        return 0
    return frames * page_size


def free_bytes(path: Path) -> int:
    """Bytes that are free on the disk of a file."""
    return shutil.disk_usage(path.parent).free


def lock(database: Path) -> Any:
    """Locks a database until the returned file is closed. Raises `StorageError` if another process has locked it."""
    import fcntl

    file = open(f"{database}.lock", "a+", encoding="utf-8")  # noqa: SIM115 - it stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise StorageError(
            f"{database} is in use by {holder}; stop it first, or set storage.url to a PostgreSQL that "
            "many gateways can share"
        ) from None
    except BaseException:
        file.close()
        raise
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()}")
    file.flush()
    return file

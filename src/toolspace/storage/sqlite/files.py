"""The files beside an SQLite database: its log, and the lock of whoever has it open."""

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
"""How long the log may be before it is copied into the database."""
LOG_BYTES, LONGEST_LOG = 8 << 20, 32 << 20
"""How long the log's file is made beforehand, and how long it may stay."""
LEAST_ROOM = 8 << 20
"""Bytes that should be free on the disk: what is written last may be large, and the log is copied after it."""
_LOG_HEAD, _FRAME_HEAD = 32, 24
"""Bytes at the beginning of the log, and of each page in it."""


class Log:
    """The file of the log: made long beforehand, and looked at to see how far it is written.

    A commit that makes a file longer waits for the books of the file system too, longer than for all the rest. What is
    behind the last page that was written means nothing to SQLite.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        self._mark = _LOG_HEAD + CHECKPOINT_BYTES // page * (_FRAME_HEAD + page)
        self._file = open(f"{path}-wal", "r+b", buffering=0)  # noqa: SIM115 - it stays open
        with contextlib.suppress(OSError):  # The disk is full. Whatever has to be written says so.
            missing = LOG_BYTES - self._file.seek(0, os.SEEK_END)
            if missing > 0:
                self._file.write(bytes(missing))

    def is_long(self) -> bool:
        """Whether it should be copied: the page at the mark has the log's salts, so it is not of an earlier turn."""
        try:
            return os.pread(self._file.fileno(), 8, self._mark + 8) == os.pread(self._file.fileno(), 8, 16)
        except OSError:
            return False

    def close(self) -> None:
        self._file.close()


def copy_log(connection: sqlite3.Connection, path: Path) -> int:
    """Copies as much of the log as can be without waiting for anyone. Says how long it is."""
    try:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        _, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        _log.warning("copying the log of %s: %s", path, error)
        return 0
    return frames * page


def room(path: Path) -> int:
    """Bytes that are free where a file is."""
    return shutil.disk_usage(path.parent).free


def lock(database: Path) -> Any:
    """Holds the lock of a database for as long as the process lives, or says who has it."""
    import fcntl

    file = open(f"{database}.lock", "a+", encoding="utf-8")  # noqa: SIM115 - it is held, not read
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

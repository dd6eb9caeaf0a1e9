"""The files of an SQLite database: opening them, the lock of the process that has them, and the write-ahead log."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Final, TextIO

from toolspace.core.clock import DatabaseClock
from toolspace.errors import StorageDamaged, StorageError
from toolspace.storage.migrations import migrate
from toolspace.storage.planner_statistics import write_sqlite_statistics
from toolspace.storage.private_files import make_private_folder
from toolspace.storage.sqlite.damage import ADVICE, check_files, find_page_damage
from toolspace.storage.sqlite.group_commit import DatabaseConnection, run_program, to_storage_error

_log = logging.getLogger("toolspace.storage")

BUSY_MS: Final = 30_000
CHECKPOINT_BYTES = 16 << 20
"""How long the log may become before it is copied into the database."""
LOG_BYTES, LONGEST_LOG = 8 << 20, 32 << 20
"""How long the log's file is made beforehand, and how long it may stay."""
_CHECK_SECONDS: Final = 1.0
"""How long the pages are checked before the start; a thread checks the others after it."""
LEAST_ROOM = 8 << 20
"""Bytes that should be free on the disk: for one more large write, and for the copy of the log after it."""
APPLICATION_ID: Final = 0x746F6F73  # "toos": marks our files.
_CACHED_STATEMENTS: Final = 512
_LOG_HEADER, _FRAME_HEADER = 32, 24
"""Bytes at the beginning of the log, and of each page in it."""
_CREATED: Final = "database created"


class DatabaseFile:
    """An open database: its lock, its connections and its log. Opening it takes a while, so do it in a thread."""

    def __init__(self, path: Path, *, readers: int, clock: DatabaseClock) -> None:
        """Creates the file if it is missing, and migrates its tables. Raises `StorageError` if it cannot be opened."""
        self.path = path
        self.clock = clock
        self._resources = contextlib.ExitStack()
        try:
            make_private_folder(path.parent)
            lock = self._resources.enter_context(lock_database(path))
            check_files(path, was_created=lock.was_created)
            self.writer = self._connect()
            self._prepare()
            lock.mark_created()
            self.check_connection = self._check_pages()
            """A connection to check the other pages with; None if all pages were checked."""
            self._log_file = open(f"{path}-wal", "r+b", buffering=0)  # noqa: SIM115 - it stays open
            self._resources.callback(self._log_file.close)
            self._extend_log()
            self.checkpointer = self._connect()
            self.readers = [self._connect() for _ in range(readers)]
            for reader in self.readers:
                reader.execute("PRAGMA query_only = ON")
            self.writer.execute("PRAGMA busy_timeout = 0")  # The event loop must not wait.
        except BaseException as error:
            self.close()
            if isinstance(to_storage_error(error), StorageDamaged):
                raise StorageDamaged(f"the database {path} cannot be opened: {error}; {ADVICE}") from error
            if isinstance(error, sqlite3.Error | OSError):
                raise StorageError(f"the database {path} cannot be opened: {error}") from error
            raise

    def close(self) -> None:
        """Closes everything, and unlocks the file last."""
        self._resources.close()

    def is_disk_full(self) -> bool:
        return shutil.disk_usage(self.path.parent).free < LEAST_ROOM

    def is_log_long(self) -> bool:
        """Whether the log is due for a checkpoint: the page at the mark has its current salts, so it is not from an
        earlier round."""
        file = self._log_file.fileno()
        try:
            return os.pread(file, 8, self._log_mark + 8) == os.pread(file, 8, 16)
        except OSError:
            return False

    def _check_pages(self) -> sqlite3.Connection | None:
        """Checks the pages for a moment. A connection to go on with if there are more. Raises `StorageDamaged`."""
        connection = self._connect()
        damage, is_complete = find_page_damage(connection, _CHECK_SECONDS)
        if damage is not None:
            raise StorageDamaged(f"the database {self.path} is damaged: {damage}; {ADVICE}")
        return None if is_complete else connection

    def _connect(self) -> sqlite3.Connection:
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # Only its owner may read it.
        connection = sqlite3.connect(
            self.path,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=_CACHED_STATEMENTS,
            timeout=BUSY_MS / 1000,
            factory=DatabaseConnection,
        )
        connection.clock = self.clock
        self._resources.callback(connection.close)
        for setting in ("synchronous = FULL", "foreign_keys = ON", "cache_size = -8192", "temp_store = MEMORY"):
            connection.execute(f"PRAGMA {setting}")
        return connection

    def _prepare(self) -> None:
        writer = self.writer
        (application_id,) = writer.execute("PRAGMA application_id").fetchone()
        (tables,) = writer.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if tables and application_id != APPLICATION_ID:
            raise StorageError(f"{self.path} is a database of another program; name another file or folder")
        (mode,) = writer.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StorageError(f"{self.path} is on a file system that SQLite cannot share memory on; name a local one")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute(f"PRAGMA journal_size_limit = {LONGEST_LOG}")
        writer.execute("BEGIN IMMEDIATE")
        # In the transaction: a file that is marked as ours has tables.
        writer.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        try:
            run_program(writer, migrate)
            run_program(writer, write_sqlite_statistics)
        except StorageError as error:
            raise StorageError(f"{self.path}: {error}") from error
        writer.execute("COMMIT")

    def _extend_log(self) -> None:
        """Makes the log's file long beforehand.

        A commit that extends a file also waits for the file system's metadata, which takes longer than the rest of the
        commit. SQLite ignores what is behind the last page that it wrote.
        """
        (page_size,) = self.writer.execute("PRAGMA page_size").fetchone()
        self._log_mark = _LOG_HEADER + CHECKPOINT_BYTES // page_size * (_FRAME_HEADER + page_size)
        with contextlib.suppress(OSError):  # The disk is full: the next write reports it.
            missing_bytes = LOG_BYTES - self._log_file.seek(0, os.SEEK_END)
            if missing_bytes > 0:
                self._log_file.write(bytes(missing_bytes))


def run_checkpoint(connection: sqlite3.Connection, path: Path) -> bool:
    """Copies as much of the log into the database as is possible without waiting. Whether the log is still long."""
    try:
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        _, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        _log.warning("checkpoint of %s failed: %s", path, error)
        return False
    return frames * page_size >= CHECKPOINT_BYTES


def check_idle_files(path: Path) -> None:
    """Raises `StorageDamaged` if the files are damaged. Does nothing while a process uses them: it has checked them."""
    if not path.parent.is_dir() or not os.path.exists(f"{path}.lock"):
        return
    try:
        with lock_database(path) as lock:
            check_files(path, was_created=lock.was_created)
    except (StorageDamaged, OSError):
        raise
    except StorageError:  # A process has locked them.
        return


class DatabaseLock:
    """A lock file: the lock of one process on a database, and the note whether the database was created."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        file.seek(0)
        self.was_created = _CREATED in file.read()
        self._write()

    def mark_created(self) -> None:
        """Notes that the database was created: from now on an empty or missing file has lost its data."""
        self.was_created = True
        self._write()

    def _write(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"process {os.getpid()}\n{_CREATED if self.was_created else ''}")
        self._file.flush()


@contextlib.contextmanager
def lock_database(path: Path) -> Generator[DatabaseLock]:
    """Locks a database while the block runs. Raises `StorageError` if another process has locked it."""
    import fcntl

    with open(f"{path}.lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.readline().strip() or "another process"
            raise StorageError(
                f"{path} is in use by {holder}; stop it first, or set storage.url to a PostgreSQL that "
                "many gateways can share"
            ) from None
        yield DatabaseLock(file)

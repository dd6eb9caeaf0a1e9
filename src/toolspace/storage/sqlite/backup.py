"""Reads all rows of an SQLite database for a backup, and writes a database from one."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from toolspace.errors import StorageDamaged, StorageError
from toolspace.storage.backup import BATCH_ROWS, TableSource, TableTarget
from toolspace.storage.database import Row
from toolspace.storage.migrations import migrate
from toolspace.storage.private_files import make_private_folder
from toolspace.storage.sqlite.database_file import APPLICATION_ID, check_idle_files, lock_database
from toolspace.storage.sqlite.group_commit import run_program

_TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
_SIDE_FILES: Final = ("", "-wal", "-shm")


class SqliteSource(TableSource):
    """One state of a database file. A gateway may write to the file meanwhile."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute("BEGIN")
        (version,) = connection.execute("SELECT COALESCE(MAX(version), 0) FROM migrations").fetchone()
        self.schema_version = version
        names = [name for (name,) in connection.execute(_TABLES) if name != "migrations"]
        self.tables = {name: self._list_columns(name) for name in names}

    def _list_columns(self, table: str) -> tuple[str, ...]:
        return tuple(row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")'))

    async def read_rows(self, table: str, *, skip_damaged: bool) -> AsyncIterator[list[Row]]:
        columns = ", ".join(f'"{column}"' for column in self.tables[table])
        try:
            cursor = await asyncio.to_thread(self._connection.execute, f'SELECT {columns} FROM "{table}"')
            while rows := await asyncio.to_thread(self._fetch, cursor):
                yield rows
        except sqlite3.DatabaseError as error:
            raise StorageDamaged(f"the table {table} cannot be read: {error}") from error

    def _fetch(self, cursor: sqlite3.Cursor) -> list[Row]:
        """The next rows. Those before a damaged one are returned first."""
        rows: list[Row] = []
        while len(rows) < BATCH_ROWS:
            try:
                row = cursor.fetchone()
            except sqlite3.DatabaseError:
                if not rows:
                    raise
                return rows
            if row is None:
                return rows
            rows.append(row)
        return rows


@contextmanager
def open_source(path: Path, *, skip_damaged: bool = False) -> Generator[SqliteSource]:
    """Opens a database to read it. Raises `StorageError`, and `StorageDamaged` if commits in its log are lost."""
    if not skip_damaged:
        check_idle_files(path)
    if not path.exists():
        raise StorageError(f"there is no database {path}: no gateway of this configuration has run yet")
    try:
        with closing(
            sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=30,
                isolation_level=None,
                check_same_thread=False,
            )
        ) as connection:
            yield SqliteSource(connection)
    except sqlite3.DatabaseError as error:
        raise StorageDamaged(f"the database {path} cannot be read: {error}") from error


class SqliteTarget(TableTarget):
    """A new database file beside the one that it replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode = OFF", "synchronous = OFF", "foreign_keys = OFF"):
            self._connection.execute(f"PRAGMA {setting}")

    async def create_tables(self, schema_version: int) -> None:
        self._connection.execute("BEGIN")
        self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        await asyncio.to_thread(run_program, self._connection, partial(migrate, schema_version))

    async def order_tables(self, tables: Sequence[str]) -> list[str]:
        return list(tables)  # References are not checked while rows are written.

    async def write_rows(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        names = ", ".join(f'"{column}"' for column in columns)
        marks = ", ".join("?" * len(columns))
        sql = f'INSERT INTO "{table}" ({names}) VALUES ({marks})'
        try:
            await asyncio.to_thread(self._connection.executemany, sql, rows)
        except sqlite3.Error as error:
            raise StorageError(f"rows of the table {table} cannot be restored: {error}") from error

    async def finish(self) -> None:
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        run_program(self._connection, migrate)
        self._connection.execute("COMMIT")
        problems = self._connection.execute("PRAGMA foreign_key_check").fetchmany(1)
        self.close()
        if problems:
            raise StorageError(f"the backup is not consistent: a row of the table {problems[0][0]} refers to nothing")
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        self._connection.close()


@contextmanager
def open_target(path: Path, *, replace: bool) -> Generator[SqliteTarget]:
    """A new database that takes its place when the block ends without an error.

    The old files are kept under other names. Raises `StorageError` if a gateway uses the database, or if there is one
    and `replace` is not set.
    """
    make_private_folder(path.parent)
    with lock_database(path) as lock:
        if path.exists() and path.stat().st_size and not replace:
            raise StorageError(f"there is a database {path} already; --replace keeps it under another name")
        new_path = path.with_name(f"{path.name}.restored")
        new_path.unlink(missing_ok=True)
        os.close(os.open(new_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        target = SqliteTarget(new_path)
        try:
            yield target
            old_name = f"{path}.before-restore-{time.strftime('%Y%m%d-%H%M%S')}"
            for suffix in _SIDE_FILES:
                if os.path.exists(f"{path}{suffix}"):
                    os.rename(f"{path}{suffix}", f"{old_name}{suffix}")
            new_path.rename(path)
            lock.mark_created()
        finally:
            target.close()
            new_path.unlink(missing_ok=True)

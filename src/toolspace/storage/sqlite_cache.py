"""`SqliteCache`: results in one SQLite file that several processes may open. Losing the file loses only time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from toolspace.core.extension_points import CachedResult, ResultCache
from toolspace.errors import ToolspaceError
from toolspace.storage.private_files import make_private_folder

_T = TypeVar("_T")

_APPLICATION_ID = 0x746F6F6C  # "tool": marks our files.
_VERSION = 1
_SCHEMA = """
CREATE TABLE results (
    id INTEGER PRIMARY KEY,  -- grows with time, so the lowest is the oldest
    key BLOB NOT NULL UNIQUE,
    text BLOB NOT NULL,
    parts BLOB NOT NULL,
    expires REAL NOT NULL
);
CREATE INDEX results_expires ON results (expires);
"""
_BUSY_MS = 5_000
_SWEEP_EVERY = 60.0
_ROW_OVERHEAD = 100  # Bytes that a row takes besides its text, about.
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class SqliteCache(ResultCache):
    """Caches results in a file until they expire, or until newer ones need the space.

    SQLite runs in a thread of its own, which the first call starts: the event loop never waits for the disk, and a
    busy thread pool never delays the cache. The file has a hash of each key, not the arguments of the call.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 256 * 1024 * 1024,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(path)
        self._file = _CacheFile(self._path, max_bytes, clock)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="toolspace-cache")
        self._closed = False

    async def get(self, key: str) -> CachedResult | None:
        digest = _digest(key)
        return await self._run(lambda: self._file.get(digest))

    async def set(self, key: str, value: CachedResult, ttl: float) -> None:
        digest = _digest(key)
        await self._run(lambda: self._file.set(digest, value, ttl))

    async def clear(self) -> None:
        await self._run(self._file.clear)

    async def aclose(self) -> None:
        if not self._closed:
            closing_file = self._run(self._file.close)
            self._closed = True
            await closing_file
            self._executor.shutdown()

    def _run(self, work: Callable[[], _T]) -> Awaitable[_T]:
        """Runs `work` in the thread to its end, even if the caller is cancelled."""
        if self._closed:
            raise ToolspaceError(f"the cache {self._path} is closed")
        return asyncio.shield(asyncio.wrap_future(self._executor.submit(work)))


class _Stale(Exception):
    """The file is a cache of another release, or empty."""


class _CacheFile:
    """The file, used by one thread."""

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float]) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._last_sweep = 0.0

    def get(self, digest: bytes) -> CachedResult | None:
        row = self._try(
            lambda database: database.execute(
                "SELECT text, parts FROM results WHERE key = ? AND expires > ?", (digest, self._clock())
            ).fetchone()
        )
        return None if row is None else CachedResult(text=row[0], parts=row[1])

    def set(self, digest: bytes, value: CachedResult, ttl: float) -> None:
        now = self._clock()

        def write(database: sqlite3.Connection) -> None:
            if ttl <= 0 or len(value.text) + len(value.parts) > self._max_bytes // 8:
                database.execute("DELETE FROM results WHERE key = ?", (digest,))
                return
            database.execute(
                "INSERT OR REPLACE INTO results (key, text, parts, expires) VALUES (?, ?, ?, ?)",
                (digest, value.text, value.parts, now + ttl),
            )
            self._free_space(database, now)

        self._try(write)

    def clear(self) -> None:
        self._try(lambda database: database.execute("DELETE FROM results"))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _free_space(self, database: sqlite3.Connection, now: float) -> None:
        if not self._last_sweep <= now < self._last_sweep + _SWEEP_EVERY:
            self._last_sweep = now
            database.execute("DELETE FROM results WHERE expires <= ?", (now,))
        excess = _used_bytes(database) - self._max_bytes
        if excess > 0:
            # A little more than needed, so that the next writes need not do it again.
            excess += self._max_bytes // 20
            rows = database.execute("SELECT id, length(text) + length(parts) FROM results ORDER BY id")
            last_id = 0
            for row_id, size in rows:
                last_id = row_id
                excess -= size + _ROW_OVERHEAD
                if excess <= 0:
                    break
            rows.close()
            database.execute("DELETE FROM results WHERE id <= ?", (last_id,))

    def _try(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Runs `work` on the file; if the file is corrupt, moves it away and runs `work` on a new one."""
        try:
            return work(self._database())
        except _Stale:
            pass
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _CORRUPT:
                raise
        self._move_away()
        return work(self._database())

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            if not self._path.exists():
                self._create()
            self._inode = self._path.stat().st_ino
            self._connection = self._connect(self._path)
            if not self._is_ours(self._connection):
                self.close()
                raise ToolspaceError(f"{self._path} is a database of another program; give the cache a file of its own")
        return self._connection

    def _is_ours(self, database: sqlite3.Connection) -> bool:
        application = database.execute("PRAGMA application_id").fetchone()[0]
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if application == _APPLICATION_ID and version == _VERSION:
            return True
        if application == _APPLICATION_ID or not database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise _Stale
        return False

    def _create(self) -> None:
        """Creates the file under another name and links it into place when it is complete.

        Of several processes that start at once, one succeeds, and none sees an incomplete database.
        """
        make_private_folder(self._path.parent)
        draft = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.new")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        draft.chmod(0o600)  # Whatever the umask. SQLite gives its side files the mode of the database.
        try:
            with contextlib.closing(self._connect(draft)) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_SCHEMA)
                database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
            with contextlib.suppress(FileExistsError):
                os.link(draft, self._path)
        finally:
            for leftover in _files(draft):
                leftover.unlink(missing_ok=True)

    def _connect(self, path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path, timeout=_BUSY_MS / 1000, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA journal_size_limit = 4194304")
        except BaseException:
            database.close()
            raise
        return database

    def _move_away(self) -> None:
        """Renames a corrupt file, unless another process has done so."""
        inode, self._inode = self._inode, 0
        self.close()
        with contextlib.suppress(FileNotFoundError):
            if inode in (0, self._path.stat().st_ino):
                for part in _files(self._path):
                    with contextlib.suppress(FileNotFoundError):
                        part.replace(part.with_name(f"{part.name}.broken"))


def _files(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(path.name + end) for end in ("", "-wal", "-shm"))


def _used_bytes(database: sqlite3.Connection) -> int:
    pages, free, size = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

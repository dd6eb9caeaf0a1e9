"""SQLite: one writer thread that commits many programs together, and readers beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from toolspace.abc.database import Database, Program, Row
from toolspace.errors import StorageError, StorageUnavailable, UnkeepableError
from toolspace.stores.private import make_private_folder
from toolspace.stores.sql.schema import migrate

_log = logging.getLogger("toolspace.stores")
T = TypeVar("T")

_APPLICATION = 0x746F6F73  # "toos": tells our files from any other SQLite database.
_MOST_AT_ONCE = 512
"""Programs in one commit."""
_READERS = 2
_STATEMENTS = 512
_CHECKPOINT_BYTES, _CHECKPOINT_SECONDS = 4 << 20, 5.0
_LONGEST_LOG = 32 << 20
"""Beyond that the writer itself brings the log to its end, so that it starts again at its beginning."""

_UNAVAILABLE = frozenset(
    (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOTADB,
    )
)


class SqliteDatabase(Database):
    """A file. One process at a time may have it open: opening it twice is an error that says so.

    A program that fails is rolled back to where it began, and the others of its commit are not touched. `run` returns
    once the commit is on the disk (`synchronous=FULL`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writes: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._checkpoint = threading.Event()
        self._log_is_long = False
        self._closing = False
        self._written = 0
        self._lock: Any = None

    @classmethod
    async def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens the file, makes it where there is none, and brings its tables up to date."""
        self = cls(Path(path))
        opening = asyncio.get_running_loop().run_in_executor(None, self._open)
        try:
            writer, checkpointer, *readers = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._give_up)
            raise
        self._start("writer", self._write, writer)
        self._start("checkpoint", self._check_point, checkpointer)
        for reader in readers:
            self._start("reader", self._read, reader)
        return self

    async def run(self, program: Callable[[], Program[T]], *, then: Callable[[T], None] | None = None) -> T:
        return await self._ask(self._writes, program, then)

    async def read(self, program: Callable[[], Program[T]]) -> T:
        return await self._ask(self._reads, program, None)

    async def aclose(self) -> None:
        if not self._closing:
            self._closing = True
            self._writes.put(None)
            for _ in range(_READERS):
                self._reads.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._join)

    def _join(self) -> None:
        self._checkpoint.set()
        for thread in self._threads:
            thread.join()
        if self._lock is not None:
            self._lock.close()

    def _ask(
        self,
        jobs: queue.SimpleQueue[_Job | None],
        program: Callable[[], Program[Any]],
        then: Callable[[Any], None] | None,
    ) -> asyncio.Future[Any]:
        if self._closing:
            raise StorageUnavailable(f"the database {self.path} is closed")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        jobs.put(_Job(program, answer, then))
        return answer

    # Opening

    def _open(self) -> list[sqlite3.Connection]:
        opened: list[sqlite3.Connection] = []
        try:
            make_private_folder(self.path.parent)
            self._lock = _lock(self.path)
            self._prepare(self._connect(opened))
            for _ in range(1 + _READERS):
                self._connect(opened)
            for reader in opened[2:]:
                reader.execute("PRAGMA query_only = ON")
        except BaseException as error:
            self._close_all(opened)
            if isinstance(error, sqlite3.Error | OSError):
                raise StorageError(f"the database {self.path} cannot be opened: {error}") from error
            raise
        return opened

    def _prepare(self, writer: sqlite3.Connection) -> None:
        (application,) = writer.execute("PRAGMA application_id").fetchone()
        (tables,) = writer.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if tables and application != _APPLICATION:
            raise StorageError(f"{self.path} is a database of another program; name another file or folder")
        (mode,) = writer.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StorageError(f"{self.path} is on a file system that SQLite cannot share memory on; name a local one")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute(f"PRAGMA journal_size_limit = {_LONGEST_LOG}")
        writer.execute("BEGIN IMMEDIATE")
        # In the transaction: a file that says it is ours has tables.
        writer.execute(f"PRAGMA application_id = {_APPLICATION}")
        try:
            _step_through(writer, migrate)
        except StorageError as error:
            raise StorageError(f"{self.path}: {error}") from error
        writer.execute("COMMIT")

    def _connect(self, opened: list[sqlite3.Connection]) -> sqlite3.Connection:
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # Nobody else's to read, from the start.
        connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS, timeout=30.0
        )
        opened.append(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA cache_size = -8192")
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    def _close_all(self, opened: Sequence[sqlite3.Connection]) -> None:
        for connection in opened:
            connection.close()
        if self._lock is not None:
            self._lock.close()

    def _give_up(self, opening: asyncio.Future[list[sqlite3.Connection]]) -> None:
        """Whoever opened it was canceled meanwhile."""
        if not opening.cancelled() and opening.exception() is None:
            self._close_all(opening.result())

    def _start(self, name: str, work: Callable[[sqlite3.Connection], None], connection: sqlite3.Connection) -> None:
        thread = threading.Thread(target=work, args=(connection,), name=f"toolspace-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # The writer

    def _write(self, connection: sqlite3.Connection) -> None:
        going = True
        size = 0
        log = f"{self.path}-wal"
        while going:
            batch, going = _next_of(self._writes)
            if not batch:
                continue
            _commit(connection, batch)
            self._written += len(batch)
            _answer(batch)
            if self._log_is_long:
                _copy_log(connection, self.path)
                self._log_is_long = False
            with contextlib.suppress(OSError):
                now = os.stat(log).st_size
                if not size <= now < size + _CHECKPOINT_BYTES:
                    size = now
                    self._checkpoint.set()
        connection.close()

    def _check_point(self, connection: sqlite3.Connection) -> None:
        """Copies what was written from the log into the file, beside the writer, which must not wait for that.

        Under constant writing there is always more in the log than was copied, and it would grow for ever: then the
        writer is asked to copy the rest.
        """
        copied = 0
        while not self._closing:
            self._checkpoint.wait(_CHECKPOINT_SECONDS)
            self._checkpoint.clear()
            if copied != self._written:
                copied = self._written
                self._log_is_long = _copy_log(connection, self.path) > _LONGEST_LOG
        connection.close()

    # The readers

    def _read(self, connection: sqlite3.Connection) -> None:
        while (job := self._reads.get()) is not None:
            try:
                connection.execute("BEGIN")  # One view for all of its statements.
                job.result = _step_through(connection, job.program)
            except BaseException as error:
                job.error = _explained(error)
            _roll_back(connection)
            _answer([job])
        connection.close()


class _Job:
    __slots__ = ("answer", "error", "loop", "program", "result", "then")

    def __init__(
        self,
        program: Callable[[], Program[Any]],
        answer: asyncio.Future[Any],
        then: Callable[[Any], None] | None,
    ) -> None:
        self.program = program
        self.answer = answer
        self.loop = answer.get_loop()
        self.then = then
        self.result: Any = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        if self.error is None and self.then is not None:
            try:
                self.then(self.result)
            except Exception:
                _log.exception("what was written could not be told")
        if self.answer.done():
            return  # Whoever asked went away; what was written stays written.
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.result)


def _next_of(jobs: queue.SimpleQueue[_Job | None]) -> tuple[list[_Job], bool]:
    """Everything that waits, up to a limit; and whether there may be more."""
    batch: list[_Job] = []
    job = jobs.get()
    while job is not None:
        batch.append(job)
        if len(batch) >= _MOST_AT_ONCE:
            return batch, True
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return batch, True
    return batch, False


def _commit(connection: sqlite3.Connection, batch: Sequence[_Job]) -> None:
    """Runs the programs of a batch and commits them together."""
    for attempt in (_run_plainly, _run_apart):
        for job in batch:
            job.error = None
        try:
            connection.execute("BEGIN IMMEDIATE")
            done = attempt(connection, batch)
            connection.execute("COMMIT" if done else "ROLLBACK")
        except BaseException as error:
            _roll_back(connection)
            for job in batch:
                job.error = job.error or _explained(error)
            return
        if done:
            return


def _run_plainly(connection: sqlite3.Connection, batch: Sequence[_Job]) -> bool:
    """Without savepoints, which cost as much as a small program. False where one failed after it had changed rows."""
    for job in batch:
        changes = connection.total_changes
        try:
            job.result = _step_through(connection, job.program)
        except BaseException as error:
            if not connection.in_transaction:
                raise  # The disk is full, or worse: SQLite has taken everything back.
            if connection.total_changes != changes:
                return False
            job.error = _explained(error)
    return True


def _run_apart(connection: sqlite3.Connection, batch: Sequence[_Job]) -> bool:
    for job in batch:
        connection.execute("SAVEPOINT program")
        try:
            job.result = _step_through(connection, job.program)
        except BaseException as error:
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO program")
            job.error = _explained(error)
        connection.execute("RELEASE program")
    return True


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def _copy_log(connection: sqlite3.Connection, path: Path) -> int:
    """Copies as much of the log as can be without waiting for anyone. Says how long it is."""
    try:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        _, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        _log.warning("copying the log of %s: %s", path, error)
        return 0
    return frames * page


def _answer(batch: Sequence[_Job]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in batch:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, jobs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # That loop is closed: nobody waits there.
            loop.call_soon_threadsafe(_settle, jobs)


def _settle(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.settle()


def _step_through(connection: sqlite3.Connection, program: Callable[[], Program[T]]) -> T:
    steps = program()
    rows: Any = None
    try:
        while True:
            sql, values = steps.send(rows)
            rows = _execute(connection, sql, values)
    except StopIteration as done:
        return done.value
    finally:
        steps.close()


def _execute(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[Row]:
    for value in values:
        if type(value) is str and "\0" in value:  # SQLite would take it, PostgreSQL does not.
            raise UnkeepableError(_UNKEEPABLE)
    try:
        return connection.execute(sql, values).fetchall()
    except (OverflowError, UnicodeEncodeError):
        raise UnkeepableError(_UNKEEPABLE) from None


_UNKEEPABLE = "a value cannot be kept: no NUL characters, no lone surrogates, integers of 64 bits"


def _explained(error: BaseException) -> BaseException:
    if not isinstance(error, sqlite3.Error):
        return error
    code: int = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in _UNAVAILABLE:
        return StorageUnavailable(f"the database does not answer: {error}")
    return StorageError(f"the database refuses this: {error}")


def _lock(database: Path) -> Any:
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

"""SQLite: many programs in one commit, which a thread waits for, and readers beside it.

Programs that write run on the event loop: their statements take some microseconds each, and a thread that takes turns
with the loop for every statement takes several times as long. What takes long is the disk, so a thread commits; what
comes meanwhile is in the next commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from toolspace.abc.database import Database, Program, Row, Rows, Tail
from toolspace.errors import StorageError, StorageUnavailable, UnkeepableError
from toolspace.stores.private import make_private_folder
from toolspace.stores.sql import tails
from toolspace.stores.sql.schema import migrate

_log = logging.getLogger("toolspace.stores")
T = TypeVar("T")

_APPLICATION = 0x746F6F73  # "toos": tells our files from any other SQLite database.
_MOST_AT_ONCE = 512
"""Programs in one commit."""
_BUSY_MS = 30_000
_READERS = 2
_TAKING_SECONDS = 0.001
"""How long the loop waits at most for the thread to begin a commit."""
_STATEMENTS = 512
_CHECKPOINT_BYTES, _CHECKPOINT_SECONDS = 16 << 20, 5.0
"""How long the log may be, and how old what is in it, before it is copied into the file."""
_LOG_BYTES, _LONGEST_LOG = 8 << 20, 32 << 20
"""How long the log's file is made beforehand, and how long it may stay."""
_LOG_HEAD, _FRAME_HEAD = 32, 24
"""Bytes at the beginning of the log, and of each page in it."""

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
        self._loop = asyncio.get_running_loop()
        self._connection: sqlite3.Connection | None = None
        """The one that writes: the loop's, or while a commit is under way the thread's."""
        self._waiting: deque[_Job] = deque()
        self._is_due = False
        """Whether what waits is about to be run."""
        self._is_committing = False
        self._idle = asyncio.Event()
        self._commits: queue.SimpleQueue[_Commit | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._taken = threading.Lock()
        """Held, but for the moment in which the thread takes what it is to commit."""
        self._taken.acquire()
        self._threads: list[threading.Thread] = []
        self._checkpoint = threading.Event()
        self._log: _Log | None = None
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
        writer.execute("PRAGMA busy_timeout = 0")  # On the loop nobody waits.
        self._connection = writer
        self._start("writer", self._write, writer)
        self._start("checkpoint", self._check_point, checkpointer)
        for reader in readers:
            self._start("reader", self._read, reader)
        return self

    async def run(
        self,
        program: Callable[[], Program[T]],
        *,
        then: Callable[[T], None] | None = None,
        tail: Callable[[], Tail] | None = None,
        aside: bool = False,
    ) -> T:
        job = self._job(program, then, tail)
        job.aside = aside
        self._waiting.append(job)
        if not self._is_due and not self._is_committing:
            self._soon()
        return await job.answer

    async def read(self, program: Callable[[], Program[T]]) -> T:
        job = self._job(program)
        self._reads.put(job)
        return await job.answer

    async def aclose(self) -> None:
        if not self._closing:
            self._closing = True
            for _ in range(_READERS):
                self._reads.put(None)
            if self._waiting or self._is_committing:
                await self._idle.wait()
            self._commits.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._join)

    def _join(self) -> None:
        self._checkpoint.set()
        for thread in self._threads:
            thread.join()
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            self._lock.close()

    def _job(
        self,
        program: Callable[[], Program[Any]],
        then: Callable[[Any], None] | None = None,
        tail: Callable[[], Tail] | None = None,
    ) -> _Job:
        if self._closing:
            raise StorageUnavailable(f"the database {self.path} is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise StorageError(f"the database {self.path} was opened on another event loop; open it on this one")
        return _Job(program, self._loop.create_future(), then, tail)

    # Opening

    def _open(self) -> list[sqlite3.Connection]:
        opened: list[sqlite3.Connection] = []
        try:
            make_private_folder(self.path.parent)
            self._lock = _lock(self.path)
            self._prepare(self._connect(opened))
            self._log = _Log(opened[0], self.path)
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
            self.path,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=_STATEMENTS,
            timeout=_BUSY_MS / 1000,
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
        if self._log is not None:
            self._log.close()
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

    def _soon(self) -> None:
        """Has what waits run, but not at once: what comes in the same moment goes with it."""
        self._is_due = True
        self._loop.call_soon(self._run_waiting)

    def _run_waiting(self) -> None:
        """Runs what waits, as one transaction, and leaves it to the thread to commit it."""
        self._is_due = False
        connection = self._connection
        assert connection is not None
        while self._waiting:
            batch = self._next_batch()
            is_begun = not batch[0].aside and _is_begun(connection)
            if is_begun and not _run(connection, batch):
                _settle(batch)  # None of them wrote anything.
                continue
            self._is_committing = True
            self._commits.put(_Commit(batch, is_begun))
            if len(batch) > 1:
                # Where many write there is much to do here, and until all of it was done the thread would not get its
                # turn to begin: the disk would stand still while the loop works, and the loop while the disk does.
                self._taken.acquire(timeout=_TAKING_SECONDS)
            return
        if self._closing:
            self._idle.set()

    def _next_batch(self) -> list[_Job]:
        """What goes into one commit: all that wait, up to a limit; one that may take long goes alone."""
        batch = [self._waiting.popleft()]
        while not batch[0].aside and self._waiting and not self._waiting[0].aside and len(batch) < _MOST_AT_ONCE:
            batch.append(self._waiting.popleft())
        return batch

    def _committed(self, batch: Sequence[_Job]) -> None:
        self._written += len(batch)
        _settle(batch)
        self._is_committing = False
        self._run_waiting()  # Before those who asked go on: the disk has something to do meanwhile.

    def _write(self, connection: sqlite3.Connection) -> None:
        """Commits, in a thread: nobody else waits for the disk."""
        while (commit := self._commits.get()) is not None:
            batch = commit.batch
            if len(batch) > 1 and self._taken.locked():
                self._taken.release()
            if commit.is_begun or _begin(connection, batch):
                _commit(connection, batch)
            if self._log_is_long:
                _copy_log(connection, self.path)
                self._log_is_long = False
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits there.
                self._loop.call_soon_threadsafe(self._committed, batch)
            if self._log is not None and self._log.is_long():
                self._checkpoint.set()
        connection.close()

    def _check_point(self, connection: sqlite3.Connection) -> None:
        """Copies what was written from the log into the file, beside the writer, which must not wait for that.

        Under constant writing there is always more in the log than was copied, and it would grow for ever: then the
        writer is asked to copy the rest, so that it starts again at its beginning.
        """
        copied = 0
        while not self._closing:
            self._checkpoint.wait(_CHECKPOINT_SECONDS)
            self._checkpoint.clear()
            if copied != self._written:
                copied = self._written
                self._log_is_long = _copy_log(connection, self.path) >= _CHECKPOINT_BYTES
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
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits there.
                self._loop.call_soon_threadsafe(job.settle)
        connection.close()


class _Job:
    __slots__ = ("answer", "aside", "error", "program", "result", "tail", "then")

    def __init__(
        self,
        program: Callable[[], Program[Any]],
        answer: asyncio.Future[Any],
        then: Callable[[Any], None] | None,
        tail: Callable[[], Tail] | None,
    ) -> None:
        self.program = program
        self.tail = tail
        self.aside = False
        """Whether it may take long: then the thread runs it, alone."""
        self.answer = answer
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


class _Commit(NamedTuple):
    """Programs to be committed together."""

    batch: list[_Job]
    is_begun: bool
    """Whether they were run already; else they are, once nobody else writes."""


def _is_begun(connection: sqlite3.Connection) -> bool:
    """Begins to write, if no other program writes to the file. The thread waits for that, not the loop."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.Error:
        return False
    return True


def _begin(connection: sqlite3.Connection, batch: Sequence[_Job]) -> bool:
    """Begins, waiting for whoever else writes to the file, and runs the programs. False where that failed."""
    try:
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        try:
            connection.execute("BEGIN IMMEDIATE")
        finally:
            connection.execute("PRAGMA busy_timeout = 0")
    except BaseException as error:
        _fail(connection, batch, error)
        return False
    return _run(connection, batch)


def _run(connection: sqlite3.Connection, batch: Sequence[_Job]) -> bool:
    """Runs the programs of a batch in the transaction that was begun. False where they could not be run."""
    try:
        if not _run_plainly(connection, batch):
            connection.execute("ROLLBACK")
            for job in batch:
                job.error = None
            connection.execute("BEGIN IMMEDIATE")
            _run_apart(connection, batch)
        left = [job.tail() for job in batch if job.tail is not None and job.error is None]
        if left:
            _step_through(connection, lambda: tails.write(left))
    except BaseException as error:
        _fail(connection, batch, error)
        return False
    return True


def _commit(connection: sqlite3.Connection, batch: Sequence[_Job]) -> None:
    try:
        connection.execute("COMMIT")
    except BaseException as error:
        _fail(connection, batch, error)


def _fail(connection: sqlite3.Connection, batch: Sequence[_Job], error: BaseException) -> None:
    """All of it is taken back, whatever became of each."""
    _roll_back(connection)
    for job in batch:
        job.error = job.error or _explained(error)


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


def _run_apart(connection: sqlite3.Connection, batch: Sequence[_Job]) -> None:
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


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


class _Log:
    """The file of the log: made long beforehand, and looked at to see how far it is written.

    A commit that makes a file longer waits for the books of the file system too, longer than for all the rest. What is
    behind the last page that was written means nothing to SQLite.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        self._mark = _LOG_HEAD + _CHECKPOINT_BYTES // page * (_FRAME_HEAD + page)
        self._file = open(f"{path}-wal", "r+b", buffering=0)  # noqa: SIM115 - it stays open
        with contextlib.suppress(OSError):  # The disk is full. Whatever has to be written says so.
            missing = _LOG_BYTES - self._file.seek(0, os.SEEK_END)
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


def _copy_log(connection: sqlite3.Connection, path: Path) -> int:
    """Copies as much of the log as can be without waiting for anyone. Says how long it is."""
    try:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        _, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        _log.warning("copying the log of %s: %s", path, error)
        return 0
    return frames * page


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
    many = values if type(values) is Rows else (values,)
    for row in many:
        for value in row:
            if type(value) is str and "\0" in value:  # SQLite would take it, PostgreSQL does not.
                raise UnkeepableError(_UNKEEPABLE)
    try:
        if many is values:
            connection.executemany(sql, values)
            return []
        if sql.endswith(_WHETHER):
            # SQLite would put the rows into a table and read them from there, which takes as long as changing them.
            return [(1,)] * connection.execute(sql[: -len(_WHETHER)], values).rowcount
        return connection.execute(sql, values).fetchall()
    except (OverflowError, UnicodeEncodeError):
        raise UnkeepableError(_UNKEEPABLE) from None


_WHETHER = " RETURNING 1"
"""At the end of what wants to know only whether a row was changed."""
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

"""SQLite: many programs in one commit, which a thread waits for, and readers beside it.

Programs that write run on the event loop: their statements take some microseconds each, and a thread that takes turns
with the loop for every statement takes several times as long. What takes long is the disk, so a thread commits; what
comes meanwhile is in the next commit. What is only written, never read, the thread does whole (`sqlitetails`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from toolspace.abc.database import Database, Kind, Program, Tail
from toolspace.errors import StorageError, StorageUnavailable
from toolspace.stores.private import make_private_folder
from toolspace.stores.sql import sqlitefiles
from toolspace.stores.sql.schema import migrate
from toolspace.stores.sql.sqlitefiles import Log, copy_log
from toolspace.stores.sql.sqlitejobs import Job, commit, explained, fail, roll_back, run, step_through, tails_of
from toolspace.stores.sql.sqlitetails import UNABLE, Plan, TailWriter

T = TypeVar("T")

_APPLICATION = 0x746F6F73  # "toos": tells our files from any other SQLite database.
_MOST_AT_ONCE = 512
"""Programs in one commit."""
_BUSY_MS = 30_000
_READERS = 2
_TAKING_SECONDS = 0.001
"""How long the loop waits at most for the thread to begin a commit."""
_STATEMENTS = 512
_LOOK_SECONDS = 0.02
"""How often to look how long the log is, at most."""
_CHECKPOINT_SECONDS = 5.0
"""How old what is in the log may be before it is copied into the file."""


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
        self._tails: TailWriter = UNABLE
        self._waiting: deque[Job] = deque()
        self._is_due = False
        """Whether what waits is about to be run."""
        self._is_committing = False
        self._idle = asyncio.Event()
        self._commits: queue.SimpleQueue[_Commit | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._taken = threading.Lock()
        """Held, but for the moment in which the thread takes what it is to commit."""
        self._taken.acquire()
        self._threads: list[threading.Thread] = []
        self._checkpoint = threading.Event()
        self._log: Log | None = None
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
        self._tails = TailWriter(writer)
        self._start("writer", self._write, writer)
        self._start("checkpoint", self._check_point, checkpointer)
        for reader in readers:
            self._start("reader", self._read, reader)
        return self

    def run(
        self,
        program: Callable[[], Program[T]],
        *,
        then: Callable[[T], None] | None = None,
        tail: Callable[[], Tail] | None = None,
        aside: bool = False,
    ) -> Awaitable[T]:
        job = self._job(program, then, tail, aside=aside)
        self._waiting.append(job)
        if not self._is_due and not self._is_committing:
            self._soon()
        return job.answer

    def read(self, program: Callable[[], Program[T]]) -> Awaitable[T]:
        job = self._job(program)
        self._reads.put(job)
        return job.answer

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
        *,
        aside: bool = False,
    ) -> Job:
        if self._closing:
            raise StorageUnavailable(f"the database {self.path} is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise StorageError(f"the database {self.path} was opened on another event loop; open it on this one")
        return Job(program, self._loop.create_future(), then, tail, aside=aside)

    # Opening

    def _open(self) -> list[sqlite3.Connection]:
        opened: list[sqlite3.Connection] = []
        try:
            make_private_folder(self.path.parent)
            self._lock = sqlitefiles.lock(self.path)
            self._prepare(self._connect(opened))
            self._log = Log(opened[0], self.path)
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
        writer.execute(f"PRAGMA journal_size_limit = {sqlitefiles.LONGEST_LOG}")
        writer.execute("BEGIN IMMEDIATE")
        # In the transaction: a file that says it is ours has tables.
        writer.execute(f"PRAGMA application_id = {_APPLICATION}")
        try:
            step_through(writer, migrate)
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
            work = self._begun(connection, batch)
            if work is None:
                self._settle(batch)  # None of them wrote anything.
                continue
            self._is_committing = True
            self._taken.acquire(blocking=False)  # It may have come late last time.
            self._commits.put(work)
            if len(batch) > 1:
                # Where many write there is much to do here, and until all of it was done the thread would not get its
                # turn to begin: the disk would stand still while the loop works, and the loop while the disk does.
                self._taken.acquire(timeout=_TAKING_SECONDS)
            return
        if self._closing:
            self._idle.set()

    def _next_batch(self) -> list[Job]:
        """What goes into one commit: all that wait, up to a limit; one that may take long goes alone."""
        batch = [self._waiting.popleft()]
        while not batch[0].aside and self._waiting and not self._waiting[0].aside and len(batch) < _MOST_AT_ONCE:
            batch.append(self._waiting.popleft())
        return batch

    def _begun(self, connection: sqlite3.Connection, batch: list[Job]) -> _Commit | None:
        """Runs programs as far as the loop can. None where they failed, all of them."""
        if batch[0].aside:
            return _Commit(batch)
        is_short = True
        for job in batch:
            job.begin()
            is_short = is_short and job.steps is None
        if is_short and (plan := self._tails.plan(tails_of(batch))) is not None:
            return _Commit(batch, plan=plan)
        if not _is_begun(connection):
            return _Commit(batch)
        return _Commit(batch, is_begun=True) if run(connection, batch) else None

    def _committed(self, work: _Commit, *, as_planned: bool) -> None:
        self._written += len(work.batch)
        if as_planned and work.plan is not None:
            self._tails.note_plan(work.plan)
        else:
            self._tails.note(tails_of(work.batch))
        self._settle(work.batch)
        self._is_committing = False
        self._run_waiting()  # Before those who asked go on: the disk has something to do meanwhile.

    def _settle(self, jobs: Sequence[Job], kind: Kind = "write") -> None:
        now, observe = time.perf_counter(), self.observe
        for job in jobs:
            job.settle()
            if observe is not None:
                observe(kind, now - job.asked_at, job.error)

    def _write(self, connection: sqlite3.Connection) -> None:
        """Commits, in a thread: nobody else waits for the disk.

        It keeps to what has to be done: the loop stands still whenever something is done here that is not SQLite's.
        """
        look_at = 0.0
        while (work := self._commits.get()) is not None:
            batch = work.batch
            if len(batch) > 1 and self._taken.locked():
                self._taken.release()
            as_planned = work.plan is not None and self._tails.write(connection, work.plan)
            if not as_planned and (work.is_begun or _begin(connection, batch)):
                commit(connection, batch)
            if self._log_is_long:
                copy_log(connection, self.path)
                self._log_is_long = False
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits there.
                self._loop.call_soon_threadsafe(partial(self._committed, work, as_planned=as_planned))
            if time.monotonic() >= look_at and self._log is not None:
                look_at = time.monotonic() + _LOOK_SECONDS
                if self._log.is_long():
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
                self._log_is_long = copy_log(connection, self.path) >= sqlitefiles.CHECKPOINT_BYTES
        connection.close()

    # The readers

    def _read(self, connection: sqlite3.Connection) -> None:
        while (job := self._reads.get()) is not None:
            try:
                connection.execute("BEGIN")  # One view for all of its statements.
                job.result = step_through(connection, job.program)
            except BaseException as error:
                job.error = explained(error)
            roll_back(connection)
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits there.
                self._loop.call_soon_threadsafe(self._settle, (job,), "read")
        connection.close()


class _Commit(NamedTuple):
    """Programs to be committed together."""

    batch: list[Job]
    plan: Plan | None = None
    """What to write, where that is all there is to do."""
    is_begun: bool = False
    """Whether they were run already; else they are, once nobody else writes."""


def _is_begun(connection: sqlite3.Connection) -> bool:
    """Begins to write, if no other program writes to the file. The thread waits for that, not the loop."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.Error:
        return False
    return True


def _begin(connection: sqlite3.Connection, batch: Sequence[Job]) -> bool:
    """Begins, waiting for whoever else writes to the file, and runs the programs. False where that failed."""
    try:
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        try:
            connection.execute("BEGIN IMMEDIATE")
        finally:
            connection.execute("PRAGMA busy_timeout = 0")
    except BaseException as error:
        fail(connection, batch, error)
        return False
    return run(connection, batch)

"""SQLite: many programs in one commit, which a thread waits for, and readers beside it.

Programs that write run on the event loop: their statements take some microseconds each, and a thread that takes turns
with the loop for every statement takes several times as long. What takes long is the disk, so a thread commits; what
comes meanwhile is in the next commit. What is only written, never read, the thread does whole (`sqlitetails`).
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from toolspace.errors import StorageError, StorageUnavailable
from toolspace.storage.database import A, Database, DeferredWrites, OperationKind, Program
from toolspace.storage.private_files import make_private_folder
from toolspace.storage.schema import migrate
from toolspace.storage.sqlite import files
from toolspace.storage.sqlite.batch_writer import UNABLE, BatchWriter, PreparedBatch
from toolspace.storage.sqlite.files import Log, copy_log
from toolspace.storage.sqlite.transactions import (
    DeferredJob,
    TransactionJob,
    Work,
    commit,
    explained,
    fail,
    roll_back,
    run,
    step_through,
    tails_of,
)

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
_is_aside = operator.attrgetter("aside")


def _is_entry(job: Work) -> bool:
    return isinstance(job, DeferredJob)


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
        self._tails: BatchWriter = UNABLE
        self._waiting: deque[Work] = deque()
        self._is_due = False
        """Whether what waits is about to be run."""
        self._is_committing = False
        self._idle = asyncio.Event()
        self._commits: queue.SimpleQueue[_Commit | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[TransactionJob | None] = queue.SimpleQueue()
        self._taken = threading.Lock()
        """Held, but for the moment in which the thread takes what it is to commit."""
        self._taken.acquire()
        self._threads: list[threading.Thread] = []
        self._checkpoint = threading.Event()
        self._log: Log | None = None
        self._log_is_long = False
        self._look_at = 0.0
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
        self._tails = BatchWriter(writer)
        self._start("writer", self._write, writer)
        self._start("checkpoint", self._check_point, checkpointer)
        for reader in readers:
            self._start("reader", self._read, reader)
        return self

    def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> Awaitable[T]:
        answer = self._answer()
        self._waiting.append(TransactionJob(answer, time.perf_counter(), program, on_commit, deferred, exclusive))
        if not self._is_due and not self._is_committing:
            self._soon()
        return answer

    def commit_deferred(
        self, deferred: A, *, on_commit: Callable[[A], None], on_doubt: Callable[[A], None]
    ) -> Awaitable[bool]:
        answer = self._answer()
        self._waiting.append(DeferredJob(answer, time.perf_counter(), deferred, on_commit))
        if not self._is_due and not self._is_committing:
            self._soon()
        return answer

    def read(self, program: Callable[[], Program[T]]) -> Awaitable[T]:
        answer = self._answer()
        self._reads.put(TransactionJob(answer, time.perf_counter(), program))
        return answer

    def check_free_space(self) -> None:
        if files.room(self.path) < files.LEAST_ROOM:
            raise StorageUnavailable(f"the disk of {self.path} is full")

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

    def _answer(self) -> asyncio.Future[Any]:
        """What whoever asks waits for."""
        if self._closing:
            raise StorageUnavailable(f"the database {self.path} is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise StorageError(f"the database {self.path} was opened on another event loop; open it on this one")
        return self._loop.create_future()

    # Opening

    def _open(self) -> list[sqlite3.Connection]:
        opened: list[sqlite3.Connection] = []
        try:
            make_private_folder(self.path.parent)
            self._lock = files.lock(self.path)
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
        writer.execute(f"PRAGMA journal_size_limit = {files.LONGEST_LOG}")
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

    def _next_batch(self) -> list[Work]:
        """What goes into one commit: all that wait, up to a limit; one that may take long goes alone."""
        waiting = self._waiting
        if len(waiting) <= _MOST_AT_ONCE and not any(map(_is_aside, waiting)):
            batch = list(waiting)
            waiting.clear()
            return batch
        batch = [waiting.popleft()]
        while not batch[0].aside and waiting and not waiting[0].aside and len(batch) < _MOST_AT_ONCE:
            batch.append(waiting.popleft())
        return batch

    def _begun(self, connection: sqlite3.Connection, batch: list[Work]) -> _Commit | None:
        """Runs programs as far as the loop can. None where they failed, all of them."""
        if batch[0].aside:
            return _Commit(batch)
        is_short = True
        for job in batch:
            if isinstance(job, TransactionJob):
                job.begin()
                is_short = is_short and job.steps is None
        if is_short and (plan := self._tails.plan(tails_of(batch))) is not None:
            return _Commit(batch, plan=plan)
        if not _is_begun(connection):
            return _Commit(batch)
        return _Commit(batch, is_begun=True) if run(connection, batch) else None

    def _committed(self, work: _Commit, *, as_planned: bool, goes_on: bool) -> None:
        """The thread has committed something. `goes_on`: and what came meanwhile it took by itself."""
        self._written += len(work.batch)
        if not as_planned:
            self._tails.note(tails_of(work.batch))
        if not goes_on:
            self._is_committing = False
            self._run_waiting()  # Before those who asked hear of it: the disk has something to do meanwhile.
        self._settle(work.batch)

    def _settle(self, batch: Sequence[Work], kind: OperationKind = "write") -> None:
        for job in batch:
            job.settle()
        if self.observer is not None:
            now = time.perf_counter()
            self.observer(kind, [now - job.asked_at for job in batch], [job.error for job in batch if job.error])

    def _write(self, connection: sqlite3.Connection) -> None:
        """Commits, in a thread: nobody else waits for the disk.

        It keeps to what has to be done: the loop stands still whenever something is done here that is not SQLite's.
        """
        while (given := self._commits.get()) is not None:
            if len(given.batch) > 1 and self._taken.locked():
                self._taken.release()
            work: _Commit | None = given
            while work is not None:
                work = self._carry_out(connection, work)
                self._look_at_log()
        connection.close()

    def _carry_out(self, connection: sqlite3.Connection, work: _Commit) -> _Commit | None:
        """Commits, says so, and gives what is next."""
        plan, following = work.plan, None
        as_planned = plan is not None and self._tails.write(connection, plan)
        if plan is not None and as_planned:
            self._tails.note_plan(plan)
            following = self._following(len(work.batch))
        elif work.is_begun or _begin(connection, work.batch):
            commit(connection, work.batch)
        if self._log_is_long:
            copy_log(connection, self.path)
            self._log_is_long = False
        told = partial(self._committed, work, as_planned=as_planned, goes_on=following is not None)
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits there.
            self._loop.call_soon_threadsafe(told)
        return following

    def _look_at_log(self) -> None:
        now = time.monotonic()
        if now >= self._look_at and self._log is not None:
            self._look_at = now + _LOOK_SECONDS
            if self._log.is_long():
                self._checkpoint.set()

    def _following(self, before: int) -> _Commit | None:
        """What came during a commit, where it needs no program: the disk need not stand still until the loop has time.
        None where the loop is to look; also where it is much less than before, and more may come until then, because
        a commit takes its time however little is in it."""
        jobs = list(self._waiting)[:_MOST_AT_ONCE]
        batch: list[Work] = list(takewhile(_is_entry, jobs))
        if not batch or len(jobs) * 2 < before or (plan := self._tails.plan(tails_of(batch))) is None:
            return None
        for _ in batch:
            self._waiting.popleft()
        return _Commit(batch, plan=plan)

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
                self._log_is_long = copy_log(connection, self.path) >= files.CHECKPOINT_BYTES
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

    batch: list[Work]
    plan: PreparedBatch | None = None
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


def _begin(connection: sqlite3.Connection, batch: Sequence[Work]) -> bool:
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

"""`SqliteDatabase`: many programs in one commit, which a thread waits for, with reader threads beside it.

Programs that write run on the event loop: their statements take some microseconds each, and a thread that takes turns
with the loop for every statement takes several times as long. The disk is what takes long, so a thread commits;
programs that arrive during a commit share the next one. The thread also writes batches of deferred writes
(`group_commit.BatchWriter`).
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
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

from toolspace.core.clock import DatabaseClock, SystemClock
from toolspace.errors import ReadTimeout, StorageDamaged, StorageError, StorageUnavailable
from toolspace.storage.database import Database, DeferredT, DeferredWrites, OperationKind, Program
from toolspace.storage.sqlite.damage import find_page_damage
from toolspace.storage.sqlite.database_file import BUSY_MS, DatabaseFile, run_checkpoint
from toolspace.storage.sqlite.group_commit import (
    BatchWriter,
    DeferredJob,
    Job,
    PreparedBatch,
    TransactionJob,
    commit,
    fail_batch,
    roll_back,
    run_batch,
    run_program,
    to_storage_error,
)

T = TypeVar("T")

_MAX_JOBS: Final = 512
"""Programs in one commit."""
_READERS: Final = 3
_STEPS_BETWEEN_CHECKS: Final = 50_000
"""Steps of SQLite's virtual machine, some milliseconds, after which a reader checks whether its time is over."""
_HANDOVER_SECONDS: Final = 0.001
"""How long the loop waits at most for the thread to start a commit."""
_LOG_CHECK_SECONDS: Final = 0.02
"""How often to check the length of the log, at most."""
_CHECKPOINT_SECONDS: Final = 5.0
"""How long a write may stay in the log before it is copied into the database."""
_is_exclusive = operator.attrgetter("exclusive")


_ReadQueue = queue.SimpleQueue["TransactionJob | None"]


class SqliteDatabase(Database):
    """A file that one process at a time may have open: opening it a second time raises `StorageError`.

    A program that fails is rolled back to where it started; the others of its commit are not affected. `run` returns
    once the commit is on the disk (`synchronous=FULL`).
    """

    reader_count = _READERS

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self.clock = file.clock
        self._loop = asyncio.get_running_loop()
        self._connection = file.writer
        """Used by the loop; while a commit is under way, by the writer thread."""
        self._batch_writer = BatchWriter(file.writer)
        self._waiting_jobs: deque[Job] = deque()
        self._urgent_jobs: deque[Job] = deque()
        """Those of `urgent_access`. They come first, in a commit of their own."""
        self._is_scheduled = False
        """Whether the loop is about to run the waiting jobs."""
        self._is_committing = False
        self._idle = asyncio.Event()
        self._commits: queue.SimpleQueue[_Commit | None] = queue.SimpleQueue()
        self._reads = _ReadQueue()
        self._urgent_reads = _ReadQueue()
        """Those of `urgent_access`, which have a reader of their own."""
        self._handover = threading.Lock()
        """Locked, except in the moment in which the writer thread takes a commit."""
        self._handover.acquire()
        self._checkpoint_due = threading.Event()
        self._log_is_long = False
        self._next_log_check = 0.0
        self._is_closing = False
        self._committed_jobs = 0
        work = (("writer", self._write, file.writer), ("checkpoint", self._run_checkpoints, file.checkpointer))
        urgent_reader, *other_readers = file.readers
        urgent_reads = ("urgent-reader", partial(self._read, self._urgent_reads), urgent_reader)
        reads = (("reader", partial(self._read, self._reads), reader) for reader in other_readers)
        self._threads = [
            threading.Thread(target=run, args=(connection,), name=f"toolspace-{name}", daemon=True)
            for name, run, connection in (*work, urgent_reads, *reads)
        ]
        if file.check_connection is not None:
            self._threads.append(
                threading.Thread(
                    target=self._check_pages, args=(file.check_connection,), name="toolspace-check", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    @classmethod
    async def open(cls, path: str | os.PathLike[str], *, system_clock: SystemClock | None = None) -> Self:
        """Opens the file, creates it if it is missing, and migrates its tables. The clock is that of this process."""
        clock = DatabaseClock(system_clock)
        opening_task = asyncio.get_running_loop().run_in_executor(
            None, partial(DatabaseFile, Path(path), readers=_READERS + 1, clock=clock)
        )
        try:
            return cls(await asyncio.shield(opening_task))
        except asyncio.CancelledError:
            opening_task.add_done_callback(_close_unused)
            raise

    @property
    def urgent_access(self) -> Database:
        return _UrgentAccess(
            self, self._new_future, add_job=partial(self._enqueue, is_urgent=True), add_read=self._urgent_reads.put
        )

    def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred_writes: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> Awaitable[T]:
        future = self._new_future()
        self._enqueue(TransactionJob(future, time.perf_counter(), program, on_commit, deferred_writes, exclusive))
        return future

    def commit_deferred(
        self,
        deferred_writes: DeferredT,
        *,
        on_commit: Callable[[DeferredT], None],
        on_doubt: Callable[[DeferredT], None],
    ) -> Awaitable[bool]:
        future = self._new_future()
        self._enqueue(DeferredJob(future, time.perf_counter(), deferred_writes, on_commit))
        return future

    def read(self, program: Callable[[], Program[T]], *, timeout: float | None = None) -> Awaitable[T]:
        future = self._new_future()
        self._reads.put(TransactionJob(future, time.perf_counter(), program, timeout=timeout))
        return future

    def check_free_space(self) -> None:
        if self._file.is_disk_full():
            raise StorageUnavailable(f"the disk of {self._file.path} is full")

    async def aclose(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            for _ in range(_READERS):
                self._reads.put(None)
            self._urgent_reads.put(None)
            if self._urgent_jobs or self._waiting_jobs or self._is_committing:
                await self._idle.wait()
            self._commits.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._join_threads)

    def _join_threads(self) -> None:
        self._checkpoint_due.set()
        if self._file.check_connection is not None:
            self._file.check_connection.interrupt()
        for thread in self._threads:
            thread.join()
        self._file.close()

    def _new_future(self) -> asyncio.Future[Any]:
        if self._is_closing:
            raise StorageUnavailable(f"the database {self._file.path} is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise StorageError(f"the database {self._file.path} was opened on another event loop; open it on this one")
        return self._loop.create_future()

    # Writing, on the event loop

    def _enqueue(self, job: Job, *, is_urgent: bool = False) -> None:
        """The waiting jobs run soon, not at once: those that arrive in the same moment share a commit."""
        (self._urgent_jobs if is_urgent else self._waiting_jobs).append(job)
        if not self._is_scheduled and not self._is_committing:
            self._is_scheduled = True
            self._loop.call_soon(self._run_waiting)

    def _run_waiting(self) -> None:
        """Runs the waiting jobs in one transaction, and leaves the commit to the writer thread."""
        self._is_scheduled = False
        while self._urgent_jobs or self._waiting_jobs:
            batch = self._next_batch()
            work = self._start_batch(batch)
            if work is None:
                self._settle(batch)  # None of them wrote anything.
                continue
            self._is_committing = True
            self._handover.acquire(blocking=False)  # The thread may have released it late in the last round.
            self._commits.put(work)
            if len(batch) > 1:
                # With many writers the loop has much to do. Without this wait the thread would get the interpreter's
                # lock only after all of that: the disk would idle while the loop works, and the other way round.
                self._handover.acquire(timeout=_HANDOVER_SECONDS)
            return
        if self._is_closing:
            self._idle.set()

    def _next_batch(self) -> list[Job]:
        """The jobs of one commit: all that wait, up to a limit. An exclusive job is alone in its commit."""
        waiting_jobs = self._urgent_jobs or self._waiting_jobs
        if len(waiting_jobs) <= _MAX_JOBS and not any(map(_is_exclusive, waiting_jobs)):
            batch = list(waiting_jobs)
            waiting_jobs.clear()
            return batch
        batch = [waiting_jobs.popleft()]
        while not batch[0].exclusive and waiting_jobs and not waiting_jobs[0].exclusive and len(batch) < _MAX_JOBS:
            batch.append(waiting_jobs.popleft())
        return batch

    def _start_batch(self, batch: list[Job]) -> _Commit | None:
        """Runs jobs as far as the loop can. None if all of them failed."""
        if batch[0].exclusive:
            return _Commit(batch)
        has_statements = False
        for job in batch:
            if isinstance(job, TransactionJob):
                job.start()
                has_statements = has_statements or job.steps is not None
        if not has_statements and (prepared_batch := self._batch_writer.prepare(batch)) is not None:
            return _Commit(batch, prepared_batch=prepared_batch)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            return _Commit(batch)  # Another program writes to the file: the thread waits for it, not the loop.
        return _Commit(batch, is_run=True) if run_batch(self._connection, batch) else None

    def _on_committed(self, work: _Commit, *, in_one_statement: bool, thread_continues: bool) -> None:
        """The writer thread has committed something. `thread_continues`: it has taken the next batch by itself."""
        self._committed_jobs += len(work.batch)
        if not in_one_statement:
            self._batch_writer.remember(work.batch)
        if not thread_continues:
            self._is_committing = False
            self._run_waiting()  # Before the callers are notified: the disk is busy meanwhile.
        self._settle(work.batch)

    def _settle(self, batch: Sequence[Job], kind: OperationKind = "write") -> None:
        for job in batch:
            job.settle()
            if isinstance(job.error, StorageDamaged):
                self.report_damage(job.error)
        if self.observer is not None:
            now = time.perf_counter()
            self.observer(kind, [now - job.queued_at for job in batch], [job.error for job in batch if job.error])

    # Writing, in the writer thread

    def _write(self, connection: sqlite3.Connection) -> None:
        """Commits. Does little else: the loop stands still whenever this thread runs anything but SQLite."""
        while (next_work := self._commits.get()) is not None:
            if len(next_work.batch) > 1 and self._handover.locked():
                self._handover.release()
            work: _Commit | None = next_work
            while work is not None:
                work = self._commit(connection, work)
                now = time.monotonic()
                if now >= self._next_log_check:
                    self._next_log_check = now + _LOG_CHECK_SECONDS
                    if self._file.is_log_long():
                        self._checkpoint_due.set()

    def _commit(self, connection: sqlite3.Connection, work: _Commit) -> _Commit | None:
        """Commits a batch, reports it to the loop, and returns the next batch if the thread may take it by itself."""
        next_work = None
        in_one_statement = work.prepared_batch is not None and self._batch_writer.write(connection, work.prepared_batch)
        if in_one_statement:
            next_work = self._take_next(len(work.batch))
        elif work.is_run or _run_when_unlocked(connection, work.batch):
            commit(connection, work.batch)
        if self._log_is_long:
            run_checkpoint(connection, self._file.path)
            self._log_is_long = False
        report = partial(
            self._on_committed, work, in_one_statement=in_one_statement, thread_continues=next_work is not None
        )
        with contextlib.suppress(RuntimeError):  # The loop is closed, so nobody waits.
            self._loop.call_soon_threadsafe(report)
        return next_work

    def _take_next(self, previous_size: int) -> _Commit | None:
        """The deferred writes that arrived during a commit: the disk need not idle until the loop has time.

        None if the loop has to look at them or has urgent jobs, or if they are far fewer than before: a commit takes
        its time however small it is, and more may arrive until the loop looks.
        """
        if self._urgent_jobs:
            return None
        jobs = list(self._waiting_jobs)[:_MAX_JOBS]
        batch: list[Job] = []
        for job in jobs:
            if not isinstance(job, DeferredJob):
                break
            batch.append(job)
        if not batch or len(jobs) * 2 < previous_size:
            return None
        prepared_batch = self._batch_writer.prepare(batch)
        if prepared_batch is None:
            return None
        for _ in batch:
            self._waiting_jobs.popleft()
        return _Commit(batch, prepared_batch=prepared_batch)

    # The other threads

    def _run_checkpoints(self, connection: sqlite3.Connection) -> None:
        """Copies the log into the database, beside the writer, which must not wait for that.

        Under constant writing the log always has more than was copied, and would grow without end. So when it is long,
        the writer is asked to copy the rest: then the log starts again at its beginning.
        """
        copied_jobs = 0
        while not self._is_closing:
            self._checkpoint_due.wait(_CHECKPOINT_SECONDS)
            self._checkpoint_due.clear()
            if copied_jobs != self._committed_jobs:
                copied_jobs = self._committed_jobs
                self._log_is_long = run_checkpoint(connection, self._file.path)

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        """Checks all pages of a database that is too large to be checked before the start."""
        try:
            damage, _ = find_page_damage(connection)
        except sqlite3.Error:  # The database was closed meanwhile.
            return
        if damage is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self.report_damage, damage)

    def _read(self, reads: _ReadQueue, connection: sqlite3.Connection) -> None:
        job: TransactionJob | None = None

        def is_time_over() -> bool:
            return job is not None and _is_over(job)

        connection.set_progress_handler(is_time_over, _STEPS_BETWEEN_CHECKS)
        while (job := reads.get()) is not None:
            if job.future.cancelled():
                continue
            try:
                connection.execute("BEGIN")  # One snapshot for all of its statements.
                job.result = run_program(connection, job.program)
            except BaseException as error:
                job.error = to_storage_error(error)
            if job.error is not None and _is_over(job):
                job.error = ReadTimeout(f"the read took longer than {job.timeout:g} s")
            roll_back(connection)
            with contextlib.suppress(RuntimeError):  # The loop is closed, so nobody waits.
                self._loop.call_soon_threadsafe(self._settle, (job,), "read")


def _is_over(job: TransactionJob) -> bool:
    """Whether a read has used up its time."""
    return job.timeout is not None and time.perf_counter() - job.queued_at > job.timeout


class _UrgentAccess(Database):
    """Urgent access to a database: its writes are in the next commit, and its reads have a thread of their own."""

    def __init__(
        self,
        database: SqliteDatabase,
        new_future: Callable[[], asyncio.Future[Any]],
        *,
        add_job: Callable[[TransactionJob], None],
        add_read: Callable[[TransactionJob], None],
    ) -> None:
        self._database = database
        self.clock = database.clock
        self._new_future = new_future
        self._add_job = add_job
        self._add_read = add_read

    def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred_writes: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> Awaitable[T]:
        future = self._new_future()
        self._add_job(TransactionJob(future, time.perf_counter(), program, on_commit, deferred_writes, exclusive))
        return future

    def commit_deferred(
        self,
        deferred_writes: DeferredT,
        *,
        on_commit: Callable[[DeferredT], None],
        on_doubt: Callable[[DeferredT], None],
    ) -> Awaitable[bool]:
        return self._database.commit_deferred(deferred_writes, on_commit=on_commit, on_doubt=on_doubt)

    def read(self, program: Callable[[], Program[T]], *, timeout: float | None = None) -> Awaitable[T]:
        future = self._new_future()
        self._add_read(TransactionJob(future, time.perf_counter(), program, timeout=timeout))
        return future

    async def aclose(self) -> None:
        """Does nothing: the database closes itself."""


class _Commit(NamedTuple):
    """Jobs to commit together."""

    batch: list[Job]
    prepared_batch: PreparedBatch | None = None
    """The whole batch as one statement, if it has nothing but deferred writes."""
    is_run: bool = False
    """Whether the loop has run the jobs in an open transaction; if not, the thread runs them."""


def _close_unused(opening_task: asyncio.Future[DatabaseFile]) -> None:
    if not opening_task.cancelled() and opening_task.exception() is None:
        opening_task.result().close()


def _run_when_unlocked(connection: sqlite3.Connection, batch: Sequence[Job]) -> bool:
    """Runs jobs as soon as no other program writes to the file. False if that failed."""
    try:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        try:
            connection.execute("BEGIN IMMEDIATE")
        finally:
            connection.execute("PRAGMA busy_timeout = 0")
    except BaseException as error:
        fail_batch(connection, batch, error)
        return False
    return run_batch(connection, batch)

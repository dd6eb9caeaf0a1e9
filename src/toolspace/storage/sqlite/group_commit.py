"""Runs programs on a connection to SQLite. Those that arrive together share one transaction.

Used by `SqliteDatabase`, on the event loop and in its threads; nothing here knows which.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from toolspace.errors import StorageError, StorageUnavailable, UnstorableValueError
from toolspace.storage.database import DeferredWrites, Program, Row, RowBatch, StaleError, Statement
from toolspace.storage.queries import deferred_writes

_log = logging.getLogger("toolspace.storage")
T = TypeVar("T")

_UNAVAILABLE: Final = frozenset(
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
_RETURNING_1: Final = " RETURNING 1"
"""Ends a statement whose caller asks only whether it changed a row."""
_UNSTORABLE: Final = "a value cannot be stored: no NUL characters, no lone surrogates, integers of 64 bits"


class TransactionJob(msgspec.Struct, eq=False):
    """A program to run, and the future of its caller."""

    future: asyncio.Future[Any]
    queued_at: float
    program: Callable[[], Program[Any]]
    on_commit: Callable[[Any], None] | None = None
    make_deferred: Callable[[], DeferredWrites] | None = None
    """Gives the deferred writes of an attempt."""
    exclusive: bool = False
    """Whether it may take long: then the writer thread runs it, in a transaction of its own."""
    has_started: bool = False
    steps: Program[Any] | None = None
    """The rest of the program, which waits for the rows of `statement`."""
    statement: Statement = "", ()
    deferred: DeferredWrites | None = None
    result: Any = None
    error: BaseException | None = None

    def start(self) -> None:
        """Runs the program up to its first statement; one without statements ends here."""
        self.has_started, self.error = True, None
        try:
            steps = self.program()
            if self.make_deferred is not None:
                self.deferred = self.make_deferred()
            self.statement = next(steps)
            self.steps = steps
        except StopIteration as stop:
            self.result = stop.value
        except BaseException as error:
            self.error = to_storage_error(error)

    def finish(self, connection: sqlite3.Connection) -> None:
        """Runs the rest of the program."""
        if not self.has_started:
            self.start()
        steps, self.steps = self.steps, None
        if steps is not None:
            self.result = _run_steps(connection, steps, self.statement)

    def settle(self) -> None:
        """Gives the caller its result or error, on the event loop."""
        if self.error is None and self.on_commit is not None:
            _notify(self.on_commit, self.result)
        if self.future.done():
            return  # The caller was canceled; what was written stays written.
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class DeferredJob(msgspec.Struct, eq=False):
    """Deferred writes without a program, and the future of their caller."""

    future: asyncio.Future[bool]
    queued_at: float
    deferred: DeferredWrites
    on_commit: Callable[[Any], None]
    error: BaseException | None = None

    exclusive: ClassVar[bool] = False

    def start(self) -> None:
        self.error = None

    def finish(self, connection: sqlite3.Connection) -> None:
        """Stores the results of calls. Their inbox rows and events are written with those of the other jobs."""
        run_program(connection, partial(deferred_writes.resolve_calls, self.deferred))

    def settle(self) -> None:
        if self.error is None:
            _notify(self.on_commit, self.deferred)
        if self.future.done():
            return
        if self.error is None or isinstance(self.error, StaleError):
            self.future.set_result(self.error is None)
        else:
            self.future.set_exception(self.error)


Job = TransactionJob | DeferredJob


def _notify(on_commit: Callable[[Any], None], result: Any) -> None:
    try:
        on_commit(result)
    except Exception:
        _log.exception("A transaction is committed, but notifying subscribers of it failed")


def deferred_writes_of(batch: Sequence[Job]) -> list[DeferredWrites]:
    """The deferred writes of the jobs without an error."""
    return [job.deferred for job in batch if job.deferred is not None and job.error is None]


def run_batch(connection: sqlite3.Connection, batch: Sequence[Job]) -> bool:
    """Runs jobs in the transaction that was begun. False if all of them failed."""
    try:
        if not _run_without_savepoints(connection, batch):
            connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            _run_with_savepoints(connection, batch)
    except BaseException as error:
        fail_batch(connection, batch, error)
        return False
    return True


def commit(connection: sqlite3.Connection, batch: Sequence[Job]) -> None:
    try:
        connection.execute("COMMIT")
    except BaseException as error:
        fail_batch(connection, batch, error)


def fail_batch(connection: sqlite3.Connection, batch: Sequence[Job], error: BaseException) -> None:
    """Rolls back the transaction; every job without an error of its own gets this one."""
    roll_back(connection)
    for job in batch:
        job.error = job.error or to_storage_error(error)


def roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def run_program(connection: sqlite3.Connection, program: Callable[[], Program[T]]) -> T:
    """Runs one program from its start."""
    steps = program()
    try:
        statement = next(steps)
    except StopIteration as stop:
        return stop.value
    return _run_steps(connection, steps, statement)


def to_storage_error(error: BaseException) -> BaseException:
    """A fault of SQLite as the `StorageError` that callers handle; any other error as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    code: int = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in _UNAVAILABLE:
        return StorageUnavailable(f"the database does not answer: {error}")
    return StorageError(f"the database refuses this: {error}")


def _run_without_savepoints(connection: sqlite3.Connection, batch: Sequence[Job]) -> bool:
    """Runs all jobs; a savepoint for each would cost as much as a small program.

    False if a job failed after it had changed rows.
    """
    for job in batch:
        changes = connection.total_changes
        try:
            job.finish(connection)
        except BaseException as error:
            if not connection.in_transaction:
                raise  # SQLite has rolled back everything: the disk is full, or worse.
            if connection.total_changes != changes:
                return False
            job.error = to_storage_error(error)
    _write_deferred(connection, batch)
    return True


def _run_with_savepoints(connection: sqlite3.Connection, batch: Sequence[Job]) -> None:
    for job in batch:
        connection.execute("SAVEPOINT program")
        job.start()
        try:
            job.finish(connection)
        except BaseException as error:
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO program")
            job.error = to_storage_error(error)
        connection.execute("RELEASE program")
    _write_deferred(connection, batch)


def _write_deferred(connection: sqlite3.Connection, batch: Sequence[Job]) -> None:
    if writes := deferred_writes_of(batch):
        run_program(connection, lambda: deferred_writes.write(writes))


def _run_steps(connection: sqlite3.Connection, steps: Program[T], statement: Statement) -> T:
    """Runs the rest of a program, from the statement that it waits for."""
    try:
        while True:
            statement = steps.send(_execute(connection, *statement))
    except StopIteration as stop:
        return stop.value
    finally:
        steps.close()


def _execute(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[Row]:
    value_rows = values if type(values) is RowBatch else (values,)
    for row in value_rows:
        for value in row:
            if type(value) is str and "\0" in value:  # SQLite would store it, PostgreSQL cannot.
                raise UnstorableValueError(_UNSTORABLE)
    try:
        if value_rows is values:
            connection.executemany(sql, values)
            return []
        if sql.endswith(_RETURNING_1):
            # Without RETURNING: SQLite would copy the rows to a temporary table, which takes as long as the change.
            return [(1,)] * connection.execute(sql[: -len(_RETURNING_1)], values).rowcount
        return connection.execute(sql, values).fetchall()
    except (OverflowError, UnicodeEncodeError):
        raise UnstorableValueError(_UNSTORABLE) from None

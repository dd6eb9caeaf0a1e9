"""Programs on a connection to SQLite: each is a job, and those that come together are one transaction.

Nothing here knows whether it runs on the event loop or in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec

from toolspace.errors import StorageError, StorageUnavailable, UnstorableValueError
from toolspace.storage.database import DeferredWrites, Program, Row, RowBatch, StaleError, Statement
from toolspace.storage.queries import deferred_writes

_log = logging.getLogger("toolspace.storage")
T = TypeVar("T")

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
_WHETHER = " RETURNING 1"
"""At the end of what wants to know only whether a row was changed."""
_UNKEEPABLE = "a value cannot be kept: no NUL characters, no lone surrogates, integers of 64 bits"


class TransactionJob(msgspec.Struct, eq=False):
    """A program to be run, and whoever waits for it."""

    answer: asyncio.Future[Any]
    asked_at: float
    program: Callable[[], Program[Any]]
    then: Callable[[Any], None] | None = None
    ends_with: Callable[[], DeferredWrites] | None = None
    """Gives what an attempt leaves to the end of the transaction."""
    aside: bool = False
    """Whether it may take long: then a thread runs it, alone."""
    has_begun: bool = False
    steps: Program[Any] | None = None
    """What is left of it, and the statement that it waits for."""
    statement: Statement = "", ()
    tail: DeferredWrites | None = None
    result: Any = None
    error: BaseException | None = None

    def begin(self) -> None:
        """Runs it up to its first statement. Some have none, and are over then."""
        self.has_begun, self.error = True, None
        steps = self.program()
        if self.ends_with is not None:
            self.tail = self.ends_with()
        try:
            self.statement = next(steps)
            self.steps = steps
        except StopIteration as done:
            self.result = done.value
        except BaseException as error:
            self.error = explained(error)

    def go_on(self, connection: sqlite3.Connection) -> None:
        """Runs the rest of it."""
        if not self.has_begun:
            self.begin()
        steps, self.steps = self.steps, None
        if steps is None:
            return
        statement = self.statement
        try:
            while True:
                statement = steps.send(_execute(connection, *statement))
        except StopIteration as done:
            self.result = done.value
        finally:
            steps.close()

    def settle(self) -> None:
        """Tells whoever waits what became of it; on the event loop."""
        if self.error is None and self.then is not None:
            _tell(self.then, self.result)
        if self.answer.done():
            return  # Whoever asked went away; what was written stays written.
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.result)


class DeferredJob(msgspec.Struct, eq=False):
    """What is written without a program, and whoever waits for it."""

    answer: asyncio.Future[bool]
    asked_at: float
    tail: DeferredWrites
    then: Callable[[Any], None]
    error: BaseException | None = None

    aside: ClassVar[bool] = False

    def begin(self) -> None:
        self.error = None

    def go_on(self, connection: sqlite3.Connection) -> None:
        """Writes what others do not write together with it."""
        step_through(connection, partial(deferred_writes.resolve_calls, self.tail))

    def settle(self) -> None:
        if self.error is None:
            _tell(self.then, self.tail)
        if self.answer.done():
            return
        if self.error is None or isinstance(self.error, StaleError):
            self.answer.set_result(self.error is None)
        else:
            self.answer.set_exception(self.error)


Work = TransactionJob | DeferredJob


def _tell(then: Callable[[Any], None], result: Any) -> None:
    try:
        then(result)
    except Exception:
        _log.exception("what was written could not be told")


def tails_of(batch: Sequence[Work]) -> list[DeferredWrites]:
    """What those that went well left to the end of the transaction."""
    return [job.tail for job in batch if job.tail is not None and job.error is None]


def run(connection: sqlite3.Connection, batch: Sequence[Work]) -> bool:
    """Runs programs in the transaction that was begun. False where they could not be run."""
    try:
        if not _run_plainly(connection, batch):
            connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            _run_apart(connection, batch)
            _write_tails(connection, batch)
    except BaseException as error:
        fail(connection, batch, error)
        return False
    return True


def commit(connection: sqlite3.Connection, batch: Sequence[Work]) -> None:
    try:
        connection.execute("COMMIT")
    except BaseException as error:
        fail(connection, batch, error)


def fail(connection: sqlite3.Connection, batch: Sequence[Work], error: BaseException) -> None:
    """All of it is taken back, whatever became of each."""
    roll_back(connection)
    for job in batch:
        job.error = job.error or explained(error)


def roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def step_through(connection: sqlite3.Connection, program: Callable[[], Program[T]]) -> T:
    """Runs one program."""
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


def explained(error: BaseException) -> BaseException:
    """An error as whoever asked should see it."""
    if not isinstance(error, sqlite3.Error):
        return error
    code: int = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in _UNAVAILABLE:
        return StorageUnavailable(f"the database does not answer: {error}")
    return StorageError(f"the database refuses this: {error}")


def _run_plainly(connection: sqlite3.Connection, batch: Sequence[Work]) -> bool:
    """Without savepoints, which cost as much as a small program. False where one failed after it had changed rows."""
    for job in batch:
        changes = connection.total_changes
        try:
            job.go_on(connection)
        except BaseException as error:
            if not connection.in_transaction:
                raise  # The disk is full, or worse: SQLite has taken everything back.
            if connection.total_changes != changes:
                return False
            job.error = explained(error)
    _write_tails(connection, batch)
    return True


def _run_apart(connection: sqlite3.Connection, batch: Sequence[Work]) -> None:
    for job in batch:
        connection.execute("SAVEPOINT program")
        job.begin()
        try:
            job.go_on(connection)
        except BaseException as error:
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO program")
            job.error = explained(error)
        connection.execute("RELEASE program")


def _write_tails(connection: sqlite3.Connection, batch: Sequence[Work]) -> None:
    left = tails_of(batch)
    if left:
        step_through(connection, lambda: deferred_writes.write(left))


def _execute(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[Row]:
    many = values if type(values) is RowBatch else (values,)
    for row in many:
        for value in row:
            if type(value) is str and "\0" in value:  # SQLite would take it, PostgreSQL does not.
                raise UnstorableValueError(_UNKEEPABLE)
    try:
        if many is values:
            connection.executemany(sql, values)
            return []
        if sql.endswith(_WHETHER):
            # SQLite would put the rows into a table and read them from there, which takes as long as changing them.
            return [(1,)] * connection.execute(sql[: -len(_WHETHER)], values).rowcount
        return connection.execute(sql, values).fetchall()
    except (OverflowError, UnicodeEncodeError):
        raise UnstorableValueError(_UNKEEPABLE) from None

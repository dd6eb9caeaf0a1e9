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
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import msgspec

from toolspace.core.clock import DatabaseClock
from toolspace.core.stored_records import StoredEvent
from toolspace.errors import StorageDamaged, StorageError, StorageUnavailable, UnstorableValueError
from toolspace.storage.database import (
    READ_CLOCK,
    Database,
    DeferredWrites,
    Program,
    Row,
    RowBatch,
    StaleError,
    Statement,
)
from toolspace.storage.queries import calls, events, inbox

_log = logging.getLogger("toolspace.storage")
T = TypeVar("T")

_DAMAGED: Final = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))
_UNAVAILABLE_NAMES: Final = "BUSY LOCKED NOMEM READONLY INTERRUPT IOERR FULL CANTOPEN PROTOCOL"
_UNAVAILABLE: Final = frozenset(getattr(sqlite3, f"SQLITE_{name}") for name in _UNAVAILABLE_NAMES.split())
"""Codes of errors that are not the fault of the statement."""
_RETURNING_1: Final = " RETURNING 1"
"""Ends a statement whose caller asks only whether it changed a row."""
_NOT_NOTIFIED: Final = "A transaction is committed, but notifying subscribers of it failed"
_UNSTORABLE: Final = "a value cannot be stored: no NUL characters, no lone surrogates, integers of 64 bits"


class DatabaseConnection(sqlite3.Connection):
    """A connection that knows the clock of its database."""

    clock: DatabaseClock


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
    timeout: float | None = None
    """Of a read: how many seconds after `queued_at` it is ended."""
    has_started: bool = False
    steps: Program[Any] | None = None
    """The rest of the program, which waits for the rows of `statement`."""
    statement: Statement = "", ()
    deferred_writes: DeferredWrites | None = None
    result: Any = None
    error: BaseException | None = None

    def start(self) -> None:
        """Runs the program up to its first statement; one without statements ends here."""
        self.has_started, self.error = True, None
        try:
            steps = self.program()
            if self.make_deferred is not None:
                self.deferred_writes = self.make_deferred()
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
            try:
                self.on_commit(self.result)
            except Exception:
                _log.exception(_NOT_NOTIFIED)
        if self.future.done():
            return  # The caller was cancelled; what was written stays written.
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class DeferredJob(msgspec.Struct, eq=False):
    """Deferred writes without a program, and the future of their caller."""

    future: asyncio.Future[bool]
    queued_at: float
    deferred_writes: DeferredWrites
    on_commit: Callable[[Any], None]
    error: BaseException | None = None

    exclusive: ClassVar[bool] = False

    def start(self) -> None:
        self.error = None

    def finish(self, connection: sqlite3.Connection) -> None:
        """Stores the results of calls. Their inbox rows and events are written with those of the other jobs."""
        run_program(connection, partial(events.resolve_deferred_calls, self.deferred_writes))

    def settle(self) -> None:
        if self.error is None:
            try:
                self.on_commit(self.deferred_writes)
            except Exception:
                _log.exception(_NOT_NOTIFIED)
        if self.future.done():
            return
        if self.error is None or isinstance(self.error, StaleError):
            self.future.set_result(self.error is None)
        else:
            self.future.set_exception(self.error)


Job = TransactionJob | DeferredJob


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
    if code & 0xFF in _DAMAGED:
        return StorageDamaged(f"the database is damaged: {error}")
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
    all_writes = [job.deferred_writes for job in batch if job.deferred_writes is not None and job.error is None]
    if all_writes:
        run_program(connection, lambda: events.write_deferred(all_writes))


def _run_steps(connection: sqlite3.Connection, steps: Program[T], statement: Statement) -> T:
    """Runs the rest of a program, from the statement that it waits for."""
    try:
        while True:
            statement = steps.send(_execute(connection, *statement))
    except StopIteration as stop:
        return stop.value
    finally:
        steps.close()


def _get_clock(connection: sqlite3.Connection) -> DatabaseClock:
    return connection.clock if isinstance(connection, DatabaseConnection) else Database.clock


def _execute(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[Row]:
    if sql is READ_CLOCK:
        return [(_get_clock(connection).now_ms(),)]
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


# The twin path: a batch of nothing but deferred writes (results of remembered calls) is committed in one statement.
# It pays for itself in `benchmarks/gateway_results.py`. The plain path is `events.resolve_deferred_calls` and
# `events.write_deferred`; `tests/storage/sqlite/test_batch_writer.py` compares the two. The statement and its commit
# are one call into SQLite, made by the writer thread without the interpreter's lock, while the event loop goes on.
#
# Nothing is read before the write. The rows go in as JSON; a temporary trigger writes them into the tables, compares
# what the process remembers with what is there, and rolls everything back if they differ.

_MAX_STREAMS: Final = 4096
"""Streams whose last ids are remembered."""
_MAX_BYTES: Final = 1 << 20
"""A larger batch is written row by row."""


def _json_value(index: int) -> str:
    return f"json_extract(value, '$[{index}]')"


def _json_values(columns: Sequence[str]) -> str:
    return ", ".join(map(_json_value, range(len(columns))))


def _resolution_value(column: str) -> str:
    return _json_value(calls.RESOLUTION_COLUMNS.index(column))


_IS_REMEMBERED: Final = " AND ".join(
    f"calls.{column} IS {_resolution_value(column)}" for column in calls.REMEMBERED_COLUMNS
)
_INSERT_INBOX_ROWS: Final = inbox.insert_rows_from(
    f"SELECT {_json_values(inbox.NEW_ROW_COLUMNS)}, 'pending', 0 FROM json_each(NEW.inbox) WHERE TRUE"
)
_SETUP: Final = (
    "CREATE TEMP VIEW batches AS SELECT NULL AS calls, NULL AS inbox, NULL AS streams, NULL AS events",
    f"""CREATE TEMP TRIGGER write_batch INSTEAD OF INSERT ON batches BEGIN
        UPDATE calls SET {calls.resolution_assignments(_resolution_value)} FROM json_each(NEW.calls)
            WHERE calls.call_id = {_resolution_value("call_id")} AND {_IS_REMEMBERED};
        SELECT RAISE(ROLLBACK, 'stale') WHERE changes() <> json_array_length(NEW.calls);
        UPDATE streams SET last_id = {_json_value(1)} FROM json_each(NEW.streams)
            WHERE streams.stream = {_json_value(0)} AND streams.last_id = {_json_value(2)};
        SELECT RAISE(ROLLBACK, 'stale') WHERE changes() <> json_array_length(NEW.streams);
        {_INSERT_INBOX_ROWS};
        INSERT INTO events ({", ".join(events.COLUMNS)})
            SELECT {_json_values(events.COLUMNS)} FROM json_each(NEW.events);
    END""",
)
_WRITE: Final = "INSERT INTO batches VALUES (?, ?, ?, ?)"
_encoder = msgspec.json.Encoder()


class PreparedBatch(NamedTuple):
    """A batch as values of one statement."""

    values: list[str]
    stored_events: list[tuple[DeferredWrites, list[StoredEvent]]]
    """The events of each of the deferred writes, as they are after the commit."""
    last_ids: dict[str, int]
    """The last ids of the streams after the commit."""


class BatchWriter:
    """Prepares and writes batches. Remembers the last ids of streams: no other process writes to the file.

    Used by the event loop; while a commit is under way, by the writer thread alone.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._clock = _get_clock(connection)
        self._last_ids: dict[str, int] = {}
        self._is_available = True
        try:
            for statement in _SETUP:
                connection.execute(statement)
        except sqlite3.Error:  # An old SQLite, or one without JSON: everything is written row by row.
            self._is_available = False

    def prepare(self, batch: Sequence[Job]) -> PreparedBatch | None:
        """The deferred writes of jobs without statements.

        None if the rows have to be written one by one: the last id of a stream is unknown, or they are too large.
        """
        if not self._is_available:
            return None
        at = self._clock.now_ms()
        call_rows: list[Sequence[Any]] = []
        inbox_rows: list[Sequence[Any]] = []
        event_rows: list[Sequence[Any]] = []
        previous_ids, last_ids = self._last_ids, dict[str, int]()
        events_by_writes: list[tuple[DeferredWrites, list[StoredEvent]]] = []
        try:
            for job in batch:
                writes = job.deferred_writes
                if writes is None or job.error is not None:
                    continue
                call_rows += writes.resolved_calls
                inbox_rows += writes.inbox_rows
                stored_events: list[StoredEvent] = []
                for stream, new_events in writes.new_events.items():
                    event_id = last_ids.get(stream) or previous_ids.get(stream)
                    if event_id is None:
                        return None
                    for new_event in new_events:
                        event_id += 1
                        event, row = events.store(stream, event_id, new_event, at)
                        stored_events.append(event)
                        event_rows.append(row)
                    last_ids[stream] = event_id
                events_by_writes.append((writes, stored_events))
            stream_rows = [(stream, event_id, previous_ids[stream]) for stream, event_id in last_ids.items()]
            values = [_encoder.encode(rows).decode() for rows in (call_rows, inbox_rows, stream_rows, event_rows)]
        except Exception:  # A value that no database can store: writing it row by row reports whose it is.
            return None
        if sum(map(len, values)) > _MAX_BYTES:
            return None
        return PreparedBatch(values, events_by_writes, last_ids)

    def write(self, connection: sqlite3.Connection, batch: PreparedBatch) -> bool:
        """Commits the batch. Returns False, and writes nothing, if a row is not as remembered or cannot be written."""
        try:
            connection.execute(_WRITE, batch.values)
        except Exception:  # Any fault: writing row by row reports whose it is.
            return False
        for writes, stored_events in batch.stored_events:
            writes.stored_events = stored_events
        self._last_ids.update(batch.last_ids)
        return True

    def remember(self, batch: Sequence[Job]) -> None:
        """Takes the last ids from jobs whose events were written row by row."""
        last_ids = self._last_ids
        for job in batch:
            if job.deferred_writes is not None and job.error is None:
                last_ids.update((event.stream, event.id) for event in job.deferred_writes.stored_events)
        while len(last_ids) > _MAX_STREAMS:
            del last_ids[next(iter(last_ids))]

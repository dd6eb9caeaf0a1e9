"""`PostgresDatabase`: each program is a transaction on a pooled connection. Does not notify: see `postgres.wakeups`.

Imports the driver, asyncpg, when it is needed: it is an optional dependency.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from types import CodeType
from typing import Any, Final, Self, TypeVar

from toolspace.core.clock import DatabaseClock, SystemClock
from toolspace.errors import (
    ReadTimeout,
    StorageDamaged,
    StorageError,
    StorageInDoubt,
    StorageUnavailable,
    UnstorableValueError,
)
from toolspace.storage.database import (
    FOR_UPDATE,
    READ_CLOCK,
    SKIP_LOCKED,
    Database,
    DeferredT,
    DeferredWrites,
    OperationKind,
    Program,
    Row,
    RowBatch,
    StaleError,
    shown_address,
)
from toolspace.storage.migrations import migrate
from toolspace.storage.queries import events

_log = logging.getLogger("toolspace.storage")
T = TypeVar("T")

_SCHEMES: Final = ("postgresql://", "postgres://")
_ATTEMPTS: Final = 8
_CONNECT_TIMEOUT, _COMMAND_TIMEOUT, _POOL_TIMEOUT = 10.0, 30.0, 20.0
_ROLLBACK_TIMEOUT: Final = 5.0
_MIGRATION_TIMEOUT: Final = 3_600.0
"""For one statement of a migration: an index of many rows takes long."""
_URGENT_CONNECTIONS: Final = 4
"""Connections of `urgent_access`, opened when they are used."""
_CACHED_STATEMENTS: Final = 512
_MIGRATION_LOCK: Final = 0x746F6F6C73706163  # "toolspac": a number that other programs are unlikely to lock.

_BEGIN_WRITE: Final = "BEGIN"
_BEGIN_READ: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_SELECT_TIME: Final = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"
_QUESTION_MARK: Final = re.compile(r"'[^']*'|\?")

DAMAGE_STATES: Final = ("XX001", "XX002")
"""States of errors about pages or indexes whose contents are wrong."""
_CONFLICT: Final = ("40001", "40P01", "23503")
"""SQLSTATEs of conflicts between writers. The last: a row was deleted before the program referred to it; the next
attempt sees that."""
_CONNECTION_LOST: Final = ("08", "57P01", "57P02", "57P05")
"""The connection ended: what it had not committed did not happen."""
_UNAVAILABLE: Final = ("25006", "53", "55", "57", "58")
"""The server only reads (a replica), lacks resources, is being administered, or met a system error."""
_UNSTORABLE: Final = "22"


def load_driver() -> Any:
    """The module `asyncpg`. Raises `StorageError` if it is not installed."""
    try:
        return importlib.import_module("asyncpg")
    except ImportError as error:
        raise StorageError(
            "PostgreSQL needs the package asyncpg, which is not installed: pip install 'toolspace[postgres]'"
        ) from error


def connection_errors(driver: Any) -> tuple[type[Exception], ...]:
    """What the driver raises if the server or the connection fails; the last, if a response cannot be parsed."""
    return OSError, driver.PostgresError, driver.InterfaceError, driver.InternalClientError


def describe_error(error: BaseException, timeout: float) -> str:
    """Returns the reason. `timeout`: how many seconds the operation was allowed to take."""
    if isinstance(error, TimeoutError):
        return f"it took longer than {timeout:g} s"
    return str(error) or type(error).__name__


class PostgresDatabase(Database):
    """A database that several processes share.

    Writes run at READ COMMITTED: programs compare and set in one statement, and pick rows to change with `SKIP_LOCKED`.
    A program that met a deadlock, or lost its connection before the commit, runs again from its start.
    """

    is_shared = True

    def __init__(
        self, pool: Any, address: str, *, clock: DatabaseClock | None = None, urgent_pool: Any | None = None
    ) -> None:
        self.address = address
        self.clock = clock or DatabaseClock()
        self._urgent_access = self if urgent_pool is None else PostgresDatabase(urgent_pool, address, clock=self.clock)
        self._driver = load_driver()
        self._errors: tuple[type[Exception], ...] = connection_errors(self._driver)
        self._pool = pool
        self._is_closing = False
        self._running_tasks: set[asyncio.Task[Any]] = set()
        self._with_several_statements: set[CodeType] = set()
        """Reading programs that had more than one statement before."""

    @classmethod
    async def open(cls, url: str, *, connections: int = 10, system_clock: SystemClock | None = None) -> Self:
        """Connects to the database of a `postgresql://` URL, measures its clock and migrates its tables."""
        driver, address = load_driver(), shown_address(url)
        if not url.startswith(_SCHEMES):
            raise StorageError("not the URL of a PostgreSQL; write postgresql://user:password@host:5432/database")
        create_pool = partial(
            driver.create_pool,
            url,
            reset=_skip_reset,
            timeout=_CONNECT_TIMEOUT,
            command_timeout=_COMMAND_TIMEOUT,
            statement_cache_size=_CACHED_STATEMENTS,
            server_settings={"application_name": "toolspace"},
        )
        try:
            pool = await create_pool(min_size=1, max_size=connections)
            urgent_pool = await create_pool(min_size=0, max_size=_URGENT_CONNECTIONS)  # Connects later.
        except (ValueError, driver.ClientConfigurationError):
            # Without the driver's message: it may quote a part of the password of a malformed URL.
            raise StorageError(
                f"the URL of the PostgreSQL at {address} is not understood; write "
                "postgresql://user:password@host:5432/database, with %40 for @ and %2F for / in the password"
            ) from None
        except connection_errors(driver) as error:
            reason = describe_error(error, _CONNECT_TIMEOUT)
            raise StorageUnavailable(f"PostgreSQL at {address} does not answer: {reason}") from error
        self = cls(pool, address, clock=DatabaseClock(system_clock), urgent_pool=urgent_pool)
        self.reader_count = connections
        try:
            await self.measure_clock()
            await self._attempt(partial(self._run_transaction, timeout=_MIGRATION_TIMEOUT), _migrate_exclusively)
        except BaseException as error:
            pool.terminate()
            if isinstance(error, StorageError) and not isinstance(error, StorageUnavailable):
                raise StorageError(f"the PostgreSQL at {address} cannot be used: {error}") from error
            raise
        return self

    @property
    def urgent_access(self) -> Database:
        self._urgent_access.observer = self.observer
        return self._urgent_access

    async def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred_writes: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> T:
        def with_deferred_writes() -> Program[T]:
            result = yield from program()
            if deferred_writes is not None:
                yield from events.write_deferred((deferred_writes(),))
            return result

        started_at = time.perf_counter()
        # Shielded: if the caller is cancelled during the commit, nobody would know whether it happened.
        task = asyncio.create_task(self._run(with_deferred_writes, on_commit))
        self._running_tasks.add(task)

        def on_done(task: asyncio.Task[T]) -> None:
            self._running_tasks.discard(task)
            # Also marks the error as retrieved, for a caller that was cancelled.
            self._observe("write", started_at, None if task.cancelled() else task.exception())

        task.add_done_callback(on_done)
        return await asyncio.shield(task)

    async def commit_deferred(
        self,
        deferred_writes: DeferredT,
        *,
        on_commit: Callable[[DeferredT], None],
        on_doubt: Callable[[DeferredT], None],
    ) -> bool:
        try:
            await self.run(
                lambda: events.resolve_deferred_calls(deferred_writes),
                on_commit=lambda _: on_commit(deferred_writes),
                deferred_writes=lambda: deferred_writes,
            )
        except StaleError:
            return False
        except StorageInDoubt:
            on_doubt(deferred_writes)
            raise
        return True

    async def read(self, program: Callable[[], Program[T]], *, timeout: float | None = None) -> T:
        started_at = time.perf_counter()
        deadline = asyncio.timeout(timeout)
        try:
            # When the deadline cancels the read, the driver asks the server to end the statement.
            async with deadline:
                result = await self._attempt(self._run_read, program)
        except BaseException as error:
            if deadline.expired() and isinstance(error, TimeoutError):
                error = ReadTimeout(f"the read took longer than {timeout:g} s")
            self._observe("read", started_at, error)
            raise error
        self._observe("read", started_at, None)
        return result

    async def measure_clock(self) -> None:
        async def measure(connection: Any, _: Callable[[], Program[None]]) -> None:
            sent_ns = self.clock.monotonic_ns()
            rows = await self._fetch(connection, _SELECT_TIME, ())
            self.clock.measure(rows[0][0], sent_ns=sent_ns, received_ns=self.clock.monotonic_ns())

        await self._attempt(measure, _run_nothing)

    def _observe(self, kind: OperationKind, started_at: float, error: BaseException | None) -> None:
        if self.observer is not None:
            self.observer(kind, (time.perf_counter() - started_at,), () if error is None else (error,))

    async def _run(self, program: Callable[[], Program[T]], on_commit: Callable[[T], None] | None) -> T:
        result = await self._attempt(self._run_transaction, program)
        if on_commit is not None:
            try:
                on_commit(result)
            except Exception:
                _log.exception("a transaction is committed, but notifying subscribers of it failed")
        return result

    async def aclose(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._urgent_access is not self:
            await self._urgent_access.aclose()
        try:
            await asyncio.wait_for(self._pool.close(), _POOL_TIMEOUT)
        except self._errors as error:
            reason = describe_error(error, _POOL_TIMEOUT)
            _log.warning("closing the connections to PostgreSQL at %s failed: %s", self.address, reason)
        finally:
            self._pool.terminate()

    # Attempts and connections

    async def _attempt(
        self, work: Callable[[Any, Callable[[], Program[T]]], Any], program: Callable[[], Program[T]]
    ) -> T:
        attempt = 1
        while True:
            try:
                async with self._connection() as connection:
                    return await work(connection, program)
            except (_ConflictError, _ConnectionLostError) as error:
                if attempt == _ATTEMPTS:
                    raise
                _log.debug("attempt %d of %d failed, trying again: %s", attempt, _ATTEMPTS, error)
            # A random delay, so that the same programs do not meet again.
            await asyncio.sleep(random.uniform(0, 0.002 * 2**attempt))
            attempt += 1

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Any]:
        if self._is_closing:
            raise StorageUnavailable(f"the connections to PostgreSQL at {self.address} are closed")
        try:
            connection = await self._pool.acquire(timeout=_POOL_TIMEOUT)
        except self._errors as error:
            message = f"PostgreSQL at {self.address} does not answer: {describe_error(error, _POOL_TIMEOUT)}"
            raise StorageUnavailable(message) from error
        try:
            yield connection
        except BaseException as error:
            await self._clean(connection, error)
            raise
        finally:
            await self._pool.release(connection, timeout=_ROLLBACK_TIMEOUT)

    async def _clean(self, connection: Any, error: BaseException) -> None:
        """Rolls back a failed program: the pool hands the connection on as it is."""
        if isinstance(error, _ConflictError) or not isinstance(error, StorageUnavailable):
            try:
                # If a statement was cancelled, the driver first asks the server to stop it, and waits for that.
                if connection.is_in_transaction():
                    await connection.execute("ROLLBACK", timeout=_ROLLBACK_TIMEOUT)
                return
            except self._errors as rollback_error:
                _log.debug("rollback at %s failed, closing the connection: %s", self.address, rollback_error)
        # In an unknown state: the server rolls back when the connection ends.
        with suppress(self._driver.InterfaceError):  # The pool has closed it already.
            connection.terminate()

    # Programs

    async def _run_transaction(
        self,
        connection: Any,
        program: Callable[[], Program[T]],
        begin: str = _BEGIN_WRITE,
        *,
        timeout: float | None = None,
    ) -> T:
        """`timeout`: for each statement; None: that of the connection."""
        steps = program()
        rows: list[Row] | None = None
        try:
            await self._execute(connection, begin)
            while True:
                try:
                    sql, values = steps.send(rows) if rows is not None else next(steps)
                except StopIteration as stop:
                    await self._execute(connection, "COMMIT", is_commit=True)
                    return stop.value
                if sql is READ_CLOCK:
                    rows = self._read_clock()
                else:
                    rows = await self._fetch(connection, translate(sql), values, timeout=timeout)
        finally:
            steps.close()

    async def _run_read(self, connection: Any, program: Callable[[], Program[T]]) -> T:
        """One statement sees one snapshot by itself. Several need a transaction, which costs two more round trips."""
        steps = program()
        code: CodeType | None = getattr(steps, "gi_code", None)
        if code is None or code in self._with_several_statements:
            steps.close()
            return await self._run_transaction(connection, program, _BEGIN_READ)
        try:
            sql, values = next(steps)
            while sql is READ_CLOCK:
                sql, values = steps.send(self._read_clock())
            if sql.startswith("SELECT"):
                rows = await self._fetch(connection, translate(sql), values)
                steps.send(rows)
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()
        self._with_several_statements.add(code)
        return await self._run_transaction(connection, program, _BEGIN_READ)

    def _read_clock(self) -> list[Row]:
        return [(self.clock.now_ms(),)]

    async def _fetch(
        self, connection: Any, sql: str, values: Sequence[Any], *, timeout: float | None = None
    ) -> list[Row]:
        try:
            if isinstance(values, RowBatch):
                await connection.executemany(sql, values)
                return []
            return await connection.fetch(sql, *values, timeout=timeout)
        except self._errors as error:
            raise self._to_storage_error(error, connection) from error

    async def _execute(self, connection: Any, command: str, *, is_commit: bool = False) -> None:
        try:
            await connection.execute(command)
        except self._errors as error:
            storage_error = self._to_storage_error(error, connection)
            is_conflict = isinstance(storage_error, _ConflictError)
            if is_commit and isinstance(storage_error, StorageUnavailable) and not is_conflict:
                storage_error = StorageInDoubt(
                    f"PostgreSQL at {self.address} went away during a commit: it may have happened, or not"
                )
            raise storage_error from error

    def _to_storage_error(self, error: Exception, connection: Any) -> StorageError:
        state: str = getattr(error, "sqlstate", None) or ""
        reason = describe_error(error, _COMMAND_TIMEOUT)
        if state in _CONFLICT or isinstance(error, self._driver.InvalidCachedStatementError):
            return _ConflictError(f"PostgreSQL at {self.address} is too busy with other writers of the same: {reason}")
        is_closed = not state and not isinstance(error, TimeoutError)
        with suppress(self._driver.InterfaceError):  # The pool has taken it back already.
            is_closed = is_closed and connection.is_closed()
        # After an InternalClientError the driver cannot parse what the server sends: the connection is unusable.
        if state.startswith(_CONNECTION_LOST) or is_closed or isinstance(error, self._driver.InternalClientError):
            return _ConnectionLostError(f"the connection to PostgreSQL at {self.address} was lost: {reason}")
        if state.startswith(_UNAVAILABLE) or isinstance(error, OSError):
            return StorageUnavailable(f"PostgreSQL at {self.address} does not answer: {reason}")
        if state in DAMAGE_STATES:
            storage_error = StorageDamaged(f"PostgreSQL at {self.address} reports damage: {reason}")
            self.report_damage(storage_error)
            return storage_error
        if state.startswith(_UNSTORABLE) or isinstance(error, self._driver.DataError):
            # Without the value, which may be a secret.
            return UnstorableValueError(
                "a value cannot be stored: no NUL characters, no lone surrogates, integers of 64 bits"
            )
        return StorageError(f"the database refuses this: {reason}")


class _ConflictError(StorageUnavailable):
    """The program conflicted with another one and was rolled back."""


class _ConnectionLostError(StorageUnavailable):
    """The connection ended before the commit."""


def _migrate_exclusively() -> Program[int]:
    """Of two processes that start at once, the second waits here and then has nothing left to migrate."""
    yield "SELECT pg_advisory_xact_lock(?)", (_MIGRATION_LOCK,)
    return (yield from migrate())


def _run_nothing() -> Program[None]:
    yield from ()


@lru_cache(maxsize=4096)
def translate(sql: str) -> str:
    """The SQL of a program in the syntax of PostgreSQL."""
    count = 0

    def number(match: re.Match[str]) -> str:
        nonlocal count
        if match[0] != "?":
            return match[0]
        count += 1
        return f"${count}"

    sql = sql.replace(SKIP_LOCKED, "FOR UPDATE SKIP LOCKED").replace(FOR_UPDATE, "FOR UPDATE")
    sql = _QUESTION_MARK.sub(number, sql)
    if sql.startswith(("CREATE TABLE", "ALTER TABLE")):
        # Text sorts by its bytes, whatever language the server was set up for.
        sql = re.sub(r"\bTEXT\b", 'TEXT COLLATE "C"', sql)
    return sql


async def _skip_reset(connection: Any) -> None:
    """Instead of the driver's reset, a round trip for each program: programs leave no state on a connection."""

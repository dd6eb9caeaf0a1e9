"""PostgreSQL: programs as transactions on a pool of connections. What others hear of it is in `streams.postgres`."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from types import CodeType
from typing import Any, Self, TypeVar

from toolspace.errors import StorageError, StorageInDoubt, StorageUnavailable, UnstorableValueError
from toolspace.storage.database import (
    FOR_UPDATE,
    SKIP_LOCKED,
    A,
    Database,
    DeferredWrites,
    OperationKind,
    Program,
    Row,
    RowBatch,
    StaleError,
)
from toolspace.storage.postgres.driver import SCHEMES, faults, load_driver, shown_address
from toolspace.storage.queries import deferred_writes
from toolspace.storage.schema import migrate

_log = logging.getLogger("toolspace.storage")
T = TypeVar("T")

_ATTEMPTS = 8
_CONNECT_TIMEOUT, _COMMAND_TIMEOUT, _POOL_TIMEOUT = 10.0, 30.0, 20.0
_ROLLBACK_TIMEOUT = 5.0
_STATEMENTS = 512
_MIGRATION_LOCK = 0x746F6F6C73706163  # "toolspac": any number that others are unlikely to lock.

_WRITE = "BEGIN"
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_QUESTION_MARK = re.compile(r"'[^']*'|\?")

_CONFLICTS = ("40001", "40P01", "23503")
"""Writers in each other's way. The last: what a program looked at was removed before it referred to it, which the next
attempt sees."""
_LOST = ("08", "57P01", "57P02", "57P05")
"""A connection that ended. What it had not committed never happened."""
_UNAVAILABLE = ("25006", "53", "55", "57", "58")
"""A server that only reads (a replica), has too few resources or an operator at work, or met a system error."""
_UNKEEPABLE = "22"


class PostgresDatabase(Database):
    """A database that several processes share.

    Writes run at READ COMMITTED: programs compare and set in one statement, and pick rows to change with `SKIP_LOCKED`.
    A program that met a deadlock, or lost its connection before the commit, is run again from its start.
    """

    is_shared = True

    def __init__(self, pool: Any, address: str) -> None:
        self.address = address
        self._driver = load_driver()
        self._faults: tuple[type[Exception], ...] = faults(self._driver)
        self._pool = pool
        self._closing = False
        self._running: set[asyncio.Task[Any]] = set()
        self._longer: set[CodeType] = set()
        """Programs that were seen to read with more than one statement."""

    @classmethod
    async def open(cls, url: str, *, connections: int = 10) -> Self:
        """Connects to the database of a `postgresql://` URL and brings its tables up to date."""
        driver, address = load_driver(), shown_address(url)
        if not url.startswith(SCHEMES):
            raise StorageError("not the URL of a PostgreSQL; write postgresql://user:password@host:5432/database")
        try:
            pool = await driver.create_pool(
                url,
                min_size=1,
                max_size=connections,
                reset=_keep_nothing,
                timeout=_CONNECT_TIMEOUT,
                command_timeout=_COMMAND_TIMEOUT,
                statement_cache_size=_STATEMENTS,
                server_settings={"application_name": "toolspace"},
            )
        except (ValueError, driver.ClientConfigurationError):
            # Without what it says: a URL that was read wrongly may show a part of its password.
            raise StorageError(
                f"the URL of the PostgreSQL at {address} is not understood; write "
                "postgresql://user:password@host:5432/database, with %40 for @ and %2F for / in the password"
            ) from None
        except faults(driver) as error:
            raise StorageUnavailable(f"PostgreSQL at {address} does not answer: {_said(error)}") from error
        self = cls(pool, address)
        try:
            await self.run(_migrate_alone)
        except BaseException as error:
            pool.terminate()
            if isinstance(error, StorageError) and not isinstance(error, StorageUnavailable):
                raise StorageError(f"the PostgreSQL at {address} cannot be used: {error}") from error
            raise
        return self

    async def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> T:
        def whole() -> Program[T]:
            result = yield from program()
            if deferred is not None:
                yield from deferred_writes.write((deferred(),))
            return result

        began = time.perf_counter()
        # Shielded: whoever is canceled during the commit would never know whether it happened, nor would anyone else.
        task = asyncio.create_task(self._run(whole, on_commit))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda ended: self._observe("write", began, _error_of(ended)))
        return await asyncio.shield(task)

    async def commit_deferred(
        self, deferred: A, *, on_commit: Callable[[A], None], on_doubt: Callable[[A], None]
    ) -> bool:
        try:
            await self.run(
                lambda: deferred_writes.resolve_calls(deferred),
                on_commit=lambda _: on_commit(deferred),
                deferred=lambda: deferred,
            )
        except StaleError:
            return False
        except StorageInDoubt:
            on_doubt(deferred)
            raise
        return True

    async def read(self, program: Callable[[], Program[T]]) -> T:
        began = time.perf_counter()
        try:
            result = await self._try(self._look, program)
        except BaseException as error:
            self._observe("read", began, error)
            raise
        self._observe("read", began, None)
        return result

    def _observe(self, kind: OperationKind, began: float, error: BaseException | None) -> None:
        if self.observer is not None:
            self.observer(kind, (time.perf_counter() - began,), () if error is None else (error,))

    async def _run(self, program: Callable[[], Program[T]], then: Callable[[T], None] | None) -> T:
        result = await self._try(self._transact, program)
        if then is not None:
            try:
                then(result)
            except Exception:
                _log.exception("what was written could not be told")
        return result

    async def aclose(self) -> None:
        if self._closing:
            return
        self._closing = True
        try:
            await asyncio.wait_for(self._pool.close(), _POOL_TIMEOUT)
        except self._faults as error:
            _log.warning("closing the connections to PostgreSQL at %s: %s", self.address, _said(error))
        finally:
            self._pool.terminate()

    # Attempts and connections

    async def _try(self, work: Callable[[Any, Callable[[], Program[T]]], Any], program: Callable[[], Program[T]]) -> T:
        for attempt in range(1, _ATTEMPTS):
            try:
                async with self._connection() as connection:
                    return await work(connection, program)
            except (_ConflictError, _LostError) as error:
                _log.debug("attempt %d: %s", attempt, error)
            # Those who met here should not meet again.
            await asyncio.sleep(random.uniform(0, 0.002 * 2**attempt))
        async with self._connection() as connection:
            return await work(connection, program)

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Any]:
        if self._closing:
            raise StorageUnavailable(f"the connections to PostgreSQL at {self.address} are closed")
        try:
            connection = await self._pool.acquire(timeout=_POOL_TIMEOUT)
        except self._faults as error:
            raise StorageUnavailable(f"PostgreSQL at {self.address} does not answer: {_said(error)}") from error
        try:
            yield connection
        except BaseException as error:
            await self._clean(connection, error)
            raise
        finally:
            await self._pool.release(connection, timeout=_ROLLBACK_TIMEOUT)

    async def _clean(self, connection: Any, error: BaseException) -> None:
        """Leaves nothing of a failed program: the pool gives the connection to the next as it is."""
        if isinstance(error, _ConflictError) or not isinstance(error, StorageUnavailable):
            try:
                # Where a statement was canceled, the driver asks the server to stop it, and waits for that first.
                if connection.is_in_transaction():
                    await connection.execute("ROLLBACK", timeout=_ROLLBACK_TIMEOUT)
                return
            except self._faults as fault:
                _log.debug("a connection to PostgreSQL at %s is given up: %s", self.address, fault)
        # Who knows what is left: the server ends it with the connection.
        with suppress(self._driver.InterfaceError):  # The pool noticed first that it is gone.
            connection.terminate()

    def _is_gone(self, connection: Any) -> bool:
        try:
            return connection.is_closed()
        except self._driver.InterfaceError:  # The pool has taken it back already.
            return True

    # Programs

    async def _transact(self, connection: Any, program: Callable[[], Program[T]], begin: str = _WRITE) -> T:
        steps = program()
        rows: list[Row] | None = None
        try:
            await self._execute(connection, begin)
            while True:
                try:
                    sql, values = steps.send(rows) if rows is not None else next(steps)
                except StopIteration as done:
                    await self._execute(connection, "COMMIT", committing=True)
                    return done.value
                rows = await self._fetch(connection, _translated(sql), values)
        finally:
            steps.close()

    async def _look(self, connection: Any, program: Callable[[], Program[T]]) -> T:
        """One statement sees one view by itself. Several need a transaction, which costs two more round trips."""
        steps = program()
        code: CodeType | None = getattr(steps, "gi_code", None)
        if code is None or code in self._longer:
            steps.close()
            return await self._transact(connection, program, _READ)
        try:
            sql, values = next(steps)
            if sql.startswith("SELECT"):
                rows = await self._fetch(connection, _translated(sql), values)
                steps.send(rows)
        except StopIteration as done:
            return done.value
        finally:
            steps.close()
        self._longer.add(code)
        return await self._transact(connection, program, _READ)

    async def _fetch(self, connection: Any, sql: str, values: Sequence[Any]) -> list[Row]:
        try:
            if isinstance(values, RowBatch):
                await connection.executemany(sql, values)
                return []
            return await connection.fetch(sql, *values)
        except self._faults as error:
            raise self._explained(error, connection) from error

    async def _execute(self, connection: Any, command: str, *, committing: bool = False) -> None:
        try:
            await connection.execute(command)
        except self._faults as error:
            explained = self._explained(error, connection)
            if committing and isinstance(explained, StorageUnavailable) and not isinstance(explained, _ConflictError):
                explained = StorageInDoubt(
                    f"PostgreSQL at {self.address} went away during a commit: it may have happened, or not"
                )
            raise explained from error

    def _explained(self, error: Exception, connection: Any) -> StorageError:
        state: str = getattr(error, "sqlstate", None) or ""
        said = _said(error)
        if state in _CONFLICTS or isinstance(error, self._driver.InvalidCachedStatementError):
            return _ConflictError(f"PostgreSQL at {self.address} is too busy with other writers of the same: {said}")
        gone = not state and not isinstance(error, TimeoutError) and self._is_gone(connection)
        # The driver lost its place in what the server said: that connection is of no more use.
        if state.startswith(_LOST) or gone or isinstance(error, self._driver.InternalClientError):
            return _LostError(f"the connection to PostgreSQL at {self.address} was lost: {said}")
        if state.startswith(_UNAVAILABLE) or isinstance(error, OSError):
            return StorageUnavailable(f"PostgreSQL at {self.address} does not answer: {said}")
        if state.startswith(_UNKEEPABLE) or isinstance(error, self._driver.DataError):
            # Without the value, which may be a secret.
            return UnstorableValueError(
                "a value cannot be kept: no NUL characters, no lone surrogates, integers of 64 bits"
            )
        return StorageError(f"the database refuses this: {said}")


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """A fault is for whoever asked; where they went away, for nobody: it is looked at here."""
    return None if task.cancelled() else task.exception()


class _ConflictError(StorageUnavailable):
    """Two programs were in each other's way, and this one gave way."""


class _LostError(StorageUnavailable):
    """The connection ended before the commit."""


def _migrate_alone() -> Program[int]:
    """Two processes that start at once: the second waits here, and finds nothing left to do."""
    yield "SELECT pg_advisory_xact_lock(?)", (_MIGRATION_LOCK,)
    return (yield from migrate())


@lru_cache(maxsize=4096)
def _translated(sql: str) -> str:
    """A program's SQL as PostgreSQL writes it."""
    count = 0

    def numbered(match: re.Match[str]) -> str:
        nonlocal count
        if match[0] != "?":
            return match[0]
        count += 1
        return f"${count}"

    sql = sql.replace(SKIP_LOCKED, "FOR UPDATE SKIP LOCKED").replace(FOR_UPDATE, "FOR UPDATE")
    sql = _QUESTION_MARK.sub(numbered, sql)
    if sql.startswith("CREATE TABLE"):
        # Texts are in the order of their bytes, whatever language the server was set up for.
        sql = re.sub(r"\bTEXT\b", 'TEXT COLLATE "C"', sql)
    return sql


async def _keep_nothing(connection: Any) -> None:
    """Instead of the driver's own clean-up, a round trip for each program: programs leave nothing behind."""


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return str(error) or type(error).__name__

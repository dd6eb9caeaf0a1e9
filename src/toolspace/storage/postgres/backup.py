"""Reads all rows of a PostgreSQL database for a backup, and writes an empty one from a backup."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from graphlib import TopologicalSorter
from typing import Any, Final

from toolspace.core.ids import now_ms
from toolspace.errors import StorageDamaged, StorageError
from toolspace.storage.backup import BATCH_ROWS, TableSource, TableTarget
from toolspace.storage.database import READ_CLOCK, Program, Row, shown_address
from toolspace.storage.migrations import migrate
from toolspace.storage.postgres.database import DAMAGE_STATES, describe_error, load_driver, translate

_CONNECT_SECONDS: Final = 10.0
_TABLES: Final = """SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY c.oid, a.attnum"""
_REFERENCES: Final = """SELECT conrelid::regclass::text, confrelid::regclass::text FROM pg_constraint
    WHERE contype = 'f' AND connamespace = current_schema()::regnamespace"""


class PostgresSource(TableSource):
    """One state of a database. Gateways may write to it meanwhile."""

    def __init__(self, connection: Any, driver: Any, schema_version: int, tables: dict[str, tuple[str, ...]]) -> None:
        self._connection = connection
        self._driver = driver
        self.schema_version = schema_version
        self.tables = tables

    async def read_rows(self, table: str, *, skip_damaged: bool) -> AsyncIterator[list[Row]]:
        columns = ", ".join(f'"{column}"' for column in self.tables[table])
        batch: list[Row] = []
        try:
            async for record in self._connection.cursor(f'SELECT {columns} FROM "{table}"', prefetch=BATCH_ROWS):
                batch.append(tuple(record))
                if len(batch) == BATCH_ROWS:
                    yield batch
                    batch = []
        except self._driver.PostgresError as error:
            if error.sqlstate in DAMAGE_STATES:
                raise StorageDamaged(f"the table {table} cannot be read: {error}") from error
            raise StorageError(f"the table {table} cannot be read: {error}") from error
        if batch:
            yield batch


class PostgresTarget(TableTarget):
    """An empty database. All of it is one transaction."""

    def __init__(self, connection: Any, driver: Any) -> None:
        self._connection = connection
        self._driver = driver

    async def create_tables(self, schema_version: int) -> None:
        await self._run(migrate(schema_version))

    async def order_tables(self, tables: Sequence[str]) -> list[str]:
        sorter: TopologicalSorter[str] = TopologicalSorter({table: set[str]() for table in tables})
        for table, referenced_table in await self._connection.fetch(_REFERENCES):
            if table != referenced_table:
                sorter.add(table, referenced_table)
        return [table for table in sorter.static_order() if table in tables]

    async def write_rows(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        try:
            await self._connection.copy_records_to_table(table, records=rows, columns=list(columns))
        except (self._driver.PostgresError, self._driver.InterfaceError) as error:
            raise StorageError(f"rows of the table {table} cannot be restored: {error}") from error

    async def finish(self) -> None:
        await self._run(migrate())

    async def _run(self, program: Program[int]) -> None:
        rows: list[Row] | None = None
        while True:
            try:
                sql, values = program.send(rows) if rows is not None else next(program)
            except StopIteration:
                return
            if sql is READ_CLOCK:
                rows = [(now_ms(),)]  # For the time of the migrations.
            else:
                rows = await self._connection.fetch(translate(sql), *values)


@asynccontextmanager
async def open_source(url: str) -> AsyncGenerator[PostgresSource]:
    """Opens a database to read it. Raises `StorageError`."""
    async with (
        _connect(url) as (driver, connection),
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        tables: dict[str, tuple[str, ...]] = {}
        for table, column in await connection.fetch(_TABLES):
            tables[table] = (*tables.get(table, ()), column)
        if "migrations" not in tables:
            raise StorageError(f"the database {shown_address(url)} is empty: no gateway has run with it yet")
        del tables["migrations"]
        version = await connection.fetchval("SELECT COALESCE(MAX(version), 0) FROM migrations")
        yield PostgresSource(connection, driver, version, tables)


@asynccontextmanager
async def open_target(url: str) -> AsyncGenerator[PostgresTarget]:
    """Opens an empty database; what is written is committed when the block ends without an error.

    Raises `StorageError` if it has tables.
    """
    async with _connect(url) as (driver, connection), connection.transaction():
        if await connection.fetch(_TABLES):
            raise StorageError(
                f"the database {shown_address(url)} has tables already; create an empty one (createdb), and set "
                "storage.url to it"
            )
        yield PostgresTarget(connection, driver)


@asynccontextmanager
async def _connect(url: str) -> AsyncGenerator[tuple[Any, Any]]:
    driver = load_driver()
    try:
        connection = await driver.connect(url, timeout=_CONNECT_SECONDS)
    except (OSError, TimeoutError, ValueError, driver.PostgresError, driver.InterfaceError) as error:
        reason = describe_error(error, _CONNECT_SECONDS)
        raise StorageError(f"PostgreSQL at {shown_address(url)} does not answer: {reason}") from error
    try:
        yield driver, connection
    finally:
        connection.terminate()

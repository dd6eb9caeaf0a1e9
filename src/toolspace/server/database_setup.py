"""Opens the database that configuration names, and what carries news between the processes that share it."""

from __future__ import annotations

from toolspace.config.load import Config
from toolspace.storage.database import Database, WakeUps
from toolspace.storage.queries.locations import database_file


async def open_database(config: Config) -> tuple[Database, WakeUps | None]:
    """SQLite in the state folder, unless `storage.url` says otherwise. Raises `StorageError`."""
    url = config.storage.url
    file = database_file(url, config.state_dir)
    if file is not None:
        from toolspace.storage.sql.sqlite import SqliteDatabase

        return await SqliteDatabase.open(file), None
    from toolspace.storage.sql.postgres import PostgresDatabase  # asyncpg is an extra.
    from toolspace.storage.streams.postgres_wakeups import PostgresWakeUps

    assert url is not None  # Without one it is a file.
    database = await PostgresDatabase.open(url)
    try:
        wakeups = await PostgresWakeUps.open(url)
    except BaseException:
        await database.aclose()
        raise
    return database, wakeups

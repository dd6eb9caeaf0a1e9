"""What `toolspace doctor` finds on the gateway's database: is it there, whose is it, how new is it. Changes nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from toolspace.cli.checking import Check
from toolspace.config.load import Config
from toolspace.core.postgres import load_driver
from toolspace.errors import StorageError
from toolspace.storage.queries.locations import database_file, database_place
from toolspace.storage.sql.schema import MIGRATIONS

_WHAT = "database"
_SECONDS = 10.0
_VERSION = "SELECT COALESCE(MAX(version), 0) FROM migrations"


async def database_check(config: Config) -> Check:
    """How the gateway would find its database."""
    place = database_place(config.storage.url, config.state_dir)
    file = database_file(config.storage.url, config.state_dir)
    if file is not None:
        return await asyncio.to_thread(_sqlite, file)
    return await _postgres(config.storage.url or "", place, config.source("storage", "url"))


def _sqlite(file: Path) -> Check:
    if not file.exists():
        return Check("ok", _WHAT, f"{file}: made when the gateway first starts (toolspace serve)")
    fix = f"move {file} away, or set storage.url to another file"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if not tables:
                return Check("ok", _WHAT, f"{file}: empty")
            if "migrations" not in tables:
                return Check("problem", _WHAT, f"{file} is a database of another program", fix)
            (version,) = connection.execute(_VERSION).fetchone()
    except sqlite3.Error as error:
        return Check("problem", _WHAT, f"{file} cannot be read: {error}", fix)
    return _aged(f"{file}, SQLite {sqlite3.sqlite_version}", version)


async def _postgres(url: str, place: str, source: str) -> Check:
    mend = f"start it, or mend {source}"
    try:
        driver = load_driver()
    except StorageError as error:
        return Check("problem", _WHAT, f"{place}: {error}", "pip install 'toolspace[postgres]'")
    try:
        async with asyncio.timeout(_SECONDS):
            connection = await driver.connect(url)
            try:
                server = connection.get_server_version()
                made = await connection.fetchval("SELECT to_regclass('migrations') IS NOT NULL")
                version = await connection.fetchval(_VERSION) if made else 0
            finally:
                connection.terminate()
    except TimeoutError:
        return Check("problem", _WHAT, f"{place} does not answer", mend)
    except (driver.InvalidAuthorizationSpecificationError, driver.InvalidPasswordError):
        return Check("problem", _WHAT, f"{place} refuses the user or the password", f"mend {source}")
    except (OSError, ValueError, driver.PostgresError, driver.InterfaceError) as error:
        # The kind alone where the text may quote the URL.
        reason = str(error) if isinstance(error, OSError | driver.PostgresError) else type(error).__name__
        return Check("problem", _WHAT, f"{place} cannot be reached: {reason}", mend)
    return _aged(f"{place}, PostgreSQL {server.major}.{server.minor}", version)


def _aged(found: str, version: int) -> Check:
    newest = len(MIGRATIONS)
    if version > newest:
        return Check(
            "problem",
            _WHAT,
            f"{found}: at version {version}, which a newer Toolspace wrote; this one knows {newest}",
            "pip install --upgrade toolspace",
        )
    if version < newest:
        note = "the gateway makes its tables" if version == 0 else f"the gateway brings it from version {version}"
        return Check("ok", _WHAT, f"{found}: {note} when it next starts")
    return Check("ok", _WHAT, f"{found}, version {version}")

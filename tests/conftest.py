"""Fixtures for all tests: an isolated state directory, databases, recorded events."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from toolspace.testing import EventRecorder

if TYPE_CHECKING:
    from tests.servers.postgres import LocalPostgresServer, PostgresServer
    from toolspace.storage.database import Database

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts pytest in the background ignores SIGINT; programs under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _isolated_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("TOOLSPACE_CONFIG", "TOOLSPACE_LOG", "TOOLSPACE_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    for name in os.environ:
        if name.endswith(("_API_KEY", "_BASE_URL")):  # The tests must not reach a real model with the developer's key.
            monkeypatch.delenv(name)


@pytest.fixture
def record() -> type[EventRecorder]:
    """Records the events of a toolspace: `events = record(ts)`."""
    return EventRecorder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL server for all tests of this process, started on first use."""
    from tests.servers.postgres import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty PostgreSQL database for this test only."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture
def stoppable_postgres() -> Iterator[LocalPostgresServer]:
    """A PostgreSQL server for this test only, which it may stop, crash and start again."""
    from tests.servers.postgres import local_postgres_server

    with local_postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """Runs the test once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        from toolspace.storage.sqlite.database import SqliteDatabase

        database_connection: Database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    else:
        from toolspace.storage.postgres.database import PostgresDatabase

        database_connection = await PostgresDatabase.open(request.getfixturevalue("postgres_url"))
    try:
        yield database_connection
    finally:
        await database_connection.aclose()

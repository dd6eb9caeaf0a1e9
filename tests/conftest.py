"""What all tests share: state that never leaves the test's own folder."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from toolspace.testing import EventRecorder

if TYPE_CHECKING:
    from tests.servers.postgres import OwnServer, Server
    from toolspace.storage.database import Database

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: programs under test would inherit that, and not hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("TOOLSPACE_CONFIG", "TOOLSPACE_LOG", "TOOLSPACE_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    for name in os.environ:
        if name.endswith(("_API_KEY", "_BASE_URL")):  # A model of the developer's own must not answer.
            monkeypatch.delenv(name)


@pytest.fixture
def record() -> type[EventRecorder]:
    """Keeps the events of a toolspace: `seen = record(ts)`."""
    return EventRecorder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One PostgreSQL for all tests of this process, started when the first asks."""
    from tests.servers.postgres import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    """The URL of an empty PostgreSQL database of the test's own."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture
def stoppable_postgres() -> Iterator[OwnServer]:
    """A PostgreSQL of the test's own, which it may stop, crash and start again."""
    from tests.servers.postgres import own_postgres_server

    with own_postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """Each kind of database in turn, for what has to hold on all."""
    if request.param == "sqlite":
        from toolspace.storage.sqlite.database import SqliteDatabase

        opened: Database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    else:
        from toolspace.storage.postgres.database import PostgresDatabase

        opened = await PostgresDatabase.open(request.getfixturevalue("postgres_url"))
    try:
        yield opened
    finally:
        await opened.aclose()

"""A fixture for tests whose behaviour does not depend on the kind of database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toolspace.storage.database import Database


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Database]:
    from toolspace.storage.sqlite.database import SqliteDatabase

    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    try:
        yield database
    finally:
        await database.aclose()

"""One kind of database alone, for what does not depend on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toolspace.storage.database import Database


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Database]:
    from toolspace.storage.sqlite.database import SqliteDatabase

    opened = await SqliteDatabase.open(tmp_path / "toolspace.db")
    try:
        yield opened
    finally:
        await opened.aclose()

"""Migrations: what an earlier version wrote is brought up to date, and none of them is ever changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from toolspace.stores.sql import entities, schema, sessions
from toolspace.stores.sql.sqlite import SqliteDatabase

RELEASED = ("b5da51bf3710891313edc55339a16b7eb1f1850eae649a389b3a7665810766c2",)
"""What was out: databases were made by it."""


@pytest.mark.spec("15.2")
def test_a_migration_that_was_out_is_as_it_was() -> None:
    made = tuple(hashlib.sha256("\n".join(one).encode()).hexdigest() for one in schema.MIGRATIONS)
    assert made[: len(RELEASED)] == RELEASED


@pytest.mark.spec("15.2")
async def test_a_database_of_an_earlier_version_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", known[:1])
    old = await SqliteDatabase.open(tmp_path / "toolspace.db")
    await old.run(lambda: entities.add_entity("ent_ada", "agent", "Ada", {}))
    await old.aclose()
    monkeypatch.setattr(schema, "MIGRATIONS", known)
    new = await SqliteDatabase.open(tmp_path / "toolspace.db")
    assert await new.run(lambda: sessions.add("ent_ada", "ent_ada", "agent"))
    assert (await new.read(lambda: entities.entity("ent_ada"))) is not None
    await new.aclose()

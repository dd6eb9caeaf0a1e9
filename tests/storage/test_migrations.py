"""Migrations: databases of earlier versions are migrated, and released migrations never change."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from toolspace.storage import migrations as schema
from toolspace.storage.database import Database, Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import entities_and_spaces, goals_and_memories, inbox, sessions
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange
from toolspace.storage.sqlite.database import SqliteDatabase

RELEASED = (
    "b5da51bf3710891313edc55339a16b7eb1f1850eae649a389b3a7665810766c2",
    "02b5da9dcece4164a48faaa2d69337b1df530dc2cf790c3bda6ceb212c808d75",
    "8183a704397ba77935a51bbaf6cbdba2f110dbfb1fd34d4cff7232e5ba31b83e",
)
"""What was out: databases were made by it."""


@pytest.mark.spec("15.2")
def test_released_migrations_are_unchanged() -> None:
    digests = tuple(hashlib.sha256("\n".join(migration).encode()).hexdigest() for migration in schema.MIGRATIONS)
    assert digests[: len(RELEASED)] == RELEASED


@pytest.mark.spec("15.2")
async def test_database_of_an_earlier_version_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrations = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", migrations[:1])
    old = await SqliteDatabase.open(tmp_path / "toolspace.db")
    await old.run(lambda: entities_and_spaces.create_entity("ent_ada", "agent", "Ada", {}))
    await old.aclose()
    monkeypatch.setattr(schema, "MIGRATIONS", migrations)
    new = await SqliteDatabase.open(tmp_path / "toolspace.db")
    assert await new.run(lambda: sessions.create("ent_ada", "ent_ada", "agent"))
    assert (await new.read(lambda: entities_and_spaces.find_entity("ent_ada"))) is not None
    await new.aclose()


@pytest.mark.spec("15.2")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_inbox_of_an_earlier_version_keeps_its_events(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_database() -> Database:
        if kind == "sqlite":
            return await SqliteDatabase.open(tmp_path / "toolspace.db")
        return await PostgresDatabase.open(url)

    url: str = request.getfixturevalue("postgres_url") if kind == "postgres" else ""
    migrations = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", migrations[:2])
    old = await open_database()
    for number in range(30):
        agent = f"ent_{number % 3}"
        await old.run(lambda n=number, a=agent: inbox.add(a, f"e{n}", "service", {"n": n}, priority=n % 2, at=n // 4))
    claimed_events = await old.run(lambda: inbox.claim("ent_0", "claim_1", count=4, lease_ms=60_000))
    await old.run(lambda: inbox.acknowledge("ent_0", "claim_1", [event.event_id for event in claimed_events[:2]]))
    before = {agent: await old.read(lambda a=agent: inbox.list_events(a)) for agent in ("ent_0", "ent_1", "ent_2")}
    await old.aclose()
    monkeypatch.setattr(schema, "MIGRATIONS", migrations)
    new = await open_database()
    for agent, events in before.items():
        after = await new.read(lambda a=agent: inbox.list_events(a))
        assert [event.event_id for event in after] == [event.event_id for event in events]
        assert [msgspec.to_builtins(event) for event in after] == [msgspec.to_builtins(event) for event in events]
    assert len(await new.read(lambda: inbox.list_events("ent_0", status="processed"))) == 2
    assert len(await new.read(lambda: inbox.list_events("ent_0", status="pending"))) == 6
    assert await new.run(lambda: inbox.acknowledge("ent_0", "claim_1", [claimed_events[2].event_id])) == [
        claimed_events[2].event_id
    ]
    assert not await new.run(lambda: inbox.add("ent_0", "e0", "service", {}, priority=1))
    await new.run(lambda: inbox.delete_all("ent_0"))
    assert await new.read(lambda: inbox.list_events("ent_0")) == []
    assert len(await new.read(lambda: inbox.list_events("ent_1"))) == 10
    await new.aclose()


@pytest.mark.spec("15.2")
@pytest.mark.spec("9.3")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_goals_of_an_earlier_version_are_kept(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_database() -> Database:
        if kind == "sqlite":
            return await SqliteDatabase.open(tmp_path / "toolspace.db")
        return await PostgresDatabase.open(url)

    def insert_goal(goal_id: str, agent: str) -> Program[object]:
        yield "INSERT INTO goals VALUES (?, ?, 'Write', 'active', 2.5, 1, 0, 3, 4)", (goal_id, agent)

    url: str = request.getfixturevalue("postgres_url") if kind == "postgres" else ""
    migrations = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", migrations[:3])
    old = await open_database()
    for agent in ("ent_ada", "ent_bob"):
        await old.run(lambda a=agent: entities_and_spaces.create_entity(a, "agent", a, {}))
        await old.run(lambda a=agent: insert_goal(f"goal_{a}", a))
    await old.aclose()
    monkeypatch.setattr(schema, "MIGRATIONS", migrations)
    new = await open_database()
    (goal,) = await new.read(lambda: goals_and_memories.list_goals("ent_ada"))
    expected_goal = Goal("goal_ent_ada", "Write", "active", 2.5, True, False, {}, 3, 4)
    assert msgspec.structs.asdict(goal) == msgspec.structs.asdict(expected_goal)
    change = GoalChange(id="goal_ent_ada", description="Write")
    ((_, is_new),) = await new.run(lambda: goals_and_memories.set_goals("ent_bob", [change], clear=False))
    assert is_new
    await new.run(lambda: entities_and_spaces.delete_entity("ent_ada"))
    assert await new.read(lambda: goals_and_memories.list_goals("ent_ada")) == []
    assert len(await new.read(lambda: goals_and_memories.list_goals("ent_bob"))) == 2
    await new.aclose()

"""Migrations: databases of earlier versions are migrated, and released migrations never change."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from toolspace.storage import migrations as schema
from toolspace.storage.database import Database, Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import entities_and_spaces, goals_and_memories, inbox, plans, sessions, tasks
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

    def insert_event(number: int) -> Program[object]:
        yield (
            "INSERT INTO inbox (agent_entity_id, event_id, type, priority, at, seq, data, status, attempts, "
            "available_at) VALUES (?, ?, 'service', ?, ?, ?, ?, 'pending', 0, 0)",
            (f"ent_{number % 3}", f"e{number}", number % 2, number // 4, number, f'{{"n": {number}}}'),
        )

    def set_status(status: str, claim: str | None, *event_ids: str) -> Program[object]:
        for event_id in event_ids:
            yield "UPDATE inbox SET status = ?, claim = ? WHERE event_id = ?", (status, claim, event_id)

    url: str = request.getfixturevalue("postgres_url") if kind == "postgres" else ""
    migrations = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", migrations[:2])
    old = await open_database()
    for number in range(30):
        await old.run(lambda n=number: insert_event(n))
    await old.run(lambda: set_status("processed", None, "e0", "e6"))
    await old.run(lambda: set_status("processing", "claim_1", "e12", "e18"))
    await old.aclose()
    monkeypatch.setattr(schema, "MIGRATIONS", migrations)
    new = await open_database()
    for index in range(3):
        events = await new.read(lambda n=index: inbox.list_events(f"ent_{n}"))
        numbers = sorted(range(index, 30, 3), key=lambda n: (n % 2, n // 4, n))
        assert [event.event_id for event in events] == [f"e{number}" for number in numbers]
        assert [(event.data, event.session_id) for event in events] == [({"n": n}, f"ent_{index}") for n in numbers]
    assert len(await new.read(lambda: inbox.list_events("ent_0", status="processed"))) == 2
    assert len(await new.read(lambda: inbox.list_events("ent_0", status="pending"))) == 6
    assert await new.run(lambda: inbox.acknowledge("ent_0", "claim_1", ["e12"])) == ["e12"]
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
    expected_goal = Goal("goal_ent_ada", "Write", "active", 2.5, True, False, {}, 3, 4, "ent_ada")
    assert msgspec.structs.asdict(goal) == msgspec.structs.asdict(expected_goal)
    change = GoalChange(id="goal_ent_ada", description="Write")
    ((_, is_new),) = await new.run(lambda: goals_and_memories.set_goals("ent_bob", [change], clear=False))
    assert is_new
    await new.run(lambda: entities_and_spaces.delete_entity("ent_ada"))
    assert await new.read(lambda: goals_and_memories.list_goals("ent_ada")) == []
    assert len(await new.read(lambda: goals_and_memories.list_goals("ent_bob"))) == 2
    await new.aclose()


@pytest.mark.spec("15.2")
@pytest.mark.spec("19.1")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_an_agent_of_an_earlier_version_keeps_its_only_session(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_database() -> Database:
        if kind == "sqlite":
            return await SqliteDatabase.open(tmp_path / "toolspace.db")
        return await PostgresDatabase.open(url)

    def insert_rows() -> Program[object]:
        yield (
            "INSERT INTO sessions VALUES ('ada', 'ada', 'agent', NULL, NULL, 7, 0, 2, 1, 'They like tea.', 0, 0, 1)",
            (),
        )
        turn = '{"turn":{"type":"user","text":"Hello"}}'
        yield "INSERT INTO history VALUES ('ada', 1, 2, NULL, ?, 3, 1)", (turn,)
        yield "INSERT INTO goals VALUES ('ada', 'goal-1', 'Write', 'active', 1, 0, 0, '{}', 1, 1)", ()
        yield "INSERT INTO memories VALUES ('ada', 'tea', '\"green\"', 1, 1)", ()
        yield (
            "INSERT INTO plans (id, entity_id, name, instruction, cron, status, next_run_at, created_at, updated_at) "
            "VALUES ('plan_1', 'ada', 'Tea', 'Make tea.', '0 9 * * *', 'active', 1, 1, 1)",
            (),
        )
        yield (
            "INSERT INTO tasks (id, agent_entity_id, description, input, status, run_id, created_at) "
            "VALUES ('task_1', 'ada', 'Buy tea', 'Green.', 'running', 'run_task_1', 1)",
            (),
        )
        yield (
            "INSERT INTO inbox (agent_entity_id, event_id, type, priority, at, seq, data, status, attempts, "
            "available_at) VALUES ('ada', 'evt_1', 'service', 2, 1, 0, '{}', 'pending', 0, 0)",
            (),
        )

    url: str = request.getfixturevalue("postgres_url") if kind == "postgres" else ""
    migrations = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", migrations[: migrations.index(schema.SESSION_SCOPE)])
    old = await open_database()
    await old.run(lambda: entities_and_spaces.create_entity("ada", "agent", "Ada", {}))
    await old.run(insert_rows)
    await old.aclose()
    monkeypatch.setattr(schema, "MIGRATIONS", migrations)
    new = await open_database()
    session = await new.read(lambda: sessions.find("ada"))
    assert session is not None
    assert (session.token, session.summary, session.scope_key, session.owner_id) == (7, "They like tea.", "", "ada")
    assert await new.read(lambda: sessions.find_scope("ada")) == ("agent", False)
    assert len(await new.read(lambda: sessions.list_turns("ada"))) == 1
    assert [goal.id for goal in await new.read(lambda: goals_and_memories.list_goals("ada"))] == ["goal-1"]
    assert [memory.value for memory in await new.read(lambda: goals_and_memories.list_memories("ada"))] == ["green"]
    assert [plan.id for plan in await new.read(lambda: plans.list_plans("ada"))] == ["plan_1"]
    assert [task.session_id for task in await new.read(lambda: tasks.list_tasks("ada"))] == ["ada"]
    assert await new.read(lambda: tasks.count_running("ada")) == 1
    assert await new.read(lambda: sessions.list_with_waiting_inbox(limit=9)) == [("ada", 2)]
    events = await new.run(lambda: inbox.claim("ada", "clm", count=9, lease_ms=1, session_id="ada"))
    assert [event.event_id for event in events] == ["evt_1"]
    await new.aclose()

"""Background tasks and their sessions, on each database."""

from __future__ import annotations

from toolspace.core.language_model import UserTurn
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities_and_spaces, sessions, tasks
from toolspace.storage.queries.sessions import NewTurn, StoredTurn


async def create_agent(database: Database, id: str = "ada") -> str:
    await database.run(lambda: entities_and_spaces.create_entity(id, "agent", id, {}))
    return id


async def create_task(database: Database, agent_id: str, *ids: str) -> None:
    for at, id in enumerate(ids):
        await database.run(lambda id=id: tasks.create(id, agent_id, id, "x"))
        await database.run(lambda id=id, at=at: _set_created_at(id, at))


def _set_created_at(id: str, at: int) -> Program[None]:
    yield "UPDATE tasks SET created_at = ? WHERE id = ?", (at, id)


def test_run_id_of_a_task_identifies_its_session() -> None:
    assert tasks.find_session_id(tasks.run_id_of("task_1")) == "task_1"
    assert tasks.find_session_id(tasks.run_id_of("refl_1")) == "refl_1"
    assert tasks.find_session_id("run_01k9") is None
    assert tasks.find_session_id("task_1") is None
    assert tasks.task_id_of(tasks.reflection_id_of("task_1")) == tasks.task_id_of("task_1") == "task_1"
    assert [tasks.is_background_session(session_id) for session_id in ("task_1", "refl_1", "ent_1")] == [
        True,
        True,
        False,
    ]


async def test_tasks_are_listed_by_time_in_pages(database: Database) -> None:
    ada, bob = await create_agent(database), await create_agent(database, "bob")
    await create_task(database, ada, "task_a", "task_b", "task_c", "task_d")
    await create_task(database, bob, "task_x")

    async def list_ids(**filters: object) -> list[str]:
        matches = await database.read(lambda: tasks.list_tasks(ada, **filters))  # pyright: ignore
        return [task.id for task in matches]

    assert await list_ids() == ["task_d", "task_c", "task_b", "task_a"]
    assert await list_ids(since=1, until=3) == ["task_c", "task_b"]
    assert await list_ids(limit=2) == ["task_d", "task_c"]
    assert await list_ids(limit=2, before="task_c") == ["task_b", "task_a"]
    assert await list_ids(before="task_none") == []
    assert await list_ids(status="failed") == []
    assert await database.read(lambda: tasks.find("task_x", ada)) is None
    assert await database.read(lambda: tasks.count_running(ada)) == 4


async def test_task_is_created_once_and_ends_once(database: Database) -> None:
    ada = await create_agent(database)
    assert await database.run(lambda: tasks.create("task_a", ada, "d", "i"))
    assert not await database.run(lambda: tasks.create("task_a", ada, "another", "i"))
    finished_task = await database.run(lambda: tasks.finish("task_a", "failed", {"nul": "\0", "huge": 2**70}))
    assert finished_task is not None
    assert (finished_task.status, finished_task.result["nul"], finished_task.description) == ("failed", "\0", "d")
    assert await database.run(lambda: tasks.finish("task_a", "completed", "late")) is None
    await database.run(lambda: tasks.save_reflection("task_a", {"assessment": "so so", "toolCallsCount": 0}))
    task = await database.read(lambda: tasks.find("task_a"))
    assert task is not None
    assert (task.status, task.reflection["assessment"]) == ("failed", "so so")


async def test_old_tasks_are_deleted_with_their_sessions_and_running_ones_stay(database: Database) -> None:
    ada = await create_agent(database)
    await create_task(database, ada, "task_a", "task_b")
    for session in ("task_a", "refl_a", "task_b"):
        kind = "task" if session.startswith("task") else "reflection"
        await database.run(lambda session=session, kind=kind: sessions.create(session, ada, kind))
        turn = NewTurn(stored_turn=StoredTurn(UserTurn("x")), tokens=1, run_id=None)
        await database.run(lambda session=session, turn=turn: sessions.append_turns(session, 1, [turn]))
    await database.run(lambda: tasks.finish("task_a", "completed", "x"))
    deleted_rows = [await database.run(lambda: tasks.delete_old(database.clock.now_ms() + 1000, 2)) for _ in range(3)]
    assert deleted_rows == [2, 1, 0]  # Two turns, then the task.
    for session, remaining in (("task_a", 0), ("refl_a", 0), ("task_b", 1)):
        assert len(await database.read(lambda session=session: sessions.list_turns(session))) == remaining


async def test_postponed_session_cannot_be_leased_before_its_time(database: Database) -> None:
    ada = await create_agent(database)
    await database.run(lambda: sessions.create("task_a", ada, "task"))
    await database.run(lambda: sessions.start_cycle("task_a", "run_task_a", agent_turns=0))
    lease = await database.run(lambda: sessions.acquire_lease("task_a", "node_1", lease_ms=1000))
    assert lease is not None
    assert not await database.run(lambda: sessions.postpone("task_a", lease.token - 1, 0))
    assert await database.run(lambda: sessions.postpone("task_a", lease.token, database.clock.now_ms() + 60_000))
    for node in ("node_1", "node_2"):
        assert await database.run(lambda node=node: sessions.acquire_lease("task_a", node, lease_ms=1000)) is None
        assert await database.read(lambda: sessions.list_interrupted(limit=9)) == []
    await database.run(lambda: sessions.postpone("task_a", lease.token, database.clock.now_ms()))
    assert await database.read(lambda: sessions.list_interrupted(limit=9)) == ["task_a"]
    second_lease = await database.run(lambda: sessions.acquire_lease("task_a", "node_2", lease_ms=1000))
    assert second_lease is not None
    assert (second_lease.attempts, second_lease.token) == (2, lease.token + 1)
    turn = NewTurn(stored_turn=StoredTurn(UserTurn("x")), tokens=1, run_id=None)
    await database.run(lambda: sessions.append_turns("task_a", 1, [turn]))
    session = await database.read(lambda: sessions.find("task_a"))
    assert session is not None
    assert session.attempts == 0

"""Goals and memories on both databases: all or nothing, each agent its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from toolspace.errors import RefusedError, StorageError
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities, goals_and_memories
from toolspace.storage.queries.goals_and_memories import GoalChange

T = TypeVar("T")


class Store:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def __call__(self, program: Callable[..., Program[T]], *args: Any, **kwargs: Any) -> T:
        return await self.database.run(lambda: program(*args, **kwargs))


@pytest.fixture
async def store(database: Database) -> Store:
    made = Store(database)
    for agent in ("ada", "bob"):
        await made(entities.create_entity, agent, "agent", agent, {})
    return made


def goal(description: str, **more: Any) -> GoalChange:
    return GoalChange(description=description, **more)


@pytest.mark.spec("9.3")
async def test_goals_are_ordered_by_priority_then_by_when_they_were_said(store: Store) -> None:
    said = [goal("last", priority=-1), goal("first", priority=2.5), goal("b"), goal("a")]
    await store(goals_and_memories.set_goals, "ada", said, clear=False)
    found = await store(goals_and_memories.list_goals, "ada")
    assert [one.description for one in found] == ["first", "b", "a", "last"]
    assert (found[0].priority, found[0].status, found[0].is_completed) == (2.5, "active", False)
    assert await store(goals_and_memories.list_goals, "bob") == []


@pytest.mark.spec("9.3")
async def test_a_change_leaves_what_it_does_not_name(store: Store) -> None:
    ((made, new),) = await store(
        goals_and_memories.set_goals, "ada", [goal("write", priority=3, is_long_term=True)], clear=False
    )
    assert new
    ((changed, new),) = await store(
        goals_and_memories.set_goals, "ada", [goal("write it", id=made.id, status="completed")], clear=False
    )
    assert not new
    assert (changed.id, changed.description, changed.priority) == (made.id, "write it", 3)
    assert (changed.is_long_term, changed.is_completed, changed.status) == (True, True, "completed")
    ((again, _),) = await store(
        goals_and_memories.set_goals, "ada", [goal("write it", id=made.id, is_completed=False)], clear=False
    )
    assert (again.status, again.created_at) == ("active", made.created_at)
    (kept,) = await store(goals_and_memories.list_goals, "ada")
    assert kept.updated_at == again.updated_at


@pytest.mark.spec("9.3")
@pytest.mark.parametrize("clear", [False, True])
async def test_an_id_that_is_not_the_agents_own_changes_nothing_at_all(store: Store, clear: bool) -> None:
    ((own, _),) = await store(goals_and_memories.set_goals, "ada", [goal("mine")], clear=False)
    ((other, _),) = await store(goals_and_memories.set_goals, "bob", [goal("his")], clear=False)
    for wrong in (other.id, "goal_nobody"):
        with pytest.raises(RefusedError, match="is not a goal of this agent"):
            await store(goals_and_memories.set_goals, "ada", [goal("new"), goal("stolen", id=wrong)], clear=clear)
        with pytest.raises(RefusedError, match="is not a goal of this agent"):
            await store(goals_and_memories.delete_goals, "ada", [own.id, wrong])
    assert [one.description for one in await store(goals_and_memories.list_goals, "ada")] == ["mine"]
    assert [one.description for one in await store(goals_and_memories.list_goals, "bob")] == ["his"]


@pytest.mark.spec("9.3")
async def test_clearing_keeps_the_goals_that_are_named(store: Store) -> None:
    made = await store(goals_and_memories.set_goals, "ada", [goal("a"), goal("b")], clear=False)
    await store(goals_and_memories.set_goals, "ada", [goal("a2", id=made[0][0].id), goal("c")], clear=True)
    assert {one.description for one in await store(goals_and_memories.list_goals, "ada")} == {"a2", "c"}
    assert await store(goals_and_memories.delete_goals, "ada", [made[0][0].id, made[0][0].id]) == 1


async def test_contradictions_and_too_many_goals_are_refused(store: Store) -> None:
    with pytest.raises(RefusedError, match="isCompleted true"):
        await store(goals_and_memories.set_goals, "ada", [goal("a", status="active", is_completed=True)], clear=False)
    ((made, _),) = await store(goals_and_memories.set_goals, "ada", [goal("a")], clear=False)
    with pytest.raises(RefusedError, match="named twice"):
        await store(goals_and_memories.set_goals, "ada", [goal("b", id=made.id), goal("c", id=made.id)], clear=False)
    with pytest.raises(RefusedError, match="at most 200 goals"):
        await store(goals_and_memories.set_goals, "ada", [goal("x")] * goals_and_memories.MAX_GOALS, clear=False)
    assert len(await store(goals_and_memories.list_goals, "ada")) == 1


@pytest.mark.spec("9.2")
async def test_memories_are_values_under_keys_of_one_agent(store: Store) -> None:
    values = [("b", "text"), ("a", {"deep": [1, None, 0.5, "\0"]}), ("b", False)]
    assert await store(goals_and_memories.set_memories, "ada", values) == 2
    await store(goals_and_memories.set_memories, "bob", [("a", "his")])
    found = await store(goals_and_memories.list_memories, "ada")
    assert [(one.key, one.value) for one in found] == [("a", {"deep": [1, None, 0.5, "\0"]}), ("b", False)]
    assert [one.key for one in await store(goals_and_memories.list_memories, "ada", ["b", "nothing"])] == ["b"]
    assert await store(goals_and_memories.delete_memories, "ada", ["a", "a", "nothing"]) == 1
    assert [one.value for one in await store(goals_and_memories.list_memories, "bob")] == ["his"]


async def test_an_agent_has_so_many_memories_and_no_more(store: Store) -> None:
    many = [(f"k{n}", n) for n in range(goals_and_memories.MAX_MEMORIES)]
    assert await store(goals_and_memories.set_memories, "ada", many) == goals_and_memories.MAX_MEMORIES
    assert await store(goals_and_memories.set_memories, "ada", many[:3]) == 3
    with pytest.raises(RefusedError, match="at most 1000 memories"):
        await store(goals_and_memories.set_memories, "ada", [("one more", 1)])


async def test_what_an_agent_keeps_in_mind_goes_with_it(store: Store) -> None:
    await store(goals_and_memories.set_goals, "ada", [goal("a")], clear=False)
    await store(goals_and_memories.set_memories, "ada", [("k", 1)])
    await store(entities.delete_entity, "ada")
    assert await store(goals_and_memories.list_goals, "ada") == []
    assert await store(goals_and_memories.list_memories, "ada") == []
    with pytest.raises(StorageError):
        await store(goals_and_memories.set_memories, "ada", [("k", 1)])

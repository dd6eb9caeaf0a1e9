"""Goals and memories, on each database: all or nothing, each agent its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from toolspace.errors import RefusedError, StorageError
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities_and_spaces, goals_and_memories
from toolspace.storage.queries.goals_and_memories import GoalChange

T = TypeVar("T")


class Store:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def __call__(self, program: Callable[..., Program[T]], *args: Any, **kwargs: Any) -> T:
        return await self.database.run(lambda: program(*args, **kwargs))


@pytest.fixture
async def store(database: Database) -> Store:
    new_store = Store(database)
    for agent in ("ada", "bob"):
        await new_store(entities_and_spaces.create_entity, agent, "agent", agent, {})
    return new_store


def goal(description: str, **more: Any) -> GoalChange:
    return GoalChange(description=description, **more)


@pytest.mark.spec("9.3")
async def test_goals_are_ordered_by_priority_then_by_creation(store: Store) -> None:
    changes = [goal("last", priority=-1), goal("first", priority=2.5), goal("b"), goal("a")]
    await store(goals_and_memories.set_goals, "ada", changes, clear=False)
    goals = await store(goals_and_memories.list_goals, "ada")
    assert [item.description for item in goals] == ["first", "b", "a", "last"]
    assert (goals[0].priority, goals[0].status, goals[0].is_completed) == (2.5, "active", False)
    assert await store(goals_and_memories.list_goals, "bob") == []


@pytest.mark.spec("9.3")
async def test_change_of_a_goal_keeps_other_fields(store: Store) -> None:
    ((new_goal, new),) = await store(
        goals_and_memories.set_goals, "ada", [goal("write", priority=3, is_long_term=True)], clear=False
    )
    assert new
    ((changed_goal, new),) = await store(
        goals_and_memories.set_goals, "ada", [goal("write it", id=new_goal.id, status="completed")], clear=False
    )
    assert not new
    assert (changed_goal.id, changed_goal.description, changed_goal.priority) == (new_goal.id, "write it", 3)
    assert (changed_goal.is_long_term, changed_goal.is_completed, changed_goal.status) == (True, True, "completed")
    ((repeated_goal, _),) = await store(
        goals_and_memories.set_goals, "ada", [goal("write it", id=new_goal.id, is_completed=False)], clear=False
    )
    assert (repeated_goal.status, repeated_goal.created_at) == ("active", new_goal.created_at)
    (stored_goal,) = await store(goals_and_memories.list_goals, "ada")
    assert stored_goal.updated_at == repeated_goal.updated_at


@pytest.mark.spec("9.3")
@pytest.mark.parametrize("clear", [False, True])
async def test_two_agents_have_goals_with_the_same_id(store: Store, clear: bool) -> None:
    for agent in ("ada", "bob"):
        ((new_goal, new),) = await store(
            goals_and_memories.set_goals, agent, [goal(agent, id="goal-1", metadata={"of": agent})], clear=clear
        )
        assert (new_goal.id, new) == ("goal-1", True)
    ((changed_goal, new),) = await store(goals_and_memories.set_goals, "ada", [goal("ada 2", id="goal-1")], clear=clear)
    assert (changed_goal.metadata, new) == ({"of": "ada"}, False)
    (his,) = await store(goals_and_memories.list_goals, "bob")
    assert (his.description, his.metadata) == ("bob", {"of": "bob"})
    assert await store(goals_and_memories.delete_goals, "ada", ["goal-1"]) == 1
    assert [item.description for item in await store(goals_and_memories.list_goals, "bob")] == ["bob"]


@pytest.mark.spec("9.3")
async def test_deleting_a_goal_that_the_agent_does_not_have_changes_nothing(store: Store) -> None:
    ((own_goal, _),) = await store(goals_and_memories.set_goals, "ada", [goal("mine")], clear=False)
    ((other_goal, _),) = await store(goals_and_memories.set_goals, "bob", [goal("his")], clear=False)
    for wrong in (other_goal.id, "goal_nobody"):
        with pytest.raises(RefusedError, match="is not a goal of this agent"):
            await store(goals_and_memories.delete_goals, "ada", [own_goal.id, wrong])
    assert [item.description for item in await store(goals_and_memories.list_goals, "ada")] == ["mine"]
    assert [item.description for item in await store(goals_and_memories.list_goals, "bob")] == ["his"]


@pytest.mark.spec("9.3")
async def test_clearing_keeps_named_goals(store: Store) -> None:
    new_goals = await store(goals_and_memories.set_goals, "ada", [goal("a"), goal("b")], clear=False)
    await store(goals_and_memories.set_goals, "ada", [goal("a2", id=new_goals[0][0].id), goal("c")], clear=True)
    assert {item.description for item in await store(goals_and_memories.list_goals, "ada")} == {"a2", "c"}
    assert await store(goals_and_memories.delete_goals, "ada", [new_goals[0][0].id, new_goals[0][0].id]) == 1


async def test_contradictions_and_too_many_goals_are_refused(store: Store) -> None:
    with pytest.raises(RefusedError, match="isCompleted true"):
        await store(goals_and_memories.set_goals, "ada", [goal("a", status="active", is_completed=True)], clear=False)
    ((new_goal, _),) = await store(goals_and_memories.set_goals, "ada", [goal("a")], clear=False)
    with pytest.raises(RefusedError, match="named twice"):
        await store(
            goals_and_memories.set_goals, "ada", [goal("b", id=new_goal.id), goal("c", id=new_goal.id)], clear=False
        )
    with pytest.raises(RefusedError, match="at most 200 goals"):
        await store(goals_and_memories.set_goals, "ada", [goal("x")] * goals_and_memories.MAX_GOALS, clear=False)
    many = [goal("x", id=f"goal-{n}") for n in range(goals_and_memories.MAX_GOALS)]
    with pytest.raises(RefusedError, match="at most 200 goals"):
        await store(goals_and_memories.set_goals, "ada", many, clear=False)
    assert len(await store(goals_and_memories.list_goals, "ada")) == 1


@pytest.mark.spec("9.2")
async def test_memories_are_values_by_key_and_agent(store: Store) -> None:
    values = [("b", "text"), ("a", {"deep": [1, None, 0.5, "\0"]}), ("b", False)]
    assert await store(goals_and_memories.set_memories, "ada", values) == 2
    await store(goals_and_memories.set_memories, "bob", [("a", "his")])
    memories = await store(goals_and_memories.list_memories, "ada")
    assert [(memory.key, memory.value) for memory in memories] == [("a", {"deep": [1, None, 0.5, "\0"]}), ("b", False)]
    assert [memory.key for memory in await store(goals_and_memories.list_memories, "ada", ["b", "nothing"])] == ["b"]
    assert await store(goals_and_memories.delete_memories, "ada", ["a", "a", "nothing"]) == 1
    assert [memory.value for memory in await store(goals_and_memories.list_memories, "bob")] == ["his"]


async def test_number_of_memories_is_limited(store: Store) -> None:
    many = [(f"k{n}", n) for n in range(goals_and_memories.MAX_MEMORIES)]
    assert await store(goals_and_memories.set_memories, "ada", many) == goals_and_memories.MAX_MEMORIES
    assert await store(goals_and_memories.set_memories, "ada", many[:3]) == 3
    with pytest.raises(RefusedError, match="at most 1000 memories"):
        await store(goals_and_memories.set_memories, "ada", [("one more", 1)])


async def test_goals_and_memories_are_deleted_with_their_agent(store: Store) -> None:
    await store(goals_and_memories.set_goals, "ada", [goal("a")], clear=False)
    await store(goals_and_memories.set_memories, "ada", [("k", 1)])
    await store(entities_and_spaces.delete_entity, "ada")
    assert await store(goals_and_memories.list_goals, "ada") == []
    assert await store(goals_and_memories.list_memories, "ada") == []
    with pytest.raises(StorageError):
        await store(goals_and_memories.set_memories, "ada", [("k", 1)])

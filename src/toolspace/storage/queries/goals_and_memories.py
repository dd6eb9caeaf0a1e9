"""SQL programs for the goals and memories of agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from toolspace.core.ids import agent_of_session, new_id
from toolspace.core.stored_records import Record
from toolspace.errors import RefusedError
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries.statement_builder import Table, count_changes, first_column

MAX_GOALS = 200
MAX_MEMORIES = 1_000
"""Of one session: every prompt has all of them."""
ACTIVE, COMPLETED = "active", "completed"


class Goal(Record, frozen=True):
    """A goal of an agent."""

    id: str
    """The id of the goal. Another agent or session may have a goal with the same id."""
    description: str
    """What the agent wants to achieve."""
    status: str
    """The status, in the agent's own words."""
    priority: float
    """Goals with a higher priority come first."""
    is_long_term: bool
    """Whether the goal lasts longer than one task."""
    is_completed: bool
    """Whether the goal is reached."""
    metadata: dict[str, Any]
    """Any JSON object."""
    created_at: int
    """When the goal was created, in Unix milliseconds."""
    updated_at: int
    """When the goal was last changed, in Unix milliseconds."""
    session_id: str
    """The session of the agent that the goal belongs to."""


class GoalChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new goal, or with the id of a goal a change of it; None leaves a field as it is."""

    description: str
    id: str | None = None
    status: str | None = None
    priority: float | None = None
    is_long_term: bool | None = None
    is_completed: bool | None = None
    metadata: dict[str, Any] | None = None


class Memory(Record, frozen=True):
    """A value that an agent remembers under a key."""

    key: str
    """The key of the memory."""
    value: Any
    """The value: any JSON."""
    created_at: int
    """When the memory was created, in Unix milliseconds."""
    updated_at: int
    """When the memory was last changed, in Unix milliseconds."""
    session_id: str
    """The session of the agent that the memory belongs to."""


_GOAL = Table("goals", Goal, flags=("is_long_term", "is_completed"), json=("metadata",))
_OR_REPLACE_GOAL = _GOAL.on_conflict_update("session_id, id", except_columns=("session_id", "id", "created_at"))
_MEMORY = Table("memories", Memory, json=("value",))
_OR_REPLACE_VALUE = _MEMORY.on_conflict_update("session_id, key", except_columns=("session_id", "key", "created_at"))


def list_goals(session_id: str) -> Program[list[Goal]]:
    """The goals of a session, the most important first."""
    return _GOAL.select("WHERE session_id = ? ORDER BY priority DESC, created_at, id", session_id)


def list_goals_of_agent(entity_id: str) -> Program[list[Goal]]:
    """The goals of all sessions of an agent, the most important first."""
    return _GOAL.select("WHERE entity_id = ? ORDER BY priority DESC, created_at, id, session_id", entity_id)


def set_goals(session_id: str, changes: Sequence[GoalChange], *, clear: bool) -> Program[list[tuple[Goal, bool]]]:
    """Adds and changes goals of a session, all or none. Returns each as it is now, and whether it is new.

    A new id is the id of a new goal. `clear`: goals that are not among them are deleted.
    Raises `RefusedError` if a goal contradicts itself or is named twice, or if there are too many.
    """
    own_goals = {goal.id: goal for goal in (yield from list_goals(session_id))}
    named_ids = [change.id for change in changes if change.id is not None]
    if repeated_id := next((goal_id for goal_id in named_ids if named_ids.count(goal_id) > 1), None):
        raise RefusedError("invalid", f'the goal "{repeated_id}" is named twice')
    other_goals = set[str]() if clear else own_goals.keys() - set(named_ids)
    if len(other_goals) + len(changes) > MAX_GOALS:
        raise RefusedError("invalid", f"an agent has at most {MAX_GOALS} goals; delete or complete some first")
    if clear:
        for goal_id in own_goals.keys() - set(named_ids):
            yield "DELETE FROM goals WHERE id = ? AND session_id = ?", (goal_id, session_id)
    at = yield from current_time()
    goals: list[tuple[Goal, bool]] = []
    for position, change in enumerate(changes):
        before = own_goals.get(change.id or "")
        goal = _apply_change(session_id, before, change, at + position)  # Their times keep their order.
        values = msgspec.structs.asdict(goal)
        yield from _GOAL.insert(_OR_REPLACE_GOAL, **values, entity_id=agent_of_session(session_id))
        goals.append((goal, before is None))
    return goals


def delete_goals(session_id: str, goal_ids: Sequence[str]) -> Program[int]:
    """Deletes goals, all or none; returns how many. Raises `RefusedError` if the session has no goal of an id."""
    unique_ids = list(dict.fromkeys(goal_ids))
    own_ids = {goal.id for goal in (yield from list_goals(session_id))}
    for goal_id in unique_ids:
        if goal_id not in own_ids:
            raise RefusedError("not_found", f'"{goal_id}" is not a goal of this agent; get_goals shows their ids')
    for goal_id in unique_ids:
        yield "DELETE FROM goals WHERE id = ? AND session_id = ?", (goal_id, session_id)
    return len(unique_ids)


def list_memories(session_id: str, keys: Sequence[str] | None = None) -> Program[list[Memory]]:
    """The memories of a session, by key; only those of some keys, if they are given."""
    memories = yield from _MEMORY.select("WHERE session_id = ? ORDER BY key", session_id)
    return memories if keys is None else [memory for memory in memories if memory.key in set(keys)]


def list_memories_of_agent(entity_id: str) -> Program[list[Memory]]:
    """The memories of all sessions of an agent, by key."""
    return _MEMORY.select("WHERE entity_id = ? ORDER BY key, session_id", entity_id)


def set_memories(session_id: str, values: Sequence[tuple[str, Any]]) -> Program[int]:
    """Stores values under keys; of a repeated key, the last value. Returns how many."""
    keys = yield from first_column("SELECT key FROM memories WHERE session_id = ?", session_id)
    new_values = dict(values)
    if len(new_values.keys() | keys) > MAX_MEMORIES:
        raise RefusedError("invalid", f"an agent has at most {MAX_MEMORIES} memories; delete some first")
    at = yield from current_time()
    for key in sorted(new_values):  # Sorted, so that two writers cannot deadlock.
        yield from _MEMORY.insert(
            _OR_REPLACE_VALUE,
            session_id=session_id,
            entity_id=agent_of_session(session_id),
            key=key,
            value=new_values[key],
            created_at=at,
            updated_at=at,
        )
    return len(new_values)


def delete_memories(session_id: str, keys: Sequence[str]) -> Program[int]:
    """Deletes the memories of these keys; returns how many there were."""
    deleted_count = 0
    for key in sorted(set(keys)):
        deleted_count += yield from count_changes(
            "DELETE FROM memories WHERE session_id = ? AND key = ?", session_id, key
        )
    return deleted_count


def delete_all(table: Literal["goals", "memories"], *, session_id: str) -> Program[int]:
    """Deletes the goals or memories of a session; returns how many there were."""
    return count_changes(f"DELETE FROM {table} WHERE session_id = ?", session_id)


def delete_all_of_agent(table: Literal["goals", "memories"], *, entity_id: str) -> Program[int]:
    """Deletes the goals or memories of all sessions of an agent; returns how many there were."""
    return count_changes(f"DELETE FROM {table} WHERE entity_id = ?", entity_id)


def _apply_change(session_id: str, before: Goal | None, change: GoalChange, at: int) -> Goal:
    was_completed, was_long_term = (before.is_completed, before.is_long_term) if before else (False, False)
    status, is_completed = change.status, change.is_completed
    if is_completed is None:
        is_completed = was_completed if status is None else status == COMPLETED
    if status is None and before and was_completed == is_completed:
        status = before.status
    elif status is None:
        status = COMPLETED if is_completed else ACTIVE
    if (status == COMPLETED) != is_completed:
        raise RefusedError(
            "invalid", f'a goal cannot have the status "{status}" and isCompleted {str(is_completed).lower()}'
        )
    old_priority = before.priority if before else 0.0
    return Goal(
        id=change.id or new_id("goal"),
        description=change.description,
        status=status,
        priority=old_priority if change.priority is None else float(change.priority),
        is_long_term=was_long_term if change.is_long_term is None else change.is_long_term,
        is_completed=is_completed,
        metadata=(before.metadata if before else {}) if change.metadata is None else change.metadata,
        created_at=before.created_at if before else at,
        updated_at=at,
        session_id=session_id,
    )

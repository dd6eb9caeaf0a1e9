"""Programs for what agents keep in mind over their runs: goals and memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import new_id, now_ms
from toolspace.core.records import Record
from toolspace.errors import RefusedError
from toolspace.storage.database import Program, Row

_GOAL = "id, description, status, priority, is_long_term, is_completed, created_at, updated_at"
_MEMORY = "key, value, created_at, updated_at"

MAX_GOALS = 200
MAX_MEMORIES = 1_000
"""Of one agent: all of them are in every prompt."""
ACTIVE, COMPLETED = "active", "completed"


class Goal(Record, frozen=True):
    """Something that an agent wants to reach."""

    id: str
    description: str
    status: str
    priority: float
    is_long_term: bool
    is_completed: bool
    created_at: int
    updated_at: int


class GoalChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new goal, or with an id what becomes of one; None leaves a field as it is."""

    description: str
    id: str | None = None
    status: str | None = None
    priority: float | None = None
    is_long_term: bool | None = None
    is_completed: bool | None = None


class Memory(Record, frozen=True):
    """Something that an agent remembers, under a key of its own."""

    key: str
    value: Any
    created_at: int
    updated_at: int


def list_goals(entity_id: str) -> Program[list[Goal]]:
    """The goals of an agent, the most important first."""
    rows = yield (
        f"SELECT {_GOAL} FROM goals WHERE entity_id = ? ORDER BY priority DESC, created_at, id",
        (entity_id,),
    )
    return [_goal(row) for row in rows]


def set_goals(entity_id: str, changes: Sequence[GoalChange], *, clear: bool) -> Program[list[tuple[Goal, bool]]]:
    """Adds and changes goals, all or none: each as it is now, and whether it is new.

    `clear`: the goals that are not named go. Raises `RefusedError` where an id is not the agent's own.
    """
    own = {goal.id: goal for goal in (yield from list_goals(entity_id))}
    named = [change.id for change in changes if change.id is not None]
    _check_own(named, own)
    if twice := next((one for one in named if named.count(one) > 1), None):
        raise RefusedError("invalid", f'the goal "{twice}" is named twice')
    left = len(named) if clear else len(own)
    if left + len(changes) - len(named) > MAX_GOALS:
        raise RefusedError("invalid", f"an agent has at most {MAX_GOALS} goals; delete or complete some first")
    if clear:
        for gone in own.keys() - set(named):
            yield "DELETE FROM goals WHERE id = ? AND entity_id = ?", (gone, entity_id)
    at = now_ms()
    done: list[tuple[Goal, bool]] = []
    for place, change in enumerate(changes):
        goal = _changed(own.get(change.id or ""), change, at + place)  # In the order in which they were said.
        yield (
            f"INSERT INTO goals ({_GOAL}, entity_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET description = excluded.description, status = excluded.status, "
            "priority = excluded.priority, is_long_term = excluded.is_long_term, "
            "is_completed = excluded.is_completed, updated_at = excluded.updated_at "
            "WHERE goals.entity_id = excluded.entity_id",
            (
                goal.id,
                goal.description,
                goal.status,
                goal.priority,
                int(goal.is_long_term),
                int(goal.is_completed),
                goal.created_at,
                goal.updated_at,
                entity_id,
            ),
        )
        done.append((goal, change.id is None))
    return done


def delete_goals(entity_id: str, goal_ids: Sequence[str]) -> Program[int]:
    """Removes goals, all or none; says how many. Raises `RefusedError` where an id is not the agent's own."""
    own = {goal.id: goal for goal in (yield from list_goals(entity_id))}
    wanted = list(dict.fromkeys(goal_ids))
    _check_own(wanted, own)
    for goal_id in wanted:
        yield "DELETE FROM goals WHERE id = ? AND entity_id = ?", (goal_id, entity_id)
    return len(wanted)


def list_memories(entity_id: str, keys: Sequence[str] | None = None) -> Program[list[Memory]]:
    """What an agent remembers, by key; only under these keys, if some are named."""
    rows = yield f"SELECT {_MEMORY} FROM memories WHERE entity_id = ? ORDER BY key", (entity_id,)
    found = [_memory(row) for row in rows]
    return found if keys is None else [memory for memory in found if memory.key in set(keys)]


def set_memories(entity_id: str, values: Sequence[tuple[str, Any]]) -> Program[int]:
    """Remembers values under keys, the last one where a key is there twice; says how many."""
    rows = yield "SELECT key FROM memories WHERE entity_id = ?", (entity_id,)
    wanted = dict(values)
    if len({row[0] for row in rows} | wanted.keys()) > MAX_MEMORIES:
        raise RefusedError("invalid", f"an agent has at most {MAX_MEMORIES} memories; delete some first")
    at = now_ms()
    for key in sorted(wanted):  # In one order: two writers must not wait for each other.
        yield (
            f"INSERT INTO memories ({_MEMORY}, entity_id) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (entity_id, key) DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at",
            (key, json_text.encode_for_storage(wanted[key]), at, at, entity_id),
        )
    return len(wanted)


def delete_memories(entity_id: str, keys: Sequence[str]) -> Program[int]:
    """Forgets what is under these keys; says how many there were."""
    deleted = 0
    for key in sorted(set(keys)):
        rows = yield "DELETE FROM memories WHERE entity_id = ? AND key = ? RETURNING key", (entity_id, key)
        deleted += len(rows)
    return deleted


def _check_own(named: Sequence[str], own: dict[str, Goal]) -> None:
    for goal_id in named:
        if goal_id not in own:
            raise RefusedError("not_found", f'"{goal_id}" is not a goal of this agent; get_goals shows their ids')


def _changed(before: Goal | None, change: GoalChange, at: int) -> Goal:
    completed = change.is_completed
    if completed is None and change.status is not None:
        completed = change.status == COMPLETED
    if completed is None:
        completed = before.is_completed if before is not None else False
    status = change.status
    if status is None and before is not None and before.is_completed == completed:
        status = before.status
    if status is None:
        status = COMPLETED if completed else ACTIVE
    if (status == COMPLETED) != completed:
        raise RefusedError(
            "invalid", f'a goal cannot have the status "{status}" and isCompleted {str(completed).lower()}'
        )
    old_priority, old_term = (before.priority, before.is_long_term) if before is not None else (0.0, False)
    return Goal(
        id=before.id if before is not None else new_id("goal"),
        description=change.description,
        status=status,
        priority=old_priority if change.priority is None else float(change.priority),
        is_long_term=old_term if change.is_long_term is None else change.is_long_term,
        is_completed=completed,
        created_at=at if before is None else before.created_at,
        updated_at=at,
    )


def _goal(row: Row) -> Goal:
    return Goal(
        id=row[0],
        description=row[1],
        status=row[2],
        priority=row[3],
        is_long_term=bool(row[4]),
        is_completed=bool(row[5]),
        created_at=row[6],
        updated_at=row[7],
    )


def _memory(row: Row) -> Memory:
    return Memory(key=row[0], value=json_text.decode(row[1]), created_at=row[2], updated_at=row[3])

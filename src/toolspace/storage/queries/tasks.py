"""SQL programs for background tasks and their results.

The work itself is a session (see `sessions`) under the id of the task. The id of its run follows from that id.
"""

from __future__ import annotations

from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import agent_of_session
from toolspace.core.stored_records import TaskRecord, TaskStatus
from toolspace.storage.database import Program, current_time, long_running
from toolspace.storage.queries.statement_builder import Table, delete_selected, first_column, first_value, where_clause

_TASK_PREFIX, _REFLECTION_PREFIX, _RUN_PREFIX = "task_", "refl_", "run_"
_BACKGROUND_RUN_PREFIXES = _RUN_PREFIX + _TASK_PREFIX, _RUN_PREFIX + _REFLECTION_PREFIX
_TASK = Table("tasks", TaskRecord, json=("result", "reflection"))


def run_id_of(session_id: str) -> str:
    """The id of the only run of a task or of a reflection."""
    return f"{_RUN_PREFIX}{session_id}"


def find_session_id(run_id: str) -> str | None:
    """The session that a run belongs to, by its id, if that is of a task or a reflection. None for any other run."""
    return run_id.removeprefix(_RUN_PREFIX) if run_id.startswith(_BACKGROUND_RUN_PREFIXES) else None


def is_background_session(session_id: str) -> bool:
    """Whether a session is, by its id, a task or a reflection: people do not wait for those."""
    return session_id.startswith((_TASK_PREFIX, _REFLECTION_PREFIX))


def reflection_id_of(task_id: str) -> str:
    """The id of the session that reflects on a task."""
    return f"{_REFLECTION_PREFIX}{task_id.removeprefix(_TASK_PREFIX)}"


def task_id_of(session_id: str) -> str:
    """The task that a session works on or reflects on."""
    if not session_id.startswith(_REFLECTION_PREFIX):
        return session_id
    return f"{_TASK_PREFIX}{session_id.removeprefix(_REFLECTION_PREFIX)}"


def create(task_id: str, session_id: str, description: str, input: str) -> Program[bool]:
    """Adds a running task of a session. False if the id is in use."""
    now = yield from current_time()
    task = yield from _TASK.insert(
        id=task_id,
        agent_entity_id=agent_of_session(session_id),
        session_id=session_id,
        description=description,
        input=input,
        status="running",
        run_id=run_id_of(task_id),
        created_at=now,
    )
    return task is not None


def find(
    task_id: str, agent_entity_id: str | None = None, *, session_id: str | None = None
) -> Program[TaskRecord | None]:
    """A task; only if it is of this agent or session, if one is given."""
    clauses = "WHERE id = ? AND agent_entity_id = COALESCE(?, agent_entity_id) AND session_id = COALESCE(?, session_id)"
    return _TASK.find(clauses, task_id, agent_entity_id, session_id)


def list_tasks(
    agent_entity_id: str,
    *,
    since: int | None = None,
    until: int | None = None,
    status: TaskStatus | None = None,
    session_id: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[TaskRecord]]:
    """The tasks of an agent, newest first. `since`, `until`: when they were created. `before`: older than this task."""
    conditions, values = where_clause(
        ("agent_entity_id = ?", agent_entity_id),
        ("session_id = ?", session_id),
        ("created_at >= ?", since),
        ("created_at < ?", until),
        ("status = ?", status),
        ("(created_at, id) < (SELECT created_at, id FROM tasks WHERE id = ?)", before),
    )
    return _TASK.select(f"{conditions}ORDER BY created_at DESC, id DESC LIMIT ?", *values, limit)


def count_running(session_id: str) -> Program[int]:
    """How many tasks of a session are running."""
    select = "SELECT COUNT(*) FROM tasks WHERE agent_entity_id = ? AND session_id = ? AND status = 'running'"
    return first_value(select, agent_of_session(session_id), session_id)


def finish(task_id: str, status: TaskStatus, result: Any) -> Program[TaskRecord | None]:
    """running → completed, failed or cancelled. None if it is not running."""
    assignments = "status = ?, result = ?, completed_at = ? WHERE id = ? AND status = 'running'"
    now = yield from current_time()
    return (yield from _TASK.update(assignments, status, json_text.encode_for_storage(result), now, task_id))


def save_reflection(task_id: str, reflection: Any) -> Program[None]:
    yield "UPDATE tasks SET reflection = ? WHERE id = ?", (json_text.encode_for_storage(reflection), task_id)


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes tasks that ended before a time, with their conversations: at most `limit` rows.

    Returns how many rows. A task whose turns are too many for this time stays until the others are deleted, too.
    """
    count = 0
    select = "SELECT id FROM tasks WHERE completed_at < ? ORDER BY completed_at LIMIT ?"
    for task_id in (yield from first_column(select, before, limit)):
        session_ids = task_id, reflection_id_of(task_id)
        for session_id in session_ids:
            turns = "WHERE session_id = ? ORDER BY seq LIMIT ?"
            count += len((yield from delete_selected("history", "session_id, seq", turns, session_id, limit - count)))
        if count >= limit:
            break
        yield "DELETE FROM sessions WHERE id IN (?, ?)", session_ids
        yield "DELETE FROM tasks WHERE id = ?", (task_id,)
        count += 1
        if count >= limit:
            break
    return count

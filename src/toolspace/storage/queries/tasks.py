"""SQL programs for background tasks and their results.

The work itself is a session (see `sessions`) under the id of the task. The id of its run follows from that id.
"""

from __future__ import annotations

from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import TaskRecord, TaskStatus
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries.columns import Columns, insert_into

_TASK_PREFIX, _REFLECTION_PREFIX, _RUN_PREFIX = "task_", "refl_", "run_"
_TASK = Columns(TaskRecord, json=("result", "reflection"))


def run_id_of(session_id: str) -> str:
    """The id of the only run of a task or of a reflection."""
    return f"{_RUN_PREFIX}{session_id}"


def find_session_id(run_id: str) -> str | None:
    """The session that a run belongs to, by its id, if that is of a task or a reflection. None for any other run."""
    session_id = run_id.removeprefix(_RUN_PREFIX)
    return session_id if session_id != run_id and is_background_session(session_id) else None


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


def create(task_id: str, agent_entity_id: str, description: str, input: str) -> Program[bool]:
    """Adds a running task. False if the id is in use."""
    run_id = run_id_of(task_id)
    rows = yield (
        f"{insert_into('tasks', _TASK.names)} ON CONFLICT (id) DO NOTHING RETURNING id",
        (task_id, agent_entity_id, description, input, "running", run_id, None, None, now_ms(), None),
    )
    return bool(rows)


def find(task_id: str, agent_entity_id: str | None = None) -> Program[TaskRecord | None]:
    """A task; only if it is of this agent, if one is given."""
    rows = yield (
        f"SELECT {_TASK.sql} FROM tasks WHERE id = ? AND agent_entity_id = COALESCE(?, agent_entity_id)",
        (task_id, agent_entity_id),
    )
    return _TASK.decode_first(rows)


def list_tasks(
    agent_entity_id: str,
    *,
    since: int | None = None,
    until: int | None = None,
    status: TaskStatus | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[TaskRecord]]:
    """The tasks of an agent, newest first. `since`, `until`: when they were created. `before`: older than this task."""
    where: list[str] = ["agent_entity_id = ?"]
    values: list[Any] = [agent_entity_id]
    filters: tuple[tuple[str, Any], ...] = (
        ("created_at >= ?", since),
        ("created_at < ?", until),
        ("status = ?", status),
        ("(created_at, id) < (SELECT created_at, id FROM tasks WHERE id = ?)", before),
    )
    for condition, value in filters:
        if value is not None:
            where.append(condition)
            values.append(value)
    rows = yield (
        f"SELECT {_TASK.sql} FROM tasks WHERE {' AND '.join(where)} ORDER BY created_at DESC, id DESC LIMIT ?",
        (*values, limit),
    )
    return _TASK.decode_all(rows)


def count_running(agent_entity_id: str) -> Program[int]:
    rows = yield "SELECT COUNT(*) FROM tasks WHERE agent_entity_id = ? AND status = 'running'", (agent_entity_id,)
    return rows[0][0]


def finish(task_id: str, status: TaskStatus, result: Any) -> Program[TaskRecord | None]:
    """running → completed, failed or canceled. None if it is not running."""
    rows = yield (
        "UPDATE tasks SET status = ?, result = ?, completed_at = ? WHERE id = ? AND status = 'running' "
        f"RETURNING {_TASK.sql}",
        (status, json_text.encode_for_storage(result), now_ms(), task_id),
    )
    return _TASK.decode_first(rows)


def save_reflection(task_id: str, reflection: Any) -> Program[None]:
    yield "UPDATE tasks SET reflection = ? WHERE id = ?", (json_text.encode_for_storage(reflection), task_id)


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` tasks that ended before a time, with their conversations; returns how many."""
    rows = yield (
        "DELETE FROM tasks WHERE id IN (SELECT id FROM tasks WHERE completed_at < ? ORDER BY completed_at LIMIT ?) "
        "RETURNING id",
        (before, limit),
    )
    for (task_id,) in rows:
        yield "DELETE FROM sessions WHERE id IN (?, ?)", (task_id, reflection_id_of(task_id))
    return len(rows)

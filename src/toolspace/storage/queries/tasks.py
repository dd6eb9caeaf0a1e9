"""Programs for tasks: what agents have done in the background, and what came of it.

The work itself is a session with a history; see `sessions`. Its id is the task's, and the id of its run says so too.
"""

from __future__ import annotations

from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import TaskRecord, TaskStatus
from toolspace.storage.database import Program, Row, long_running

_COLUMNS = "id, agent_entity_id, description, input, status, run_id, result, reflection, created_at, completed_at"
_TASK, _REFLECTION, _RUN = "task_", "refl_", "run_"


def run_id_of(session_id: str) -> str:
    """The id of the one run of a task, or of a reflection."""
    return f"{_RUN}{session_id}"


def find_session_id(run_id: str) -> str | None:
    """The session that a run would be of, by its id: that of a task, or of a reflection. None for any other run."""
    session_id = run_id.removeprefix(_RUN)
    return session_id if session_id != run_id and is_background_session(session_id) else None


def is_background_session(session_id: str) -> bool:
    """Whether a session is by its id a task or a reflection: something that people do not wait for."""
    return session_id.startswith((_TASK, _REFLECTION))


def reflection_id_of(task_id: str) -> str:
    """The id of the session that looks back on a task."""
    return f"{_REFLECTION}{task_id.removeprefix(_TASK)}"


def task_id_of(session_id: str) -> str:
    """The task that a session works on, or looks back on."""
    return f"{_TASK}{session_id.removeprefix(_REFLECTION)}" if session_id.startswith(_REFLECTION) else session_id


def create(task_id: str, agent_entity_id: str, description: str, input: str) -> Program[bool]:
    """Adds a task that is under way. False where there is one of this id."""
    rows = yield (
        f"INSERT INTO tasks ({_COLUMNS}) VALUES (?, ?, ?, ?, 'running', ?, NULL, NULL, ?, NULL) "
        "ON CONFLICT (id) DO NOTHING RETURNING id",
        (task_id, agent_entity_id, description, input, run_id_of(task_id), now_ms()),
    )
    return bool(rows)


def find(task_id: str, agent_entity_id: str | None = None) -> Program[TaskRecord | None]:
    """A task; only of this agent, if one is named."""
    rows = yield (
        f"SELECT {_COLUMNS} FROM tasks WHERE id = ? AND agent_entity_id = COALESCE(?, agent_entity_id)",
        (task_id, agent_entity_id),
    )
    return _task(rows[0]) if rows else None


def list_tasks(
    agent_entity_id: str,
    *,
    since: int | None = None,
    until: int | None = None,
    status: TaskStatus | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[TaskRecord]]:
    """The tasks of an agent, newest first: those made in a span of time; `before` is the id of one, to page on."""
    where: list[str] = ["agent_entity_id = ?"]
    values: list[Any] = [agent_entity_id]
    bounds: tuple[tuple[str, Any], ...] = (
        ("created_at >= ?", since),
        ("created_at < ?", until),
        ("status = ?", status),
    )
    for condition, value in bounds:
        if value is not None:
            where.append(condition)
            values.append(value)
    if before is not None:
        where.append("(created_at, id) < (SELECT created_at, id FROM tasks WHERE id = ?)")
        values.append(before)
    rows = yield (
        f"SELECT {_COLUMNS} FROM tasks WHERE {' AND '.join(where)} ORDER BY created_at DESC, id DESC LIMIT ?",
        (*values, limit),
    )
    return [_task(row) for row in rows]


def count_running(agent_entity_id: str) -> Program[int]:
    """How many tasks of an agent are under way."""
    rows = yield "SELECT COUNT(*) FROM tasks WHERE agent_entity_id = ? AND status = 'running'", (agent_entity_id,)
    return rows[0][0]


def finish(task_id: str, status: TaskStatus, result: Any) -> Program[TaskRecord | None]:
    """running → completed, failed or canceled. None where it had ended, or there is none."""
    rows = yield (
        "UPDATE tasks SET status = ?, result = ?, completed_at = ? WHERE id = ? AND status = 'running' "
        f"RETURNING {_COLUMNS}",
        (status, json_text.encode_for_storage(result), now_ms(), task_id),
    )
    return _task(rows[0]) if rows else None


def save_reflection(task_id: str, reflection: Any) -> Program[None]:
    """Keeps what came of looking back on a task."""
    yield "UPDATE tasks SET reflection = ? WHERE id = ?", (json_text.encode_for_storage(reflection), task_id)


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Removes tasks that ended before a time, with their conversations; says how many."""
    rows = yield (
        "DELETE FROM tasks WHERE id IN (SELECT id FROM tasks WHERE completed_at < ? ORDER BY completed_at LIMIT ?) "
        "RETURNING id",
        (before, limit),
    )
    for (task_id,) in rows:
        yield "DELETE FROM sessions WHERE id IN (?, ?)", (task_id, reflection_id_of(task_id))
    return len(rows)


def _task(row: Row) -> TaskRecord:
    return TaskRecord(
        id=row[0],
        agent_entity_id=row[1],
        description=row[2],
        input=row[3],
        status=row[4],
        run_id=row[5],
        result=json_text.decode(row[6]) if row[6] is not None else None,
        reflection=json_text.decode(row[7]) if row[7] is not None else None,
        created_at=row[8],
        completed_at=row[9],
    )

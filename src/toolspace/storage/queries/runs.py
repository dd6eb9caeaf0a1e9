"""Programs for runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import RunRecord, RunStatus, run_stream
from toolspace.storage.database import Program, Row, long_running

_COLUMNS = "id, agent_entity_id, space_id, status, trigger_data, steps, usage, error, created_at, completed_at"
_OPEN = "('queued', 'running', 'waiting_tool')"


def create(
    run_id: str, agent_entity_id: str, *, space_id: str | None, trigger: Any, status: RunStatus = "running"
) -> Program[RunRecord | None]:
    """None where the id is taken."""
    rows = yield (
        f"INSERT INTO runs ({_COLUMNS}, last_call_seq) VALUES (?, ?, ?, ?, ?, 0, '{{}}', NULL, ?, NULL, 0) "
        f"ON CONFLICT (id) DO NOTHING RETURNING {_COLUMNS}",
        (run_id, agent_entity_id, space_id, status, json_text.encode_for_storage(trigger), now_ms()),
    )
    return _run(rows[0]) if rows else None


def find(run_id: str) -> Program[RunRecord | None]:
    rows = yield f"SELECT {_COLUMNS} FROM runs WHERE id = ?", (run_id,)
    return _run(rows[0]) if rows else None


def list_runs(
    *,
    agent_entity_id: str | None = None,
    space_id: str | None = None,
    status: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[RunRecord]]:
    """Runs, newest first; `before` is the id of one, to page on."""
    wanted = {"agent_entity_id": agent_entity_id, "space_id": space_id, "status": status}
    given = {column: value for column, value in wanted.items() if value is not None}
    where = [f"{column} = ?" for column in given]
    values: list[Any] = list(given.values())
    if before is not None:
        where.append("(created_at, id) < (SELECT created_at, id FROM runs WHERE id = ?)")
        values.append(before)
    condition = f"WHERE {' AND '.join(where)} " if where else ""
    rows = yield (
        f"SELECT {_COLUMNS} FROM runs {condition}ORDER BY created_at DESC, id DESC LIMIT ?",
        (*values, limit),
    )
    return [_run(row) for row in rows]


def update_status(
    run_id: str,
    status: RunStatus,
    *,
    only_from: Sequence[RunStatus],
    error: str | None = None,
    usage: Mapping[str, Any] | None = None,
    ends: bool = False,
) -> Program[RunRecord | None]:
    """Moves a run on. None where it was not in one of the states that it may come from."""
    marks = ", ".join("?" * len(only_from))
    rows = yield (
        "UPDATE runs SET status = ?, error = COALESCE(?, error), usage = COALESCE(?, usage), completed_at = ? "
        f"WHERE id = ? AND status IN ({marks}) RETURNING {_COLUMNS}",
        (
            status,
            error,
            None if usage is None else json_text.encode_for_storage(usage),
            now_ms() if ends else None,
            run_id,
            *only_from,
        ),
    )
    return _run(rows[0]) if rows else None


def set_space(run_id: str, space_id: str | None) -> Program[RunRecord | None]:
    """Makes a space the active one of a run; None leaves it."""
    rows = yield f"UPDATE runs SET space_id = ? WHERE id = ? RETURNING {_COLUMNS}", (space_id, run_id)
    return _run(rows[0]) if rows else None


def clear_space(space_id: str, *, agent_entity_id: str | None = None) -> Program[None]:
    """Open runs, of one agent if it is named, are not active in a space any more."""
    yield (
        "UPDATE runs SET space_id = NULL WHERE space_id = ? AND agent_entity_id = COALESCE(?, agent_entity_id) "
        f"AND status IN {_OPEN}",
        (space_id, agent_entity_id),
    )


def list_open_of_agent(agent_entity_id: str) -> Program[list[str]]:
    """The runs of an agent that have not ended."""
    rows = yield (
        f"SELECT id FROM runs WHERE agent_entity_id = ? AND status IN {_OPEN} ORDER BY id",
        (agent_entity_id,),
    )
    return [row[0] for row in rows]


def record_step(run_id: str, number: int, usage: str | None) -> Program[bool]:
    """A run takes a step, at this cost so far. False where it has ended."""
    rows = yield (
        f"UPDATE runs SET steps = ?, usage = COALESCE(?, usage) WHERE id = ? AND status IN {_OPEN} RETURNING id",
        (number, usage, run_id),
    )
    return bool(rows)


def advance_step(run_id: str, step: int) -> Program[None]:
    """A run is at this step now, if it was not further already."""
    yield "UPDATE runs SET steps = ? WHERE id = ? AND steps < ?", (step, run_id, step)


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Removes runs that ended before a time and have no calls any more, with their streams; says how many."""
    rows = yield (
        "DELETE FROM runs WHERE id IN (SELECT id FROM runs WHERE completed_at < ? "
        "AND NOT EXISTS (SELECT 1 FROM calls WHERE calls.run_id = runs.id) ORDER BY completed_at LIMIT ?) RETURNING id",
        (before, limit),
    )
    for (run_id,) in rows:
        stream = (run_stream(run_id),)
        yield "DELETE FROM events WHERE stream = ?", stream
        yield "DELETE FROM streams WHERE stream = ?", stream
    return len(rows)


def _run(row: Row) -> RunRecord:
    return RunRecord(
        id=row[0],
        agent_entity_id=row[1],
        space_id=row[2],
        status=row[3],
        trigger=json_text.decode(row[4]),
        steps=row[5],
        usage=json_text.decode(row[6]),
        error=row[7],
        created_at=row[8],
        completed_at=row[9],
    )

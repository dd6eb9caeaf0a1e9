"""SQL programs for runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import RunRecord, RunStatus, run_stream
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries.columns import Columns, insert_into, placeholders

_RUN = Columns(RunRecord, names={"trigger": "trigger_data"}, json=("trigger", "usage"))
_INSERT = insert_into("runs", (*_RUN.names, "last_call_seq"))
_OPEN = "('queued', 'running', 'waiting_tool')"


def create(
    run_id: str, agent_entity_id: str, *, space_id: str | None, trigger: Any, status: RunStatus = "running"
) -> Program[RunRecord | None]:
    """None if the id is in use."""
    trigger_text = json_text.encode_for_storage(trigger)
    rows = yield (
        f"{_INSERT} ON CONFLICT (id) DO NOTHING RETURNING {_RUN.sql}",
        (run_id, agent_entity_id, space_id, status, trigger_text, 0, "{}", None, now_ms(), None, 0),
    )
    return _RUN.decode_first(rows)


def find(run_id: str) -> Program[RunRecord | None]:
    return _RUN.decode_first((yield f"SELECT {_RUN.sql} FROM runs WHERE id = ?", (run_id,)))


def list_runs(
    *,
    agent_entity_id: str | None = None,
    space_id: str | None = None,
    status: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[RunRecord]]:
    """Runs, newest first. `before`: older than this run."""
    columns = {"agent_entity_id": agent_entity_id, "space_id": space_id, "status": status}
    filters = {column: value for column, value in columns.items() if value is not None}
    where = [f"{column} = ?" for column in filters]
    values: list[Any] = list(filters.values())
    if before is not None:
        where.append("(created_at, id) < (SELECT created_at, id FROM runs WHERE id = ?)")
        values.append(before)
    condition = f"WHERE {' AND '.join(where)} " if where else ""
    rows = yield (
        f"SELECT {_RUN.sql} FROM runs {condition}ORDER BY created_at DESC, id DESC LIMIT ?",
        (*values, limit),
    )
    return _RUN.decode_all(rows)


def update_status(
    run_id: str,
    status: RunStatus,
    *,
    from_statuses: Sequence[RunStatus],
    error: str | None = None,
    usage: Mapping[str, Any] | None = None,
    ends: bool = False,
) -> Program[RunRecord | None]:
    """Changes the status of a run. None if it had none of `from_statuses`. `ends`: it is completed now."""
    usage_text = None if usage is None else json_text.encode_for_storage(usage)
    rows = yield (
        "UPDATE runs SET status = ?, error = COALESCE(?, error), usage = COALESCE(?, usage), completed_at = ? "
        f"WHERE id = ? AND status IN ({placeholders(from_statuses)}) RETURNING {_RUN.sql}",
        (status, error, usage_text, now_ms() if ends else None, run_id, *from_statuses),
    )
    return _RUN.decode_first(rows)


def set_space(run_id: str, space_id: str | None) -> Program[RunRecord | None]:
    """Sets the active space of a run; None for no space."""
    rows = yield f"UPDATE runs SET space_id = ? WHERE id = ? RETURNING {_RUN.sql}", (space_id, run_id)
    return _RUN.decode_first(rows)


def clear_space(space_id: str, *, agent_entity_id: str | None = None) -> Program[None]:
    """Takes open runs out of a space; only those of one agent, if it is given."""
    yield (
        "UPDATE runs SET space_id = NULL WHERE space_id = ? AND agent_entity_id = COALESCE(?, agent_entity_id) "
        f"AND status IN {_OPEN}",
        (space_id, agent_entity_id),
    )


def list_open_of_agent(agent_entity_id: str) -> Program[list[str]]:
    """The ids of an agent's runs that have not ended."""
    rows = yield (
        f"SELECT id FROM runs WHERE agent_entity_id = ? AND status IN {_OPEN} ORDER BY id",
        (agent_entity_id,),
    )
    return [row[0] for row in rows]


def record_step(run_id: str, number: int, usage: str | None) -> Program[bool]:
    """Stores the number of a step and the usage so far. False if the run has ended."""
    rows = yield (
        f"UPDATE runs SET steps = ?, usage = COALESCE(?, usage) WHERE id = ? AND status IN {_OPEN} RETURNING id",
        (number, usage, run_id),
    )
    return bool(rows)


def advance_step(run_id: str, step: int) -> Program[None]:
    """Stores the number of a step, unless the run has a higher one."""
    yield "UPDATE runs SET steps = ? WHERE id = ? AND steps < ?", (step, run_id, step)


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` runs that ended before a time and have no calls left, with their streams."""
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


# MERGED from open_work_counts: SQL programs that count open work, for metrics and operators. They change nothing.


class OpenWorkCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What is open in the database now, in all processes that share it."""

    calls: dict[str, int]
    """Calls without a result, by status."""
    inbox: dict[str, int]
    """Events of all agents that are not processed, by status."""
    runs: dict[str, int]
    """Runs that have not ended, by status."""
    nodes: int
    """Processes that share the database."""


def count_open_work() -> Program[OpenWorkCounts]:
    calls = yield from _count_by_status("calls", ("running", "waiting", "pending"))
    inbox = yield from _count_by_status("inbox", ("pending", "processing", "failed"))
    runs = yield from _count_by_status("runs", ("queued", "running", "waiting_tool"))
    nodes = yield "SELECT COUNT(*) FROM nodes", ()
    return OpenWorkCounts(calls=calls, inbox=inbox, runs=runs, nodes=nodes[0][0])


def _count_by_status(table: str, statuses: tuple[str, ...]) -> Program[dict[str, int]]:
    listed = ", ".join(f"'{status}'" for status in statuses)  # As literals: only then a partial index can be used.
    rows = yield f"SELECT status, COUNT(*) FROM {table} WHERE status IN ({listed}) GROUP BY status", ()
    return {**dict.fromkeys(statuses, 0), **{row[0]: row[1] for row in rows}}

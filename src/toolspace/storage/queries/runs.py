"""SQL programs for runs, and counts of all work that is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from toolspace.core.stored_records import RunRecord, RunStatus, run_stream
from toolspace.storage.database import Program, current_time, long_running
from toolspace.storage.queries.statement_builder import (
    Table,
    delete_selected,
    first_column,
    first_value,
    has_changed,
    json_or_null,
    placeholders,
    where_clause,
    without_index,
)

_RUN = Table(
    "runs",
    RunRecord,
    columns={"trigger": "trigger_data"},
    json=("trigger", "usage"),
    flags=("tool_budget_exceeded",),
)
_OPEN = "('queued', 'running', 'waiting_tool')"


def create(
    run_id: str,
    agent_entity_id: str,
    *,
    space_id: str | None,
    trigger: Any,
    principal: str | None = None,
    session_id: str | None = None,
    status: RunStatus = "running",
) -> Program[RunRecord | None]:
    """None if the id is in use. Without a principal, the agent works for itself; without a session, in its main one."""
    now = yield from current_time()
    return (
        yield from _RUN.insert(
            id=run_id,
            agent_entity_id=agent_entity_id,
            space_id=space_id,
            status=status,
            trigger=trigger,
            steps=0,
            usage={},
            created_at=now,
            principal=principal if principal is not None else agent_entity_id,
            session_id=session_id if session_id is not None else agent_entity_id,
            last_call_seq=0,
        )
    )


def find(run_id: str) -> Program[RunRecord | None]:
    return _RUN.find("WHERE id = ?", run_id)


def list_runs(
    *,
    agent_entity_id: str | None = None,
    space_id: str | None = None,
    status: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[RunRecord]]:
    """Runs, newest first. `before`: older than this run."""
    has_other_filter = agent_entity_id is not None or space_id is not None
    conditions, values = where_clause(
        ("agent_entity_id = ?", agent_entity_id),
        ("space_id = ?", space_id),
        (f"{without_index('status') if has_other_filter else 'status'} = ?", status),
        ("(created_at, id) < (SELECT created_at, id FROM runs WHERE id = ?)", before),
    )
    return _RUN.select(f"{conditions}ORDER BY created_at DESC, id DESC LIMIT ?", *values, limit)


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
    assignments = (
        "status = ?, error = COALESCE(?, error), usage = COALESCE(?, usage), completed_at = ? "
        f"WHERE id = ? AND status IN ({placeholders(from_statuses)})"
    )
    now = yield from current_time()
    completed_at = now if ends else None
    return (
        yield from _RUN.update(assignments, status, error, json_or_null(usage), completed_at, run_id, *from_statuses)
    )


def set_space(run_id: str, space_id: str | None) -> Program[RunRecord | None]:
    """Sets the active space of a run; None for no space."""
    return _RUN.update("space_id = ? WHERE id = ?", space_id, run_id)


def clear_space(space_id: str, *, agent_entity_id: str | None = None) -> Program[None]:
    """Takes open runs out of a space; only those of one agent, if it is given."""
    yield (
        "UPDATE runs SET space_id = NULL WHERE space_id = ? AND agent_entity_id = COALESCE(?, agent_entity_id) "
        f"AND status IN {_OPEN}",
        (space_id, agent_entity_id),
    )


def list_open_of_agent(agent_entity_id: str) -> Program[list[str]]:
    """The ids of an agent's runs that have not ended."""
    select = f"SELECT id FROM runs WHERE agent_entity_id = ? AND status IN {_OPEN} ORDER BY id"
    return first_column(select, agent_entity_id)


def record_step(run_id: str, number: int, usage: str | None) -> Program[bool]:
    """Stores the number of a step and the usage so far. False if the run has ended."""
    update = f"UPDATE runs SET steps = ?, usage = COALESCE(?, usage) WHERE id = ? AND status IN {_OPEN}"
    return has_changed(update, number, usage, run_id)


def set_usage(run_id: str, usage: Mapping[str, Any]) -> Program[None]:
    """Stores what a run has used, also of one that has ended."""
    yield "UPDATE runs SET usage = ? WHERE id = ?", (json_or_null(usage), run_id)


def advance_step(run_id: str, step: int) -> Program[None]:
    """Stores the number of a step, unless the run has a higher one."""
    yield "UPDATE runs SET steps = ? WHERE id = ? AND steps < ?", (step, run_id, step)


def mark_budget_exceeded(run_id: str) -> Program[None]:
    """Stores that a result did not fit into the context window of a run."""
    yield "UPDATE runs SET tool_budget_exceeded = 1 WHERE id = ?", (run_id,)


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes runs that ended before a time and have no calls left, with their events: at most `limit` rows.

    Returns how many rows. A run whose events are too many for this time stays until the others are deleted, too.
    """
    without_calls = "NOT EXISTS (SELECT 1 FROM calls WHERE calls.run_id = runs.id)"
    clauses = f"WHERE completed_at < ? AND {without_calls} ORDER BY completed_at LIMIT ?"
    count = 0
    for run_id in (yield from first_column(f"SELECT id FROM runs {clauses}", before, limit)):
        stream = run_stream(run_id)
        events = "WHERE stream = ? ORDER BY id LIMIT ?"
        count += len((yield from delete_selected("events", "stream, id", events, stream, limit - count)))
        if count >= limit:
            break
        yield "DELETE FROM streams WHERE stream = ?", (stream,)
        yield "DELETE FROM runs WHERE id = ?", (run_id,)
        count += 1
        if count >= limit:
            break
    return count


# Open work, for metrics and operators


MAX_COUNT: Final = 100_000
"""How far open work is counted: more is shown as this number."""


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
    return OpenWorkCounts(
        calls=(yield from _count_by_status("calls", "running", "waiting", "pending")),
        inbox=(yield from _count_by_status("inbox", "pending", "processing", "failed")),
        runs=(yield from _count_by_status("runs", "queued", "running", "waiting_tool")),
        nodes=(yield from first_value("SELECT COUNT(*) FROM nodes")),
    )


def _count_by_status(table: str, *statuses: str) -> Program[dict[str, int]]:
    """How many rows have each status, at most `MAX_COUNT` of each."""
    counts: dict[str, int] = {}
    for status in statuses:
        # The status is a literal, not a parameter: only then a partial index can be used.
        rows = f"SELECT 1 FROM {table} WHERE status = '{status}' LIMIT {MAX_COUNT}"
        counts[status] = yield from first_value(f"SELECT COUNT(*) FROM ({rows}) AS counted")
    return counts

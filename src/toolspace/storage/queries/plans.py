"""Programs for what agents plan: each plan has the time when it fires next, which is moved on by compare-and-set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from toolspace.core.ids import now_ms
from toolspace.core.records import Record
from toolspace.storage.database import Program, Row

PlanStatus = Literal["active", "completed", "expired"]
_COLUMNS = (
    "id, entity_id, name, instruction, run_after, scheduled_at, cron, timezone, status, next_run_at, last_run_at, "
    "created_at, updated_at"
)

MAX_PLANS = 500
"""Of one agent."""


class Plan(Record, frozen=True):
    """Something that an agent wants to be told of at a time."""

    id: str
    entity_id: str
    name: str
    instruction: str
    run_after: str | None
    """As it was said."""
    scheduled_at: int | None
    cron: str | None
    timezone: str | None
    status: PlanStatus
    next_run_at: int | None
    last_run_at: int | None
    created_at: int
    updated_at: int


def save(plan: Plan) -> Program[Plan | None]:
    """Adds a plan, or changes the agent's own of that id. None where the id is another agent's."""
    rows = yield (
        f"INSERT INTO plans ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET name = excluded.name, instruction = excluded.instruction, "
        "run_after = excluded.run_after, scheduled_at = excluded.scheduled_at, cron = excluded.cron, "
        "timezone = excluded.timezone, status = excluded.status, next_run_at = excluded.next_run_at, "
        "updated_at = excluded.updated_at WHERE plans.entity_id = excluded.entity_id "
        f"RETURNING {_COLUMNS}",
        (
            plan.id,
            plan.entity_id,
            plan.name,
            plan.instruction,
            plan.run_after,
            plan.scheduled_at,
            plan.cron,
            plan.timezone,
            plan.status,
            plan.next_run_at,
            plan.last_run_at,
            plan.created_at,
            plan.updated_at,
        ),
    )
    return _plan(rows[0]) if rows else None


def find(plan_id: str) -> Program[Plan | None]:
    rows = yield f"SELECT {_COLUMNS} FROM plans WHERE id = ?", (plan_id,)
    return _plan(rows[0]) if rows else None


def list_plans(entity_id: str, *, status: str | None = None) -> Program[list[Plan]]:
    """The plans of an agent, the next to fire first."""
    only, values = ("AND status = ? ", (status,)) if status is not None else ("", ())
    rows = yield (
        f"SELECT {_COLUMNS} FROM plans WHERE entity_id = ? {only}"
        "ORDER BY CASE WHEN next_run_at IS NULL THEN 1 ELSE 0 END, next_run_at, created_at, id",
        (entity_id, *values),
    )
    return [_plan(row) for row in rows]


def count(entity_id: str) -> Program[int]:
    rows = yield "SELECT COUNT(*) FROM plans WHERE entity_id = ?", (entity_id,)
    return rows[0][0]


def delete(entity_id: str, plan_ids: Sequence[str]) -> Program[int]:
    """Says how many of them there were; none of another agent's."""
    deleted = 0
    for plan_id in dict.fromkeys(plan_ids):
        rows = yield "DELETE FROM plans WHERE id = ? AND entity_id = ? RETURNING id", (plan_id, entity_id)
        deleted += len(rows)
    return deleted


def list_due(*, limit: int) -> Program[list[Plan]]:
    rows = yield (
        f"SELECT {_COLUMNS} FROM plans WHERE status = 'active' AND next_run_at <= ? ORDER BY next_run_at LIMIT ?",
        (now_ms(), limit),
    )
    return [_plan(row) for row in rows]


def find_next_due() -> Program[int | None]:
    rows = yield "SELECT MIN(next_run_at) FROM plans WHERE status = 'active'", ()
    return rows[0][0]


def advance(plan: Plan, *, status: PlanStatus, next_run_at: int | None) -> Program[bool]:
    """A plan fires now, and next at another time. False where someone else moved it on already."""
    rows = yield (
        "UPDATE plans SET status = ?, next_run_at = ?, last_run_at = ? "
        "WHERE id = ? AND status = 'active' AND next_run_at = ? RETURNING id",
        (status, next_run_at, now_ms(), plan.id, plan.next_run_at),
    )
    return bool(rows)


def _plan(row: Row) -> Plan:
    return Plan(
        id=row[0],
        entity_id=row[1],
        name=row[2],
        instruction=row[3],
        run_after=row[4],
        scheduled_at=row[5],
        cron=row[6],
        timezone=row[7],
        status=row[8],
        next_run_at=row[9],
        last_run_at=row[10],
        created_at=row[11],
        updated_at=row[12],
    )

"""SQL programs for plans. `next_run_at` is when a plan fires next; a compare-and-set advances it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from toolspace.core.stored_records import Record
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries.statement_builder import Table, count_changes, first_value, has_changed, where_clause

PlanStatus = Literal["active", "completed", "expired"]

MAX_PLANS = 500
"""Of one session."""


class Plan(Record, frozen=True):
    """An instruction that an agent gets in its inbox at a time, once or repeatedly."""

    id: str
    """The id of the plan."""
    entity_id: str
    """The agent of the plan."""
    name: str
    """The name of the plan."""
    instruction: str
    """What the agent is told when the plan runs."""
    run_after: str | None
    """The delay as the agent gave it."""
    scheduled_at: int | None
    """When it runs once, in Unix milliseconds."""
    cron: str | None
    """The cron expression of a repeated plan."""
    timezone: str | None
    """The time zone of times without an offset."""
    status: PlanStatus
    """The status of the plan."""
    next_run_at: int | None
    """When it runs next, in Unix milliseconds; null if it does not."""
    last_run_at: int | None
    """When it last ran, in Unix milliseconds."""
    created_at: int
    """When the plan was created, in Unix milliseconds."""
    updated_at: int
    """When the plan was last changed, in Unix milliseconds."""
    principal: str | None = None
    """For whom the agent works when the plan runs: whoever created or last changed it; null: for itself."""
    session_id: str = ""
    """The session of the agent that the plan belongs to."""


_PLAN = Table("plans", Plan)
_OR_REPLACE_OWN = (
    _PLAN.on_conflict_update("id", except_columns=("id", "entity_id", "session_id", "last_run_at", "created_at"))
    + " WHERE plans.session_id = excluded.session_id"
)


def save(plan: Plan) -> Program[Plan | None]:
    """Adds a plan, or changes the session's own of that id. None if the plan of that id is another session's."""
    return _PLAN.insert(_OR_REPLACE_OWN, **msgspec.structs.asdict(plan))


def find(plan_id: str) -> Program[Plan | None]:
    return _PLAN.find("WHERE id = ?", plan_id)


def list_plans(session_id: str, *, status: str | None = None) -> Program[list[Plan]]:
    """The plans of a session, the next to fire first."""
    return _list_plans(("session_id = ?", session_id), ("status = ?", status))


def list_plans_of_agent(entity_id: str, *, status: str | None = None) -> Program[list[Plan]]:
    """The plans of all sessions of an agent, the next to fire first."""
    return _list_plans(("entity_id = ?", entity_id), ("status = ?", status))


def _list_plans(*conditions: tuple[str, str | None]) -> Program[list[Plan]]:
    condition, values = where_clause(*conditions)
    order = "ORDER BY CASE WHEN next_run_at IS NULL THEN 1 ELSE 0 END, next_run_at, created_at, id"
    return _PLAN.select(condition + order, *values)


def count(session_id: str) -> Program[int]:
    return first_value("SELECT COUNT(*) FROM plans WHERE session_id = ?", session_id)


def delete(session_id: str, plan_ids: Sequence[str]) -> Program[int]:
    """Deletes plans of one session; returns how many there were."""
    deleted_count = 0
    for plan_id in dict.fromkeys(plan_ids):
        deleted_count += yield from count_changes(
            "DELETE FROM plans WHERE id = ? AND session_id = ?", plan_id, session_id
        )
    return deleted_count


def list_due(*, limit: int) -> Program[list[Plan]]:
    now = yield from current_time()
    return (
        yield from _PLAN.select("WHERE status = 'active' AND next_run_at <= ? ORDER BY next_run_at LIMIT ?", now, limit)
    )


def find_next_due() -> Program[int | None]:
    return first_value("SELECT MIN(next_run_at) FROM plans WHERE status = 'active'")


def advance(plan: Plan, *, status: PlanStatus, next_run_at: int | None) -> Program[bool]:
    """A plan fires now, and next at another time. False if another process advanced it already."""
    update = (
        "UPDATE plans SET status = ?, next_run_at = ?, last_run_at = ? "
        "WHERE id = ? AND status = 'active' AND next_run_at = ?"
    )
    now = yield from current_time()
    return (yield from has_changed(update, status, next_run_at, now, plan.id, plan.next_run_at))

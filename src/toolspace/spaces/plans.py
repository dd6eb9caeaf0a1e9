"""The transactions of plans: validated when an agent creates them, fired once each time they are due."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toolspace.core.ids import agent_of_session, new_id
from toolspace.core.times import (
    format_iso,
    from_milliseconds,
    get_time_zone,
    next_cron_time,
    parse_delay,
    parse_iso_time,
    to_milliseconds,
)
from toolspace.errors import RefusedError
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries import inbox
from toolspace.storage.queries import plans as plan_queries
from toolspace.storage.queries.plans import MAX_PLANS, Plan, PlanStatus


class NewPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A new plan, or with an id a change of one. Exactly one of `run_after`, `scheduled_at` and `cron` is set."""

    name: str
    instruction: str
    id: str | None = None
    run_after: str | None = None
    scheduled_at: str | None = None
    cron: str | None = None
    timezone: str | None = None


def set_plans(
    effects: Effects, session_id: str, plans: Sequence[NewPlan], *, principal: str | None
) -> Program[list[Plan]]:
    """Creates or changes plans of one session, all or none. They run for the principal who changed them last."""
    now = yield from current_time()
    saved_plans: list[Plan] = []
    for new in plans:
        before = (yield from plan_queries.find(new.id)) if new.id is not None else None
        if new.id is not None and (before is None or before.session_id != session_id):
            raise RefusedError("not_found", f'you have no plan "{new.id}"; leave the id out to make a new one')
        plan = yield from plan_queries.save(_build_plan(new, session_id, before, principal, now=now))
        if plan is None:
            raise RefusedError("not_found", f'you have no plan "{new.id}"')
        saved_plans.append(plan)
    if (yield from plan_queries.count(session_id)) > MAX_PLANS:
        raise RefusedError("invalid", f"an agent has at most {MAX_PLANS} plans; delete some first")
    effects.wake_keys.append("plans")
    return saved_plans


def fire(effects: Effects, plan: Plan) -> Program[bool]:
    """Adds a due plan to the inbox of its session and sets its next run. Exactly once, whatever processes try it.

    A cron plan that was missed several times while no process ran fires once.
    """
    due = plan.next_run_at
    if due is None:
        return False
    status: PlanStatus = "completed"
    next_run_at: int | None = None
    if plan.cron is not None:
        now = yield from current_time()
        next_time = next_cron_time(plan.cron, from_milliseconds(max(now, due)), plan.timezone)
        next_run_at = to_milliseconds(next_time) if next_time is not None else None
        status = "active" if next_run_at is not None else "expired"
    if not (yield from plan_queries.advance(plan, status=status, next_run_at=next_run_at)):
        return False
    data = {
        "planId": plan.id,
        "name": plan.name,
        "instruction": plan.instruction,
        "scheduledFor": format_iso(due),
        "nextRunAt": format_iso(next_run_at) if next_run_at is not None else None,
    }
    yield from inbox.add(plan.session_id, f"plan:{plan.id}:{due}", "plan", data, priority=inbox.PLAN_OR_SERVICE)
    effects.notify_inbox(plan.session_id)
    return True


def describe(plan: Plan) -> dict[str, object]:
    """A plan as its agent sees it."""
    texts = {"runAfter": plan.run_after, "cron": plan.cron, "timezone": plan.timezone}
    times = {"scheduledAt": plan.scheduled_at, "nextRunAt": plan.next_run_at, "lastRunAt": plan.last_run_at}
    return {
        "id": plan.id,
        "name": plan.name,
        "instruction": plan.instruction,
        **{key: value for key, value in texts.items() if value is not None},
        **{key: format_iso(value) for key, value in times.items() if value is not None},
        "status": plan.status,
    }


def _build_plan(new: NewPlan, session_id: str, before: Plan | None, principal: str | None, *, now: int) -> Plan:
    schedules = {"runAfter": new.run_after, "scheduledAt": new.scheduled_at, "cron": new.cron}
    names = [name for name, value in schedules.items() if value is not None]
    if len(names) != 1:
        reason = f"has {' and '.join(names)}" if names else "has none of them"
        advice = "give exactly one of runAfter, scheduledAt and cron"
        raise RefusedError("invalid", f'plan "{new.name}": {advice}; it {reason}')
    scheduled_at: int | None = None
    next_run_at: int | None
    try:
        get_time_zone(new.timezone)
        if new.cron is not None:
            next_time = next_cron_time(new.cron, from_milliseconds(now), new.timezone)
            if next_time is None:
                raise ValueError(f"{new.cron!r} never comes")
            next_run_at = to_milliseconds(next_time)
        elif new.run_after is not None:
            scheduled_at = next_run_at = now + round(parse_delay(new.run_after) * 1000)
        else:
            scheduled_at = next_run_at = to_milliseconds(parse_iso_time(new.scheduled_at or "", new.timezone))
            if next_run_at <= now:
                raise ValueError(f"{new.scheduled_at!r} is in the past; it is {format_iso(now)} now")
    except ValueError as error:
        raise RefusedError("invalid", f'plan "{new.name}": {error}') from None
    return Plan(
        id=before.id if before is not None else new_id("plan"),
        entity_id=agent_of_session(session_id),
        name=new.name,
        instruction=new.instruction,
        run_after=new.run_after,
        scheduled_at=scheduled_at,
        cron=new.cron,
        timezone=new.timezone,
        status="active",
        next_run_at=next_run_at,
        last_run_at=before.last_run_at if before is not None else None,
        created_at=before.created_at if before is not None else now,
        updated_at=now,
        principal=principal,
        session_id=session_id,
    )

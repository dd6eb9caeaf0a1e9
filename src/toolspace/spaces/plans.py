"""Plans: checked when an agent makes them, and fired once each time that they are due."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toolspace.core.ids import new_id, now_ms
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
from toolspace.storage.database import Program
from toolspace.storage.queries import inbox
from toolspace.storage.queries import plans as rows
from toolspace.storage.queries.plans import MAX_PLANS, Plan, PlanStatus


class NewPlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A plan as an agent makes it, or with an id what becomes of one. Exactly one of the three says when."""

    name: str
    instruction: str
    id: str | None = None
    run_after: str | None = None
    scheduled_at: str | None = None
    cron: str | None = None
    timezone: str | None = None


def set_plans(effects: Effects, entity_id: str, plans: Sequence[NewPlan]) -> Program[list[Plan]]:
    """Makes or changes plans of one agent, all or none."""
    made: list[Plan] = []
    for new in plans:
        before = (yield from rows.find(new.id)) if new.id is not None else None
        if new.id is not None and (before is None or before.entity_id != entity_id):
            raise RefusedError("not_found", f'you have no plan "{new.id}"; leave the id out to make a new one')
        stored = yield from rows.save(_scheduled(new, entity_id, before))
        if stored is None:
            raise RefusedError("not_found", f'you have no plan "{new.id}"')
        made.append(stored)
    if (yield from rows.count(entity_id)) > MAX_PLANS:
        raise RefusedError("invalid", f"an agent has at most {MAX_PLANS} plans; delete some first")
    effects.wake_keys.append("plans")
    return made


def fire(effects: Effects, plan: Plan) -> Program[bool]:
    """Tells the agent that its plan is due, and moves it on: exactly once, in whichever process.

    A cron that was missed while nothing ran fires once, however often it would have.
    """
    due = plan.next_run_at
    if due is None:
        return False
    status: PlanStatus = "completed"
    following: int | None = None
    if plan.cron is not None:
        found = next_cron_time(plan.cron, from_milliseconds(max(now_ms(), due)), plan.timezone)
        following = to_milliseconds(found) if found is not None else None
        status = "active" if following is not None else "expired"
    if not (yield from rows.advance(plan, status=status, next_run_at=following)):
        return False
    data = {
        "planId": plan.id,
        "name": plan.name,
        "instruction": plan.instruction,
        "scheduledFor": format_iso(due),
        "nextRunAt": format_iso(following) if following is not None else None,
    }
    yield from inbox.add(plan.entity_id, f"plan:{plan.id}:{due}", "plan", data, priority=inbox.PLAN_OR_SERVICE)
    effects.notify_inbox(plan.entity_id)
    return True


def describe(plan: Plan) -> dict[str, object]:
    """A plan as its agent sees it."""
    times = {"scheduledAt": plan.scheduled_at, "nextRunAt": plan.next_run_at, "lastRunAt": plan.last_run_at}
    said = {"runAfter": plan.run_after, "cron": plan.cron, "timezone": plan.timezone}
    return {
        "id": plan.id,
        "name": plan.name,
        "instruction": plan.instruction,
        **{key: value for key, value in said.items() if value is not None},
        **{key: format_iso(value) for key, value in times.items() if value is not None},
        "status": plan.status,
    }


def _scheduled(new: NewPlan, entity_id: str, before: Plan | None) -> Plan:
    now = now_ms()
    given = [name for name, value in _schedules(new).items() if value is not None]
    if len(given) != 1:
        said = f"has {' and '.join(given)}" if given else "has none of them"
        wanted = "give exactly one of runAfter, scheduledAt and cron"
        raise RefusedError("invalid", f'plan "{new.name}": {wanted}; it {said}')
    scheduled: int | None = None
    following: int | None
    try:
        get_time_zone(new.timezone)
        if new.cron is not None:
            found = next_cron_time(new.cron, from_milliseconds(now), new.timezone)
            if found is None:
                raise ValueError(f"{new.cron!r} never comes")
            following = to_milliseconds(found)
        elif new.run_after is not None:
            scheduled = following = now + round(parse_delay(new.run_after) * 1000)
        else:
            scheduled = following = to_milliseconds(parse_iso_time(new.scheduled_at or "", new.timezone))
            if following <= now:
                raise ValueError(f"{new.scheduled_at!r} is in the past; it is {format_iso(now)} now")
    except ValueError as error:
        raise RefusedError("invalid", f'plan "{new.name}": {error}') from None
    return Plan(
        id=before.id if before is not None else new_id("plan"),
        entity_id=entity_id,
        name=new.name,
        instruction=new.instruction,
        run_after=new.run_after,
        scheduled_at=scheduled,
        cron=new.cron,
        timezone=new.timezone,
        status="active",
        next_run_at=following,
        last_run_at=before.last_run_at if before is not None else None,
        created_at=before.created_at if before is not None else now,
        updated_at=now,
    )


def _schedules(new: NewPlan) -> dict[str, str | None]:
    return {"runAfter": new.run_after, "scheduledAt": new.scheduled_at, "cron": new.cron}

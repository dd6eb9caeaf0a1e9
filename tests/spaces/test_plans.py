"""Plans: checked when they are made, fired once, late rather than never."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace.errors import RefusedError
from toolspace.spaces import plans
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import plans as rows
from toolspace.storage.queries.plans import Plan


async def _set(harness: ServiceHarness, **fields: Any) -> Plan:
    new = NewPlan(**{"name": "Report", "instruction": "Write it", **fields})
    (made,) = await harness.ledger.commit(plans.set_plans, harness.agent, [new])
    return made


def _missed(plan_id: str, at: int) -> Program[None]:
    yield "UPDATE plans SET next_run_at = ? WHERE id = ?", (at, plan_id)


@pytest.mark.spec("9.4")
async def test_a_plan_fires_into_the_inbox_and_is_completed(database: Database) -> None:
    async with service_harness(database) as harness:
        told = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        plan = await _set(harness, run_after="1 second")
        assert plan.status == "active"
        await harness.ledger.write(_missed, plan.id, 1)  # It was due while nothing ran: it fires late.
        harness.sweeper.wake()
        await told
        (event,) = await harness.inbox()
        assert event.type == "plan"
        assert event.data["instruction"] == "Write it"
        (after,) = await harness.ledger.read(rows.list_plans, harness.agent)
        assert (after.status, after.next_run_at) == ("completed", None)


@pytest.mark.spec("9.4")
async def test_a_cron_that_was_missed_often_fires_once_and_goes_on(database: Database) -> None:
    async with service_harness(database) as harness:
        plan = await _set(harness, cron="* * * * *")
        await harness.ledger.write(_missed, plan.id, 60_000)  # Since 1970, every minute.
        (due,) = await harness.ledger.read(rows.list_due, limit=5)
        others = [Ledger(harness.ledger.database) for _ in range(3)]
        fired = await asyncio.gather(*(one.commit(plans.fire, due) for one in others))
        assert sorted(fired) == [False, False, True] or not any(fired)  # Or the sweeper was faster than all.
        assert len(await harness.inbox()) == 1
        (after,) = await harness.ledger.read(rows.list_plans, harness.agent)
        assert after.status == "active"
        assert after.next_run_at is not None
        assert after.next_run_at > 1_700_000_000_000


@pytest.mark.spec("9.4")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has none of them"),
        ({"cron": "* * * * *", "run_after": "1 hour"}, "has runAfter and cron"),
        ({"cron": "nonsense"}, "five fields"),
        ({"run_after": "soon"}, "2 hours"),
        ({"scheduled_at": "2001-01-01T00:00:00Z"}, "in the past"),
        ({"run_after": "1 hour", "timezone": "Mars"}, "time zone"),
    ],
)
async def test_a_plan_has_exactly_one_schedule_that_can_come(
    database: Database, fields: dict[str, Any], message: str
) -> None:
    async with service_harness(database) as harness:
        with pytest.raises(RefusedError, match=message):
            await _set(harness, **fields)
        assert await harness.ledger.read(rows.list_plans, harness.agent) == []


@pytest.mark.spec("9.4")
async def test_plans_of_others_are_neither_changed_nor_deleted(database: Database) -> None:
    async with service_harness(database) as harness:
        plan = await _set(harness, run_after="1 hour")
        with pytest.raises(RefusedError, match="you have no plan"):
            await harness.ledger.commit(
                plans.set_plans, harness.person, [NewPlan(id=plan.id, name="x", instruction="x", run_after="1 hour")]
            )
        assert await harness.ledger.write(rows.delete, harness.person, [plan.id]) == 0
        changed = await _set(harness, id=plan.id, cron="0 9 * * *")
        assert (changed.id, changed.cron, changed.run_after) == (plan.id, "0 9 * * *", None)
        assert await harness.ledger.write(rows.delete, harness.agent, [plan.id]) == 1

"""Plans: validated when they are created, fired once, late rather than never."""

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


async def _save_plan(harness: ServiceHarness, **fields: Any) -> Plan:
    new = NewPlan(**{"name": "Report", "instruction": "Write it", **fields})
    (plan,) = await harness.ledger.commit(plans.set_plans, harness.agent, [new], principal=None)
    return plan


def _make_overdue(plan_id: str, at: int) -> Program[None]:
    yield "UPDATE plans SET next_run_at = ? WHERE id = ?", (at, plan_id)


@pytest.mark.spec("9.4")
async def test_due_plan_is_added_to_the_inbox_and_completed(database: Database) -> None:
    async with service_harness(database) as harness:
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        plan = await _save_plan(harness, run_after="1 second")
        assert plan.status == "active"
        await harness.ledger.write(_make_overdue, plan.id, 1)  # It was due while no process ran: it fires late.
        harness.sweeper.wake()
        await notification
        (event,) = await harness.inbox()
        assert event.type == "plan"
        assert event.data["instruction"] == "Write it"
        (after,) = await harness.ledger.read(rows.list_plans, harness.agent)
        assert (after.status, after.next_run_at) == ("completed", None)


@pytest.mark.spec("9.4")
async def test_cron_plan_missed_several_times_fires_once(database: Database) -> None:
    async with service_harness(database) as harness:
        plan = await _save_plan(harness, cron="* * * * *")
        await harness.ledger.write(_make_overdue, plan.id, 60_000)  # Missed every minute since 1970.
        (due,) = await harness.ledger.read(rows.list_due, limit=5)
        ledgers = [Ledger(harness.ledger.database) for _ in range(3)]
        outcomes = await asyncio.gather(*(ledger.commit(plans.fire, due) for ledger in ledgers))
        assert sorted(outcomes) == [False, False, True] or not any(outcomes)  # Or the sweeper was faster.
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
async def test_plan_needs_exactly_one_possible_schedule(
    database: Database, fields: dict[str, Any], message: str
) -> None:
    async with service_harness(database) as harness:
        with pytest.raises(RefusedError, match=message):
            await _save_plan(harness, **fields)
        assert await harness.ledger.read(rows.list_plans, harness.agent) == []


@pytest.mark.spec("9.4")
async def test_plans_of_other_agents_cannot_be_changed_or_deleted(database: Database) -> None:
    async with service_harness(database) as harness:
        plan = await _save_plan(harness, run_after="1 hour")
        with pytest.raises(RefusedError, match="you have no plan"):
            await harness.ledger.commit(
                plans.set_plans,
                harness.person,
                [NewPlan(id=plan.id, name="x", instruction="x", run_after="1 hour")],
                principal=None,
            )
        assert await harness.ledger.write(rows.delete, harness.person, [plan.id]) == 0
        changed_plan = await _save_plan(harness, id=plan.id, cron="0 9 * * *")
        assert (changed_plan.id, changed_plan.cron, changed_plan.run_after) == (plan.id, "0 9 * * *", None)
        assert await harness.ledger.write(rows.delete, harness.agent, [plan.id]) == 1

"""The sweeper: calls, claims and inbox events of dead processes and departed workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, pending_tool, service_harness
from toolspace.core.ids import new_id
from toolspace.spaces import call_transactions, plans, runs
from toolspace.spaces.heartbeats import ProcessMonitor
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.plans import NewPlan
from toolspace.spaces.retention import Retention
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import call_delivery, inbox, workers_and_presence
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries.calls import NewCall

DEAD = "node_dead"


def _new(harness: ServiceHarness, run: str, **changes: Any) -> NewCall:
    fields: dict[str, Any] = {
        "call_id": new_id("call"),
        "run_id": run,
        "agent_entity_id": harness.agent,
        "space_id": harness.space,
        "tool_name": "t",
        "args": {},
        "execution_type": "external",
        "execution_target": "external",
        "visible": True,
        "visibility": "full",
        "status": "waiting",
        "node_id": DEAD,
    }
    return NewCall(**{**fields, **changes})


def _age_heartbeats(node_id: str) -> Program[None]:
    yield "UPDATE nodes SET seen_at = 1 WHERE id = ?", (node_id,)


async def _kill(harness: ServiceHarness) -> None:
    """A process of that id existed, and its last heartbeat is old."""
    await harness.ledger.write(workers_and_presence.record_heartbeat, DEAD, started_at=1)
    await harness.ledger.write(_age_heartbeats, DEAD)


async def _clean_up(harness: ServiceHarness) -> None:
    """Cleans up as another process does."""
    monitor = ProcessMonitor(Ledger(harness.ledger.database))
    for seconds in range(0, 12, 2):
        await harness.sweeper.heartbeats.send()  # The process of the harness is alive.
        await monitor.clean_up_silent(seconds)


@pytest.mark.spec("15.2")
async def test_calls_of_a_dead_process_end_or_go_to_the_inbox(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run(in_space=True)
        waiting_call = _new(harness, run)
        running_call = _new(harness, run, status="running", execution_type="function", execution_target="server")
        answered_call = _new(harness, run)
        delivered_call = _new(harness, run)
        for new in (waiting_call, running_call, answered_call, delivered_call):
            await harness.ledger.commit(call_transactions.start, new)
        for new in (answered_call, delivered_call):
            await harness.submit(new.call_id, "here")
        await harness.ledger.write(call_delivery.mark_delivered, [delivered_call.call_id])
        await _kill(harness)
        await _clean_up(harness)
        assert (await harness.get_call(waiting_call.call_id)).status == "pending"
        interrupted_call = await harness.get_call(running_call.call_id)
        assert (interrupted_call.status, interrupted_call.is_error) == ("failed", True)
        assert "interrupted" in interrupted_call.result
        # One result was stored and never delivered, so it goes to the inbox. The other one was delivered.
        assert [event.data["callId"] for event in await harness.inbox()] == [answered_call.call_id]
        states = {message.call_id: message.status for message in await harness.messages()}
        assert states[running_call.call_id] == "error"
        assert states[waiting_call.call_id] == "requires_action"
        await harness.submit(waiting_call.call_id, "late")
        assert {event.data["callId"] for event in await harness.inbox()} == {
            answered_call.call_id,
            waiting_call.call_id,
        }


@pytest.mark.spec("6.7")
async def test_claims_of_a_departed_worker_are_offered_again(database: Database) -> None:
    async with service_harness(database, pending_tool("t", is_async=True)) as harness:
        run = await harness.open_run()
        await harness.ledger.write(
            workers_and_presence.register_holder, "wrk_a", ["tool:t"], node_id=harness.ledger.node_id
        )
        call_id = (await harness.call(run, "t")).call_id
        (first_claim,) = await harness.ledger.write(call_rows.claim, "wrk_a", ["t"], limit=5)
        assert first_claim.call_id == call_id
        assert await harness.ledger.write(call_rows.claim, "wrk_b", ["t"], limit=5) == []
        wake_up = harness.ledger.waiters.register("offers:t")
        await harness.ledger.write(workers_and_presence.mark_left, "wrk_a", node_id=harness.ledger.node_id)
        await wake_up
        (second_claim,) = await harness.ledger.write(call_rows.claim, "wrk_b", ["t"], limit=5)
        assert second_claim.call_id == call_id


@pytest.mark.spec("7.3")
async def test_inbox_event_of_a_dead_process_is_released(database: Database) -> None:
    async with service_harness(database) as harness:
        await harness.ledger.write(inbox.add, harness.agent, "evt_1", "service", {"n": 1}, priority=2)
        (claimed_event,) = await harness.ledger.write(inbox.claim, harness.agent, "claim_1", count=5, lease_ms=1)
        assert claimed_event.status == "processing"
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        harness.sweeper.wake()
        await notification
        (event,) = await harness.inbox()
        assert (event.status, event.attempts) == ("pending", 1)


@pytest.mark.spec("6.1")
async def test_timer_survives_the_process_that_started_it(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        new = _new(
            harness, run, execution_type="wait", execution_target="server", status="waiting", due_at=1, visible=False
        )
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")

        def left_alone(effects: Effects) -> Program[None]:
            yield from call_transactions.start(effects, new)
            yield from call_transactions.make_pending(effects, new.call_id)

        await harness.ledger.commit(left_alone)
        harness.sweeper.wake()
        await notification
        (event,) = await harness.inbox()
        assert event.data["result"]["waited"] >= 0


def _break(plan_id: str) -> Program[None]:
    yield "UPDATE plans SET cron = 'never at all', next_run_at = 1 WHERE id = ?", (plan_id,)


async def test_failure_of_one_item_does_not_stop_the_sweep(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        daily = NewPlan(name="p", instruction="i", cron="0 9 * * *")
        (plan,) = await harness.ledger.commit(plans.set_plans, harness.agent, [daily], principal=None)
        await harness.ledger.write(_break, plan.id)
        new = _new(harness, run, status="pending", expires_at=1, node_id=harness.ledger.node_id)
        await harness.ledger.commit(call_transactions.start, new)
        await harness.sweeper.sweep()
        assert (await harness.get_call(new.call_id)).status == "expired"


async def test_overdue_waiting_call_becomes_pending(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        new = _new(harness, run, wait_until=1, node_id=harness.ledger.node_id)
        await harness.ledger.commit(call_transactions.start, new)
        await harness.sweeper.sweep()
        assert (await harness.get_call(new.call_id)).status == "pending"


@pytest.mark.spec("15.3")
async def test_process_is_dead_if_it_was_silent_while_another_watched(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        waiting_call = _new(harness, run)
        await harness.ledger.commit(call_transactions.start, waiting_call)
        await _kill(harness)
        monitor = ProcessMonitor(Ledger(database))

        async def after(*seconds: float) -> str:
            for at in seconds:
                await monitor.clean_up_silent(at)
            return (await harness.get_call(waiting_call.call_id)).status

        # Its last heartbeat is old, but the database may have been down.
        assert await after(100.0, 102.0, 104.0) == "waiting"
        await harness.ledger.write(workers_and_presence.record_heartbeat, DEAD, started_at=1)
        assert await after(106.0, 108.0, 110.0, 112.0, 114.0) == "waiting"
        # After a gap between two checks, the silence starts anew.
        assert await after(130.0, 132.0, 134.0, 136.0, 138.0) == "waiting"
        assert await after(140.0) == "pending"


async def test_process_that_was_declared_dead_is_notified(database: Database) -> None:
    async with service_harness(database) as harness:
        declared_dead = asyncio.Event()

        async def hear() -> None:
            declared_dead.set()

        harness.sweeper.heartbeats.on_declared_dead = hear
        await harness.sweeper.heartbeats.send()
        assert not declared_dead.is_set()
        await harness.ledger.write(workers_and_presence.delete_node, harness.ledger.node_id)
        await harness.sweeper.heartbeats.send()
        assert declared_dead.is_set()


async def test_process_is_notified_even_if_its_heartbeat_was_cancelled(database: Database) -> None:
    async with service_harness(database) as harness:
        await harness.sweeper.__aexit__()  # It would send heartbeats, too.
        declared_dead = asyncio.Event()

        async def hear() -> None:
            declared_dead.set()

        harness.sweeper.heartbeats.on_declared_dead = hear
        heartbeat_task = asyncio.create_task(harness.sweeper.heartbeats.send())
        await asyncio.sleep(0)
        heartbeat_task.cancel()
        await asyncio.gather(heartbeat_task, return_exceptions=True)
        assert heartbeat_task.cancelled()
        async with asyncio.timeout(30):
            await declared_dead.wait()


@pytest.mark.spec("15.2")
async def test_stopped_process_leaves_no_open_calls(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        other_ledger = Ledger(database)
        running_call = _new(harness, run, status="running", execution_target="server", node_id=other_ledger.node_id)
        async with Sweeper(other_ledger):
            await harness.ledger.commit(call_transactions.start, running_call)
        assert (await harness.get_call(running_call.call_id)).status == "failed"
        nodes = await harness.ledger.read(workers_and_presence.list_heartbeats, except_node=harness.ledger.node_id)
        assert nodes == {}


@pytest.mark.spec("7.1")
async def test_old_ended_records_are_deleted_and_open_ones_and_messages_stay(database: Database) -> None:
    async with service_harness(database, pending_tool("ask", is_async=True, visible=True)) as harness:
        ended_run, open_run = await harness.open_run(in_space=True), await harness.open_run(in_space=True)
        ended_call_id = (await harness.call(ended_run, "ask")).call_id
        await harness.submit(ended_call_id, "yes")
        (event,) = await harness.inbox()
        await harness.ledger.write(inbox.claim, harness.agent, "claim_1", count=1, lease_ms=60_000)
        await harness.ledger.write(inbox.acknowledge, harness.agent, "claim_1", [event.event_id])
        await harness.ledger.write(inbox.add, harness.agent, "evt_new", "service", {}, priority=2)
        await harness.ledger.commit(runs.close_run, ended_run)
        pending = (await harness.call(open_run, "ask")).call_id

        await Retention(Ledger(database)).delete_old_records()
        assert await harness.ledger.read(call_rows.find, ended_call_id) is not None
        await Retention(Ledger(database), retention=-1).delete_old_records()

        assert await harness.ledger.read(call_rows.find, ended_call_id) is None
        assert await harness.ledger.read(run_rows.find, ended_run) is None
        assert await harness.events(f"run:{ended_run}") == []
        assert [event.event_id for event in await harness.inbox()] == ["evt_new"]
        assert (await harness.get_call(pending)).status == "pending"
        assert await harness.ledger.read(run_rows.find, open_run) is not None
        assert [(message.call_id, message.status) for message in await harness.messages()] == [
            (ended_call_id, "complete"),
            (pending, "requires_action"),
        ]

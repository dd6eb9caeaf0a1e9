"""What becomes of calls, claims and inbox events when the process or the worker that had them is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, pending_tool, service_harness
from toolspace.core.ids import new_id, now_ms
from toolspace.spaces import call_transactions, plans, runs
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.plans import NewPlan
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import inbox, presence
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


def _silence(node_id: str) -> Program[None]:
    yield "UPDATE nodes SET seen_at = 1 WHERE id = ?", (node_id,)


async def _die(harness: ServiceHarness) -> None:
    """A process of that name was there, and has not been heard of for long."""
    await harness.ledger.write(presence.record_heartbeat, DEAD, started_at=1)
    await harness.ledger.write(_silence, DEAD)


async def _clear_up(harness: ServiceHarness) -> None:
    """As another process does it that starts, or looks around."""
    other = Ledger(harness.ledger.database)
    sweeper = Sweeper(other)
    await sweeper.clean_up_dead_nodes(2)


@pytest.mark.spec("15.2")
async def test_what_a_dead_process_left_behind_ends_or_goes_to_the_inbox(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run(in_space=True)
        waiting = _new(harness, run)
        running = _new(harness, run, status="running", execution_type="function", execution_target="server")
        answered = _new(harness, run)
        arrived = _new(harness, run)
        for new in (waiting, running, answered, arrived):
            await harness.ledger.commit(call_transactions.start, new)
        for new in (answered, arrived):
            await harness.submit(new.call_id, "here")
        await harness.ledger.write(call_rows.mark_delivered, [arrived.call_id])
        await _die(harness)
        await _clear_up(harness)
        assert (await harness.get_call(waiting.call_id)).status == "pending"
        interrupted = await harness.get_call(running.call_id)
        assert (interrupted.status, interrupted.is_error) == ("failed", True)
        assert "interrupted" in interrupted.result
        # Its answer was written down, and never reached who waited: so it goes to the inbox. The other arrived.
        assert [event.data["callId"] for event in await harness.inbox()] == [answered.call_id]
        states = {message.call_id: message.status for message in await harness.messages()}
        assert states[running.call_id] == "error"
        assert states[waiting.call_id] == "requires_action"
        await harness.submit(waiting.call_id, "late")
        assert {event.data["callId"] for event in await harness.inbox()} == {answered.call_id, waiting.call_id}


@pytest.mark.spec("6.7")
async def test_claims_of_a_worker_that_went_away_are_offered_again(database: Database) -> None:
    async with service_harness(database, pending_tool("t", is_async=True)) as harness:
        run = await harness.open_run()
        await harness.ledger.write(presence.register, "wrk_a", ["tool:t"], node_id=harness.ledger.node_id)
        call_id = (await harness.call(run, "t")).call_id
        (claimed,) = await harness.ledger.write(call_rows.claim, "wrk_a", ["t"], limit=5)
        assert claimed.call_id == call_id
        assert await harness.ledger.write(call_rows.claim, "wrk_b", ["t"], limit=5) == []
        offered = harness.ledger.waiters.register("offers:t")
        await harness.ledger.write(presence.mark_left, "wrk_a", node_id=harness.ledger.node_id)
        await offered
        (again,) = await harness.ledger.write(call_rows.claim, "wrk_b", ["t"], limit=5)
        assert again.call_id == call_id


@pytest.mark.spec("7.3")
async def test_an_inbox_event_comes_back_when_the_process_that_took_it_is_gone(database: Database) -> None:
    async with service_harness(database) as harness:
        await harness.ledger.write(inbox.add, harness.agent, "evt_1", "service", {"n": 1}, priority=2)
        (taken,) = await harness.ledger.write(inbox.claim, harness.agent, "claim_1", count=5, lease_ms=1)
        assert taken.status == "processing"
        told = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        harness.sweeper.wake()
        await told
        (event,) = await harness.inbox()
        assert (event.status, event.attempts) == ("pending", 1)


@pytest.mark.spec("6.1")
async def test_a_wait_survives_the_process_that_began_it(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        new = _new(
            harness, run, execution_type="wait", execution_target="server", status="waiting", due_at=1, visible=False
        )
        told = harness.ledger.waiters.register(f"inbox:{harness.agent}")

        def left_alone(effects: Effects) -> Program[None]:
            yield from call_transactions.start(effects, new)
            yield from call_transactions.make_pending(effects, new.call_id)

        await harness.ledger.commit(left_alone)
        harness.sweeper.wake()
        await told
        (event,) = await harness.inbox()
        assert event.data["result"]["waited"] >= 0


def _break(plan_id: str) -> Program[None]:
    yield "UPDATE plans SET cron = 'never at all', next_run_at = 1 WHERE id = ?", (plan_id,)


async def test_what_cannot_be_done_does_not_keep_the_rest_from_being_done(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        daily = NewPlan(name="p", instruction="i", cron="0 9 * * *")
        (plan,) = await harness.ledger.commit(plans.set_plans, harness.agent, [daily])
        await harness.ledger.write(_break, plan.id)
        new = _new(harness, run, status="pending", expires_at=1, node_id=harness.ledger.node_id)
        await harness.ledger.commit(call_transactions.start, new)
        await harness.sweeper.sweep()
        assert (await harness.get_call(new.call_id)).status == "expired"


async def test_a_caller_that_overstays_is_parked(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        new = _new(harness, run, wait_until=1, node_id=harness.ledger.node_id)
        await harness.ledger.commit(call_transactions.start, new)
        await harness.sweeper.sweep()
        assert (await harness.get_call(new.call_id)).status == "pending"


@pytest.mark.spec("15.3")
async def test_a_process_is_taken_for_dead_once_it_was_silent_while_others_were_looking(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        waiting = _new(harness, run)
        await harness.ledger.commit(call_transactions.start, waiting)
        await _die(harness)
        looking = Sweeper(Ledger(database))

        async def after(*seconds: float) -> str:
            for at in seconds:
                await looking.clean_up_silent_nodes(at)
            return (await harness.get_call(waiting.call_id)).status

        # Its last sign is old. But the database may have been away, and it could not give another.
        assert await after(100.0, 102.0, 104.0) == "waiting"
        await harness.ledger.write(presence.record_heartbeat, DEAD, started_at=1)
        assert await after(106.0, 108.0, 110.0, 112.0, 114.0) == "waiting"
        # Nobody looked for a while: the same again.
        assert await after(130.0, 132.0, 134.0, 136.0, 138.0) == "waiting"
        assert await after(140.0) == "pending"


async def test_a_process_that_others_took_for_dead_hears_of_it(database: Database) -> None:
    async with service_harness(database) as harness:
        forgotten = asyncio.Event()

        async def hear() -> None:
            forgotten.set()

        harness.sweeper.on_declared_dead = hear
        await harness.sweeper.send_heartbeat()
        assert not forgotten.is_set()
        await harness.ledger.write(presence.delete_node, harness.ledger.node_id)
        await harness.sweeper.send_heartbeat()
        assert forgotten.is_set()


async def test_it_is_heard_of_though_whoever_asked_for_the_sign_of_life_stopped_waiting(database: Database) -> None:
    async with service_harness(database) as harness:
        await harness.sweeper.__aexit__()  # It would beat, too.
        forgotten = asyncio.Event()

        async def hear() -> None:
            forgotten.set()

        harness.sweeper.on_declared_dead = hear
        beating = asyncio.create_task(harness.sweeper.send_heartbeat())
        await asyncio.sleep(0)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        assert beating.cancelled()
        async with asyncio.timeout(30):
            await forgotten.wait()


@pytest.mark.spec("15.2")
async def test_a_process_that_stops_leaves_nothing_open_behind(database: Database) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        other = Ledger(database)
        running = _new(harness, run, status="running", execution_target="server", node_id=other.node_id)
        async with Sweeper(other):
            await harness.ledger.commit(call_transactions.start, running)
        assert (await harness.get_call(running.call_id)).status == "failed"
        assert (
            await harness.ledger.read(presence.list_dead_nodes, before=now_ms() + 1, except_node=harness.ledger.node_id)
            == []
        )


@pytest.mark.spec("7.1")
async def test_what_ended_long_ago_is_forgotten_and_what_is_open_or_was_said_is_not(database: Database) -> None:
    async with service_harness(database, pending_tool("ask", is_async=True, visible=True)) as harness:
        over, going = await harness.open_run(in_space=True), await harness.open_run(in_space=True)
        done = (await harness.call(over, "ask")).call_id
        await harness.submit(done, "yes")
        (event,) = await harness.inbox()
        await harness.ledger.write(inbox.claim, harness.agent, "claim_1", count=1, lease_ms=60_000)
        await harness.ledger.write(inbox.acknowledge, harness.agent, "claim_1", [event.event_id])
        await harness.ledger.write(inbox.add, harness.agent, "evt_new", "service", {}, priority=2)
        await harness.ledger.commit(runs.close_run, over)
        pending = (await harness.call(going, "ask")).call_id

        await Sweeper(Ledger(database)).delete_old_records()
        assert await harness.ledger.read(call_rows.find, done) is not None
        await Sweeper(Ledger(database), retention=-1).delete_old_records()

        assert await harness.ledger.read(call_rows.find, done) is None
        assert await harness.ledger.read(run_rows.find, over) is None
        assert await harness.events(f"run:{over}") == []
        assert [event.event_id for event in await harness.inbox()] == ["evt_new"]
        assert (await harness.get_call(pending)).status == "pending"
        assert await harness.ledger.read(run_rows.find, going) is not None
        assert [(message.call_id, message.status) for message in await harness.messages()] == [
            (done, "complete"),
            (pending, "requires_action"),
        ]

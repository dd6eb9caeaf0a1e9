"""What becomes of calls, claims and inbox events when the process or the worker that had them is gone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spaces.rig import Rig, elsewhere, rig
from toolspace.abc.database import Database, Program
from toolspace.core.ids import new_id
from toolspace.spaces import calls
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.sweeper import Sweeper
from toolspace.stores.sql import calls as call_rows
from toolspace.stores.sql import inbox, presence
from toolspace.stores.sql.calls import NewCall

DEAD = "node_dead"


def _new(r: Rig, run: str, **changes: Any) -> NewCall:
    fields: dict[str, Any] = {
        "call_id": new_id("call"),
        "run_id": run,
        "agent_entity_id": r.agent,
        "space_id": r.space,
        "tool_name": "t",
        "args": {},
        "execution_type": "external",
        "execution_target": "external",
        "visible": True,
        "exposure": "full",
        "status": "waiting",
        "node_id": DEAD,
    }
    return NewCall(**{**fields, **changes})


def _silence(node_id: str) -> Program[None]:
    yield "UPDATE nodes SET seen_at = 1 WHERE id = ?", (node_id,)


async def _die(r: Rig) -> None:
    """A process of that name was there, and has not been heard of for long."""
    await r.ledger.write(presence.beat, DEAD, started_at=1)
    await r.ledger.write(_silence, DEAD)


async def _clear_up(r: Rig) -> None:
    """As another process does it that starts, or looks around."""
    other = Ledger(r.ledger.database)
    sweeper = Sweeper(other)
    await sweeper.clear_up(2)


@pytest.mark.spec("15.2")
async def test_what_a_dead_process_left_behind_ends_or_goes_to_the_inbox(database: Database) -> None:
    async with rig(database) as r:
        run = await r.open_run(in_space=True)
        waiting = _new(r, run)
        running = _new(r, run, status="running", execution_type="function", execution_target="server")
        answered = _new(r, run)
        arrived = _new(r, run)
        for new in (waiting, running, answered, arrived):
            await r.ledger.commit(calls.begin, new)
        for new in (answered, arrived):
            await r.submit(new.call_id, "here")
        await r.ledger.write(call_rows.delivered, [arrived.call_id])
        await _die(r)
        await _clear_up(r)
        assert (await r.row(waiting.call_id)).status == "pending"
        interrupted = await r.row(running.call_id)
        assert (interrupted.status, interrupted.is_error) == ("failed", True)
        assert "interrupted" in interrupted.result
        # Its answer was written down, and never reached who waited: so it goes to the inbox. The other arrived.
        assert [event.data["callId"] for event in await r.inbox()] == [answered.call_id]
        states = {message.call_id: message.status for message in await r.messages()}
        assert states[running.call_id] == "error"
        assert states[waiting.call_id] == "requires_action"
        await r.submit(waiting.call_id, "late")
        assert {event.data["callId"] for event in await r.inbox()} == {answered.call_id, waiting.call_id}


@pytest.mark.spec("6.7")
async def test_claims_of_a_worker_that_went_away_are_offered_again(database: Database) -> None:
    async with rig(database, elsewhere("t", is_async=True)) as r:
        run = await r.open_run()
        await r.ledger.write(presence.come, "wrk_a", ["tool:t"], node_id=r.ledger.node_id)
        call_id = (await r.call(run, "t")).call_id
        (claimed,) = await r.ledger.write(call_rows.claim, "wrk_a", ["t"], limit=5)
        assert claimed.call_id == call_id
        assert await r.ledger.write(call_rows.claim, "wrk_b", ["t"], limit=5) == []
        offered = r.ledger.waiters.expect("offers:t")
        await r.ledger.write(presence.leave, "wrk_a", node_id=r.ledger.node_id)
        await offered
        (again,) = await r.ledger.write(call_rows.claim, "wrk_b", ["t"], limit=5)
        assert again.call_id == call_id


@pytest.mark.spec("7.3")
async def test_an_inbox_event_comes_back_when_the_process_that_took_it_is_gone(database: Database) -> None:
    async with rig(database) as r:
        await r.ledger.write(inbox.push, r.agent, "evt_1", "service", {"n": 1}, priority=2)
        (taken,) = await r.ledger.write(inbox.claim, r.agent, "claim_1", count=5, lease_ms=1)
        assert taken.status == "processing"
        told = r.ledger.waiters.expect(f"inbox:{r.agent}")
        r.sweeper.poke()
        await told
        (event,) = await r.inbox()
        assert (event.status, event.attempts) == ("pending", 1)


@pytest.mark.spec("6.1")
async def test_a_wait_survives_the_process_that_began_it(database: Database) -> None:
    async with rig(database) as r:
        run = await r.open_run()
        new = _new(r, run, execution_type="wait", execution_target="server", status="waiting", due_at=1, visible=False)
        told = r.ledger.waiters.expect(f"inbox:{r.agent}")

        def left_alone(effects: Effects) -> Program[None]:
            yield from calls.begin(effects, new)
            yield from calls.park(effects, new.call_id)

        await r.ledger.commit(left_alone)
        r.sweeper.poke()
        await told
        (event,) = await r.inbox()
        assert event.data["result"]["waited"] >= 0


async def test_a_caller_that_overstays_is_parked(database: Database) -> None:
    async with rig(database) as r:
        run = await r.open_run()
        new = _new(r, run, wait_until=1, node_id=r.ledger.node_id)
        await r.ledger.commit(calls.begin, new)
        await r.sweeper.sweep()
        assert (await r.row(new.call_id)).status == "pending"

"""Spaces, members and entities that are removed while something of theirs is open."""

from __future__ import annotations

import asyncio

import pytest

from tests.spaces.rig import elsewhere, rig
from toolspace.core.ids import new_id
from toolspace.core.records import RunRecord
from toolspace.errors import RefusedError
from toolspace.spaces import call_transactions, deletion, messaging, runs
from toolspace.storage.database import Database
from toolspace.storage.queries import entities, inbox
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries.calls import NewCall


async def test_whoever_waits_for_an_answer_from_a_space_that_is_removed_is_told(database: Database) -> None:
    async with rig(
        database, elsewhere("confirm", "space", visible=True), elsewhere("later", "space", visible=True, is_async=True)
    ) as r:
        run = await r.open_run(in_space=True)
        calling = asyncio.create_task(r.call(run, "confirm"))
        await r.began(run)
        later = await r.call(run, "later")
        assert await r.ledger.commit(deletion.delete_space, r.space)
        assert (await calling).error_kind == "canceled"
        (event,) = await r.inbox()
        assert (event.data["callId"], event.data["status"]) == (later.call_id, "canceled")
        record = await r.ledger.read(run_rows.find, run)
        assert record is not None
        assert record.space_id is None
        again = await r.call(run, "confirm")
        assert "you are not in a space" in str(again.error)
        assert not await r.ledger.commit(deletion.delete_space, r.space)


async def test_a_space_of_an_id_that_was_used_before_shows_nothing_of_the_first(database: Database) -> None:
    async with rig(database) as r:
        await r.ledger.commit(messaging.send_message, r.space, r.person, "a secret")
        last = (await r.events(f"space:{r.space}"))[-1].id
        await r.ledger.commit(deletion.delete_space, r.space)
        await r.ledger.write(entities.create_space, r.space, "Another", {})
        await r.ledger.write(entities.add_member, r.space, r.person)
        assert await r.events(f"space:{r.space}") == []
        await r.ledger.commit(messaging.send_message, r.space, r.person, "hello")
        assert (await r.events(f"space:{r.space}"))[0].id == last + 1


async def test_an_agent_that_is_removed_leaves_nothing_open(database: Database) -> None:
    async with rig(database, elsewhere("confirm", "space", visible=True)) as r:
        run = await r.open_run(in_space=True)
        calling = asyncio.create_task(r.call(run, "confirm"))
        call = await r.began(run)
        alone = NewCall(
            call_id=new_id("call"), run_id=None, agent_entity_id=r.agent, space_id=None, tool_name="t", args={},
            execution_type="external", execution_target="external", visible=False, exposure="none", status="pending",
            node_id=r.ledger.node_id,
        )  # fmt: skip
        await r.ledger.commit(call_transactions.start, alone)
        await r.ledger.write(inbox.add, r.agent, "evt_1", "service", {}, priority=2)
        assert await r.ledger.commit(deletion.delete_entity, r.agent)
        assert (await calling).error_kind == "canceled"
        assert [(await r.row(one)).status for one in (call.call_id, alone.call_id)] == ["canceled", "canceled"]
        (message,) = await r.messages()
        assert message.status == "error"
        assert await r.inbox() == []
        types = [event.type for event in await r.events(f"space:{r.space}")]
        assert types == ["run.started", "tool.started", "tool.error", "run.done"]
        assert not await r.ledger.commit(deletion.delete_entity, r.agent)


@pytest.mark.spec("6.6")
async def test_an_agent_that_is_not_a_member_any_more_shows_nothing_in_the_space(database: Database) -> None:
    async with rig(database, elsewhere("confirm", "space", visible=True)) as r:
        run = await r.open_run(in_space=True)
        assert await r.ledger.commit(deletion.remove_member, r.space, r.agent)
        result = await r.call(run, "confirm")
        assert "you are not in a space" in str(result.error)
        assert await r.messages() == []


async def test_what_is_begun_while_an_agent_is_removed_is_done_or_refused(database: Database) -> None:
    async with rig(database) as r:
        for number in range(20):
            agent = f"ent_{number}"
            await r.ledger.write(entities.create_entity, agent, "agent", "Bo", {})
            opening = [r.ledger.commit(runs.open_run, agent) for _ in range(3)]
            *opened, removed = await asyncio.gather(
                *opening, r.ledger.commit(deletion.delete_entity, agent), return_exceptions=True
            )
            assert removed is True
            for one in opened:
                assert isinstance(one, RunRecord) or (isinstance(one, RefusedError) and one.reason == "not_found")

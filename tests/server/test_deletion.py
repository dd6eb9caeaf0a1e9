"""Deleting spaces, members and entities while something of theirs is open."""

from __future__ import annotations

import asyncio

import pytest

from tests.spaces.service_harness import pending_tool, service_harness
from toolspace.core.ids import new_id
from toolspace.core.stored_records import RunRecord
from toolspace.errors import RefusedError
from toolspace.server.routes.entities_and_spaces import (
    delete_entity_transaction,
    remove_member_transaction,
)
from toolspace.spaces import call_transactions, messaging, runs
from toolspace.spaces.space_deletion import delete_space
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, inbox
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries.calls import NewCall


async def test_open_calls_of_a_deleted_space_are_cancelled(database: Database) -> None:
    async with service_harness(
        database,
        pending_tool("confirm", "space", visible=True),
        pending_tool("later", "space", visible=True, is_async=True),
    ) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "confirm"))
        await harness.wait_until_started(run)
        later = await harness.call(run, "later")
        assert await harness.ledger.commit(delete_space, harness.space)
        assert (await call_task).error_kind == "canceled"
        (event,) = await harness.inbox()
        assert (event.data["callId"], event.data["status"]) == (later.call_id, "canceled")
        record = await harness.ledger.read(run_rows.find, run)
        assert record is not None
        assert record.space_id is None
        second_result = await harness.call(run, "confirm")
        assert "you are not in a space" in str(second_result.error)
        assert not await harness.ledger.commit(delete_space, harness.space)


async def test_space_with_a_reused_id_shows_nothing_of_the_deleted_one(database: Database) -> None:
    async with service_harness(database) as harness:
        await harness.ledger.commit(messaging.send_message, harness.space, harness.person, "a secret")
        last = (await harness.events(f"space:{harness.space}"))[-1].id
        await harness.ledger.commit(delete_space, harness.space)
        await harness.ledger.write(entities_and_spaces.create_space, harness.space, "Another", {})
        await harness.ledger.write(entities_and_spaces.add_member, harness.space, harness.person)
        assert await harness.events(f"space:{harness.space}") == []
        await harness.ledger.commit(messaging.send_message, harness.space, harness.person, "hello")
        assert (await harness.events(f"space:{harness.space}"))[0].id == last + 1


async def test_deleted_agent_leaves_nothing_open(database: Database) -> None:
    async with service_harness(database, pending_tool("confirm", "space", visible=True)) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "confirm"))
        call = await harness.wait_until_started(run)
        alone = NewCall(
            call_id=new_id("call"), run_id=None, agent_entity_id=harness.agent, space_id=None, tool_name="t", args={},
            execution_type="external", execution_target="external", visible=False, visibility="none", status="pending",
            node_id=harness.ledger.node_id,
        )  # fmt: skip
        await harness.ledger.commit(call_transactions.start, alone)
        await harness.ledger.write(inbox.add, harness.agent, "evt_1", "service", {}, priority=2)
        assert await harness.ledger.commit(delete_entity_transaction, harness.agent)
        assert (await call_task).error_kind == "canceled"
        assert [(await harness.get_call(call_id)).status for call_id in (call.call_id, alone.call_id)] == [
            "canceled",
            "canceled",
        ]
        (message,) = await harness.messages()
        assert message.status == "error"
        assert await harness.inbox() == []
        types = [event.type for event in await harness.events(f"space:{harness.space}")]
        assert types == ["run.started", "tool.started", "tool.ready", "tool.error", "run.done"]
        assert not await harness.ledger.commit(delete_entity_transaction, harness.agent)


@pytest.mark.spec("6.6")
async def test_agent_that_was_removed_from_a_space_shows_nothing_there(database: Database) -> None:
    async with service_harness(database, pending_tool("confirm", "space", visible=True)) as harness:
        run = await harness.open_run(in_space=True)
        assert await harness.ledger.commit(remove_member_transaction, harness.space, harness.agent)
        result = await harness.call(run, "confirm")
        assert "you are not in a space" in str(result.error)
        assert await harness.messages() == []


async def test_call_started_while_its_agent_is_deleted_ends_or_is_refused(database: Database) -> None:
    async with service_harness(database) as harness:
        for number in range(20):
            agent = f"ent_{number}"
            await harness.ledger.write(entities_and_spaces.create_entity, agent, "agent", "Bo", {})
            programs = [harness.ledger.commit(runs.open_run, agent) for _ in range(3)]
            *run_outcomes, was_removed = await asyncio.gather(
                *programs, harness.ledger.commit(delete_entity_transaction, agent), return_exceptions=True
            )
            assert was_removed is True
            for call_id in run_outcomes:
                assert isinstance(call_id, RunRecord) or (
                    isinstance(call_id, RefusedError) and call_id.reason == "not_found"
                )

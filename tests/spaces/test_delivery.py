"""Results whose callers leave, are canceled or time out in the very moment in which they come: once, and never lost."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, hold_write_lock, pending_tool, service_harness
from toolspace import ToolContext
from toolspace.core.ids import now_ms
from toolspace.errors import StorageInDoubt, StorageUnavailable
from toolspace.spaces import runs
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.sqlite.database import SqliteDatabase


class _Watched(SqliteDatabase):
    """Says when it is asked to write, may be away for a while, and may go away after a commit: nobody hears of it."""

    asked: asyncio.Event | None = None
    away = 0
    loses = False

    async def run(self, program: Any, *, on_commit: Any = None, deferred: Any = None, exclusive: bool = False) -> Any:
        if self.away:
            self.away -= 1
            raise StorageUnavailable("the database does not answer")
        if self.loses:
            self.loses = False
            await super().run(program, deferred=deferred)
            raise StorageInDoubt("went away during a commit: it may have happened, or not")
        working = super().run(program, on_commit=on_commit, deferred=deferred, exclusive=exclusive)
        if self.asked is not None:
            self.asked.set()
        return await working

    async def commit_deferred(self, deferred: Any, *, on_commit: Any, on_doubt: Any) -> bool:
        if self.loses:
            self.loses = False
            await super().commit_deferred(deferred, on_commit=_nobody_hears, on_doubt=on_doubt)
            on_doubt(deferred)
            raise StorageInDoubt("went away during a commit: it may have happened, or not")
        return await super().commit_deferred(deferred, on_commit=on_commit, on_doubt=on_doubt)


def _nobody_hears(_: Any) -> None: ...


async def _inbox_of(harness: ServiceHarness, call_id: str) -> Any:
    """What the inbox says of a call, once it says something."""
    while True:
        told = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        found = [event.data for event in await harness.inbox() if event.data["callId"] == call_id]
        if found:
            harness.ledger.waiters.unregister(f"inbox:{harness.agent}", told)
            (event,) = found
            return event
        await told


async def _shown(harness: ServiceHarness) -> None:
    """Waits until someone is asked in the space."""
    async with await harness.ledger.hub.subscribe(f"space:{harness.space}", after=0) as reader:
        async for batch in reader:
            if any(event.type == "tool.started" for event in batch):
                return


async def _ended(harness: ServiceHarness, run: str, count: int) -> None:
    """Waits until so many calls of a run have failed."""
    seen = 0
    async with await harness.ledger.hub.subscribe(f"run:{run}", after=0) as reader:
        async for batch in reader:
            seen += sum(event.type == "tool.error" for event in batch)
            if seen >= count:
                return


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("way", ["the call is canceled", "the caller is canceled"])
async def test_a_result_that_comes_as_its_caller_is_canceled_goes_to_the_inbox(database: Database, way: str) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        calling = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        cancel = calling.cancel if way == "the caller is canceled" else lambda: harness.ts.cancel("call_1")
        harness.ledger.waiters.listen("call:call_1", lambda _: cancel())
        await harness.submit("call_1", "here")
        await asyncio.gather(calling, return_exceptions=True)
        assert calling.cancelled() or calling.result().error_kind == "canceled"
        assert (await _inbox_of(harness, "call_1"))["result"] == "here"


@pytest.mark.spec("6.4")
async def test_a_result_that_beats_the_time_out_of_a_caller_who_leaves_goes_to_the_inbox(tmp_path: Path) -> None:
    database = await _Watched.open(tmp_path / "a.db")
    async with service_harness(database, pending_tool("fetch", timeout=0.2)) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        calling = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        async with hold_write_lock(tmp_path / "a.db"):
            database.asked = asyncio.Event()
            submitting = asyncio.create_task(harness.submit("call_1", "here"))
            await database.asked.wait()
            database.asked.clear()
            await database.asked.wait()  # The time is over: the caller wants it parked, behind the result.
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        await submitting
        assert (await _inbox_of(harness, "call_1"))["result"] == "here"


@pytest.mark.spec("6.4")
@pytest.mark.spec("15.3")
async def test_a_call_that_times_out_while_the_database_is_away_is_pending_all_the_same(tmp_path: Path) -> None:
    database = await _Watched.open(tmp_path / "a.db")
    async with service_harness(database, pending_tool("fetch", timeout=0.2)) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        await harness.sweeper.__aexit__()  # It would write, too.
        await harness.register_worker("fetch")
        calling = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        database.away = 1
        result = await calling
        assert (result.error, result.extras["pendingToolCallId"]) == ("Tool timed out after 200ms", "call_1")
        assert result.executed
        assert database.away == 0
        await harness.submit("call_1", "here")
        assert (await _inbox_of(harness, "call_1"))["result"] == "here"


@pytest.mark.spec("3.32")
@pytest.mark.spec("6.4")
async def test_a_batch_gives_what_comes_in_time_and_the_inbox_what_comes_late(database: Database) -> None:
    async with service_harness(
        database, pending_tool("fast"), pending_tool("slow", timeout=0.3), pending_tool("later", is_async=True)
    ) as harness:
        await harness.register_worker("fast", "slow")
        run = await harness.open_run()
        batch = {"calls": [{"id": name, "tool": name} for name in ("fast", "slow", "later")]}
        calling = asyncio.create_task(harness.call(run, "agent__batch", batch))
        async with await harness.ledger.hub.subscribe(f"run:{run}", after=0) as reader:
            asked: dict[str, str] = {}
            while len(asked) < 4:
                found = [event.data for event in await reader.next_batch() if event.type == "tool.started"]
                asked |= {data["toolName"]: data["toolCallId"] for data in found}
        await harness.submit(asked["fast"], 1)
        fast, slow, later = (await calling).unwrap()["results"]
        assert fast["output"] == 1
        assert (slow["errorKind"], slow["pendingToolCallId"]) == ("timeout", asked["slow"])
        assert later["output"]["pendingToolCallId"] == asked["later"]
        for name in ("slow", "later"):
            await harness.submit(asked[name], name)
        assert {event.data["result"] for event in await harness.inbox()} == {"slow", "later"}


@pytest.mark.spec("3.32")
async def test_a_batch_that_is_canceled_asks_nobody_any_more(database: Database) -> None:
    async with service_harness(database, pending_tool("confirm", "space", visible=True)) as harness:
        run = await harness.open_run(in_space=True)
        batch = {"calls": [{"id": "1", "tool": "confirm"}]}
        calling = asyncio.create_task(harness.call(run, "agent__batch", batch, call_id="call_batch"))
        await _shown(harness)
        assert harness.ts.cancel("call_batch")
        assert (await calling).error_kind == "canceled"
        await _ended(harness, run, 2)
        rows = {call.tool_name: call.status for call, _ in await harness.ledger.read(call_rows.list_of_run, run)}
        assert rows == {"agent__batch": "canceled", "confirm": "canceled"}
        assert [message.status for message in await harness.messages()] == ["error"]


@pytest.mark.spec("6.4")
@pytest.mark.spec("7.4")
async def test_a_result_of_which_nobody_knows_whether_it_was_written_down_is_heard_of(tmp_path: Path) -> None:
    database = await _Watched.open(tmp_path / "a.db")
    async with service_harness(database, pending_tool("fetch", timeout=3600.0)) as harness:
        run = await harness.open_run()
        await harness.sweeper.__aexit__()  # It would write, too.
        await harness.register_worker("fetch")
        calling = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        reading = asyncio.create_task(harness.wait_for_event(run, "tool.done"))
        await asyncio.sleep(0)
        database.loses = True
        with pytest.raises(StorageInDoubt):
            await harness.submit("call_1", "here")
        assert (await calling).unwrap() == "here"
        assert (await reading).data["output"] == "here"


@pytest.mark.spec("6.4")
async def test_calls_that_ended_with_their_run_are_not_told_to_the_agent_after_a_restart(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        room, limits = await harness.open_host(run)
        context = ToolContext(agent_entity_id=harness.agent, host=room)
        calling = asyncio.create_task(harness.ts.call("fetch", context=context, run=limits, call_id="call_1"))
        await harness.wait_until_started(run)
        await harness.ledger.commit(runs.cancel_run, run)
        await asyncio.gather(calling, return_exceptions=True)
        await harness.pending_calls.aclose()
        await Sweeper(Ledger(database)).clean_up_dead_nodes(now_ms() + 60_000)
        assert await harness.inbox() == []


@pytest.mark.spec("6.8")
async def test_results_and_the_cancellation_of_a_paused_run_never_wait_for_each_other(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = await PostgresDatabase.open(postgres_url)
    async with service_harness(database, pending_tool("approve", pauses_run=True)) as harness:
        with caplog.at_level(logging.DEBUG, logger="toolspace.storage"):
            for _ in range(20):
                ids = [await harness.open_run() for _ in range(4)]
                asked = [(await harness.call(run, "approve")).call_id for run in ids]
                await asyncio.gather(
                    *(harness.submit(call_id, "yes") for call_id in asked),
                    *(harness.ledger.commit(runs.cancel_run, run) for run in ids),
                    return_exceptions=True,
                )
                states = [(await harness.get_call(call_id)).status for call_id in asked]
                assert set(states) <= {"resolved", "canceled"}
        assert "deadlock" not in caplog.text


async def test_whoever_asks_again_for_a_call_is_let_go_when_the_process_stops(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", is_async=True)) as harness:
        run = await harness.open_run()
        call_id = (await harness.call(run, "approve")).call_id
        await harness.ledger.commit(_wait_again, call_id)
        attending = asyncio.create_task(harness.pending_calls.wait_for_result(call_id, 3600))
        await asyncio.sleep(0)
        await harness.pending_calls.drain()
        assert (await attending).call_id == call_id


def _wait_again(effects: Effects, call_id: str) -> Program[None]:
    yield "UPDATE calls SET status = 'waiting' WHERE call_id = ?", (call_id,)

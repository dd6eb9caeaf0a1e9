"""Results that arrive in the moment in which their caller is cancelled or times out: delivered once, never lost."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, hold_write_lock, pending_tool, service_harness
from toolspace import ToolContext
from toolspace.errors import StorageInDoubt, StorageUnavailable
from toolspace.spaces import runs
from toolspace.spaces.heartbeats import ProcessMonitor
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Database, Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.sqlite.database import SqliteDatabase


class _FlakyDatabase(SqliteDatabase):
    """Signals write requests, can fail some writes, and can lose the connection after a commit."""

    write_requested: asyncio.Event | None = None
    failures = 0
    loses_connection = False

    async def run(
        self, program: Any, *, on_commit: Any = None, deferred_writes: Any = None, exclusive: bool = False
    ) -> Any:
        if self.failures:
            self.failures -= 1
            raise StorageUnavailable("the database does not answer")
        if self.loses_connection:
            self.loses_connection = False
            await super().run(program, deferred_writes=deferred_writes)
            raise StorageInDoubt("went away during a commit: it may have happened, or not")
        work = super().run(program, on_commit=on_commit, deferred_writes=deferred_writes, exclusive=exclusive)
        if self.write_requested is not None:
            self.write_requested.set()
        return await work

    async def commit_deferred(self, deferred_writes: Any, *, on_commit: Any, on_doubt: Any) -> bool:
        if self.loses_connection:
            self.loses_connection = False
            await super().commit_deferred(deferred_writes, on_commit=_ignore, on_doubt=on_doubt)
            on_doubt(deferred_writes)
            raise StorageInDoubt("went away during a commit: it may have happened, or not")
        work = super().commit_deferred(deferred_writes, on_commit=on_commit, on_doubt=on_doubt)
        if self.write_requested is not None:
            self.write_requested.set()
        return await work


def _ignore(_: Any) -> None: ...


async def _wait_for_inbox_event(harness: ServiceHarness, call_id: str) -> Any:
    """The data of the inbox event of a call, once there is one."""
    while True:
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        matches = [event.data for event in await harness.inbox() if event.data["callId"] == call_id]
        if matches:
            harness.ledger.waiters.unregister(f"inbox:{harness.agent}", notification)
            (event,) = matches
            return event
        await notification


async def _wait_until_started(harness: ServiceHarness) -> None:
    """Waits until a call is started in the space."""
    async with await harness.ledger.hub.subscribe(f"space:{harness.space}", after=0) as reader:
        async for batch in reader:
            if any(event.type == "tool.ready" for event in batch):
                return


async def _wait_until_ended(harness: ServiceHarness, run: str, count: int) -> None:
    """Waits until `count` calls of a run have failed."""
    last_id = 0
    async with await harness.ledger.hub.subscribe(f"run:{run}", after=0) as reader:
        async for batch in reader:
            last_id += sum(event.type == "tool.error" for event in batch)
            if last_id >= count:
                return


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("way", ["the call is canceled", "the caller is canceled"])
async def test_result_that_arrives_as_its_caller_is_cancelled_goes_to_the_inbox(database: Database, way: str) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        cancel = call_task.cancel if way == "the caller is canceled" else lambda: harness.ts.cancel("call_1")
        harness.ledger.waiters.listen("call:call_1", lambda _: cancel())
        await harness.submit("call_1", "here")
        await asyncio.gather(call_task, return_exceptions=True)
        assert call_task.cancelled() or call_task.result().error_kind == "canceled"
        assert (await _wait_for_inbox_event(harness, "call_1"))["result"] == "here"


@pytest.mark.spec("6.4")
async def test_result_just_before_the_timeout_of_a_cancelled_caller_goes_to_the_inbox(tmp_path: Path) -> None:
    database = await _FlakyDatabase.open(tmp_path / "a.db")
    async with service_harness(database, pending_tool("fetch", timeout=0.2)) as harness:
        await harness.sweeper.__aexit__()  # It would write, too.
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        async with hold_write_lock(tmp_path / "a.db"):
            database.write_requested = asyncio.Event()
            submit_task = asyncio.create_task(harness.submit("call_1", "here"))
            await database.write_requested.wait()
            database.write_requested.clear()
            # The time is over: the caller makes the call pending, after the result.
            await database.write_requested.wait()
            call_task.cancel()
            await asyncio.gather(call_task, return_exceptions=True)
        await submit_task
        assert (await _wait_for_inbox_event(harness, "call_1"))["result"] == "here"


@pytest.mark.spec("6.4")
@pytest.mark.spec("15.3")
async def test_call_that_times_out_while_the_database_is_down_becomes_pending(tmp_path: Path) -> None:
    database = await _FlakyDatabase.open(tmp_path / "a.db")
    async with service_harness(database, pending_tool("fetch", timeout=0.2)) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        await harness.sweeper.__aexit__()  # It would write, too.
        await harness.register_worker("fetch")
        call_task = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        database.failures = 1
        result = await call_task
        assert (result.error, result.extras["pendingToolCallId"]) == ("Tool timed out after 200ms", "call_1")
        assert result.executed
        assert database.failures == 0
        await harness.submit("call_1", "here")
        assert (await _wait_for_inbox_event(harness, "call_1"))["result"] == "here"


@pytest.mark.spec("3.32")
@pytest.mark.spec("6.4")
async def test_batch_returns_timely_results_and_late_ones_go_to_the_inbox(database: Database) -> None:
    async with service_harness(
        database, pending_tool("fast"), pending_tool("slow", timeout=0.3), pending_tool("later", is_async=True)
    ) as harness:
        await harness.register_worker("fast", "slow")
        run = await harness.open_run()
        batch = {"calls": [{"id": name, "tool": name} for name in ("fast", "slow", "later")]}
        call_task = asyncio.create_task(harness.call(run, "agent__batch", batch))
        async with await harness.ledger.hub.subscribe(f"run:{run}", after=0) as reader:
            call_ids: dict[str, str] = {}
            while len(call_ids) < 4:
                started = [event.data for event in await reader.next_batch() if event.type == "tool.ready"]
                call_ids |= {data["toolName"]: data["toolCallId"] for data in started}
        await harness.submit(call_ids["fast"], 1)
        fast, slow, later = (await call_task).unwrap()["results"]
        assert fast["output"] == 1
        assert (slow["errorKind"], slow["pendingToolCallId"]) == ("timeout", call_ids["slow"])
        assert later["output"]["pendingToolCallId"] == call_ids["later"]
        for name in ("slow", "later"):
            await harness.submit(call_ids[name], name)
        assert {event.data["result"] for event in await harness.inbox()} == {"slow", "later"}


@pytest.mark.spec("3.32")
async def test_cancelled_batch_cancels_its_pending_calls(database: Database) -> None:
    async with service_harness(database, pending_tool("confirm", "space", visible=True)) as harness:
        run = await harness.open_run(in_space=True)
        batch = {"calls": [{"id": "1", "tool": "confirm"}]}
        call_task = asyncio.create_task(harness.call(run, "agent__batch", batch, call_id="call_batch"))
        await _wait_until_started(harness)
        assert harness.ts.cancel("call_batch")
        assert (await call_task).error_kind == "canceled"
        await _wait_until_ended(harness, run, 2)
        rows = {call.tool_name: call.status for call, _ in await harness.ledger.read(call_rows.list_of_run, run)}
        assert rows == {"agent__batch": "canceled", "confirm": "canceled"}
        assert [message.status for message in await harness.messages()] == ["error"]


@pytest.mark.spec("6.4")
@pytest.mark.spec("7.4")
async def test_result_in_doubt_reaches_its_caller(tmp_path: Path) -> None:
    database = await _FlakyDatabase.open(tmp_path / "a.db")
    async with service_harness(database, pending_tool("fetch", timeout=3600.0)) as harness:
        run = await harness.open_run()
        await harness.sweeper.__aexit__()  # It would write, too.
        await harness.register_worker("fetch")
        call_task = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        await harness.wait_until_started(run)
        read_task = asyncio.create_task(harness.wait_for_event(run, "tool.done"))
        await asyncio.sleep(0)
        database.loses_connection = True
        with pytest.raises(StorageInDoubt):
            await harness.submit("call_1", "here")
        assert (await call_task).unwrap() == "here"
        assert (await read_task).data["output"] == "here"


@pytest.mark.spec("6.4")
async def test_calls_that_ended_with_their_run_add_no_inbox_event_after_a_restart(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        host, limits = await harness.open_host(run)
        context = ToolContext(agent_entity_id=harness.agent, host=host)
        call_task = asyncio.create_task(harness.ts.call("fetch", context=context, run=limits, call_id="call_1"))
        await harness.wait_until_started(run)
        await harness.ledger.commit(runs.cancel_run, run)
        await asyncio.gather(call_task, return_exceptions=True)
        await harness.pending_calls.aclose()
        await ProcessMonitor(Ledger(database)).clean_up_all_others()
        assert await harness.inbox() == []


@pytest.mark.spec("6.8")
async def test_results_and_cancellation_of_a_paused_run_do_not_deadlock(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = await PostgresDatabase.open(postgres_url)
    async with service_harness(database, pending_tool("approve", pauses_run=True)) as harness:
        with caplog.at_level(logging.DEBUG, logger="toolspace.storage"):
            for _ in range(20):
                ids = [await harness.open_run() for _ in range(4)]
                call_ids = [(await harness.call(run, "approve")).call_id for run in ids]
                await asyncio.gather(
                    *(harness.submit(call_id, "yes") for call_id in call_ids),
                    *(harness.ledger.commit(runs.cancel_run, run) for run in ids),
                    return_exceptions=True,
                )
                states = [(await harness.get_call(call_id)).status for call_id in call_ids]
                assert set(states) <= {"resolved", "canceled"}
        assert "deadlock" not in caplog.text


async def test_waiting_for_a_result_ends_when_the_process_stops(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", is_async=True)) as harness:
        run = await harness.open_run()
        call_id = (await harness.call(run, "approve")).call_id
        await harness.ledger.commit(_wait_again, call_id)
        wait_task = asyncio.create_task(harness.pending_calls.wait_for_result(call_id, 3600))
        await asyncio.sleep(0)
        await harness.pending_calls.drain()
        assert (await wait_task).call_id == call_id


def _wait_again(effects: Effects, call_id: str) -> Program[None]:
    yield "UPDATE calls SET status = 'waiting' WHERE call_id = ?", (call_id,)

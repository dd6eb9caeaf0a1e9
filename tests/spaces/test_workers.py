"""Assignment of calls to workers: each to one worker, shared fairly, and again when a worker departs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toolspace.core.ids import new_id
from toolspace.core.stored_records import CallRecord
from toolspace.errors import RefusedError
from toolspace.spaces import call_transactions
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.workers import WorkerConnection, WorkerEvent, Workers
from toolspace.storage.database import Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import calls as call_queries
from toolspace.storage.queries import workers_and_presence as presence
from toolspace.storage.queries import workers_and_presence as worker_queries
from toolspace.storage.queries.calls import NewCall
from toolspace.storage.sqlite.database import SqliteDatabase

GRACE = 0.15


@pytest.fixture(params=["sqlite", "postgres"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    if request.param == "postgres":
        database = await PostgresDatabase.open(request.getfixturevalue("postgres_url"))
    else:
        database = await SqliteDatabase.open(tmp_path / "data" / "toolspace.db")
    ledger = Ledger(database)
    yield ledger
    await ledger.aclose()


@pytest.fixture
async def workers(ledger: Ledger) -> AsyncIterator[Workers]:
    async with Workers(ledger, grace=GRACE) as workers:
        yield workers


async def open_call(ledger: Ledger, tool: str = "move", *, needs_worker: bool = False, **args: object) -> CallRecord:
    new = NewCall(
        call_id=new_id("call"),
        run_id=None,
        agent_entity_id=None,
        space_id=None,
        tool_name=tool,
        args=args,
        execution_type="external",
        execution_target="external",
        visible=False,
        visibility="none",
        status="waiting",
        node_id=ledger.node_id,
    )
    return (await ledger.commit(call_transactions.start, new, needs_worker=needs_worker)).call


async def submit_result(ledger: Ledger, call: CallRecord, result: object = "done") -> None:
    await ledger.commit(call_transactions.submit, call_transactions.Submission(call_id=call.call_id, result=result))


async def next_events(connection: WorkerConnection, count: int) -> list[WorkerEvent]:
    """The next `count` events of a worker."""
    events: list[WorkerEvent] = []
    async with asyncio.timeout(10):
        while len(events) < count:
            events += await connection.next_events()
    return events


async def offered_calls(connection: WorkerConnection, count: int = 1) -> list[CallRecord]:
    events = await next_events(connection, count)
    assert [event[0] for event in events] == ["offered"] * count
    return [call for _, call in events if isinstance(call, CallRecord)]


async def run_woken_tasks(ledger: Ledger) -> None:
    """Lets every woken task run."""
    for _ in range(10):
        await ledger.write(presence.record_heartbeat, "node_of_the_test", started_at=0)
        await ledger.read(presence.list_workers)


@pytest.mark.spec("6.7")
async def test_call_reaches_only_a_worker_of_its_tool(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as mover, workers.connect("wrk_b", ["look"], 4) as looker:
        move = await open_call(ledger, "move", to="left")
        look = await open_call(ledger, "look")
        (first,) = await offered_calls(mover)
        (second,) = await offered_calls(looker)
    assert (first.call_id, first.args) == (move.call_id, {"to": "left"})
    assert second.call_id == look.call_id


@pytest.mark.spec("6.7")
async def test_waiting_calls_are_offered_to_a_worker_that_connects_later(ledger: Ledger, workers: Workers) -> None:
    open_calls = [await open_call(ledger), await open_call(ledger)]
    async with workers.connect("wrk_a", ["move"], 4) as worker:
        assert [call.call_id for call in await offered_calls(worker, 2)] == [call.call_id for call in open_calls]


@pytest.mark.spec("6.7")
async def test_each_call_is_given_to_exactly_one_worker(ledger: Ledger, workers: Workers) -> None:
    offered_ids: list[str] = []

    async def work(worker_id: str) -> None:
        async with workers.connect(worker_id, ["move"], 3) as connection:
            while connection.disconnect_reason is None:
                for kind, call in await connection.next_events():
                    if kind == "offered":
                        assert isinstance(call, CallRecord)
                        offered_ids.append(call.call_id)
                        await submit_result(ledger, call)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(f"wrk_{number}")) for number in range(4)]
        opened_calls = await asyncio.gather(*(open_call(ledger) for _ in range(200)))
        while len(offered_ids) < len(opened_calls):
            await run_woken_tasks(ledger)
        for task in tasks:
            task.cancel()
    assert sorted(offered_ids) == sorted(call.call_id for call in opened_calls)


async def test_worker_has_no_more_open_calls_than_its_concurrency(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 2) as worker:
        for _ in range(5):
            await open_call(ledger)
        first, _ = await offered_calls(worker, 2)
        await run_woken_tasks(ledger)
        assert len(await ledger.read(call_queries.list_claimed, "wrk_a")) == 2
        await submit_result(ledger, first)
        first_event, second_event = await next_events(worker, 2)
        assert first_event == ("answered", first.call_id)
        assert second_event[0] == "offered"
        assert len(await ledger.read(call_queries.list_claimed, "wrk_a")) == 2


async def test_simultaneous_calls_are_shared_by_the_workers(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 8) as first, workers.connect("wrk_b", ["move"], 8) as second:
        await asyncio.gather(*(open_call(ledger) for _ in range(8)))
        # Not exactly: some calls may arrive during the assignment.
        assert len(await next_events(first, 3)) < 6
        assert len(await next_events(second, 3)) < 6


async def test_idle_worker_gets_a_call_before_a_busy_one(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 8) as first, workers.connect("wrk_b", ["move"], 8) as second:
        for count in range(1, 7):
            await open_call(ledger)
            while (
                sum([len(await ledger.read(call_queries.list_claimed, worker_id)) for worker_id in ("wrk_a", "wrk_b")])
                < count
            ):
                pass
        assert len(await offered_calls(first, 3)) == len(await offered_calls(second, 3)) == 3


@pytest.mark.spec("6.7")
async def test_calls_of_a_departed_worker_go_to_another(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as first:
        call = await open_call(ledger)
        await offered_calls(first)
    async with workers.connect("wrk_b", ["move"], 4) as second:
        (second_offer,) = await offered_calls(second)
        assert second_offer.call_id == call.call_id


async def test_worker_that_reconnects_in_time_keeps_its_calls(ledger: Ledger) -> None:
    async with Workers(ledger, grace=60) as workers, workers.connect("wrk_b", ["move"], 4) as other_connection:
        async with workers.connect("wrk_a", ["look"], 4) as first:
            call = await open_call(ledger, "look")
            await offered_calls(first)
        async with workers.connect("wrk_a", ["look", "move"], 4) as second_connection:
            assert [offer.call_id for offer in await offered_calls(second_connection)] == [call.call_id]
        await run_woken_tasks(ledger)
        assert [offer.call_id for offer in await ledger.read(call_queries.list_claimed, "wrk_a")] == [call.call_id]
        assert other_connection.disconnect_reason is None


async def test_second_connection_of_a_worker_replaces_the_first(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as first:
        call = await open_call(ledger)
        await offered_calls(first)
        async with workers.connect("wrk_a", ["move"], 4) as second:
            assert await first.next_events() == []
            assert first.disconnect_reason == "replaced"
            assert [offer.call_id for offer in await offered_calls(second)] == [call.call_id]
        assert workers.count_by_tool() == {}


@pytest.mark.spec("6.7")
async def test_worker_is_told_that_a_call_was_cancelled(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 1) as worker:
        call = await open_call(ledger)
        await offered_calls(worker)
        await ledger.commit(call_transactions.end_call, call.call_id, "canceled", "not wanted")
        assert await next_events(worker, 1) == [("canceled", call.call_id)]
        second_call = await open_call(ledger)
        assert [offer.call_id for offer in await offered_calls(worker)] == [second_call.call_id]


async def test_retiring_worker_finishes_named_calls_and_others_get_the_rest(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as first:
        opened_calls = [await open_call(ledger), await open_call(ledger)]
        await offered_calls(first, 2)
        async with workers.connect("wrk_b", ["move"], 4) as second:
            assert await workers.retire("wrk_a", [opened_calls[0].call_id])
            (offered_call,) = await offered_calls(second)
            assert offered_call.call_id == opened_calls[1].call_id
            later = await open_call(ledger)
            assert [offer.call_id for offer in await offered_calls(second)] == [later.call_id]
        assert [offer.call_id for offer in await ledger.read(call_queries.list_claimed, "wrk_a")] == [
            opened_calls[0].call_id
        ]
    assert not await workers.retire("wrk_unknown", [])


@pytest.mark.spec("6.7")
async def test_worker_that_retires_during_an_assignment_gets_no_call(ledger: Ledger) -> None:
    await ledger.write(worker_queries.register_worker, "wrk_a", ["move"], node_id=ledger.node_id)
    call = await open_call(ledger)
    has_read = asyncio.Event()

    def deal() -> Program[worker_queries.CallAssignments]:
        steps = worker_queries.assign_calls(
            [worker_queries.WorkerCapacity("wrk_a", ("move",), 1)], node_id=ledger.node_id
        )
        rows = yield next(steps)
        has_read.set()
        if ledger.database.is_shared:
            yield "SELECT pg_sleep(0.3)", ()  # It retires in the meantime.
        try:
            while True:
                rows = yield steps.send(rows)
        except StopIteration as end:
            return end.value

    assign_task = asyncio.ensure_future(ledger.database.run(deal))
    await has_read.wait()
    assert await ledger.write(worker_queries.retire, "wrk_a", []) is not None
    await assign_task
    assert await ledger.read(call_queries.list_claimed, "wrk_a") == []
    await ledger.write(worker_queries.register_worker, "wrk_b", ["move"], node_id=ledger.node_id)
    assignments = await ledger.write(
        worker_queries.assign_calls, [worker_queries.WorkerCapacity("wrk_b", ("move",), 1)], node_id=ledger.node_id
    )
    assert [assigned_call.call_id for assigned_call in assignments.calls_by_worker["wrk_b"]] == [call.call_id]


@pytest.mark.spec("6.7")
async def test_call_fails_at_once_if_no_worker_serves_its_tool(ledger: Ledger, workers: Workers) -> None:
    with pytest.raises(RefusedError, match='no worker serves the tool "move"'):
        await open_call(ledger, needs_worker=True)
    async with workers.connect("wrk_a", ["move"], 1) as worker:
        await open_call(ledger, needs_worker=True)
        await offered_calls(worker)


async def test_worker_of_a_dead_process_keeps_its_calls_during_the_grace(ledger: Ledger) -> None:
    call = await open_call(ledger)
    await ledger.write(worker_queries.register_worker, "wrk_a", ["move"], node_id="node_dead")
    hand = worker_queries.WorkerCapacity("wrk_a", ("move",), 1)
    assert (await ledger.write(worker_queries.assign_calls, [hand], node_id="node_dead")).calls_by_worker
    await ledger.write(worker_queries.disconnect_workers_of_node, "node_dead")
    assert await ledger.write(presence.delete_node, "node_dead") == []
    async with (
        Workers(ledger, grace=GRACE, compare_seconds=0.05) as workers,
        workers.connect("wrk_b", ["move"], 1) as other_connection,
    ):
        (offered_call,) = await offered_calls(other_connection)
        assert offered_call.call_id == call.call_id


async def test_two_processes_never_give_one_call_to_two_workers(ledger: Ledger) -> None:
    """The second is another process on the same database, without wake-ups."""
    other_ledger = Ledger(ledger.database)
    async with (
        Workers(ledger, compare_seconds=0.02) as local_workers,
        Workers(other_ledger, compare_seconds=0.02) as remote_workers,
        local_workers.connect("wrk_a", ["move"], 100) as first,
        remote_workers.connect("wrk_b", ["move"], 100) as second,
        asyncio.timeout(20),
    ):
        opened_ids = {(await open_call(ledger)).call_id for _ in range(60)}
        offered_ids: list[str] = []

        async def take(connection: WorkerConnection) -> None:
            while len(offered_ids) < len(opened_ids):
                offered_ids.extend(
                    call.call_id for _, call in await connection.next_events() if isinstance(call, CallRecord)
                )

        tasks = [asyncio.create_task(take(connection)) for connection in (first, second)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(offered_ids) == sorted(opened_ids)


async def test_worker_that_moved_to_another_process_is_disconnected_by_the_first(ledger: Ledger) -> None:
    other_ledger = Ledger(ledger.database)
    async with (
        Workers(ledger, compare_seconds=0.02) as local_workers,
        Workers(other_ledger) as remote_workers,
        local_workers.connect("wrk_a", ["move"], 4) as old,
        remote_workers.connect("wrk_a", ["move"], 4) as new,
    ):
        async with asyncio.timeout(10):
            assert await old.next_events() == []
        assert old.disconnect_reason == "replaced"
        call = await open_call(other_ledger)
        assert [offer.call_id for offer in await offered_calls(new)] == [call.call_id]


async def test_stopping_disconnects_workers_and_leaves_them_their_calls(ledger: Ledger) -> None:
    async with Workers(ledger) as workers, workers.connect("wrk_a", ["move"], 4) as worker:
        call = await open_call(ledger)
        await offered_calls(worker)
        assert workers.count_by_tool() == {"move": 1}
        await workers.aclose()
        assert await worker.next_events() == []
        assert worker.disconnect_reason == "stopping"
    assert [claimed_call.call_id for claimed_call in await ledger.read(call_queries.list_claimed, "wrk_a")] == [
        call.call_id
    ]
    assert await ledger.read(worker_queries.list_workers) == [("wrk_a", ["move"], False)]


@pytest.mark.spec("15.3")
async def test_worker_of_a_process_declared_dead_is_not_told_that_it_was_replaced(ledger: Ledger) -> None:
    async with Workers(ledger, compare_seconds=0.02) as workers, workers.connect("wrk_a", ["move"], 4) as line:
        await ledger.write(presence.delete_node, ledger.node_id)
        async with asyncio.timeout(10):
            assert await line.next_events() == []
        assert line.disconnect_reason == "forgotten"  # So it reconnects.
        async with workers.connect("wrk_a", ["move"], 4) as second_connection:
            call = await open_call(ledger)
            assert [offer.call_id for offer in await offered_calls(second_connection)] == [call.call_id]

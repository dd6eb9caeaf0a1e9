"""Who gets which call: one worker each, shared fairly, given on when a worker goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toolspace.core.ids import new_id
from toolspace.core.records import CallRecord
from toolspace.errors import RefusedError
from toolspace.spaces import call_transactions
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.workers import WorkerConnection, WorkerEvent, Workers
from toolspace.storage.database import Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import presence
from toolspace.storage.queries import workers as claims
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


async def ask(ledger: Ledger, tool: str = "move", *, needs_worker: bool = False, **args: object) -> CallRecord:
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


async def answer(ledger: Ledger, call: CallRecord, result: object = "done") -> None:
    await ledger.commit(call_transactions.submit, call_transactions.Submission(call_id=call.call_id, result=result))


async def hear(connection: WorkerConnection, count: int) -> list[WorkerEvent]:
    """The next so many things that a worker is told."""
    news: list[WorkerEvent] = []
    async with asyncio.timeout(10):
        while len(news) < count:
            news += await connection.next_events()
    return news


async def offered(connection: WorkerConnection, count: int = 1) -> list[CallRecord]:
    news = await hear(connection, count)
    assert [one[0] for one in news] == ["offered"] * count
    return [call for _, call in news if isinstance(call, CallRecord)]


async def settled(ledger: Ledger) -> None:
    """Everything that was woken so far has had its turn."""
    for _ in range(10):
        await ledger.write(presence.record_heartbeat, "node_of_the_test", started_at=0)
        await ledger.read(presence.list_topics)


@pytest.mark.spec("6.7")
async def test_call_reaches_the_worker_that_serves_its_tool_and_no_other(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as mover, workers.connect("wrk_b", ["look"], 4) as looker:
        move = await ask(ledger, "move", to="left")
        look = await ask(ledger, "look")
        (first,) = await offered(mover)
        (second,) = await offered(looker)
    assert (first.call_id, first.args) == (move.call_id, {"to": "left"})
    assert second.call_id == look.call_id


@pytest.mark.spec("6.7")
async def test_calls_that_wait_are_offered_to_a_worker_that_comes_later(ledger: Ledger, workers: Workers) -> None:
    waiting = [await ask(ledger), await ask(ledger)]
    async with workers.connect("wrk_a", ["move"], 4) as worker:
        assert [call.call_id for call in await offered(worker, 2)] == [call.call_id for call in waiting]


@pytest.mark.spec("6.7")
async def test_each_of_many_calls_is_given_to_exactly_one_worker(ledger: Ledger, workers: Workers) -> None:
    seen: list[str] = []

    async def work(worker_id: str) -> None:
        async with workers.connect(worker_id, ["move"], 3) as connection:
            while connection.disconnect_reason is None:
                for kind, call in await connection.next_events():
                    if kind == "offered":
                        assert isinstance(call, CallRecord)
                        seen.append(call.call_id)
                        await answer(ledger, call)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(f"wrk_{number}")) for number in range(4)]
        asked = await asyncio.gather(*(ask(ledger) for _ in range(200)))
        while len(seen) < len(asked):
            await settled(ledger)
        for task in tasks:
            task.cancel()
    assert sorted(seen) == sorted(call.call_id for call in asked)


async def test_worker_has_no_more_unanswered_calls_than_it_asked_for(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 2) as worker:
        for _ in range(5):
            await ask(ledger)
        first, _ = await offered(worker, 2)
        await settled(ledger)
        assert len(await ledger.read(call_rows.list_claimed, "wrk_a")) == 2
        await answer(ledger, first)
        told, given = await hear(worker, 2)
        assert told == ("answered", first.call_id)
        assert given[0] == "offered"
        assert len(await ledger.read(call_rows.list_claimed, "wrk_a")) == 2


async def test_calls_that_come_together_are_shared_by_the_workers(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 8) as first, workers.connect("wrk_b", ["move"], 8) as second:
        await asyncio.gather(*(ask(ledger) for _ in range(8)))
        # Not to the last one: some may come while others are given out.
        assert len(await hear(first, 3)) < 6
        assert len(await hear(second, 3)) < 6


async def test_idle_worker_goes_before_a_busy_one(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 8) as first, workers.connect("wrk_b", ["move"], 8) as second:
        for count in range(1, 7):
            await ask(ledger)
            while sum([len(await ledger.read(call_rows.list_claimed, one)) for one in ("wrk_a", "wrk_b")]) < count:
                pass
        assert len(await offered(first, 3)) == len(await offered(second, 3)) == 3


@pytest.mark.spec("6.7")
async def test_calls_of_a_worker_that_went_away_go_to_another(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as first:
        call = await ask(ledger)
        await offered(first)
    async with workers.connect("wrk_b", ["move"], 4) as second:
        (again,) = await offered(second)
        assert again.call_id == call.call_id


async def test_worker_that_comes_back_in_time_keeps_its_calls(ledger: Ledger) -> None:
    async with Workers(ledger, grace=60) as workers, workers.connect("wrk_b", ["move"], 4) as other:
        async with workers.connect("wrk_a", ["look"], 4) as first:
            call = await ask(ledger, "look")
            await offered(first)
        async with workers.connect("wrk_a", ["look", "move"], 4) as again:
            assert [one.call_id for one in await offered(again)] == [call.call_id]
        await settled(ledger)
        assert [one.call_id for one in await ledger.read(call_rows.list_claimed, "wrk_a")] == [call.call_id]
        assert other.disconnect_reason is None


async def test_second_connection_of_a_worker_ends_the_first_and_takes_its_calls(
    ledger: Ledger, workers: Workers
) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as first:
        call = await ask(ledger)
        await offered(first)
        async with workers.connect("wrk_a", ["move"], 4) as second:
            assert await first.next_events() == []
            assert first.disconnect_reason == "replaced"
            assert [one.call_id for one in await offered(second)] == [call.call_id]
        assert len(workers) == 0


@pytest.mark.spec("6.7")
async def test_worker_hears_that_a_call_was_canceled(ledger: Ledger, workers: Workers) -> None:
    async with workers.connect("wrk_a", ["move"], 1) as worker:
        call = await ask(ledger)
        await offered(worker)
        await ledger.commit(call_transactions.end_call, call.call_id, "canceled", "not wanted")
        assert await hear(worker, 1) == [("canceled", call.call_id)]
        following = await ask(ledger)
        assert [one.call_id for one in await offered(worker)] == [following.call_id]


async def test_worker_that_retires_finishes_what_it_says_and_others_get_the_rest(
    ledger: Ledger, workers: Workers
) -> None:
    async with workers.connect("wrk_a", ["move"], 4) as first:
        asked = [await ask(ledger), await ask(ledger)]
        await offered(first, 2)
        async with workers.connect("wrk_b", ["move"], 4) as second:
            assert await workers.retire("wrk_a", [asked[0].call_id])
            (given,) = await offered(second)
            assert given.call_id == asked[1].call_id
            later = await ask(ledger)
            assert [one.call_id for one in await offered(second)] == [later.call_id]
        assert [one.call_id for one in await ledger.read(call_rows.list_claimed, "wrk_a")] == [asked[0].call_id]
    assert not await workers.retire("wrk_unknown", [])


@pytest.mark.spec("6.7")
async def test_worker_that_retires_while_calls_are_dealt_is_given_none(ledger: Ledger) -> None:
    await ledger.write(claims.register, "wrk_a", ["move"], node_id=ledger.node_id)
    call = await ask(ledger)
    looked = asyncio.Event()

    def deal() -> Program[claims.CallAssignments]:
        steps = claims.assign_calls([claims.WorkerCapacity("wrk_a", ("move",), 1)], node_id=ledger.node_id)
        rows = yield next(steps)
        looked.set()
        if ledger.database.is_shared:
            yield "SELECT pg_sleep(0.3)", ()  # It retires meanwhile.
        try:
            while True:
                rows = yield steps.send(rows)
        except StopIteration as done:
            return done.value

    dealing = asyncio.ensure_future(ledger.database.run(deal))
    await looked.wait()
    assert await ledger.write(claims.retire, "wrk_a", []) is not None
    await dealing
    assert await ledger.read(call_rows.list_claimed, "wrk_a") == []
    await ledger.write(claims.register, "wrk_b", ["move"], node_id=ledger.node_id)
    dealt = await ledger.write(
        claims.assign_calls, [claims.WorkerCapacity("wrk_b", ("move",), 1)], node_id=ledger.node_id
    )
    assert [one.call_id for one in dealt.calls_by_worker["wrk_b"]] == [call.call_id]


@pytest.mark.spec("6.7")
async def test_call_fails_at_once_where_no_worker_serves_its_tool(ledger: Ledger, workers: Workers) -> None:
    with pytest.raises(RefusedError, match='no worker serves the tool "move"'):
        await ask(ledger, needs_worker=True)
    async with workers.connect("wrk_a", ["move"], 1) as worker:
        await ask(ledger, needs_worker=True)
        await offered(worker)


async def test_worker_of_a_dead_process_has_its_grace_and_then_others_get_its_calls(ledger: Ledger) -> None:
    call = await ask(ledger)
    await ledger.write(claims.register, "wrk_a", ["move"], node_id="node_dead")
    hand = claims.WorkerCapacity("wrk_a", ("move",), 1)
    assert (await ledger.write(claims.assign_calls, [hand], node_id="node_dead")).calls_by_worker
    await ledger.write(claims.disconnect_workers_of_node, "node_dead")
    assert await ledger.write(presence.delete_node, "node_dead") == []
    async with (
        Workers(ledger, grace=GRACE, compare_seconds=0.05) as workers,
        workers.connect("wrk_b", ["move"], 1) as other,
    ):
        (given,) = await offered(other)
        assert given.call_id == call.call_id


async def test_two_processes_never_give_one_call_to_two_workers(ledger: Ledger) -> None:
    """The second one is another node on the same database: it hears nothing, and looks by itself."""
    other = Ledger(ledger.database)
    async with (
        Workers(ledger, compare_seconds=0.02) as here,
        Workers(other, compare_seconds=0.02) as there,
        here.connect("wrk_a", ["move"], 100) as first,
        there.connect("wrk_b", ["move"], 100) as second,
        asyncio.timeout(20),
    ):
        asked = {(await ask(ledger)).call_id for _ in range(60)}
        given: list[str] = []

        async def take(connection: WorkerConnection) -> None:
            while len(given) < len(asked):
                given.extend(call.call_id for _, call in await connection.next_events() if isinstance(call, CallRecord))

        tasks = [asyncio.create_task(take(connection)) for connection in (first, second)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(given) == sorted(asked)


async def test_worker_that_moved_to_another_process_is_let_go_by_the_first(ledger: Ledger) -> None:
    other = Ledger(ledger.database)
    async with (
        Workers(ledger, compare_seconds=0.02) as here,
        Workers(other) as there,
        here.connect("wrk_a", ["move"], 4) as old,
        there.connect("wrk_a", ["move"], 4) as new,
    ):
        async with asyncio.timeout(10):
            assert await old.next_events() == []
        assert old.disconnect_reason == "replaced"
        call = await ask(other)
        assert [one.call_id for one in await offered(new)] == [call.call_id]


async def test_stopping_ends_the_connections_and_leaves_the_calls_with_their_workers(ledger: Ledger) -> None:
    async with Workers(ledger) as workers, workers.connect("wrk_a", ["move"], 4) as worker:
        call = await ask(ledger)
        await offered(worker)
        assert workers.count_by_tool() == {"move": 1}
        await workers.aclose()
        assert await worker.next_events() == []
        assert worker.disconnect_reason == "stopping"
    assert [one.call_id for one in await ledger.read(call_rows.list_claimed, "wrk_a")] == [call.call_id]
    assert await ledger.read(claims.list_workers) == [("wrk_a", ["move"], False)]


@pytest.mark.spec("15.3")
async def test_worker_whose_process_was_taken_for_dead_is_not_told_that_another_replaced_it(ledger: Ledger) -> None:
    async with Workers(ledger, compare_seconds=0.02) as workers, workers.connect("wrk_a", ["move"], 4) as line:
        await ledger.write(presence.delete_node, ledger.node_id)
        async with asyncio.timeout(10):
            assert await line.next_events() == []
        assert line.disconnect_reason == "forgotten"  # So it comes back, and serves again.
        async with workers.connect("wrk_a", ["move"], 4) as again:
            call = await ask(ledger)
            assert [one.call_id for one in await offered(again)] == [call.call_id]

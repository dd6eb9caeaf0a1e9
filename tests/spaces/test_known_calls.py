"""Results of calls that are known from when they were begun: nothing is read for them, and much is written at once."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from tests.spaces.rig import Rig, elsewhere, locked, rig
from toolspace.core.records import NewEvent, run_stream
from toolspace.errors import RefusedError
from toolspace.spaces import call_transactions, runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import events
from toolspace.storage.sqlite import database as sqlite
from toolspace.storage.sqlite.batch_writer import BatchWriter, PreparedBatch
from toolspace.storage.sqlite.database import SqliteDatabase
from toolspace.storage.sqlite.transactions import Work, tails_of


async def _pending(r: Rig, run_id: str, count: int) -> list[str]:
    results = await asyncio.gather(*(r.call(run_id, "later", {"n": number}) for number in range(count)))
    ids = [result.call_id for result in results]
    assert set(ids) <= set(r.ledger.open_calls)
    return ids


async def _told(r: Rig, run_id: str) -> list[Any]:
    """The results as the stream of the run has them. No id is missing, none is there twice."""
    stored = await r.ledger.read(events.list_after, run_stream(run_id), 0, 10_000)
    assert [event.id for event in stored] == list(range(1, len(stored) + 1))
    told = [event for event in stored if event.type in ("tool.done", "tool.error", "said")]
    return [event.data["output"] if "output" in event.data else event.data["error"] for event in told]


def _later(**options: Any) -> Any:
    return elsewhere("later", is_async=True, **options)


@pytest.mark.spec("6.4")
async def test_results_that_come_together_are_kept_each_as_it_is(database: Database) -> None:
    results: list[Any] = [None, False, 0, "é\0\ud800", {"deep": [1.5, None]}, 2**70, "x" * 3000, []]
    async with rig(database, _later()) as r:
        run_id = await r.open_run()
        ids = await _pending(r, run_id, len(results))
        pairs = list(enumerate(zip(ids, results, strict=True)))
        brought = await asyncio.gather(
            *(r.submit(call_id, result, is_error=n % 2 == 1, key=f"k{n}") for n, (call_id, result) in pairs)
        )
        assert not r.ledger.open_calls
        for number, (call_id, call) in enumerate(zip(ids, brought, strict=True)):
            there = await r.row(call_id)
            assert there.wire() == call.wire()
            assert (there.status, there.is_error, there.source) == ("resolved", number % 2 == 1, "client")
        kept = [*results[:3], "é\0?", *results[4:]]
        assert [call.result for call in brought] == kept
        assert len(await _told(r, run_id)) == len(results)
        assert sorted(event.data["callId"] for event in await r.inbox()) == sorted(ids)
        # The same once more, under the same keys: the same answers, and nobody hears of it again.
        again = await asyncio.gather(
            *(r.submit(call_id, result, is_error=n % 2 == 1, key=f"k{n}") for n, (call_id, result) in pairs)
        )
        assert [call.wire() for call in again] == [call.wire() for call in brought]
        assert len(await _told(r, run_id)) == len(results) == len(await r.inbox())


@pytest.mark.spec("6.4")
async def test_of_two_results_in_one_moment_one_is_taken(database: Database) -> None:
    async with rig(database, _later()) as r:
        run_id = await r.open_run()
        ids = await _pending(r, run_id, 20)
        ends = await asyncio.gather(
            *(r.submit(call_id, number) for call_id in ids for number in range(3)), return_exceptions=True
        )
        assert sum(isinstance(end, RefusedError) for end in ends) == 40
        taken = [end.result for end in ends if not isinstance(end, BaseException)]
        assert [(await r.row(call_id)).result for call_id in ids] == taken
        assert sorted(await _told(r, run_id)) == sorted(taken)
        assert len(await r.inbox()) == 20


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("other", ["cancel", "end", "run"])
@pytest.mark.parametrize("first", ["result", "other"])
async def test_a_result_and_the_end_of_its_call_in_one_moment_are_not_both(
    database: Database, other: str, first: str
) -> None:
    async with rig(database, _later()) as r:
        run_id = await r.open_run()
        ids = await _pending(r, run_id, 8)
        ways: dict[str, Callable[[], Any]] = {
            "cancel": lambda: r.ledger.commit(call_transactions.cancel, ids[3]),
            "end": lambda: r.ledger.commit(call_transactions.end_call, ids[3], "expired", "too late"),
            "run": lambda: r.ledger.commit(runs.cancel_run, run_id),
        }
        work = [*(r.submit(call_id, "yes") for call_id in ids)]
        work.insert(len(work) if first == "result" else 0, ways[other]())
        ends = await asyncio.gather(*work, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, BaseException) and not isinstance(end, RefusedError)]
        answered = 0
        for call_id in ids:
            row = await r.row(call_id)
            answered += row.status == "resolved"
            assert row.status == "resolved" or row.status in ("canceled", "expired")
            assert (row.result == "yes") is (row.status == "resolved")
        assert (await _told(r, run_id)).count("yes") == answered
        if not database.is_shared:  # One after the other, in the order in which they came.
            assert answered == {"result": 8, "other": 0 if other == "run" else 7}[first]


@pytest.mark.spec("15.2")
async def test_results_alone_are_one_statement_of_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Sequence[Any]] = []
    run = sqlite.run

    def noted(connection: sqlite3.Connection, batch: Sequence[Work]) -> bool:
        ran.extend(row for tail in tails_of(batch) for row in tail.resolved_calls)
        return run(connection, batch)

    async with rig(await SqliteDatabase.open(tmp_path / "toolspace.db"), _later()) as r:
        run_id = await r.open_run()
        ids = await _pending(r, run_id, 64)
        monkeypatch.setattr(sqlite, "run", noted)
        await asyncio.gather(*(r.submit(call_id, number) for number, call_id in enumerate(ids)))
        assert ran == []
        assert sorted(await _told(r, run_id)) == list(range(64))
        # Whoever has the file open may read it there and then.
        with closing(sqlite3.connect(tmp_path / "toolspace.db")) as other:
            assert other.execute("SELECT COUNT(*) FROM calls WHERE status = 'resolved'").fetchone() == (64,)


class _Held:
    """Stops the thread that commits before its first statement, and notes what it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.second = threading.Event()
        self.written: list[int] = []
        write = BatchWriter.write

        def held(writer: BatchWriter, connection: sqlite3.Connection, plan: PreparedBatch) -> bool:
            assert self.go_on.wait(30)
            if self.written:
                self.second.set()
            self.written.append(len(plan.stored))
            return write(writer, connection, plan)

        monkeypatch.setattr(BatchWriter, "write", held)


@asynccontextmanager
async def _holding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> AsyncIterator[tuple[Rig, str, list[str], _Held]]:
    """So many pending calls of a run, and a thread that is held as soon as it writes a result."""
    async with rig(await SqliteDatabase.open(tmp_path / "toolspace.db"), _later()) as r:
        run_id = await r.open_run()
        ids = await _pending(r, run_id, count)
        await r.sweeper.__aexit__()  # It would write, too.
        yield r, run_id, ids, _Held(monkeypatch)


async def _bring_some(r: Rig, ids: Sequence[str], first: int) -> list[asyncio.Task[Any]]:
    """Results, of which some are being written when the others come."""
    bringing = [asyncio.create_task(r.submit(call_id, n)) for n, call_id in enumerate(ids[:first])]
    await asyncio.sleep(0.01)
    bringing += [asyncio.create_task(r.submit(call_id, n)) for n, call_id in enumerate(ids[first:], first)]
    await asyncio.sleep(0.01)
    return bringing


@pytest.mark.spec("15.2")
async def test_what_comes_during_a_commit_is_written_without_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _holding(tmp_path, monkeypatch, 12) as (r, run_id, ids, held):
        bringing = await _bring_some(r, ids, 5)
        held.go_on.set()
        assert held.second.wait(30)  # The loop stands still meanwhile.
        assert held.written[0] == 5
        assert [call.result for call in await asyncio.gather(*bringing)] == list(range(12))
        assert held.written == [5, 7]
        assert await _told(r, run_id) == list(range(12))
        assert len(await r.inbox()) == 12


@pytest.mark.spec("15.2")
async def test_little_that_comes_during_a_commit_waits_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _holding(tmp_path, monkeypatch, 10) as (r, run_id, ids, held):
        bringing = await _bring_some(r, ids, 8)
        held.go_on.set()
        assert not held.second.wait(0.2)  # It is left to the loop, which stands still.
        await asyncio.gather(*bringing)
        assert held.written == [8, 2]
        assert await _told(r, run_id) == list(range(10))


@pytest.mark.spec("15.2")
async def test_a_program_between_results_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(effects: Effects) -> Program[None]:
        effects.emit(run_stream(run_id), NewEvent("said", {"output": "a program"}))
        yield "SELECT 1", ()

    async with _holding(tmp_path, monkeypatch, 6) as (r, run_id, ids, held):
        bringing: list[asyncio.Task[Any]] = await _bring_some(r, ids[:4], 2)
        bringing.append(asyncio.create_task(r.ledger.commit(emit)))
        bringing += [asyncio.create_task(r.submit(call_id, n)) for n, call_id in enumerate(ids[4:], 4)]
        await asyncio.sleep(0.01)
        held.go_on.set()
        await asyncio.gather(*bringing)
        assert await _told(r, run_id) == [0, 1, 2, 3, "a program", 4, 5]


@pytest.mark.spec("6.4")
async def test_what_changed_under_the_thread_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _holding(tmp_path, monkeypatch, 8) as (r, run_id, ids, held):
        bringing = await _bring_some(r, ids, 4)
        with closing(sqlite3.connect(tmp_path / "toolspace.db")) as other, other:
            other.execute("UPDATE calls SET status = 'canceled' WHERE call_id = ?", (ids[5],))
        held.go_on.set()
        ends = await asyncio.gather(*bringing, return_exceptions=True)
        assert [n for n, end in enumerate(ends) if isinstance(end, RefusedError)] == [5]
        assert await _told(r, run_id) == [0, 1, 2, 3, 4, 6, 7]
        assert (await r.row(ids[5])).result is None
        assert len(await r.inbox()) == 7


@pytest.mark.spec("15.2")
async def test_what_is_remembered_of_a_stream_is_not_believed(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")

    def emit(effects: Effects) -> Program[None]:
        effects.emit(run_stream(run_id), NewEvent("said", {"output": "by others"}))
        return
        yield

    async with rig(database, _later()) as r:
        run_id = await r.open_run()
        ids = await _pending(r, run_id, 3)
        await r.submit(ids[0], "a")
        await database.run(lambda: events.append(run_stream(run_id), [NewEvent("said", {"output": "unheard"})]))
        await r.submit(ids[1], "b")
        await r.ledger.commit(emit)
        await r.submit(ids[2], "c")
        assert await _told(r, run_id) == ["a", "unheard", "b", "by others", "c"]


@pytest.mark.spec("15.2")
async def test_a_result_waits_for_another_program_that_writes_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.db"
    async with rig(await SqliteDatabase.open(path), _later()) as r:
        run_id = await r.open_run()
        ids = await _pending(r, run_id, 4)
        heard: list[Any] = []
        follower = r.ledger.hub.subscribe_all()
        async with locked(path):
            bringing = [asyncio.create_task(r.submit(call_id, n)) for n, call_id in enumerate(ids)]
            done, _ = await asyncio.wait(bringing, timeout=0.1)
            assert not done
        await asyncio.gather(*bringing)
        assert await _told(r, run_id) == [0, 1, 2, 3]
        while len(heard) < 4:  # Each is told once, with the id that it has.
            heard += [(event.id, event.data["output"]) for event in await follower.next_batch()]
        assert heard == [(6, 0), (7, 1), (8, 2), (9, 3)]
        follower.close()


@pytest.mark.spec("15.2")
async def test_a_large_result_is_kept_too(tmp_path: Path) -> None:
    async with rig(await SqliteDatabase.open(tmp_path / "toolspace.db"), _later()) as r:
        run_id = await r.open_run()
        (call_id,) = await _pending(r, run_id, 1)
        await r.submit(call_id, "y" * 700_000)
        assert (await r.row(call_id)).result == "y" * 700_000
        assert await _told(r, run_id) == ["y" * 700_000]

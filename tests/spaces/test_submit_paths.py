"""Submitting results of remembered calls: the path without a read, compared with the plain path.

A process remembers the open calls that it started. `PendingCalls.submit` then resolves a call from memory, and SQLite
commits such results in one statement. Rows, events and inbox must be the same as on the plain path.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.spaces.service_harness import ServiceHarness, hold_write_lock, pending_tool, service_harness
from toolspace.core.stored_records import NewEvent, run_stream
from toolspace.errors import RefusedError
from toolspace.spaces import call_transactions, runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import calls, events, inbox
from toolspace.storage.sqlite.database import SqliteDatabase


async def _open_calls(harness: ServiceHarness, run_id: str, count: int) -> list[str]:
    results = await asyncio.gather(*(harness.call(run_id, "later", {"n": number}) for number in range(count)))
    ids = [result.call_id for result in results]
    assert set(ids) <= set(harness.ledger.open_calls)
    return ids


async def _streamed_results(harness: ServiceHarness, run_id: str) -> list[Any]:
    """The results in the stream of the run. Checks that the ids of its events have no gap."""
    stored_events = await harness.ledger.read(events.list_after, run_stream(run_id), 0, 10_000)
    assert [event.id for event in stored_events] == list(range(1, len(stored_events) + 1))
    results = [event for event in stored_events if event.type in ("tool.done", "tool.error", "note")]
    return [event.data["output"] if "output" in event.data else event.data["error"] for event in results]


def _later(**options: Any) -> Any:
    return pending_tool("later", is_async=True, **options)


# Random sequences, on both paths

_CALLS = 12
_RESULTS: list[Any] = [None, False, 0, "", "é\0\ud800", {"deep": [1.5, None]}, 2**70, "x" * 3000, [], {"error": "no"}]


class _Step:
    """One operation of a sequence, drawn before either path runs."""

    def __init__(self, chance: random.Random, path: str) -> None:
        self.path = path
        self.kind = chance.choices(("submit", "cancel", "expire", "time_out", "end_run"), weights=(12, 2, 2, 2, 0.3))[0]
        self.call_id = f"{path}_call_{chance.randrange(_CALLS)}"
        self.result = chance.choice(_RESULTS)
        self.options: dict[str, Any] = {"is_error": chance.random() < 0.3}
        if chance.random() < 0.5:
            self.options["key"] = chance.choice("ab")
        if chance.random() < 0.2:
            self.options["run_id"] = f"{path}_run_{chance.choice(('1', '2', 'none'))}"
        if chance.random() < 0.1:
            self.options["space_id"] = "spc_none"

    async def run(self, harness: ServiceHarness) -> str:
        commit = harness.ledger.commit
        try:
            match self.kind:
                case "submit":
                    call = await harness.submit(self.call_id, self.result, **self.options)
                    return f"submitted {call.status} {json.dumps(call.result)} {call.is_error} {call.source}"
                case "cancel":
                    return (await commit(call_transactions.cancel, self.call_id)).status
                case "expire":
                    ended_call = await commit(call_transactions.end_call, self.call_id, "expired", "too late")
                    return str(ended_call and ended_call.status)
                case "time_out":
                    call, has_result = await commit(call_transactions.make_pending, self.call_id)
                    return f"{call.status} {has_result}"
                case _:
                    return (await commit(runs.cancel_run, f"{self.path}_run_2")).status
        except RefusedError as error:
            return f"refused {error.reason}: {error}".replace(self.path, "PATH")


async def _run_sequence(database: Database, seed: int, path: Literal["memory", "plain"]) -> tuple[list[str], Any]:
    """Runs a random sequence. Returns what each step returned, and everything that it left in the database."""
    chance = random.Random(seed)
    groups = [[_Step(chance, path) for _ in range(chance.randint(1, 6))] for _ in range(16)]
    call_ids = [f"{path}_call_{number}" for number in range(_CALLS)]
    async with service_harness(database, _later(), pending_tool("now", timeout=60.0), owns=False) as harness:
        await harness.sweeper.__aexit__()  # It would write, too.
        await harness.register_worker("now")
        for number in (1, 2):
            space_id = harness.space if number == 2 else None
            await harness.ledger.commit(runs.open_run, harness.agent, run_id=f"{path}_run_{number}", space_id=space_id)
        wait_tasks: list[asyncio.Task[Any]] = []
        for number, call_id in enumerate(call_ids):
            run_id = f"{path}_run_{1 if number % 3 else 2}"
            if number % 4:
                await harness.call(run_id, "later", {"n": number}, call_id=call_id)
            else:
                wait_tasks.append(asyncio.create_task(harness.call(run_id, "now", call_id=call_id)))
                while call_id not in harness.ledger.open_calls:  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(0.001)
        outcomes: list[str] = []
        for group in groups:
            if path == "plain":
                harness.ledger.open_calls.clear()
            # SQLite runs what arrives together in its order; PostgreSQL may run it in any order.
            if database.is_shared:
                outcomes += [await step.run(harness) for step in group]
            else:
                outcomes += await asyncio.gather(*(step.run(harness) for step in group))
        await harness.pending_calls.drain()
        results = await asyncio.gather(*wait_tasks, return_exceptions=True)
        await harness.pending_calls.aclose()
        outcomes += [str(result).replace(path, "PATH") for result in map(_describe_result, results)]
        return outcomes, await _dump(harness, path, call_ids)


def _describe_result(result: Any) -> str:
    return repr(result) if isinstance(result, BaseException) else f"{result.ok} {result.result} {result.error}"


async def _dump(harness: ServiceHarness, path: str, call_ids: list[str]) -> Any:
    """Calls, events and inbox, without times and generated ids."""
    rows = [await harness.ledger.read(calls.find_with_submission, call_id) for call_id in call_ids]
    streams = (f"run:{path}_run_1", f"run:{path}_run_2", f"space:{harness.space}")
    dump = {
        "calls": [(call.wire(), *submission) for call, *submission in filter(None, rows)],
        "inline": [await harness.ledger.read(calls.is_inline, call_id) for call_id in call_ids],
        "events": [[(event.id, event.type, event.data) for event in await harness.events(name)] for name in streams],
        "inbox": sorted(
            (event.event_id, event.type, event.priority, event.data)
            for event in await harness.ledger.read(inbox.list_events, harness.agent, limit=1000)
        ),
    }
    text = json.dumps(dump)
    for generated_id, name in ((harness.agent, "AGENT"), (harness.space, "SPACE"), (path, "PATH")):
        text = text.replace(generated_id, name)
    return _without_times(json.loads(text))


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_times(item)
            for key, item in value.items()
            if not key.endswith("At") and key not in ("durationMs", "timestamp")
        }
    return [_without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("seed", range(8))
async def test_random_sequences_have_the_same_effects_on_both_paths(seed: int, database: Database) -> None:
    returned_from_memory, effects_from_memory = await _run_sequence(database, seed, "memory")
    returned_plainly, effects_plainly = await _run_sequence(database, seed, "plain")
    assert returned_from_memory == returned_plainly
    assert effects_from_memory == effects_plainly
    assert any(text.startswith("submitted") for text in returned_plainly)


# Single cases


@pytest.mark.spec("6.4")
async def test_results_that_arrive_together_are_all_stored(database: Database) -> None:
    results: list[Any] = [None, False, 0, "é\0\ud800", {"deep": [1.5, None]}, 2**70, "x" * 3000, []]
    async with service_harness(database, _later()) as harness:
        run_id = await harness.open_run()
        ids = await _open_calls(harness, run_id, len(results))
        pairs = list(enumerate(zip(ids, results, strict=True)))
        submitted_calls = await asyncio.gather(
            *(harness.submit(call_id, result, is_error=n % 2 == 1, key=f"k{n}") for n, (call_id, result) in pairs)
        )
        assert not harness.ledger.open_calls
        for number, (call_id, call) in enumerate(zip(ids, submitted_calls, strict=True)):
            stored_call = await harness.get_call(call_id)
            assert stored_call.wire() == call.wire()
            assert (stored_call.status, stored_call.is_error, stored_call.source) == (
                "resolved",
                number % 2 == 1,
                "client",
            )
        expected = [*results[:3], "é\0?", *results[4:]]
        assert [call.result for call in submitted_calls] == expected
        assert len(await _streamed_results(harness, run_id)) == len(results)
        assert sorted(event.data["callId"] for event in await harness.inbox()) == sorted(ids)
        # Submitted again under the same keys: the same answers, and no new event.
        repetitions = await asyncio.gather(
            *(harness.submit(call_id, result, is_error=n % 2 == 1, key=f"k{n}") for n, (call_id, result) in pairs)
        )
        assert [call.wire() for call in repetitions] == [call.wire() for call in submitted_calls]
        assert len(await _streamed_results(harness, run_id)) == len(results) == len(await harness.inbox())


@pytest.mark.spec("6.4")
async def test_one_of_several_results_for_the_same_call_is_stored(database: Database) -> None:
    async with service_harness(database, _later()) as harness:
        run_id = await harness.open_run()
        ids = await _open_calls(harness, run_id, 20)
        ends = await asyncio.gather(
            *(harness.submit(call_id, number) for call_id in ids for number in range(3)), return_exceptions=True
        )
        assert sum(isinstance(end, RefusedError) for end in ends) == 40
        accepted_results = [end.result for end in ends if not isinstance(end, BaseException)]
        assert [(await harness.get_call(call_id)).result for call_id in ids] == accepted_results
        assert sorted(await _streamed_results(harness, run_id)) == sorted(accepted_results)
        assert len(await harness.inbox()) == 20


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("other_writer", ["cancel", "end", "run"])
@pytest.mark.parametrize("first", ["result", "other"])
async def test_call_is_either_resolved_or_ended_if_both_happen_at_once(
    database: Database, other_writer: str, first: str
) -> None:
    async with service_harness(database, _later()) as harness:
        run_id = await harness.open_run()
        ids = await _open_calls(harness, run_id, 8)
        other_ends: dict[str, Callable[[], Any]] = {
            "cancel": lambda: harness.ledger.commit(call_transactions.cancel, ids[3]),
            "end": lambda: harness.ledger.commit(call_transactions.end_call, ids[3], "expired", "too late"),
            "run": lambda: harness.ledger.commit(runs.cancel_run, run_id),
        }
        work = [*(harness.submit(call_id, "yes") for call_id in ids)]
        work.insert(len(work) if first == "result" else 0, other_ends[other_writer]())
        ends = await asyncio.gather(*work, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, BaseException) and not isinstance(end, RefusedError)]
        resolved_count = 0
        for call_id in ids:
            call = await harness.get_call(call_id)
            resolved_count += call.status == "resolved"
            assert call.status == "resolved" or call.status in ("canceled", "expired")
            assert (call.result == "yes") is (call.status == "resolved")
        assert (await _streamed_results(harness, run_id)).count("yes") == resolved_count
        if not database.is_shared:  # One after the other, in the order in which they arrived.
            assert resolved_count == {"result": 8, "other": 0 if other_writer == "run" else 7}[first]


@asynccontextmanager
async def _sqlite_harness(tmp_path: Path, count: int) -> AsyncGenerator[tuple[ServiceHarness, str, list[str]]]:
    """So many pending calls of a run, and no sweeper that writes."""
    async with service_harness(await SqliteDatabase.open(tmp_path / "toolspace.db"), _later()) as harness:
        run_id = await harness.open_run()
        ids = await _open_calls(harness, run_id, count)
        await harness.sweeper.__aexit__()
        yield harness, run_id, ids


@pytest.mark.spec("15.2")
async def test_acknowledged_results_are_in_the_file(tmp_path: Path) -> None:
    async with _sqlite_harness(tmp_path, 64) as (harness, run_id, ids):
        await asyncio.gather(*(harness.submit(call_id, number) for number, call_id in enumerate(ids)))
        assert sorted(await _streamed_results(harness, run_id)) == list(range(64))
        with closing(sqlite3.connect(tmp_path / "toolspace.db")) as connection:
            assert connection.execute("SELECT COUNT(*) FROM calls WHERE status = 'resolved'").fetchone() == (64,)


@pytest.mark.spec("15.2")
@pytest.mark.parametrize("first", [1, 5, 11])
async def test_results_that_arrive_during_a_commit_are_stored_in_their_order(tmp_path: Path, first: int) -> None:
    async with _sqlite_harness(tmp_path, 12) as (harness, run_id, ids):
        async with hold_write_lock(tmp_path / "toolspace.db"):  # The first commit takes as long as this.
            submit_tasks = [asyncio.create_task(harness.submit(call_id, n)) for n, call_id in enumerate(ids[:first])]
            await asyncio.sleep(0.01)
            submit_tasks += [
                asyncio.create_task(harness.submit(call_id, n)) for n, call_id in enumerate(ids[first:], first)
            ]
            await asyncio.sleep(0.01)
        assert [call.result for call in await asyncio.gather(*submit_tasks)] == list(range(12))
        assert await _streamed_results(harness, run_id) == list(range(12))
        assert len(await harness.inbox()) == 12


@pytest.mark.spec("15.2")
async def test_program_between_results_is_committed_in_its_order(tmp_path: Path) -> None:
    def emit(effects: Effects) -> Program[None]:
        effects.emit(run_stream(run_id), NewEvent("note", {"output": "a program"}))
        yield "SELECT 1", ()

    async with _sqlite_harness(tmp_path, 6) as (harness, run_id, ids):
        async with hold_write_lock(tmp_path / "toolspace.db"):
            submit_tasks: list[asyncio.Task[Any]] = [
                asyncio.create_task(harness.submit(call_id, n)) for n, call_id in enumerate(ids[:4])
            ]
            await asyncio.sleep(0.01)
            submit_tasks.append(asyncio.create_task(harness.ledger.commit(emit)))
            submit_tasks += [asyncio.create_task(harness.submit(call_id, n)) for n, call_id in enumerate(ids[4:], 4)]
            await asyncio.sleep(0.01)
        await asyncio.gather(*submit_tasks)
        assert await _streamed_results(harness, run_id) == [0, 1, 2, 3, "a program", 4, 5]


@pytest.mark.spec("6.4")
async def test_call_that_changed_before_the_commit_takes_no_result(tmp_path: Path) -> None:
    async with _sqlite_harness(tmp_path, 8) as (harness, run_id, ids):
        with closing(sqlite3.connect(tmp_path / "toolspace.db")) as connection, connection:
            connection.execute("UPDATE calls SET status = 'canceled' WHERE call_id = ?", (ids[5],))
            submit_tasks = [asyncio.create_task(harness.submit(call_id, n)) for n, call_id in enumerate(ids)]
            await asyncio.sleep(0.01)
        ends = await asyncio.gather(*submit_tasks, return_exceptions=True)
        assert [n for n, end in enumerate(ends) if isinstance(end, RefusedError)] == [5]
        assert await _streamed_results(harness, run_id) == [0, 1, 2, 3, 4, 6, 7]
        assert (await harness.get_call(ids[5])).result is None
        assert len(await harness.inbox()) == 7


@pytest.mark.spec("15.2")
async def test_events_that_others_append_get_ids_of_their_own(tmp_path: Path) -> None:
    def emit(effects: Effects) -> Program[None]:
        effects.emit(run_stream(run_id), NewEvent("note", {"output": "with effects"}))
        return
        yield

    async with _sqlite_harness(tmp_path, 3) as (harness, run_id, ids):
        await harness.submit(ids[0], "a")
        note = NewEvent("note", {"output": "without effects"})
        await harness.ledger.database.run(lambda: events.append(run_stream(run_id), [note]))
        await harness.submit(ids[1], "b")
        await harness.ledger.commit(emit)
        await harness.submit(ids[2], "c")
        assert await _streamed_results(harness, run_id) == ["a", "without effects", "b", "with effects", "c"]


@pytest.mark.spec("15.2")
async def test_results_wait_for_another_program_that_writes_to_the_file(tmp_path: Path) -> None:
    async with _sqlite_harness(tmp_path, 4) as (harness, run_id, ids):
        published_results: list[Any] = []
        subscription = harness.ledger.hub.subscribe_all()
        async with hold_write_lock(tmp_path / "toolspace.db"):
            submit_tasks = [asyncio.create_task(harness.submit(call_id, n)) for n, call_id in enumerate(ids)]
            done_tasks, _ = await asyncio.wait(submit_tasks, timeout=0.1)
            assert not done_tasks
        await asyncio.gather(*submit_tasks)
        assert await _streamed_results(harness, run_id) == [0, 1, 2, 3]
        while len(published_results) < 4:  # Each is published once, with its id.
            published_results += [(event.id, event.data["output"]) for event in await subscription.next_batch()]
        assert published_results == [(10, 0), (11, 1), (12, 2), (13, 3)]
        subscription.close()


@pytest.mark.spec("15.2")
async def test_large_result_is_stored(tmp_path: Path) -> None:
    async with _sqlite_harness(tmp_path, 1) as (harness, run_id, ids):
        await harness.submit(ids[0], "y" * 700_000)
        assert (await harness.get_call(ids[0])).result == "y" * 700_000
        assert await _streamed_results(harness, run_id) == ["y" * 700_000]

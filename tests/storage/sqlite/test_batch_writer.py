"""The batch writer of SQLite, compared with writing row by row, on random deferred writes."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from toolspace.core.stored_records import NewEvent, StoredEvent
from toolspace.storage.database import DeferredWrites, Program, StaleError
from toolspace.storage.queries import calls, events, inbox
from toolspace.storage.queries.calls import CallTransition, NewCall
from toolspace.storage.sqlite.database import SqliteDatabase

_TEXTS = ("", "a", "é", '"quoted"', "back\\slash", "{}", "𝄞 𐍈", "x" * 500)
_STREAMS = ("run:1", "space:1", "run:2")


class _Writes:
    """Deferred writes as the ledger makes them."""

    def __init__(self, chance: random.Random, open_calls: Sequence[CallTransition]) -> None:
        self.resolved_calls: list[Sequence[Any]] = []
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            remembered_call = chance.choice(open_calls)
            _, row = calls.build_resolution(
                remembered_call,
                result={"text": chance.choice(_TEXTS), "n": chance.randint(-(2**60), 2**60)},
                is_error=chance.random() < 0.3,
                source="client",
                now=7,
                submission=chance.choice((None, *_TEXTS)),
                client_id=chance.choice((None, *_TEXTS)),
            )
            values = dict(zip(calls.RESOLUTION_COLUMNS, row, strict=True))
            if chance.random() < 0.1:  # Not as it is stored.
                values |= chance.choice(({"status": "waiting"}, {"created_at": 1}, {"space_id": "spc_2"}))
            self.resolved_calls.append(tuple(values.values()))
        self.inbox_rows = [
            inbox.build_row("ada", f"e{chance.randint(0, 40)}", "service", chance.choice(_TEXTS), priority=1, at=5)
            for _ in range(chance.randint(0, 2))
        ]
        self.new_events = {
            stream: [
                NewEvent(chance.choice(_TEXTS), {"text": chance.choice(_TEXTS)}, chance.choice(("full", "none")))
                for _ in range(chance.randint(1, 3))
            ]
            for stream in chance.sample(_STREAMS, chance.randint(0, 3))
        }
        self.stored_events: list[StoredEvent] = []


def _write_row_by_row(deferred_writes: DeferredWrites) -> Program[bool]:
    yield "SELECT 1", ()  # A program with a statement is never written in one statement with others.
    try:
        yield from events.resolve_deferred_calls(deferred_writes)
    except StaleError:
        raise
    return True


async def _open_calls(database: SqliteDatabase, count: int) -> list[CallTransition]:
    open_calls: list[CallTransition] = []
    for number in range(count):
        new = NewCall(
            call_id=f"call_{number}",
            run_id="run_1",
            agent_entity_id="ada",
            space_id="spc_1" if number % 2 else None,
            tool_name="later",
            args={},
            execution_type="external",
            execution_target="external",
            visible=False,
            visibility="none",
            status="pending",
            node_id="node_1",
            created_at=3,
        )
        call = await database.run(lambda new=new, number=number: calls.create(new, seq=number, message_id=None))
        assert call is not None
        open_calls.append(CallTransition(call, "none", None, pauses_run=False))
    return open_calls


async def _warm_up(database: SqliteDatabase) -> None:
    """The writer has to know the last ids of the streams."""
    start = [NewEvent("start", {})]

    class Start:
        resolved_calls: list[Sequence[Any]] = []  # noqa: RUF012 - the names of the protocol
        inbox_rows: list[Sequence[Any]] = []  # noqa: RUF012
        new_events = dict.fromkeys(_STREAMS, start)
        stored_events: list[StoredEvent] = []  # noqa: RUF012

    await database.run(lambda: _write_row_by_row(Start()), deferred_writes=Start)


def _ignore(_: object) -> None: ...


async def _run(path: Path, seed: int, *, in_one_statement: bool) -> tuple[list[bool], list[Any], dict[str, Any]]:
    chance = random.Random(seed)
    database = await SqliteDatabase.open(path)
    open_calls = await _open_calls(database, 60)
    await _warm_up(database)
    results: list[bool] = []
    stored_events: list[Any] = []

    async def write(writes_of_call: _Writes) -> bool:
        if in_one_statement:
            return await database.commit_deferred(writes_of_call, on_commit=_ignore, on_doubt=_ignore)
        try:
            return await database.run(lambda: _write_row_by_row(writes_of_call), deferred_writes=lambda: writes_of_call)
        except StaleError:
            return False

    for _ in range(20):
        writes = [_Writes(chance, open_calls) for _ in range(chance.randint(1, 12))]
        results += await asyncio.gather(*map(write, writes))
        stored_events += [
            [
                (event.stream, event.id, event.type, event.data, event.visibility)
                for event in writes_of_call.stored_events
            ]
            for writes_of_call in writes
        ]
    await database.aclose()
    return results, stored_events, _dump(path)


def _dump(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as database:
        return {
            "calls": database.execute("SELECT * FROM calls ORDER BY call_id").fetchall(),
            "inbox": database.execute("SELECT * FROM inbox ORDER BY event_id").fetchall(),
            "streams": database.execute("SELECT * FROM streams ORDER BY stream").fetchall(),
            "events": database.execute(
                "SELECT stream, id, type, data, exposure FROM events ORDER BY stream, id"
            ).fetchall(),
        }


@pytest.mark.spec("15.2")
@pytest.mark.parametrize("seed", range(8))
async def test_batches_have_the_same_effects_as_single_rows(seed: int, tmp_path: Path) -> None:
    in_one_statement = await _run(tmp_path / "batches.db", seed, in_one_statement=True)
    row_by_row = await _run(tmp_path / "rows.db", seed, in_one_statement=False)
    assert in_one_statement == row_by_row
    results, _, dump = row_by_row
    assert True in results
    assert False in results
    assert any(row for row in dump["calls"] if "resolved" in row)

"""Event streams and deferred writes, on each database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from toolspace.core.stored_records import NewEvent, StoredEvent
from toolspace.storage.database import Database
from toolspace.storage.queries import events, inbox


@pytest.mark.spec("7.4")
async def test_each_stream_has_its_own_counter_and_never_reuses_an_id(database: Database) -> None:
    assert await database.read(lambda: events.get_bounds("space:1")) == (1, 0)
    await database.run(lambda: events.append("space:1", [NewEvent("a", {"x": [1, None]}), NewEvent("b", {}, "none")]))
    await database.run(lambda: events.append("space:2", [NewEvent("c", {}, "name")]))
    first, second = await database.read(lambda: events.list_after("space:1", 0, 10))
    assert (first.id, first.type, first.data, first.visibility) == (1, "a", {"x": [1, None]}, "full")
    assert (second.id, second.type, second.visibility, second.stream) == (2, "b", "none", "space:1")
    assert [event.id for event in await database.read(lambda: events.list_after("space:2", 0, 10))] == [1]

    assert await database.run(lambda: events.delete_old(database.clock.now_ms() + 1, 2)) == 2
    assert await database.run(lambda: events.delete_old(database.clock.now_ms() + 1, 2)) == 1
    assert await database.run(lambda: events.delete_old(database.clock.now_ms() + 1, 2)) == 0
    assert await database.read(lambda: events.get_bounds("space:1")) == (3, 2)
    (third,) = await database.run(lambda: events.append("space:1", [NewEvent("d", {})]))
    assert third.id == 3
    assert await database.read(lambda: events.get_bounds("space:1")) == (3, 3)


@pytest.mark.spec("7.4")
async def test_deferred_writes_of_many_programs_keep_the_order_of_each_stream(database: Database) -> None:
    class Writes:
        def __init__(self, number: int) -> None:
            self.resolved_calls: list[Sequence[Any]] = []
            self.inbox_rows = [inbox.build_row("ada", f"{number % 130}", "service", {"n": number}, priority=1, at=1)]
            self.new_events = {"space:all": [NewEvent("n", {"n": number}), NewEvent("n", {"n": -number})]}
            self.new_events[f"run:{number}"] = [NewEvent("n", {})]
            self.stored_events: list[StoredEvent] = []

    writes = [Writes(number) for number in range(150)]
    await database.run(lambda: events.write_deferred(writes))
    for number, deferred_writes in enumerate(writes):
        in_space = [
            (event.id, event.data["n"]) for event in deferred_writes.stored_events if event.stream == "space:all"
        ]
        assert in_space == [(2 * number + 1, number), (2 * number + 2, -number)]
        assert [event.id for event in deferred_writes.stored_events if event.stream == f"run:{number}"] == [1]
        assert len(deferred_writes.stored_events) == 3
    read = await database.read(lambda: events.list_after("space:all", 0, 1000))
    assert [event.data["n"] for event in read] == [n for number in range(150) for n in (number, -number)]
    inbox_events = await database.read(lambda: inbox.list_events("ada", limit=1000))
    assert sorted(event.data["n"] for event in inbox_events) == list(range(130))
    await database.run(lambda: events.write_deferred([]))


async def test_long_burst_of_events_keeps_its_order(database: Database) -> None:
    new = [NewEvent("n", {"n": number}) for number in range(257)]
    stored_events = await database.run(lambda: events.append("run:1", new))
    assert [event.id for event in stored_events] == list(range(1, 258))
    read = await database.read(lambda: events.list_after("run:1", 0, 1000))
    assert [(event.id, event.data["n"]) for event in read] == [(number + 1, number) for number in range(257)]

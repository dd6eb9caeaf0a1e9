"""Runs, event streams and presence, on each database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from toolspace.core.ids import now_ms
from toolspace.core.records import NewEvent, StoredEvent
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import calls, entities_and_spaces, events, inbox, runs, workers_and_presence


async def _create_agent(database: Database, name: str = "ada") -> None:
    await database.run(lambda: entities_and_spaces.create_entity(name, "agent", name, {}))


@pytest.mark.spec("7.1")
async def test_run_changes_status_only_from_given_statuses(database: Database) -> None:
    await _create_agent(database)
    run = await database.run(lambda: runs.create("run_1", "ada", space_id=None, trigger={"why": ["now"]}))
    assert run is not None
    assert (run.status, run.trigger, run.steps, run.usage, run.completed_at) == (
        "running",
        {"why": ["now"]},
        0,
        {},
        None,
    )
    assert await database.run(lambda: runs.create("run_1", "ada", space_id=None, trigger=None)) is None

    for turn in (2, 1):  # It never decreases.
        await database.run(lambda turn=turn: runs.advance_step("run_1", turn))

    waiting_run = await database.run(
        lambda: runs.update_status("run_1", "waiting_tool", from_statuses=("running", "queued"))
    )
    assert waiting_run is not None
    assert waiting_run.completed_at is None
    assert await database.run(lambda: runs.update_status("run_1", "waiting_tool", from_statuses=("running",))) is None

    ends = await asyncio.gather(
        *(
            database.run(
                lambda status=status: runs.update_status(
                    "run_1", status, from_statuses=("waiting_tool", "running"), usage={"tokens": 3}, ends=True
                )
            )
            for status in ("completed", "failed", "canceled")
        )
    )
    (winner,) = [end for end in ends if end is not None]
    stored_run = await database.read(lambda: runs.find("run_1"))
    assert stored_run is not None
    assert (stored_run.status, stored_run.usage, stored_run.steps) == (winner.status, {"tokens": 3}, 2)
    assert stored_run.completed_at is not None


async def test_runs_are_listed_newest_first_in_pages(database: Database) -> None:
    await _create_agent(database)
    await _create_agent(database, "cleo")
    for number in range(7):
        agent = "cleo" if number == 3 else "ada"
        await database.run(
            lambda number=number, agent=agent: runs.create(f"run_{number}", agent, space_id=None, trigger=None)
        )

    async def ids(**filters: object) -> list[str]:
        return [run.id for run in await database.read(lambda: runs.list_runs(**filters))]  # type: ignore[arg-type]

    assert await ids(agent_entity_id="ada", limit=3) == ["run_6", "run_5", "run_4"]
    assert await ids(agent_entity_id="ada", before="run_4") == ["run_2", "run_1", "run_0"]
    assert await ids(agent_entity_id="ada", status="failed") == []
    assert len(await ids()) == 7
    run_in_space = await database.run(lambda: runs.set_space("run_1", "spc_1"))
    assert run_in_space is not None
    assert await ids(space_id="spc_1") == ["run_1"]
    assert await database.run(lambda: runs.set_space("run_9", "spc_1")) is None


async def test_concurrent_calls_of_a_run_get_unique_numbers(database: Database) -> None:
    await _create_agent(database)
    await database.run(lambda: runs.create("run_1", "ada", space_id="spc_1", trigger=None))
    numbers = await asyncio.gather(*(database.run(lambda: calls.allocate_sequence_number("run_1")) for _ in range(40)))
    assert sorted(number[0] for number in numbers if number) == list(range(1, 41))
    assert {number[1:] for number in numbers if number} == {("running", "spc_1")}
    assert await database.run(lambda: calls.allocate_sequence_number("run_2")) is None


@pytest.mark.spec("7.4")
async def test_each_stream_has_its_own_counter_and_never_reuses_an_id(database: Database) -> None:
    assert await database.read(lambda: events.get_bounds("space:1")) == (1, 0)
    await database.run(lambda: events.append("space:1", [NewEvent("a", {"x": [1, None]}), NewEvent("b", {}, "none")]))
    await database.run(lambda: events.append("space:2", [NewEvent("c", {}, "name")]))
    first, second = await database.read(lambda: events.list_after("space:1", 0, 10))
    assert (first.id, first.type, first.data, first.visibility) == (1, "a", {"x": [1, None]}, "full")
    assert (second.id, second.type, second.visibility, second.stream) == (2, "b", "none", "space:1")
    assert [event.id for event in await database.read(lambda: events.list_after("space:2", 0, 10))] == [1]

    assert await database.run(lambda: events.delete_old(now_ms() + 1, 2)) == 2
    assert await database.run(lambda: events.delete_old(now_ms() + 1, 2)) == 1
    assert await database.run(lambda: events.delete_old(now_ms() + 1, 2)) == 0
    assert await database.read(lambda: events.get_bounds("space:1")) == (3, 2)
    (third,) = await database.run(lambda: events.append("space:1", [NewEvent("d", {})]))
    assert third.id == 3
    assert await database.read(lambda: events.get_bounds("space:1")) == (3, 3)


@pytest.mark.spec("7.4")
async def test_deferred_writes_of_many_programs_keep_the_order_of_each_stream(database: Database) -> None:
    class Writes:
        def __init__(self, number: int) -> None:
            self.resolved_calls: list[Sequence[Any]] = []
            self.inbox_rows = [inbox.build_row("ada", f"{number % 130}", "service", {"n": number}, priority=1)]
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


async def test_process_is_listed_by_its_heartbeat_and_deleted_with_its_connections(database: Database) -> None:
    await database.run(lambda: workers_and_presence.record_heartbeat("node_1", started_at=1))
    await database.run(lambda: workers_and_presence.record_heartbeat("node_2", started_at=1))
    assert (
        await database.read(lambda: workers_and_presence.list_dead_nodes(before=now_ms() - 1000, except_node="node_1"))
        == []
    )
    assert await database.read(
        lambda: workers_and_presence.list_dead_nodes(before=now_ms() + 1, except_node="node_1")
    ) == ["node_2"]
    await database.run(lambda: workers_and_presence.register_holder("wrk_1", ["tool:a", "tool:b"], node_id="node_2"))
    await database.run(lambda: workers_and_presence.register_holder("wrk_2", ["tool:a"], node_id="node_1"))
    assert await database.run(lambda: workers_and_presence.delete_node("node_2")) == ["wrk_1"]
    assert await database.run(lambda: workers_and_presence.delete_node("node_2")) == []
    assert await database.read(workers_and_presence.list_topics) == [("tool:a", "wrk_2")]
    assert (await database.read(runs.count_open_work)).nodes == 1


@pytest.mark.spec("6.7")
async def test_disconnected_holder_may_come_back(database: Database) -> None:
    await database.run(lambda: workers_and_presence.register_holder("wrk_1", ["tool:a", "tool:b"], node_id="node_1"))
    assert await database.read(lambda: workers_and_presence.is_any_served(["tool:a"])) is True
    assert await database.read(lambda: workers_and_presence.is_any_served(["tool:c"])) is False
    assert await database.read(lambda: workers_and_presence.is_any_served([])) is False
    assert await database.run(lambda: workers_and_presence.mark_left("wrk_1", node_id="node_2")) is False
    assert await database.run(lambda: workers_and_presence.mark_left("wrk_1", node_id="node_1")) is True
    assert await database.run(lambda: workers_and_presence.mark_left("wrk_1", node_id="node_1")) is False
    assert await database.run(lambda: workers_and_presence.delete_departed(before=now_ms() - 60_000)) == []
    await database.run(lambda: workers_and_presence.register_holder("wrk_1", ["tool:a", "tool:b"], node_id="node_2"))
    assert await database.run(lambda: workers_and_presence.delete_departed(before=now_ms() + 60_000)) == []
    assert await database.run(lambda: workers_and_presence.mark_left("wrk_1", node_id="node_1")) is False
    assert await database.run(lambda: workers_and_presence.mark_left("wrk_1", node_id="node_2")) is True
    assert await database.run(lambda: workers_and_presence.delete_departed(before=now_ms() + 60_000)) == ["wrk_1"]
    assert await database.read(workers_and_presence.list_topics) == []


async def test_one_of_two_concurrent_first_heartbeats_registers_the_process(database: Database) -> None:
    def beat() -> Program[bool]:
        steps = workers_and_presence.record_heartbeat("node_1", started_at=1)
        rows = yield next(steps)
        if database.is_shared:
            yield "SELECT pg_sleep(0.3)", ()  # The other one reads in the meantime.
        try:
            while True:
                rows = yield steps.send(rows)
        except StopIteration as stop:
            return stop.value

    assert sum(await asyncio.gather(database.run(beat), database.run(beat))) == 1

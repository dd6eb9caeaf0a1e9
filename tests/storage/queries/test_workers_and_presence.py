"""Heartbeats of processes and presence of holders, on each database."""

from __future__ import annotations

import asyncio

import pytest

from toolspace.storage.database import Database, Program
from toolspace.storage.queries import runs, workers_and_presence


def _list_topics() -> Program[list[tuple[str, str]]]:
    rows = yield "SELECT topic, holder FROM presence ORDER BY topic, holder", ()
    return [(row[0], row[1]) for row in rows]


async def test_process_is_listed_by_its_heartbeat_and_deleted_with_its_connections(database: Database) -> None:
    await database.run(lambda: workers_and_presence.record_heartbeat("node_1", started_at=1))
    await database.run(lambda: workers_and_presence.record_heartbeat("node_2", started_at=1))
    assert list(await database.read(lambda: workers_and_presence.list_heartbeats(except_node="node_1"))) == ["node_2"]
    await database.run(lambda: workers_and_presence.register_holder("wrk_1", ["tool:a", "tool:b"], node_id="node_2"))
    await database.run(lambda: workers_and_presence.register_holder("wrk_2", ["tool:a"], node_id="node_1"))
    assert await database.run(lambda: workers_and_presence.delete_node("node_2")) == ["wrk_1"]
    assert await database.run(lambda: workers_and_presence.delete_node("node_2")) == []
    assert await database.read(_list_topics) == [("tool:a", "wrk_2")]
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
    assert (
        await database.run(lambda: workers_and_presence.delete_departed(before=database.clock.now_ms() - 60_000)) == []
    )
    await database.run(lambda: workers_and_presence.register_holder("wrk_1", ["tool:a", "tool:b"], node_id="node_2"))
    assert (
        await database.run(lambda: workers_and_presence.delete_departed(before=database.clock.now_ms() + 60_000)) == []
    )
    assert await database.run(lambda: workers_and_presence.mark_left("wrk_1", node_id="node_1")) is False
    assert await database.run(lambda: workers_and_presence.mark_left("wrk_1", node_id="node_2")) is True
    assert await database.run(
        lambda: workers_and_presence.delete_departed(before=database.clock.now_ms() + 60_000)
    ) == ["wrk_1"]
    assert await database.read(_list_topics) == []


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

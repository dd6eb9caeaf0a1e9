"""Runs, on each database."""

from __future__ import annotations

import asyncio

import pytest

from toolspace.storage.database import Database
from toolspace.storage.queries import calls, entities_and_spaces, runs


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

"""One agent, one process at a time: however many there are, and whether they die, stop or stall."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.agents.agent_harness import Village, agent, village
from tests.agents.chaos.storm import Storm
from toolspace import tool
from toolspace.agents import cycle as cycles
from toolspace.agents import cycle_transactions
from toolspace.agents.agent import Agent
from toolspace.config.agent_settings import AgentLimits
from toolspace.core.model import ModelRequest
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.postgres.wakeups import PostgresWakeUps
from toolspace.storage.queries import sessions


class Watched:
    """A model that several processes share, and how many ask it at once."""

    def __init__(self) -> None:
        self.inside = self.most = self.asked = 0

    async def think(self, request: ModelRequest) -> str:
        self.inside += 1
        self.asked += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        return "Hm."


async def replica(stack: AsyncExitStack, url: str, folder: Path, ada: Agent) -> Village:
    database = await PostgresDatabase.open(url)
    wakeups = await PostgresWakeUps.open(url)
    return await stack.enter_async_context(village(database, ada, folder=folder, wakeups=wakeups))


async def steal(database: Database, session_id: str) -> None:
    """Another process takes a session whose lease has ended."""
    other = Ledger(database)
    await other.write(sessions.release_all_leases, "")
    assert await other.commit(cycle_transactions.acquire, session_id, other.node_id) is not None


@pytest.mark.spec("11.1")
async def test_the_cycles_of_one_agent_never_overlap_in_two_processes(postgres_url: str, tmp_path: Path) -> None:
    watched = Watched()
    limits = AgentLimits(inbox_batch=1, cycles_per_minute=10_000)
    ada = agent("ada", ScriptedModel(watched.think, record=False), limits=limits)
    async with AsyncExitStack() as stack:
        towns = [await replica(stack, postgres_url, tmp_path, ada) for _ in range(2)]
        for number in range(40):
            await towns[number % 2].say(f"Message {number}")
        await towns[0].run_ended(40)
        for town in towns:
            await town.quiet()
        runs = await towns[0].runs()
        assert [run.status for run in runs] == ["completed"] * 40
        assert (watched.asked, watched.most) == (40, 1)
        assert {event.status for event in await towns[0].inbox()} == {"processed"}
        turns = [row.run_id for row in await towns[0].history()]
        assert turns == sorted(turns, key=turns.index)  # The turns of each run stand together.


@pytest.mark.spec("11.1")
async def test_who_lost_an_agent_keeps_nothing_of_what_its_model_said(database: Database, tmp_path: Path) -> None:
    async def is_slow(request: ModelRequest) -> str:
        await steal(database, town.agent)
        return "Too late."

    async with village(database, agent("ada", ScriptedModel([is_slow])), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        while (await town.token()) < 2:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)
        await town.quiet()
        [run] = await town.runs()
        assert (run.status, run.steps) == ("running", 0)
        assert [row.seq for row in await town.history()] == [1]
        assert [event.status for event in await town.inbox()] == ["processing"]


@pytest.mark.spec("11.1")
@pytest.mark.spec("11.6")
async def test_who_was_away_for_longer_than_its_lease_looks_before_it_acts(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @tool(visible=False)
    async def stall() -> str:
        """Takes longer than the lease lasts."""
        monkeypatch.setattr(cycles, "now", lambda: float("inf"))
        await steal(database, town.agent)
        return "back"

    @tool(visible=False)
    async def act() -> str:
        """Has an effect."""
        done.append("acted")
        return "acted"

    calls = [call("stall"), call("enter_space", {"spaceId": "spc_room"}), call("act"), call("act")]
    async with village(
        database, agent("ada", ScriptedModel([calls])), tools=[stall, act], folder=tmp_path, owns=False
    ) as town:
        await town.say("Hello?")
        while (await town.token()) < 2:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)
        await town.quiet()
        [run] = await town.runs()
        assert (run.status, run.space_id) == ("running", None)  # For whoever has the agent now.
    assert done == []


@pytest.mark.spec("11.1")
async def test_a_process_that_stops_hands_its_agents_over_at_once(tmp_path: Path, postgres_url: str) -> None:
    # With such a lease nobody would ever take over from a process that did not let go.
    storm = Storm(tmp_path, url=postgres_url, processes=2, jobs=16, kills=0, stops=6, lease_ms=3_600_000)
    await storm.run()
    await storm.check()


@pytest.mark.spec("11.1")
@pytest.mark.spec("11.6")
async def test_a_process_that_stalls_loses_its_agents_and_does_nothing_twice(tmp_path: Path, postgres_url: str) -> None:
    storm = Storm(tmp_path, url=postgres_url, processes=2, jobs=12, kills=0, stalls=4, lease_ms=800)
    await storm.run()
    await storm.check()

"""One process runs an agent at a time, whether processes die, stop or stall."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, agent, run_agents
from tests.agents.chaos.storm import ProcessStorm
from toolspace import tool
from toolspace.agents import durable_loop, session_transactions
from toolspace.agents.agent import Agent
from toolspace.config.agent_settings import AgentLimits
from toolspace.core.ids import session_id_for
from toolspace.core.language_model import ModelRequest
from toolspace.core.stored_records import SessionScope
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.postgres.wakeups import PostgresWakeUps
from toolspace.storage.queries import sessions


def session_of(harness: AgentHarness, scope: SessionScope) -> str:
    """The session of the first agent that gets messages of the person in the common space."""
    scope_keys = {"agent": "", "space": f"space:{harness.space}", "user": f"user:{harness.person}"}
    return session_id_for(harness.agent, scope_keys[scope])


class RequestCounter:
    """A model that several processes share. Counts its requests, and how many it gets at the same time."""

    def __init__(self) -> None:
        self.active = self.max_active = self.count = 0

    async def respond(self, request: ModelRequest) -> str:
        self.active += 1
        self.count += 1
        self.max_active = max(self.max_active, self.active)
        await asyncio.sleep(0)
        self.active -= 1
        return "Hm."


async def start_process(stack: AsyncExitStack, url: str, directory: Path, ada: Agent) -> AgentHarness:
    database = await PostgresDatabase.open(url)
    wakeups = await PostgresWakeUps.open(url)
    return await stack.enter_async_context(
        run_agents(database, ada, session_dir=directory, wakeups=wakeups, closes_database=True)
    )


async def take_lease(database: Database, session_id: str) -> None:
    """Another process takes a session whose lease has ended."""
    other_ledger = Ledger(database)
    await other_ledger.write(sessions.release_all_leases, "")
    assert await other_ledger.write(
        sessions.acquire_lease, session_id, other_ledger.node_id, lease_ms=session_transactions.LEASE_MS
    )


@pytest.mark.spec("11.1")
@pytest.mark.spec("19.1")
@pytest.mark.parametrize("session", ["agent", "space", "user"])
async def test_the_cycles_of_one_session_never_overlap_in_two_processes(
    postgres_url: str, tmp_path: Path, session: SessionScope
) -> None:
    counter = RequestCounter()
    limits = AgentLimits(inbox_batch=1, cycles_per_minute=10_000)
    ada = agent("ada", ScriptedModel(counter.respond, record=False), limits=limits, session=session)
    async with AsyncExitStack() as stack:
        harnesses = [await start_process(stack, postgres_url, tmp_path, ada) for _ in range(2)]
        for number in range(40):
            await harnesses[number % 2].send_message(f"Message {number}")
        await harnesses[0].wait_for_run(40)
        for harness in harnesses:
            await harness.wait_until_idle()
        runs = await harnesses[0].runs()
        assert [run.status for run in runs] == ["completed"] * 40
        assert (counter.count, counter.max_active) == (40, 1)
        assert {event.status for event in await harnesses[0].inbox()} == {"processed"}
        turns = [row.run_id for row in await harnesses[0].history(session_of(harnesses[0], session))]
        assert turns == sorted(turns, key=turns.index)  # The turns of each run stand together.


@pytest.mark.spec("11.1")
@pytest.mark.spec("19.1")
@pytest.mark.parametrize("session", ["agent", "space", "user"])
async def test_a_process_that_lost_its_lease_stores_nothing(
    database: Database, tmp_path: Path, session: SessionScope
) -> None:
    async def is_slow(request: ModelRequest) -> str:
        await take_lease(database, session_of(harness, session))
        return "Too late."

    ada = agent("ada", ScriptedModel([is_slow]), session=session)
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        while (await harness.lease_token(session_of(harness, session))) < 2:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)
        await harness.wait_until_idle()
        [run] = await harness.runs()
        assert (run.status, run.steps) == ("running", 0)
        assert [row.seq for row in await harness.history(session_of(harness, session))] == [1]
        assert [event.status for event in await harness.inbox()] == ["processing"]


@pytest.mark.spec("11.1")
@pytest.mark.spec("11.6")
async def test_a_process_whose_lease_expired_checks_it_before_a_call(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects: list[str] = []

    @tool(visible=False)
    async def stall() -> str:
        """Takes longer than the lease lasts."""
        monkeypatch.setattr(durable_loop, "now", lambda: float("inf"))
        await take_lease(database, harness.agent)
        return "back"

    @tool(visible=False)
    async def act() -> str:
        """Has an effect."""
        effects.append("acted")
        return "acted"

    calls = [call("stall"), call("enter_space", {"spaceId": "spc_room"}), call("act"), call("act")]
    async with run_agents(
        database, agent("ada", ScriptedModel([calls])), tools=[stall, act], session_dir=tmp_path
    ) as harness:
        await harness.send_message("Hello?")
        while (await harness.lease_token()) < 2:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)
        await harness.wait_until_idle()
        [run] = await harness.runs()
        assert (run.status, run.space_id) == ("running", None)  # The process with the lease continues it.
    assert effects == []


class SlowDatabase(Database):
    """Wraps a database whose next writes take a while, and happen even if their caller is cancelled."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_shared = database.is_shared
        self.is_slow = False
        self.has_started = asyncio.Event()
        self.read = database.read  # type: ignore[method-assign]
        self.commit_deferred = database.commit_deferred  # type: ignore[method-assign]

    async def read(self, *args: object, **kwargs: object) -> object: ...  # type: ignore[override]

    async def commit_deferred(self, *args: object, **kwargs: object) -> bool: ...  # type: ignore[override, empty-body]

    async def run(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return await asyncio.shield(asyncio.create_task(self._run(*args, **kwargs)))

    async def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_slow:
            self.has_started.set()
            await asyncio.sleep(0.05)
        return await self._database.run(*args, **kwargs)

    async def aclose(self) -> None: ...


@pytest.mark.spec("11.1")
async def test_a_lease_that_is_acquired_while_the_process_stops_is_released(database: Database, tmp_path: Path) -> None:
    slow = SlowDatabase(database)
    async with run_agents(slow, agent("ada", ScriptedModel([])), session_dir=tmp_path) as harness:
        await harness.wait_until_idle()
        slow.is_slow = True
        harness.host.scheduler.wake(harness.agent)
        await slow.has_started.wait()
    other_ledger = Ledger(database)
    assert await other_ledger.write(
        sessions.acquire_lease, harness.agent, other_ledger.node_id, lease_ms=session_transactions.LEASE_MS
    )


@pytest.mark.spec("11.1")
async def test_a_process_that_stops_releases_its_leases_at_once(tmp_path: Path, postgres_url: str) -> None:
    # The lease is so long that no other process takes over unless it is released.
    storm = ProcessStorm(tmp_path, url=postgres_url, processes=2, jobs=16, kills=0, stops=6, lease_ms=3_600_000)
    await storm.run()
    await storm.check()


@pytest.mark.spec("11.1")
@pytest.mark.spec("11.6")
async def test_a_process_that_stalls_loses_its_leases_and_repeats_nothing(tmp_path: Path, postgres_url: str) -> None:
    storm = ProcessStorm(tmp_path, url=postgres_url, processes=2, jobs=12, kills=0, stalls=4, lease_ms=800)
    await storm.run()
    await storm.check()

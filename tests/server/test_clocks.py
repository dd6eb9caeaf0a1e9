"""Gateways whose clocks are wrong: what is stored has the time of the database, and the order of a space stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from tests.shifted_clock import ShiftedClock, set_database_ahead
from tests.spaces.service_harness import ServiceHarness, pending_tool, service_harness
from toolspace.agents.session_transactions import LEASE_MS
from toolspace.server.gateway import Gateway
from toolspace.spaces import plans
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.plans import NewPlan
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import calls, inbox, sessions
from toolspace.storage.sqlite.database import SqliteDatabase

HOUR = 3600.0


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else None


async def open_database(url: str | None, folder: Path, clock: ShiftedClock) -> Database:
    if url is None:
        return await SqliteDatabase.open(folder / "toolspace.db", system_clock=clock)
    return await PostgresDatabase.open(url, system_clock=clock)


@asynccontextmanager
async def open_gateways(folder: Path, url: str, *clocks: ShiftedClock) -> AsyncGenerator[list[ApiClient]]:
    """Gateways with these clocks on one PostgreSQL."""
    config = write_config(folder, storage={"url": url})
    async with AsyncExitStack() as stack:
        apis: list[ApiClient] = []
        for clock in clocks:
            gateway = await stack.enter_async_context(Gateway.open(config, system_clock=clock))
            apis.append(await stack.enter_async_context(open_api(gateway)))
        yield apis


async def save_plan(harness: ServiceHarness, run_after: str) -> None:
    plan = NewPlan(name="Report", instruction="Write it", run_after=run_after)
    await harness.ledger.commit(plans.set_plans, harness.agent, [plan], principal=None)


@pytest.mark.spec("15.1")
async def test_messages_keep_the_order_of_their_space_through_gateways_with_different_clocks(
    postgres_url: str, tmp_path: Path
) -> None:
    clocks = ShiftedClock(30), ShiftedClock(-30)
    async with open_gateways(tmp_path, postgres_url, *clocks) as apis:
        first, second = apis
        agent = await first.create("/api/entities", type="agent", name="Ada")
        person = await first.create("/api/entities", type="human", name="Ann")
        space = await first.create("/api/spaces", name="Room", members=[agent["id"], person["id"]])
        for number in range(20):
            api = apis[number % 2]
            await api.create(f"/api/spaces/{space['id']}/messages", entityId=person["id"], content=str(number))
        events = await _list_inbox(second, agent["id"])
        assert [event["data"]["seq"] for event in events] == list(range(1, 21))
        claimed_events = (await first.create(f"/api/agents/{agent['id']}/inbox/claim", count=20))["items"]
        assert [event["data"]["seq"] for event in claimed_events] == list(range(1, 21))


async def test_the_skew_of_the_clock_is_a_metric_and_is_logged(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with open_gateways(tmp_path, postgres_url, ShiftedClock(30), ShiftedClock()) as (
            fast_gateway,
            correct_gateway,
        ):
            assert 29 < await _read_skew(fast_gateway) < 31
            assert -1 < await _read_skew(correct_gateway) < 1
            async with asyncio.timeout(30):
                while "is 30.0 s ahead of the database" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert caplog.text.count("the clock of this machine") == 1


@pytest.mark.spec("15.1")
@pytest.mark.parametrize("skew", [-30, 30])
async def test_a_process_with_another_clock_steals_no_session_and_no_inbox_event(
    postgres_url: str, skew: float
) -> None:
    database = await PostgresDatabase.open(postgres_url)
    other_database = await PostgresDatabase.open(postgres_url, system_clock=ShiftedClock(skew))
    async with service_harness(database) as harness:
        ledger = harness.ledger
        await ledger.write(sessions.create, harness.agent, harness.agent, "agent")
        assert await ledger.write(sessions.acquire_lease, harness.agent, "node_1", lease_ms=LEASE_MS) is not None
        await ledger.write(inbox.add, harness.agent, "evt_1", "service", {}, priority=2)
        (event,) = await ledger.write(inbox.claim, harness.agent, "claim_1", count=1, lease_ms=LEASE_MS)
        other_ledger = Ledger(other_database)
        await Sweeper(other_ledger).sweep()
        assert await other_ledger.write(sessions.acquire_lease, harness.agent, "node_2", lease_ms=LEASE_MS) is None
        assert await other_ledger.read(sessions.list_interrupted, limit=5) == []
        assert [item.status for item in await harness.inbox()] == [event.status] == ["processing"]
    await other_database.aclose()


@pytest.mark.spec("9.4")
async def test_plans_and_timers_end_after_the_clock_of_the_process_was_set_back(
    database_url: str | None, tmp_path: Path
) -> None:
    clock = ShiftedClock()
    database = await open_database(database_url, tmp_path, clock)
    async with service_harness(database, pending_tool("ask", is_async=True, expires_after=0.2)) as harness:
        await save_plan(harness, "0.2 seconds")
        run_id = await harness.open_run()
        call_id = (await harness.call(run_id, "ask")).call_id
        clock.seconds -= HOUR
        async with asyncio.timeout(30):
            while {event.type for event in await harness.inbox()} != {"plan", "tool_result"}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await harness.get_call(call_id)).status == "expired"
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        await save_plan(harness, "0.1 seconds")  # It is as far away as it says, also after the jump.
        async with asyncio.timeout(30):
            await notification


@pytest.mark.spec("9.4")
async def test_nothing_ends_early_after_the_clock_of_a_process_was_set_forward(postgres_url: str) -> None:
    clock = ShiftedClock()
    database = await PostgresDatabase.open(postgres_url, system_clock=clock)
    async with service_harness(database, pending_tool("ask", is_async=True, expires_after=1800)) as harness:
        await save_plan(harness, "30 minutes")
        call_id = (await harness.call(await harness.open_run(), "ask")).call_id
        clock.seconds += HOUR
        await database.measure_clock()
        await harness.sweeper.sweep()
        assert await harness.inbox() == []
        assert (await harness.get_call(call_id)).status == "pending"
        assert await harness.ledger.read(calls.list_expired, limit=5) == []


async def test_events_that_are_new_are_available_even_if_the_clock_was_wrong_before_a_restart(tmp_path: Path) -> None:
    database = await open_database(None, tmp_path, ShiftedClock(HOUR))
    await database.run(lambda: inbox.add("agent", "evt_1", "service", {}, priority=2))
    await database.aclose()
    database = await open_database(None, tmp_path, ShiftedClock())
    (event,) = await database.run(lambda: inbox.claim("agent", "claim_1", count=5, lease_ms=1_000))
    assert event.event_id == "evt_1"
    await database.aclose()


async def test_a_released_event_is_available_again_if_the_clock_was_wrong_before_a_restart(tmp_path: Path) -> None:
    database = await open_database(None, tmp_path, ShiftedClock(HOUR))
    async with service_harness(database) as harness:
        agent = harness.agent
        await harness.ledger.write(inbox.add, agent, "evt_1", "service", {}, priority=2)
        await harness.ledger.write(inbox.claim, agent, "claim_1", count=1, lease_ms=60_000)
        await harness.ledger.write(inbox.release, agent, "claim_1", ["evt_1"], error=None)
    database = await open_database(None, tmp_path, ShiftedClock())
    async with Sweeper(Ledger(database)):
        (event,) = await database.run(lambda: inbox.claim(agent, "claim_2", count=5, lease_ms=60_000))
        assert event.attempts == 2
    await database.aclose()


async def test_measured_time_is_that_of_the_database_server(postgres_url: str) -> None:
    await set_database_ahead(postgres_url, "1 hour")
    database = await PostgresDatabase.open(postgres_url)
    assert -3601 < database.clock.skew_seconds < -3599

    def read_both() -> Program[tuple[int, int]]:
        rows = yield "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)", ()
        return rows[0][0], database.clock.now_ms()

    database_ms, measured_ms = await database.read(read_both)
    assert abs(database_ms - measured_ms) < 1_000
    await database.aclose()


async def _list_inbox(api: ApiClient, agent_id: str) -> list[Any]:
    reply = await api.get(f"/api/agents/{agent_id}/inbox")
    assert reply.status == 200, reply
    return reply.data["items"]


async def _read_skew(api: ApiClient) -> float:
    text = (await api.get("/metrics")).body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith("toolspace_clock_skew_seconds ")]
    return float(line.split()[1])

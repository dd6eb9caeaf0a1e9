"""A provider whose calls keep failing is not called for a while, and comes back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from toolspace import Settings, Tool, ToolContext, ToolProvider, ToolResult, Toolspace, tool
from toolspace.errors import ToolExecutionError, ToolTransportError

pytestmark = pytest.mark.spec("22.4")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


class Service(ToolProvider):
    """A service that can be down."""

    namespace = "service"

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.calls: list[str] = []
        self.gate: asyncio.Event | None = None
        self.is_entered = asyncio.Event()
        self.connected_at = 0.0

    def list_tools(self) -> Sequence[Tool]:
        return [
            Tool("ask", "Asks.", {"type": "object"}),
            Tool("cached", "Asks.", {"type": "object"}, cache=60),
            Tool("brief", "Asks.", {"type": "object"}, timeout=0.01),
        ]

    def last_connected_at(self) -> float:
        return self.connected_at

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        self.calls.append(name)
        self.is_entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return ToolResult(True, "answer")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_toolspace(service: Service, clock: Clock | None = None, **settings: Any) -> Toolspace:
    ts = Toolspace(providers=[service], settings=Settings(circuit_breaker_failures=3, **settings))
    ts.orchestrator.circuits.clock = clock or Clock()
    return ts


async def open_breaker(ts: Toolspace, service: Service) -> None:
    service.error = ToolTransportError("connection refused", executed=False)
    for _ in range(3):
        assert (await ts.call("service__ask")).error == "connection refused"
    service.calls.clear()


async def test_after_some_failures_in_a_row_calls_fail_at_once_with_the_reason(clock: Clock) -> None:
    service = Service()
    async with open_toolspace(service, clock) as ts:
        await open_breaker(ts, service)
        for name in ("service__ask", "service__brief"):
            result = await ts.call(name)
            assert (result.error_kind, result.executed) == ("transport_error", False)
            assert "last 3 calls failed with transport errors or timeouts: connection refused" in (result.error or "")
            assert "the next call is let through at 20" in (result.error or "")
        assert service.calls == []


async def test_the_default_is_five_failures() -> None:
    service = Service()
    service.error = ToolTransportError("down")
    async with Toolspace(providers=[service]) as ts:
        for _ in range(7):
            await ts.call("service__ask")
    assert len(service.calls) == 5


async def test_a_call_after_the_delay_closes_the_breaker_if_it_reaches_the_service(clock: Clock) -> None:
    service = Service()
    async with open_toolspace(service, clock, circuit_breaker_delay=10) as ts:
        await open_breaker(ts, service)
        clock.seconds += 10
        assert (await ts.call("service__ask")).error == "connection refused"
        assert "circuit breaker" in ((await ts.call("service__ask")).error or "")
        clock.seconds += 10
        service.error = None
        assert [(await ts.call("service__ask")).ok for _ in range(2)] == [True, True]
        assert len(service.calls) == 3
        assert [status.is_open for _, status in ts.orchestrator.circuits.statuses()] == [False]


async def test_one_probe_runs_at_a_time(clock: Clock) -> None:
    service = Service()
    async with open_toolspace(service, clock, circuit_breaker_delay=10) as ts:
        await open_breaker(ts, service)
        clock.seconds += 10
        service.error, service.gate = None, asyncio.Event()
        service.is_entered.clear()
        probe = asyncio.create_task(ts.call("service__ask"))
        await service.is_entered.wait()
        refusal = await ts.call("service__ask")
        assert "a call tests right now whether it is back" in (refusal.error or "")
        service.gate.set()
        assert (await probe).ok
        assert (await ts.call("service__ask")).ok


async def test_a_cancelled_probe_leaves_its_place_to_the_next_call(clock: Clock) -> None:
    service = Service()
    async with open_toolspace(service, clock, circuit_breaker_delay=10) as ts:
        await open_breaker(ts, service)
        clock.seconds += 10
        service.error, service.gate = None, asyncio.Event()
        service.is_entered.clear()
        probe = asyncio.create_task(ts.call("service__ask", call_id="probe"))
        await service.is_entered.wait()
        ts.cancel("probe")
        assert (await probe).error_kind == "canceled"
        service.gate = None
        assert (await ts.call("service__ask")).ok


async def test_timeouts_count_and_errors_of_the_service_do_not() -> None:
    service = Service()
    service.gate = asyncio.Event()
    async with open_toolspace(service) as ts:
        kinds = [(await ts.call("service__brief")).error_kind for _ in range(4)]
        assert kinds == ["timeout", "timeout", "timeout", "transport_error"]
    service = Service()
    async with open_toolspace(service) as ts:
        for error in (ToolTransportError("down"), ToolExecutionError("no such page")) * 4:
            service.error = error
            assert (await ts.call("service__ask")).error == str(error)
    assert len(service.calls) == 8


async def test_a_timeout_because_of_the_deadline_of_a_run_does_not_count() -> None:
    service = Service()
    service.gate = asyncio.Event()
    async with open_toolspace(service) as ts:
        for _ in range(4):
            async with ts.run(deadline=0.01) as run:
                assert (await run.call("service__ask")).error_kind == "timeout"
        service.gate = None
        assert (await ts.call("service__ask")).ok


async def test_calls_that_fail_together_count_once() -> None:
    service = Service()
    service.error, service.gate = ToolTransportError("it went away"), asyncio.Event()
    async with open_toolspace(service) as ts:
        calls = [asyncio.create_task(ts.call("service__ask")) for _ in range(10)]
        while len(service.calls) < 10:  # noqa: ASYNC110 - each call is one turn of the loop
            await asyncio.sleep(0)
        service.gate.set()
        assert {result.error for result in await asyncio.gather(*calls)} == {"it went away"}
        service.error = None
        assert (await ts.call("service__ask")).ok


async def test_a_new_connection_lets_the_next_call_through(clock: Clock) -> None:
    service = Service()
    async with open_toolspace(service, clock) as ts:
        await open_breaker(ts, service)
        clock.seconds += 1
        service.error, service.connected_at = None, clock.seconds
        assert (await ts.call("service__ask")).ok


async def test_a_cached_result_is_returned_and_the_reason_of_another_user_is_not(clock: Clock) -> None:
    service = Service()
    async with open_toolspace(service, clock) as ts:
        assert (await ts.call("service__cached")).ok
        await open_breaker(ts, service)
        assert (await ts.call("service__cached")).ok
        result = await ts.call("service__ask", context=ToolContext(user_id="somebody else"))
        assert "circuit breaker" in (result.error or "")
        assert "connection refused" not in (result.error or "")


async def test_null_turns_it_off_and_functions_have_none() -> None:
    @tool
    async def fail() -> None:
        """Fails."""
        raise ToolTransportError("down")

    service = Service()
    service.error = ToolTransportError("down")
    async with Toolspace([fail], providers=[service], settings=Settings(circuit_breaker_failures=None)) as ts:
        assert {(await ts.call("service__ask")).error for _ in range(8)} == {"down"}
    async with Toolspace([fail]) as ts:
        assert {(await ts.call("fail")).error for _ in range(8)} == {"down"}


async def test_the_breaker_is_behind_the_cache_and_before_the_queue() -> None:
    from toolspace.orchestrator.pipeline import STAGES

    names = [stage.__name__ for stage in STAGES]  # type: ignore[attr-defined]
    assert names.index("cache") < names.index("circuit_breaker") == names.index("queue") - 1

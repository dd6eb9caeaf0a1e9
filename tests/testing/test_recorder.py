"""The recorder and the clock that tests of extensions use."""

from __future__ import annotations

import asyncio

import pytest

from toolspace import EventType, Toolspace, tool
from toolspace.testing import EventRecorder, FakeClock


@tool
async def rest() -> None:
    await asyncio.sleep(60)


@tool
async def add(a: int, b: int) -> int:
    return a + b


async def test_events_are_kept_in_order_and_by_call() -> None:
    async with Toolspace(tools=[add]) as ts:
        seen = EventRecorder(ts)
        first = await ts.call("add", {"a": 1, "b": 2})
        second = await ts.call("add", {"a": 1})
        assert seen.types() == [
            "TOOL_CALL_REQUESTED",
            "TOOL_CALL_COMPLETED",
            "TOOL_CALL_REQUESTED",
            "TOOL_CALL_FAILED",
        ]
        assert [event.type.name for event in seen.of_call(second.call_id)] == seen.types()[2:]
        assert len(seen.of_type(EventType.TOOL_CALL_COMPLETED)) == 1
        assert seen.of_call(first.call_id)[0].tool_name == "add"
        seen.stop()
        await ts.call("add", {"a": 1, "b": 2})
        assert len(seen.events) == 4


async def test_it_waits_for_what_is_to_come() -> None:
    async with Toolspace(tools=[rest]) as ts:
        seen = EventRecorder(ts)
        task = asyncio.create_task(ts.call("rest"))
        began = await seen.wait_for_start("rest")
        ts.cancel(began.call_id)
        ended = await seen.wait_for(lambda event: event.type is EventType.TOOL_CALL_FAILED)
        assert (await task).error_kind == "canceled"
        assert seen.events == [began, ended]


async def test_what_never_comes_is_a_timeout() -> None:
    async with Toolspace() as ts:
        with pytest.raises(TimeoutError):
            await EventRecorder(ts, timeout=0.01).wait_for_start("nothing")


def test_a_clock_stands_until_it_is_moved() -> None:
    clock = FakeClock(10.0)
    assert (clock(), clock()) == (10.0, 10.0)
    clock.advance(2.5)
    assert clock() == clock.now == 12.5

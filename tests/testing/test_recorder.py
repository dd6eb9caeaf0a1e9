"""The event recorder and the fake clock."""

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
        recorder = EventRecorder(ts)
        first = await ts.call("add", {"a": 1, "b": 2})
        second = await ts.call("add", {"a": 1})
        assert recorder.types() == [
            "TOOL_CALL_REQUESTED",
            "TOOL_CALL_COMPLETED",
            "TOOL_CALL_REQUESTED",
            "TOOL_CALL_FAILED",
        ]
        assert [event.type.name for event in recorder.of_call(second.call_id)] == recorder.types()[2:]
        assert len(recorder.of_type(EventType.TOOL_CALL_COMPLETED)) == 1
        assert recorder.of_call(first.call_id)[0].tool_name == "add"
        recorder.stop()
        await ts.call("add", {"a": 1, "b": 2})
        assert len(recorder.events) == 4


async def test_it_waits_for_later_events() -> None:
    async with Toolspace(tools=[rest]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("rest"))
        start_event = await recorder.wait_for_start("rest")
        ts.cancel(start_event.call_id)
        failure_event = await recorder.wait_for(lambda event: event.type is EventType.TOOL_CALL_FAILED)
        assert (await task).error_kind == "canceled"
        assert recorder.events == [start_event, failure_event]


async def test_waiting_for_an_event_that_never_comes_times_out() -> None:
    async with Toolspace() as ts:
        with pytest.raises(TimeoutError):
            await EventRecorder(ts, timeout=0.01).wait_for_start("nothing")


def test_a_fake_clock_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(10.0)
    assert (clock(), clock()) == (10.0, 10.0)
    clock.advance(2.5)
    assert clock() == clock.now == 12.5

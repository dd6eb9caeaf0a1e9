"""SPEC 4.2, the cache: equal calls run once, failures are not cached, and a broken cache fails no call."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace import EventType, ResultCache, Settings, ToolContext, ToolResult, ToolRules, Toolspace, tool
from toolspace.core import json_text
from toolspace.core.events import CallEvent
from toolspace.core.extension_points import CachedResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.pipeline import CallHandler, StageContext
from toolspace.storage.memory_cache import MemoryCache
from toolspace.testing import EventRecorder


class CountingTool:
    def __init__(self, *, cache: float | None = 60, per_user: bool = False, fail: int = 0) -> None:
        self.runs = 0
        self._fail = fail

        @tool(cache=cache or 0, cache_per_user=per_user)
        async def look_up(key: str = "", limit: int = 10) -> Any:
            self.runs += 1
            if self.runs <= self._fail:
                raise ValueError("not yet")
            return {"key": key, "run": self.runs}

        self.tool = look_up


@pytest.mark.spec("4.2")
async def test_equal_arguments_run_once_however_they_are_written() -> None:
    counter = CountingTool()
    async with Toolspace(tools=[counter.tool]) as ts:
        results = [
            await ts.call("look_up", arguments)
            for arguments in ({"key": "a", "limit": 5}, '{"limit": 5, "key": "a"}', {"limit": "5", "key": "a"})
        ]
        records = ts.orchestrator.call_log.recent
    assert [result.result for result in results] == [{"key": "a", "run": 1}] * 3
    assert [record.cache_hit for record in records] == [False, True, True]
    assert [result.executed for result in results] == [True, False, False]


@pytest.mark.spec("4.2")
async def test_the_cache_is_off_unless_asked_for() -> None:
    counter = CountingTool(cache=None)
    async with Toolspace(tools=[counter.tool]) as ts:
        await ts.call("look_up")
        await ts.call("look_up")
    assert counter.runs == 2


@pytest.mark.spec("4.2")
async def test_cached_results_expire() -> None:
    now = 0.0
    counter = CountingTool(cache=10)
    async with Toolspace(tools=[counter.tool], cache=MemoryCache(clock=lambda: now)) as ts:
        await ts.call("look_up")
        now = 9.9
        await ts.call("look_up")
        assert counter.runs == 1
        now = 10.1
        await ts.call("look_up")
    assert counter.runs == 2


@pytest.mark.spec("4.2")
async def test_failures_are_never_cached() -> None:
    counter = CountingTool(fail=2)
    async with Toolspace(tools=[counter.tool]) as ts:
        oks = [(await ts.call("look_up")).ok for _ in range(4)]
    assert oks == [False, False, True, True]
    assert counter.runs == 3


@pytest.mark.spec("4.2")
@pytest.mark.parametrize(("per_user", "runs"), [(False, 1), (True, 2)])
async def test_a_result_that_depends_on_the_user_is_cached_per_user(per_user: bool, runs: int) -> None:
    counter = CountingTool(per_user=per_user)
    async with Toolspace(tools=[counter.tool]) as ts:
        for user in ("ann", "bob", "ann", "bob"):
            await ts.call("look_up", context=ToolContext(user_id=user))
    assert counter.runs == runs


@pytest.mark.spec("4.2")
async def test_equal_calls_in_flight_share_one_execution() -> None:
    release = asyncio.Event()
    runs = 0

    @tool(cache=60)
    async def slow(n: int) -> int:
        nonlocal runs
        runs += 1
        await release.wait()
        return n

    async with Toolspace(tools=[slow]) as ts:
        tasks = [asyncio.create_task(ts.call("slow", {"n": 1}, call_id=f"c{i}")) for i in range(20)]
        other_task = asyncio.create_task(ts.call("slow", {"n": 2}))
        await asyncio.sleep(0)
        release.set()
        results = await asyncio.gather(*tasks, other_task)
    assert runs == 2
    assert [result.result for result in results] == [1] * 20 + [2]
    assert [result.call_id for result in results[:20]] == [f"c{i}" for i in range(20)]


@pytest.mark.spec("4.2")
async def test_when_the_executing_call_is_cancelled_another_one_executes() -> None:
    release = asyncio.Event()
    runs = 0

    @tool(cache=60)
    async def slow() -> int:
        nonlocal runs
        runs += 1
        await release.wait()
        return runs

    async with Toolspace(tools=[slow]) as ts:
        recorder = EventRecorder(ts)
        leader = asyncio.create_task(ts.call("slow", call_id="leader"))
        await recorder.wait_for_start("slow")
        followers = [asyncio.create_task(ts.call("slow")) for _ in range(3)]
        await asyncio.sleep(0)
        ts.cancel("leader")
        assert (await leader).error_kind == "canceled"
        release.set()
        results = await asyncio.wait_for(asyncio.gather(*followers), 10)
    assert [result.result for result in results] == [2, 2, 2]


@pytest.mark.spec("4.2")
async def test_a_waiting_call_that_is_cancelled_does_not_affect_the_others() -> None:
    release = asyncio.Event()

    @tool(cache=60)
    async def slow() -> str:
        await release.wait()
        return "done"

    async with Toolspace(tools=[slow]) as ts:
        leader, leaver, follower = (asyncio.create_task(ts.call("slow")) for _ in range(3))
        await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        release.set()
        assert [(await leader).result, (await follower).result] == ["done", "done"]


@pytest.mark.spec("4.2")
async def test_changing_a_result_does_not_change_that_of_other_callers() -> None:
    counter = CountingTool()
    async with Toolspace(tools=[counter.tool]) as ts:
        first = await ts.call("look_up")
        first.result["key"] = "changed"
        second = await ts.call("look_up")
        second.result["key"] = "changed too"
        third = await ts.call("look_up")
    assert third.result == {"key": "", "run": 1}


@pytest.mark.spec("4.2")
async def test_null_and_false_are_cached_like_any_result() -> None:
    runs = 0

    @tool(cache=60)
    async def empty(value: bool | None = None) -> Any:
        nonlocal runs
        runs += 1
        return value

    async with Toolspace(tools=[empty]) as ts:
        values = [
            (await ts.call("empty", arguments)).result for arguments in ({}, {}, {"value": False}, {"value": False})
        ]
    assert values == [None, None, False, False]
    assert runs == 2


class BrokenCache(ResultCache):
    async def get(self, key: str) -> CachedResult | None:
        raise ConnectionError("the cache is gone")

    async def set(self, key: str, value: CachedResult, ttl: float) -> None:
        raise ConnectionError("the cache is gone")

    async def clear(self) -> None: ...


@pytest.mark.spec("4.2")
async def test_a_broken_cache_never_fails_a_call() -> None:
    counter = CountingTool()
    async with Toolspace(tools=[counter.tool], cache=BrokenCache()) as ts:
        results = [await ts.call("look_up") for _ in range(2)]
    assert [result.ok for result in results] == [True, True]
    assert counter.runs == 2


@pytest.mark.spec("4.1")
async def test_a_denied_call_never_reads_the_cache() -> None:
    counter = CountingTool()
    keys: list[str] = []

    class Watched(MemoryCache):
        async def get(self, key: str) -> CachedResult | None:
            keys.append(key)
            return await super().get(key)

    async with Toolspace(tools=[counter.tool], cache=Watched()) as ts:
        await ts.call("look_up", {"wrong": 1})
        assert keys == []
        await ts.call("look_up")
        assert len(keys) == 1


async def test_configuration_can_turn_a_tools_cache_off() -> None:
    counter = CountingTool(cache=60)
    async with Toolspace(tools=[counter.tool], settings=Settings(overrides={"look_up": ToolRules(cache=0)})) as ts:
        await ts.call("look_up")
        await ts.call("look_up")
    assert counter.runs == 2


class BlockedTool:
    """A cached tool that runs until it is released."""

    def __init__(self, *, cache: float = 60) -> None:
        self.runs = 0
        self.entered_event = asyncio.Event()
        self.release = asyncio.Event()

        @tool(cache=cache)
        async def look_up() -> dict[str, Any]:
            self.runs += 1
            self.entered_event.set()
            await self.release.wait()
            return {"found": [1, 2]}

        self.tool = look_up


async def followers(ts: Toolspace, count: int, **more: Any) -> list[asyncio.Task[Any]]:
    """Starts calls that wait for the running call."""
    tasks = [asyncio.create_task(ts.call("look_up", **more)) for _ in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.spec("4.2")
async def test_a_call_in_a_run_and_one_outside_share_one_execution() -> None:
    blocked_tool = BlockedTool()
    async with Toolspace(tools=[blocked_tool.tool]) as ts:
        first = asyncio.create_task(ts.run().call("look_up"))
        await blocked_tool.entered_event.wait()
        waiting_calls = await followers(ts, 2)
        blocked_tool.release.set()
        assert {str((await task).result) for task in (first, *waiting_calls)} == {"{'found': [1, 2]}"}
    assert blocked_tool.runs == 1


@pytest.mark.spec("4.2")
async def test_calls_that_share_an_execution_do_not_share_its_runs_deadline() -> None:
    blocked_tool = BlockedTool()
    async with Toolspace(tools=[blocked_tool.tool]) as ts:
        first = asyncio.create_task(ts.run(deadline=0.05).call("look_up"))
        await blocked_tool.entered_event.wait()
        (other_task,) = await followers(ts, 1)
        assert (await first).error_kind == "timeout"
        blocked_tool.release.set()
        assert (await other_task).ok
    assert blocked_tool.runs == 2


async def test_a_shared_result_is_copied_before_its_first_caller_can_change_it() -> None:
    blocked_tool = BlockedTool()
    async with Toolspace(tools=[blocked_tool.tool]) as ts:

        async def spoil() -> None:
            (await ts.call("look_up")).result["found"].clear()

        first = asyncio.create_task(spoil())
        await blocked_tool.entered_event.wait()
        (other_task,) = await followers(ts, 1)
        blocked_tool.release.set()
        await first
        assert (await other_task).result == {"found": [1, 2]}


async def test_equal_calls_of_two_event_loops_at_once_both_get_their_answer() -> None:
    both = threading.Barrier(2, timeout=10)

    @tool(cache=60)
    async def look_up() -> str:
        await asyncio.to_thread(both.wait)
        return "found"

    ts = Toolspace(tools=[look_up])

    def in_a_loop() -> ToolResult:
        return asyncio.run(ts.call("look_up"))  # type: ignore[arg-type]

    first, second = await asyncio.gather(asyncio.to_thread(in_a_loop), asyncio.to_thread(in_a_loop))
    assert (first.result, second.result) == ("found", "found")


async def test_a_call_cancelled_before_it_would_wait_for_an_equal_one_does_not_wait() -> None:
    blocked_tool = BlockedTool()
    async with Toolspace(tools=[blocked_tool.tool]) as ts:
        first = asyncio.create_task(ts.call("look_up"))
        await blocked_tool.entered_event.wait()
        ts.bus.subscribe(lambda event: ts.cancel("late") and None, EventType.TOOL_CALL_REQUESTED)
        async with asyncio.timeout(5):
            late = await ts.call("look_up", call_id="late")
        assert (late.error_kind, late.executed) == ("canceled", False)
        blocked_tool.release.set()
        assert (await first).ok


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def pass_through(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """A stage that does nothing. With it, every call takes all stages: the instant path is off."""

    async def run(call: Call) -> ToolResult:
        return await next(call)

    return run


async def observe_hit(value: Any, arguments: str, *, nested: bool, is_instant: bool) -> list[Any]:
    """Calls a cached tool twice, and returns everything that the second call shows: result, events, log, statistics."""

    @tool(cache=60)
    async def look_up(key: Any = None) -> Any:
        return value

    @tool
    async def outer(context: ToolContext) -> Any:
        nested_results.append(await context.call("look_up", arguments))

    nested_results: list[ToolResult] = []
    async with Toolspace(tools=[look_up, outer]) as ts:
        if not is_instant:
            ts.orchestrator.add_stage(pass_through)
        await ts.call("look_up", arguments)
        explanation = ts.orchestrator.explain("look_up")
        assert explanation is not None
        assert (explanation[0].instant_handler is not None) is is_instant
        recorder = EventRecorder(ts)
        if nested:
            await ts.call("outer")
            result = nested_results[0]
        else:
            result = await ts.call("look_up", arguments)
        events = [
            (event.type, event.run_id, event.parent_id is not None, getattr(event, "params", None))
            for event in recorder.of_call(result.call_id)
            if isinstance(event, CallEvent)
        ]
        entries = [entry.to_dict() for entry in ts.orchestrator.call_log.recent if entry.call_id == result.call_id]
        stats = ts.get_stats().to_dict()
    for wire in (*entries, wire_result := result.to_dict()):
        for name in ("callId", "startedAt", "completedAt", "durationMs", "latencyMs", "queueWaitMs", "parentId"):
            wire.pop(name, None)
    counts = {name: (numbers["count"], numbers["failures"]) for name, numbers in stats["callStats"].items()}
    return [wire_result, result.text, events, entries, counts]


@pytest.mark.spec("4.2")
@settings(deadline=None, max_examples=60)
@given(value=JSON, key=JSON, spaces=st.sampled_from(("", " ", "\n")), nested=st.booleans())
def test_an_instant_hit_equals_a_hit_through_all_stages(value: Any, key: Any, spaces: str, nested: bool) -> None:
    arguments = f'{spaces}{{"key":{spaces}{json_text.encode(key)}}}'
    instant, plain = (
        asyncio.run(observe_hit(value, arguments, nested=nested, is_instant=is_instant)) for is_instant in (True, False)
    )
    assert instant == plain
    assert instant[3][0]["cacheHit"] is True


@pytest.mark.spec("18")
async def test_the_completion_of_a_cache_hit_can_be_deferred() -> None:
    counter = CountingTool()
    async with Toolspace(tools=[counter.tool]) as ts:
        await ts.call("look_up", "{}")
        recorder = EventRecorder(ts)
        result = await ts.orchestrator.execute("look_up", "{}", defer_completion=True)
        assert not result.executed
        assert recorder.types() == ["TOOL_CALL_REQUESTED"]
        assert ts.orchestrator.emit_completion(result)
        assert recorder.types() == ["TOOL_CALL_REQUESTED", "TOOL_CALL_COMPLETED"]

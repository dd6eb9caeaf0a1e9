"""SPEC 4.2, the cache: equal calls run once, failures are not cached, and a broken cache fails no call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace import EventType, ResultCache, Settings, Tool, ToolContext, ToolResult, ToolRules, Toolspace, tool
from toolspace.core import json_text
from toolspace.core.events import CallEvent
from toolspace.core.extension_points import CachedResult
from toolspace.core.tool import CacheScope
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.pipeline import CallHandler, StageContext
from toolspace.orchestrator.tool_fingerprint import get_fingerprint
from toolspace.providers.rest.provider import RestProvider, RestSpec
from toolspace.storage.memory_cache import MemoryCache
from toolspace.storage.sqlite_cache import SqliteCache
from toolspace.testing import EventRecorder


class CountingTool:
    def __init__(self, *, cache: float | None = 60, scope: CacheScope = "principal", fail: int = 0) -> None:
        self.runs = 0
        self._fail = fail

        @tool(cache=cache or 0, cache_scope=scope)
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
@pytest.mark.spec("21.1")
@pytest.mark.parametrize(("scope", "runs"), [("principal", 3), ("shared", 1)])
@pytest.mark.parametrize("arguments", [None, "{}"], ids=["no text", "text"])
async def test_principals_share_cached_results_only_if_the_tool_says_so(
    scope: CacheScope, runs: int, arguments: str | None
) -> None:
    counter = CountingTool(scope=scope)
    async with Toolspace(tools=[counter.tool]) as ts:
        for user in ("ann", "bob", None, "ann", "bob", None):
            await ts.call("look_up", arguments, context=ToolContext(user_id=user))
    assert counter.runs == runs


@pytest.mark.spec("4.2")
@pytest.mark.parametrize(
    "reach",
    [
        {"allowed_paths": ("/other",)},
        {"private_paths": ("/other",)},
        {"allowed_hosts": ("other.example",)},
        {"allowed_env": ("OTHER",)},
        {"web_search": {"provider": "brave"}},
    ],
    ids=lambda reach: next(iter(reach)),
)
@pytest.mark.parametrize("scope", ["principal", "shared"])
async def test_a_caller_who_may_reach_something_else_gets_no_cached_result(
    reach: dict[str, Any], scope: CacheScope
) -> None:
    counter = CountingTool(scope=scope)
    async with Toolspace(tools=[counter.tool]) as ts:
        for _ in range(2):
            await ts.call("look_up", "{}")
            await ts.call("look_up", "{}", context=ToolContext(**reach))
    assert counter.runs == 2


@pytest.mark.spec("4.2")
async def test_memory_directories_keep_results_apart_unless_they_are_shared() -> None:
    for scope, runs in (("principal", 2), ("shared", 1)):
        counter = CountingTool(scope=scope)
        async with Toolspace(tools=[counter.tool]) as ts:
            for folder in ("/memory/ann", "/memory/bob"):
                await ts.call("look_up", "{}", context=ToolContext(memory_dir=folder))
        assert counter.runs == runs


@pytest.mark.spec("21.1")
async def test_principals_do_not_share_a_running_execution_or_its_error() -> None:
    release = asyncio.Event()
    both_run = asyncio.Event()
    users: list[str | None] = []

    @tool(cache=60)
    async def slow(context: ToolContext) -> str:
        users.append(context.user_id)
        if len(users) == 2:
            both_run.set()
        await release.wait()
        raise ValueError(f"secret of {context.user_id}")

    async with Toolspace(tools=[slow]) as ts:
        tasks = [asyncio.create_task(ts.call("slow", context=ToolContext(user_id=user))) for user in ("ann", "bob")]
        await asyncio.wait_for(both_run.wait(), 10)
        release.set()
        results = await asyncio.gather(*tasks)
    assert ["ann" in (results[0].error or ""), "bob" in (results[1].error or "")] == [True, True]


@pytest.mark.spec("4.2")
async def test_a_tool_that_changed_does_not_return_the_results_of_its_earlier_code(tmp_path: Path) -> None:
    """Each version runs in a toolspace of its own, and all have one cache on disk."""

    def first() -> str:
        return "first"

    def second() -> str:
        return "second"

    def make(text: str) -> Callable[[], str]:
        return lambda: text

    functions = [first, second, make("third"), make("fourth")]
    versions = [
        *(Tool("answer", handler=lambda _, __, function=function: function()) for function in functions),
        tool(name="answer", cache=60, version="2")(first),
        tool(name="answer", cache=60, version="3")(first),
        tool(name="answer", cache=60, input_schema={"type": "object", "title": "other"})(first),
    ]
    executions: list[bool] = []
    for definition in [*versions, *versions]:
        async with Toolspace(tools=[definition.replace(cache=60)], cache=SqliteCache(tmp_path / "cache.db")) as ts:
            executions.append((await ts.call("answer", "{}")).executed)
    assert executions == [True] * len(versions) + [False] * len(versions)


@pytest.mark.spec("4.2")
async def test_a_configured_tool_that_changed_does_not_return_its_earlier_results(tmp_path: Path) -> None:
    def configure(output: str) -> Path:
        file = tmp_path / "toolspace.yaml"
        definition = {"name": "greet", "executionType": "static", "cache": "1h", "execution": {"output": output}}
        file.write_text(json_text.encode({"storage": {"cache": "disk", "dir": str(tmp_path)}, "tools": [definition]}))
        return file

    outputs: list[object] = []
    for output in ("hello", "good morning", "hello"):
        async with Toolspace.open(configure(output)) as ts:
            result = await ts.call("greet", "{}")
            outputs.append((result.result, result.executed))
    assert outputs == [("hello", True), ("good morning", True), ("hello", False)]


@pytest.mark.spec("4.2")
async def test_a_rest_tool_with_another_credential_does_not_return_earlier_results() -> None:
    specs = [
        RestSpec(name="me", url="http://service.example/me", headers={"authorization": token}) for token in ("a", "b")
    ]
    providers = [RestProvider([spec]) for spec in (*specs, specs[0])]
    fingerprints: list[str] = []
    for provider in providers:
        async with Toolspace(providers=[provider]) as ts:
            explanation = ts.orchestrator.explain("rest__me")
            assert explanation is not None
            fingerprints.append(get_fingerprint(explanation[0]))
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


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


async def observe_hit(
    value: Any, arguments: str, *, nested: bool, is_instant: bool, user: str | None, scope: CacheScope
) -> list[Any]:
    """Calls a cached tool twice, and returns everything that the second call shows: result, events, log, statistics."""

    @tool(cache=60, cache_scope=scope)
    async def look_up(key: Any = None) -> Any:
        return value

    @tool
    async def outer(context: ToolContext) -> Any:
        nested_results.append(await context.call("look_up", arguments))

    nested_results: list[ToolResult] = []
    async with Toolspace(tools=[look_up, outer]) as ts:
        if not is_instant:
            ts.orchestrator.add_stage(pass_through)
        first_user = "carla" if scope == "shared" else user
        await ts.call("look_up", arguments, context=ToolContext(user_id=first_user))
        explanation = ts.orchestrator.explain("look_up")
        assert explanation is not None
        assert (explanation[0].instant_handler is not None) is is_instant
        recorder = EventRecorder(ts)
        if nested:
            await ts.call("outer", context=ToolContext(user_id=user))
            result = nested_results[0]
        else:
            result = await ts.call("look_up", arguments, context=ToolContext(user_id=user))
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
@given(
    value=JSON,
    key=JSON,
    spaces=st.sampled_from(("", " ", "\n")),
    nested=st.booleans(),
    user=st.sampled_from((None, "ann")),
    scope=st.sampled_from(("principal", "shared")),
)
def test_an_instant_hit_equals_a_hit_through_all_stages(
    value: Any, key: Any, spaces: str, nested: bool, user: str | None, scope: CacheScope
) -> None:
    arguments = f'{spaces}{{"key":{spaces}{json_text.encode(key)}}}'
    instant, plain = (
        asyncio.run(observe_hit(value, arguments, nested=nested, is_instant=is_instant, user=user, scope=scope))
        for is_instant in (True, False)
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

"""SPEC 4.4 and 4.5: timeouts and cancellation really stop what runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from toolspace import EventType, QueueSpec, Settings, ToolContext, ToolRegistry, ToolRules, Toolspace, tool
from toolspace.core.events import CallFailed
from toolspace.core.extension_points import CachedResult, OutputWriter
from toolspace.orchestrator.stages import timeout
from toolspace.storage.memory_cache import MemoryCache
from toolspace.storage.memory_outputs import MemoryOutputs
from toolspace.testing import EventRecorder


@pytest.mark.spec("4.4")
async def test_a_timeout_cancels_the_coroutine() -> None:
    endings: list[str] = []

    @tool(timeout=0.05)
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            endings.append("cancelled")
            raise

    async with Toolspace(tools=[slow]) as ts:
        result = await ts.call("slow")
    assert (result.error_kind, result.executed) == ("timeout", True)
    assert result.error == "Tool execution timed out after 50ms"
    assert endings == ["cancelled"]


@pytest.mark.spec("4.4")
async def test_the_tools_own_timeout_beats_the_default_and_configuration_beats_both() -> None:
    @tool(timeout=0.02)
    async def own_task() -> None:
        await asyncio.sleep(60)

    @tool
    async def default() -> None:
        await asyncio.sleep(60)

    @tool(timeout=60)
    async def overridden() -> None:
        await asyncio.sleep(60)

    settings = Settings(tool_timeout=0.03, overrides={"over*": ToolRules(timeout=0.01)})
    async with Toolspace(tools=[own_task, default, overridden], settings=settings) as ts:
        errors = [(await ts.call(name)).error for name in ("own_task", "default", "overridden")]
    assert errors == [f"Tool execution timed out after {n}ms" for n in (20, 30, 10)]


@pytest.mark.spec("4.4")
async def test_a_tool_that_ignores_cancellation_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout, "GRACE_SECONDS", 0.05)
    rounds = 0

    @tool(timeout=0.02)
    async def stubborn() -> None:
        nonlocal rounds
        while True:
            try:
                rounds += 1
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async with Toolspace(tools=[stubborn]) as ts:
        result = await ts.call("stubborn")
        assert result.error_kind == "timeout"
        assert ts.orchestrator.abandoned_count == 1
    assert rounds == 2


@pytest.mark.spec("4.4")
async def test_cleaning_up_after_a_timeout_may_take_a_moment() -> None:
    cleanups: list[bool] = []

    @tool(timeout=0.02)
    async def careful() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleanups.append(True)

    async with Toolspace(tools=[careful]) as ts:
        assert (await ts.call("careful")).error_kind == "timeout"
    assert cleanups == [True]


@pytest.mark.spec("4.4")
async def test_an_abandoned_thread_is_counted_and_its_result_discarded() -> None:
    release, canceled = threading.Event(), threading.Event()

    @tool(timeout=0.05)
    def block(context: ToolContext) -> str:
        while not context.canceled:
            release.wait(0.01)
        canceled.set()
        release.wait()
        return "late"

    async with Toolspace(tools=[block]) as ts:
        recorder = EventRecorder(ts)
        result = await ts.call("block")
        assert result.error_kind == "timeout"
        assert await asyncio.to_thread(canceled.wait, 10)
        assert ts.orchestrator.abandoned_count == 1
        release.set()
        async with asyncio.timeout(10):
            while ts.orchestrator.abandoned_count:  # noqa: ASYNC110 - a thread ends without telling anyone
                await asyncio.sleep(0.001)
        assert recorder.types() == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]


async def test_stuck_threads_do_not_use_up_the_limit() -> None:
    release = threading.Event()

    @tool(timeout=0.3)
    def block() -> None:
        release.wait()

    @tool
    def quick(n: int) -> int:
        return n

    async with Toolspace(tools=[block, quick]) as ts:
        try:
            failed = await asyncio.gather(*(ts.call("block") for _ in range(80)))
            assert {result.error_kind for result in failed} == {"timeout"}
            assert (await ts.call("quick", {"n": 4})).result == 4
        finally:
            release.set()


@pytest.mark.spec("4.4")
async def test_a_deadline_of_a_run_bounds_every_call_in_it() -> None:
    @tool
    async def slow() -> None:
        await asyncio.sleep(60)

    async with Toolspace(tools=[slow]) as ts:
        run = ts.run(deadline=0.05)
        first = await run.call("slow")
        second = await run.call("slow")
    assert first.error_kind == second.error_kind == "timeout"
    assert (first.executed, second.executed) == (True, False)
    assert second.error == "the run's deadline has passed, 50ms after its start"


@pytest.mark.spec("4.5")
async def test_cancel_stops_a_running_call_and_its_caller_gets_a_result() -> None:
    stopped = asyncio.Event()

    @tool
    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    async with Toolspace(tools=[wait]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("wait", call_id="c1"))
        await recorder.wait_for_start("wait")
        assert ts.cancel("c1")
        result = await task
        assert (result.error_kind, result.executed) == ("canceled", True)
        assert stopped.is_set()
        assert not ts.cancel("c1")
        assert recorder.types() == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
        assert not task.cancelled()


@pytest.mark.spec("4.5")
async def test_cancelling_the_caller_stops_all_child_calls() -> None:
    stopped: list[str] = []

    @tool
    async def inner() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append("inner")

    @tool
    async def outer(context: ToolContext) -> Any:
        try:
            return (await context.call("inner")).result
        finally:
            stopped.append("outer")

    async with Toolspace(tools=[inner, outer]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("outer"))
        await recorder.wait_for_start("inner")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        failed = [event.to_dict() for event in recorder.of_type(EventType.TOOL_CALL_FAILED)]
    assert stopped == ["inner", "outer"]
    assert [(event["toolName"], event["errorKind"]) for event in failed] == [
        ("inner", "canceled"),
        ("outer", "canceled"),
    ]


@pytest.mark.spec("4.5")
async def test_cancelling_a_child_leaves_its_parent_running() -> None:
    @tool
    async def inner() -> None:
        await asyncio.sleep(60)

    @tool
    async def outer(context: ToolContext) -> Any:
        child = await context.call("inner")
        await asyncio.sleep(0)
        return child.error_kind

    async with Toolspace(tools=[inner, outer]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("outer"))
        child = await recorder.wait_for_start("inner")
        ts.cancel(child.call_id)
        result = await task
    assert (result.ok, result.result) == (True, "canceled")


@pytest.mark.spec("4.5")
async def test_a_run_cancels_all_of_its_calls_and_refuses_new_ones() -> None:
    @tool
    async def wait() -> None:
        await asyncio.sleep(60)

    async with Toolspace(tools=[wait]) as ts:
        run, other_run = ts.run(), ts.run()
        recorder = EventRecorder(ts)
        tasks = [asyncio.create_task(run.call("wait")) for _ in range(3)]
        survivor = asyncio.create_task(other_run.call("wait", call_id="other"))
        await recorder.wait_for(lambda _: len(recorder.of_type(EventType.TOOL_CALL_REQUESTED)) == 4)
        run.cancel()
        results = await asyncio.gather(*tasks)
        assert {result.error_kind for result in results} == {"canceled"}
        late = await run.call("wait")
        assert (late.error_kind, late.executed) == ("canceled", False)
        assert not survivor.done()
        ts.cancel("other")
        await survivor


async def test_a_call_that_cancels_itself_ends_where_it_next_waits() -> None:
    reached_names: list[str] = []

    @tool
    async def suicidal(context: ToolContext) -> None:
        assert ts.cancel(context.call_id)
        reached_names.append("still running")
        await asyncio.sleep(60)
        reached_names.append("never")

    ts = Toolspace(tools=[suicidal])
    async with ts:
        result = await ts.call("suicidal")
        await asyncio.sleep(0)  # The caller's own next await is not cancelled.
    assert result.error_kind == "canceled"
    assert reached_names == ["still running"]


async def test_a_cancel_for_a_tool_that_ignores_it_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeout, "GRACE_SECONDS", 0.05)

    @tool
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async with Toolspace(tools=[stubborn]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("stubborn", call_id="c"))
        await recorder.wait_for_start("stubborn")
        ts.cancel("c")
        assert (await task).error_kind == "canceled"
        external = asyncio.create_task(ts.call("stubborn"))
        await asyncio.sleep(0)
        external.cancel()
        with pytest.raises(asyncio.CancelledError):
            await external


async def test_a_tools_own_timeout_inside_does_not_touch_the_call() -> None:
    @tool
    async def tries() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            return "gave up"
        return "no"

    async with Toolspace(tools=[tries]) as ts:
        assert (await ts.call("tries")).result == "gave up"


async def test_a_timeout_around_the_call_works() -> None:
    @tool
    async def wait() -> None:
        await asyncio.sleep(60)

    async with Toolspace(tools=[wait]) as ts:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await ts.call("wait")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@pytest.mark.spec("4.4")
async def test_a_stream_that_times_out_closes_its_generator() -> None:
    closed: list[bool] = []

    @tool(timeout=0.05)
    async def stream() -> AsyncIterator[str]:
        try:
            yield "a"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async with Toolspace(tools=[stream]) as ts:
        assert (await ts.call("stream")).error_kind == "timeout"
    assert closed == [True]


@pytest.mark.spec("4.5")
async def test_closing_a_toolspace_ends_its_calls() -> None:
    @tool
    async def wait() -> None:
        await asyncio.sleep(60)

    ts = Toolspace(tools=[wait])
    recorder = EventRecorder(ts)
    async with ts:
        task = asyncio.create_task(ts.call("wait"))
        await recorder.wait_for_start("wait")
    assert (await task).error_kind == "canceled"


class SlowOutputs(MemoryOutputs):
    """An output store that signals a write and then never returns."""

    def __init__(self) -> None:
        super().__init__(ttl=60)
        self.reached_event = asyncio.Event()

    async def create(self, *, session: str, owner: str | None, tool: str) -> OutputWriter:
        self.reached_event.set()
        await asyncio.sleep(60)
        raise AssertionError("never")


class SlowCache(MemoryCache):
    def __init__(self) -> None:
        super().__init__()
        self.reached_event = asyncio.Event()

    def peek(self, key: str) -> CachedResult | None:
        return None

    async def get(self, key: str) -> CachedResult | None:
        self.reached_event.set()
        await asyncio.sleep(60)
        return None


def _large() -> tuple[Toolspace, asyncio.Event]:
    @tool
    async def large() -> str:
        return "x" * 2_000

    outputs = SlowOutputs()
    return Toolspace(tools=[large], outputs=outputs, settings=Settings(max_inline_bytes=1_000)), outputs.reached_event


def _cached() -> tuple[Toolspace, asyncio.Event]:
    @tool(cache=60)
    async def large() -> str:
        return "x"

    cache = SlowCache()
    return Toolspace(tools=[large], cache=cache), cache.reached_event


@pytest.mark.spec("4.5")
@pytest.mark.parametrize(("make", "executed"), [(_large, True), (_cached, False)])
async def test_a_caller_cancelled_while_its_call_stores_or_reads_the_cache_is_cancelled(
    make: Callable[[], tuple[Toolspace, asyncio.Event]], executed: bool
) -> None:
    ts, reached_event = make()
    async with ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("large"))
        await reached_event.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (end,) = recorder.of_type(EventType.TOOL_CALL_FAILED)
    assert isinstance(end, CallFailed)
    assert (end.result.error_kind, end.result.executed) == ("canceled", executed)


@pytest.mark.spec("4.5")
@pytest.mark.parametrize(("make", "executed"), [(_large, True), (_cached, False)])
async def test_a_call_can_be_cancelled_while_it_stores_its_result_or_reads_the_cache(
    make: Callable[[], tuple[Toolspace, asyncio.Event]], executed: bool
) -> None:
    ts, reached_event = make()
    async with ts:
        task = asyncio.create_task(ts.call("large", call_id="c"))
        await reached_event.wait()
        assert ts.cancel("c")
        result = await task
    assert (result.error_kind, result.executed) == ("canceled", executed)


async def test_a_tools_own_task_group_does_not_start_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task group cancels its own task, waits for its children, and withdraws the cancellation."""
    monkeypatch.setattr(timeout, "GRACE_SECONDS", 0.02)

    async def linger() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)

    async def fail() -> None:
        raise ValueError("no")

    @tool
    async def falls_back() -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(linger())
                group.create_task(fail())
        except* ValueError:
            pass
        await asyncio.sleep(0.1)
        return "the other way"

    @tool(timeout=0.2)
    async def hangs() -> None:
        await falls_back()
        await asyncio.sleep(60)

    async with Toolspace(tools=[falls_back, hangs]) as ts:
        assert (await ts.call("falls_back")).result == "the other way"
        assert (await ts.call("hangs")).error_kind == "timeout"  # Its own time still counts.
        assert ts.orchestrator.abandoned_count == 0


async def test_a_tool_that_ignores_cancellation_and_keeps_failing_inside_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeout, "GRACE_SECONDS", 0.05)
    loop = asyncio.get_running_loop()

    def failing_future() -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()
        loop.call_later(0.01, lambda: future.done() or future.set_exception(ValueError("again")))
        return future

    @tool(timeout=0.02)
    async def stubborn() -> None:
        while True:
            try:
                await failing_future()
            except (asyncio.CancelledError, ValueError):
                continue

    async with Toolspace(tools=[stubborn]) as ts, asyncio.timeout(5):
        assert (await ts.call("stubborn")).error_kind == "timeout"


@pytest.mark.spec("4.5")
async def test_when_all_calls_are_cancelled_no_parent_continues() -> None:
    reached_names: list[str] = []

    @tool
    async def child() -> None:
        await asyncio.sleep(60)

    @tool
    async def parent(context: ToolContext) -> None:
        await context.call("child")
        reached_names.append("went on")

    async with Toolspace(tools=[child, parent]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("parent"))
        await recorder.wait_for_start("child")
        assert ts.orchestrator.cancel()
        assert (await task).error_kind == "canceled"
        assert task.cancelling() == 0
        assert len(recorder.of_type(EventType.TOOL_CALL_FAILED)) == 2
    assert reached_names == []


@pytest.mark.spec("4.5")
async def test_a_tool_that_cancels_all_calls_stops_its_parent_too() -> None:
    reached_names: list[str] = []

    @tool
    async def child() -> None:
        ts.orchestrator.cancel()
        await asyncio.sleep(60)

    @tool
    async def parent(context: ToolContext) -> None:
        await context.call("child")
        reached_names.append("went on")

    ts = Toolspace(tools=[child, parent])
    async with ts:
        assert (await ts.call("parent")).error_kind == "canceled"
        await asyncio.sleep(0)
    assert reached_names == []


@pytest.mark.spec("4.5")
async def test_canceling_a_call_stops_its_child_calls() -> None:
    @tool
    async def child() -> None:
        await asyncio.sleep(60)

    child_tasks: list[asyncio.Task[Any]] = []

    @tool
    async def parent(context: ToolContext) -> None:
        child_tasks.append(asyncio.create_task(context.call("child")))
        await asyncio.sleep(60)

    async with Toolspace(tools=[child, parent]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("parent", call_id="p"))
        await recorder.wait_for_start("child")
        assert ts.cancel("p")
        assert (await task).error_kind == "canceled"
        assert (await child_tasks[0]).error_kind == "canceled"


async def test_a_caller_cancelled_in_the_moment_its_call_is_cancelled_is_still_cancelled() -> None:
    @tool
    async def wait() -> None:
        await asyncio.sleep(60)

    async with Toolspace(tools=[wait]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("wait", call_id="c"))
        await recorder.wait_for_start("wait")
        ts.cancel("c")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()


async def test_a_call_that_cancels_itself_keeps_the_cancellation_of_its_caller() -> None:
    @tool
    async def suicidal(context: ToolContext) -> None:
        ts.cancel(context.call_id)
        await asyncio.sleep(60)

    ts = Toolspace(tools=[suicidal])

    async def caller() -> tuple[str | None, int]:
        task = asyncio.current_task()
        assert task is not None
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            result = await ts.call("suicidal")
            return result.error_kind, task.cancelling()
        raise AssertionError

    async with ts:
        task = asyncio.create_task(caller())
        await asyncio.sleep(0)
        task.cancel()
        assert await task == ("canceled", 1)


@pytest.mark.spec("4.5")
async def test_a_thread_can_cancel_a_call() -> None:
    entered_event = threading.Event()
    release = threading.Event()

    @tool
    def stop(context: ToolContext) -> None:
        assert ts.cancel(context.call_id)
        entered_event.set()
        release.wait(10)

    ts = Toolspace(tools=[stop])
    async with ts:
        # Nothing else happens on the loop: only the thread can wake it.
        result = await ts.call("stop")
        assert entered_event.wait(10)  # It may not have started yet
        release.set()
    assert result.error_kind == "canceled"


async def test_closing_a_toolspace_inside_a_tool_of_another_leaves_that_call_alone() -> None:
    @tool
    async def outer() -> str:
        async with Toolspace(tools=[]):
            pass
        await asyncio.sleep(0)
        return "done"

    async with Toolspace(tools=[outer]) as ts:
        assert (await ts.call("outer")).result == "done"


@pytest.mark.spec("4.5")
async def test_a_closed_toolspace_has_recorded_and_announced_every_end() -> None:
    cleanups: list[str] = []

    @tool
    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleanups.append("up")

    ts = Toolspace(tools=[wait])
    recorder = EventRecorder(ts)
    async with ts:
        task = asyncio.create_task(ts.call("wait"))
        await recorder.wait_for_start("wait")
    assert cleanups == ["up"]
    assert recorder.types()[-1] == "TOOL_CALL_FAILED"
    assert [entry.error_kind for entry in ts.orchestrator.call_log.recent] == ["canceled"]
    assert (await task).error_kind == "canceled"


async def test_a_tool_may_close_the_toolspace_it_runs_in() -> None:
    @tool
    async def leave() -> None:
        await asyncio.sleep(0)
        await ts.aclose()

    ts = Toolspace(tools=[leave])
    async with asyncio.timeout(5):
        assert (await ts.call("leave")).error_kind == "canceled"


@pytest.mark.spec("4.4")
async def test_a_deadline_of_a_run_ends_the_wait_in_a_queue() -> None:
    @tool(queue="q")
    async def wait() -> None:
        await asyncio.sleep(60)

    async with Toolspace(tools=[wait], settings=Settings(queues={"q": QueueSpec(concurrent=1)})) as ts:
        recorder = EventRecorder(ts)
        first = asyncio.create_task(ts.call("wait", call_id="first"))
        await recorder.wait_for_start("wait")
        async with asyncio.timeout(5):
            late = await ts.run(deadline=0.05).call("wait")
        assert (late.error_kind, late.executed) == ("timeout", False)
        assert "50ms" in (late.error or "")
        assert not first.done()
        ts.cancel("first")
        await first


@pytest.mark.spec("4.4")
async def test_a_deadline_of_a_run_ends_the_wait_for_an_equal_call() -> None:
    @tool(cache=60)
    async def wait() -> None:
        await asyncio.sleep(60)

    async with Toolspace(tools=[wait]) as ts:
        recorder = EventRecorder(ts)
        first = asyncio.create_task(ts.call("wait", call_id="first"))
        await recorder.wait_for_start("wait")
        async with asyncio.timeout(5):
            assert (await ts.run(deadline=0.05).call("wait")).error_kind == "timeout"
        assert not first.done()
        ts.cancel("first")
        await first


@pytest.mark.parametrize("how", ["time", "cancel"])
async def test_closing_a_child_that_ignores_cancellation_leaves_its_parent_running(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeout, "GRACE_SECONDS", 0.05)

    @tool(timeout=0.02 if how == "time" else 30)
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    @tool
    async def parent(context: ToolContext) -> str | None:
        child = await context.call("stubborn")
        await asyncio.sleep(0.1)
        return child.error_kind

    async with Toolspace(tools=[stubborn, parent]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(ts.call("parent"))
        child = await recorder.wait_for_start("stubborn")
        await asyncio.sleep(0)
        if how == "cancel":
            assert ts.cancel(child.call_id)
        result = await task
        assert result.result == ("timeout" if how == "time" else "canceled")
        assert task.cancelling() == 0
        assert ts.orchestrator.abandoned_count == 1


async def test_a_call_left_behind_by_a_closed_loop_does_not_keep_a_toolspace_open() -> None:
    @tool
    async def wait() -> None:
        await asyncio.sleep(60)

    ts = Toolspace(tools=[wait])

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(ts.call("wait"))
        loop.run_until_complete(asyncio.sleep(0))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    await asyncio.to_thread(abandon)
    assert len(ts.orchestrator.active_calls.ids) == 1
    await ts.aclose()


async def test_a_toolspace_that_is_closed_twice_closes_its_providers_once() -> None:
    closed: list[int] = []

    class Counting(ToolRegistry):
        async def aclose(self) -> None:
            closed.append(1)

    async with Toolspace(providers=[Counting(kind="counting")]) as ts:
        await ts.aclose()
    assert closed == [1]

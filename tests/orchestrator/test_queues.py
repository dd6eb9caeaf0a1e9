"""SPEC 4.3, queues: first in, first out; cancelled calls leave; a call never waits for its own ancestors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from toolspace import EventType, QueueSpec, Settings, ToolContext, ToolRules, Toolspace, tool
from toolspace.orchestrator.stages.queue import CallQueue, RateLimit
from toolspace.testing import EventRecorder


class Gate:
    """A tool body that waits until it is released, and counts how many calls are inside at once."""

    def __init__(self) -> None:
        self.active_count = 0
        self.most = 0
        self.order: list[int] = []
        self.open = asyncio.Event()
        self.entered_event = asyncio.Event()

    async def __call__(self, n: int) -> int:
        self.order.append(n)
        self.active_count += 1
        self.most = max(self.most, self.active_count)
        self.entered_event.set()
        try:
            await self.open.wait()
        finally:
            self.active_count -= 1
        return n


def space(gate: Gate, **spec: Any) -> Toolspace:
    @tool(queue="q")
    async def work(n: int) -> int:
        return await gate(n)

    return Toolspace(tools=[work], settings=Settings(queues={"q": QueueSpec(**spec)}))


@pytest.mark.spec("4.3")
async def test_ten_thousand_calls_at_once_through_a_queue_of_ten() -> None:
    active_count = most = 0

    @tool(queue="q")
    async def work(n: int) -> int:
        nonlocal active_count, most
        active_count += 1
        most = max(most, active_count)
        await asyncio.sleep(0)
        active_count -= 1
        return n

    async with Toolspace(tools=[work], settings=Settings(queues={"q": QueueSpec(concurrent=10)})) as ts:
        results = await asyncio.gather(*(ts.call("work", {"n": n}) for n in range(10_000)))
    assert [result.result for result in results] == list(range(10_000))
    assert most == 10


@pytest.mark.spec("4.3")
async def test_calls_are_served_in_the_order_they_came() -> None:
    gate = Gate()
    async with space(gate, concurrent=2) as ts:
        tasks = [asyncio.create_task(ts.call("work", {"n": n})) for n in range(50)]
        await gate.entered_event.wait()
        gate.open.set()
        await asyncio.gather(*tasks)
    assert gate.order == list(range(50))
    assert gate.most == 2


@pytest.mark.spec("4.3")
async def test_a_full_queue_refuses_at_once() -> None:
    gate = Gate()
    async with space(gate, concurrent=1, max_waiting=2) as ts:
        tasks = [asyncio.create_task(ts.call("work", {"n": n})) for n in range(3)]
        await gate.entered_event.wait()
        refusal = await ts.call("work", {"n": 9})
        assert (refusal.error_kind, refusal.executed) == ("limit_exceeded", False)
        assert 'queue "q" is full' in (refusal.error or "")
        gate.open.set()
        assert [result.result for result in await asyncio.gather(*tasks)] == [0, 1, 2]


@pytest.mark.spec("4.3")
async def test_a_call_that_waits_too_long_fails_without_running() -> None:
    gate = Gate()
    async with space(gate, concurrent=1, wait_timeout=0.03) as ts:
        first = asyncio.create_task(ts.call("work", {"n": 1}))
        await gate.entered_event.wait()
        late = await ts.call("work", {"n": 2})
        assert (late.error_kind, late.executed) == ("limit_exceeded", False)
        gate.open.set()
        await first
        assert (await ts.call("work", {"n": 3})).result == 3
    assert gate.order == [1, 3]


@pytest.mark.spec("4.3")
async def test_cancelling_a_waiting_call_removes_it_from_the_queue_at_once() -> None:
    gate = Gate()
    async with space(gate, concurrent=1) as ts:
        first = asyncio.create_task(ts.call("work", {"n": 1}))
        await gate.entered_event.wait()
        waiting_task = asyncio.create_task(ts.call("work", {"n": 2}, call_id="second"))
        third = asyncio.create_task(ts.call("work", {"n": 3}))
        await asyncio.sleep(0)
        assert ts.cancel("second")
        result = await waiting_task
        assert (result.error_kind, result.executed) == ("canceled", False)
        gate.open.set()
        await asyncio.gather(first, third)
    assert gate.order == [1, 3]


@pytest.mark.spec("4.3")
async def test_a_slot_of_a_call_cancelled_at_that_moment_goes_to_the_next() -> None:
    queue = CallQueue("q", QueueSpec(concurrent=1))
    slot = await queue.acquire()
    second, third = (asyncio.create_task(queue.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    slot.release()
    second.cancel()  # In the same moment in which it gets the slot.
    await asyncio.gather(second, return_exceptions=True)
    lease = await asyncio.wait_for(third, 5)
    lease.release()
    assert queue.active == 0


@pytest.mark.spec("4.3")
async def test_a_call_inside_a_call_never_waits_for_its_ancestors_slot() -> None:
    @tool(queue="q")
    async def leaf(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @tool(queue="q")
    async def tree(depth: int, context: ToolContext) -> Any:
        name, arguments = ("tree", {"depth": depth - 1}) if depth else ("leaf", {"n": 7})
        return (await context.call(name, arguments)).unwrap()

    async with Toolspace(tools=[leaf, tree], settings=Settings(queues={"q": QueueSpec(concurrent=1)})) as ts:
        results = await asyncio.wait_for(asyncio.gather(*(ts.call("tree", {"depth": 5}) for _ in range(4))), 20)
        queue = ts.orchestrator.queues.get("q")
        assert queue is not None
        assert queue.active == 0
    assert [result.result for result in results] == [7] * 4


@pytest.mark.spec("4.3")
async def test_parallel_children_take_turns_on_the_slot_of_their_parent() -> None:
    active_count = most = 0

    @tool(queue="q")
    async def leaf(n: int) -> int:
        nonlocal active_count, most
        active_count += 1
        most = max(most, active_count)
        await asyncio.sleep(0)
        active_count -= 1
        return n

    @tool(queue="q")
    async def parent(context: ToolContext) -> Any:
        children = await asyncio.gather(*(context.call("leaf", {"n": n}) for n in range(8)))
        return [child.result for child in children]

    async with Toolspace(tools=[leaf, parent], settings=Settings(queues={"q": QueueSpec(concurrent=1)})) as ts:
        result = await asyncio.wait_for(ts.call("parent"), 20)
    assert result.result == list(range(8))
    assert most == 1


@pytest.mark.spec("4.3")
async def test_cancelled_children_pass_the_lent_slot_on() -> None:
    gate = Gate()

    @tool(queue="q")
    async def leaf(n: int) -> int:
        return await gate(n)

    @tool(queue="q")
    async def parent(context: ToolContext) -> Any:
        tasks = [asyncio.create_task(context.call("leaf", {"n": n})) for n in range(3)]
        await gate.entered_event.wait()
        tasks[1].cancel()
        gate.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [getattr(item, "result", "cancelled") for item in results]

    async with Toolspace(tools=[leaf, parent], settings=Settings(queues={"q": QueueSpec(concurrent=1)})) as ts:
        result = await asyncio.wait_for(ts.call("parent"), 20)
    assert result.result == [0, "cancelled", 2]


@pytest.mark.spec("4.3")
async def test_a_rate_limit_bounds_starts_in_every_window() -> None:
    now = 0.0
    queue = CallQueue("q", QueueSpec(concurrent=100, rate=RateLimit(3, 10.0)), clock=lambda: now)
    for _ in range(3):
        (await queue.acquire()).release()
    assert queue.try_acquire() is None
    now = 9.99
    assert queue.try_acquire() is None
    now = 10.0
    assert queue.try_acquire() is not None


@pytest.mark.spec("4.3")
async def test_a_rate_limit_admits_waiting_calls_as_time_passes() -> None:
    starts: list[float] = []

    @tool(queue="q")
    async def work() -> None:
        starts.append(asyncio.get_running_loop().time())

    spec = QueueSpec(concurrent=10, rate=RateLimit(2, 0.05))
    async with Toolspace(tools=[work], settings=Settings(queues={"q": spec})) as ts:
        await asyncio.gather(*(ts.call("work") for _ in range(6)))
    assert len(starts) == 6
    assert all(later - earlier >= 0.045 for earlier, later in zip(starts, starts[2:], strict=False))


@pytest.mark.spec("4.3")
async def test_a_run_bounds_its_own_concurrency_and_a_batch_fits_inside() -> None:
    active_count = most = 0

    @tool
    async def work(n: int) -> int:
        nonlocal active_count, most
        active_count += 1
        most = max(most, active_count)
        await asyncio.sleep(0)
        active_count -= 1
        return n

    async with Toolspace(tools=[work]) as ts:
        run = ts.run(max_concurrent_tools=2)
        await asyncio.gather(*(run.call("work", {"n": n}) for n in range(20)))
        assert most == 2
        for limit in (1, 3):
            most = 0
            run = ts.run(max_concurrent_tools=limit)
            calls = [{"id": str(n), "tool": "work", "parameters": {"n": n}} for n in range(9)]
            batch = await asyncio.wait_for(run.call("agent__batch", {"calls": calls}), 20)
            assert [entry["output"] for entry in batch.result["results"]] == list(range(9))
            assert most == limit  # The calls of a batch use the slot of the batch and all others.
            queue = run.concurrency_queue
            assert queue is not None
            assert (queue.active, queue.waiting_count) == (0, 0)


@pytest.mark.spec("4.3")
async def test_a_nested_call_that_is_cancelled_while_it_waits_leaves_all_slots_to_the_others() -> None:
    gate = Gate()

    @tool
    async def work(n: int) -> int:
        return await gate(n)

    @tool
    async def outer(context: ToolContext) -> list[Any]:
        calls = [asyncio.create_task(context.call("work", {"n": n})) for n in range(6)]
        await gate.entered_event.wait()
        calls[4].cancel()
        await asyncio.wait([calls[4]])
        gate.open.set()
        return [(await call).result for call in calls if call is not calls[4]]

    async with Toolspace(tools=[work, outer]) as ts:
        run = ts.run(max_concurrent_tools=2)
        result = await asyncio.wait_for(run.call("outer"), 20)
    assert result.result == [0, 1, 2, 3, 5]
    queue = run.concurrency_queue
    assert queue is not None
    assert (queue.active, queue.waiting_count) == (0, 0)


@pytest.mark.spec("4.1")
@pytest.mark.spec("4.8")
async def test_the_wait_in_a_queue_is_recorded_and_not_counted_as_the_tools_time() -> None:
    gate = Gate()

    @tool(queue="q", timeout=0.2)
    async def work(n: int) -> int:
        return await gate(n)

    async with Toolspace(tools=[work], settings=Settings(queues={"q": QueueSpec(concurrent=1)})) as ts:
        recorder = EventRecorder(ts)
        first = asyncio.create_task(ts.call("work", {"n": 1}))
        await recorder.wait_for_start("work")
        second = asyncio.create_task(ts.call("work", {"n": 2}))
        assert (await first).error_kind == "timeout"  # The second waited as long, and still has all its time.
        gate.open.set()
        assert (await second).result == 2
        record = ts.orchestrator.call_log.recent[-1]
    assert record.queue_wait_ms > 0


async def test_an_unknown_queue_is_an_error_that_names_the_known() -> None:
    @tool(queue="gone")
    async def work() -> None: ...

    async with Toolspace(tools=[work], settings=Settings(queues={"here": QueueSpec()})) as ts:
        result = await ts.call("work")
    assert (result.error_kind, result.executed) == ("execution_error", False)
    assert '"gone"' in (result.error or "")
    assert "here" in (result.error or "")


async def test_a_call_interrupted_from_inside_its_parent_releases_its_slot() -> None:
    """A call that cancels itself is interrupted without cancelling its task, in whichever child call it waits."""
    gate = Gate()

    @tool(queue="q")
    async def work(n: int) -> int:
        return await gate(n)

    @tool
    async def suicidal(context: ToolContext) -> None:
        ts.cancel(context.call_id)
        await context.call("work", {"n": 2})

    settings = Settings(queues={"q": QueueSpec(concurrent=1)})
    async with Toolspace(tools=[work, suicidal], settings=settings) as ts:
        first = asyncio.create_task(ts.call("work", {"n": 1}))
        await gate.entered_event.wait()
        assert (await ts.call("suicidal")).error_kind == "canceled"
        gate.open.set()
        assert (await first).ok
        async with asyncio.timeout(5):
            assert (await ts.call("work", {"n": 3})).ok
    assert gate.order == [1, 3]


async def test_a_call_that_was_just_admitted_is_not_counted_as_waiting() -> None:
    queue = CallQueue("q", QueueSpec(concurrent=1, max_waiting=1))
    slot = queue.try_acquire()
    assert slot is not None
    second = asyncio.create_task(queue.acquire())
    await asyncio.sleep(0)
    assert queue.waiting_count == 1
    slot.release()  # The second call is admitted, but its task has not run yet.
    assert queue.waiting_count == 0
    third = asyncio.create_task(queue.acquire())
    (await second).release()
    (await third).release()
    assert (queue.active, queue.waiting_count) == (0, 0)


async def test_a_higher_limit_admits_waiting_calls_at_once() -> None:
    gate = Gate()
    async with space(gate, concurrent=1) as ts:
        tasks = [asyncio.create_task(ts.call("work", {"n": n})) for n in range(3)]
        await gate.entered_event.wait()
        await asyncio.sleep(0)
        assert gate.active_count == 1
        ts.orchestrator.configure(queues={"q": QueueSpec(concurrent=3)})
        async with asyncio.timeout(5):
            while gate.active_count < 3:
                gate.entered_event.clear()
                await gate.entered_event.wait()
        gate.open.set()
        await asyncio.gather(*tasks)


async def test_a_call_cancelled_before_it_would_wait_in_a_queue_does_not_wait() -> None:
    gate = Gate()
    async with space(gate, concurrent=1) as ts:
        first = asyncio.create_task(ts.call("work", {"n": 1}))
        await gate.entered_event.wait()
        ts.bus.subscribe(lambda event: ts.cancel("late") and None, EventType.TOOL_CALL_REQUESTED)
        async with asyncio.timeout(5):
            late = await ts.call("work", {"n": 2}, call_id="late")
        assert (late.error_kind, late.executed) == ("canceled", False)
        gate.open.set()
        assert (await first).ok


@pytest.mark.spec("4.3")
async def test_a_slot_released_on_one_event_loop_reaches_a_call_on_another() -> None:
    entered_event, release = threading.Event(), threading.Event()

    @tool(queue="q", timeout=5)
    async def work(n: int) -> int:
        if n == 1:
            entered_event.set()
            await asyncio.to_thread(release.wait, 10)
        return n

    ts = Toolspace(tools=[work], settings=Settings(queues={"q": QueueSpec(concurrent=1, wait_timeout=10)}))
    queue = ts.orchestrator.queues.get("q")
    assert queue is not None

    async def call(n: int) -> Any:
        task = asyncio.create_task(ts.call("work", {"n": n}))
        await asyncio.sleep(0)
        if n == 2:
            assert queue.waiting_count == 1
            release.set()
        return await task

    first = asyncio.create_task(asyncio.to_thread(asyncio.run, call(1)))
    await asyncio.to_thread(entered_event.wait, 10)
    second = asyncio.create_task(asyncio.to_thread(asyncio.run, call(2)))
    assert (await first).ok
    assert (await second).result == 2
    # The other loop woke it, not its own timeout.
    assert ts.orchestrator.call_log.recent[-1].queue_wait_ms < 9_000
    assert (queue.active, queue.waiting_count) == (0, 0)


@pytest.mark.spec("4.3")
async def test_waiting_calls_of_higher_priority_go_first_and_equals_in_the_order_they_came() -> None:
    gate = Gate()

    @tool(queue="q")
    async def low(n: int) -> int:
        return await gate(n)

    @tool(queue="q")
    async def plain(n: int) -> int:
        return await gate(n)

    @tool(queue="q", priority=5)
    async def urgent(n: int) -> int:
        return await gate(n)

    overrides = {"low": ToolRules(priority=-1)}
    settings = Settings(queues={"q": QueueSpec(concurrent=1)}, overrides=overrides)
    async with Toolspace(tools=[low, plain, urgent], settings=settings) as ts:
        names = ["low", "low", "plain", "urgent", "plain", "low", "urgent"]
        tasks = [asyncio.create_task(ts.call(name, {"n": n})) for n, name in enumerate(names)]
        await gate.entered_event.wait()  # The first call has the slot, the others wait.
        gate.open.set()
        await asyncio.gather(*tasks)
    assert gate.order == [0, 3, 6, 2, 4, 1, 5]


async def test_ended_calls_of_low_priority_do_not_pile_up_behind_others() -> None:
    queue = CallQueue("q", QueueSpec(concurrent=1))
    slot = queue.try_acquire()
    assert slot is not None
    for _ in range(1000):
        task = asyncio.create_task(queue.acquire(priority=-1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert queue.waiting_count == 0
    assert len(queue._waiters) < 100
    slot.release()
    assert queue.try_acquire() is not None

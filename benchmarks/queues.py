"""Measure, for information: 10,000 calls at once through a queue of 10, against a semaphore."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import byhand
from benchmarks.harness import Batch, Contestant, Report, race
from benchmarks.subjects import ARGUMENTS, ignore, toolspace_of
from toolspace import QueueSpec, tool

CALLS, SLOTS = 10_000, 10
OURS = "Toolspace.call, in a queue"
BOUNDED = "Toolspace.call, in a queue with maxWaiting"
BY_HAND = "the stages by hand, in a semaphore"
BARE = "the function alone, in a semaphore"


async def pass_on(a: int, b: int) -> int:
    """Add two numbers, after everyone else had a turn."""
    await asyncio.sleep(0)
    return a + b


async def measure() -> Report:
    free = toolspace_of([tool(queue="q")(pass_on)], queues={"q": QueueSpec(concurrent=SLOTS)})
    spec = QueueSpec(concurrent=SLOTS, max_waiting=CALLS)
    bounded = toolspace_of([tool(queue="q")(pass_on)], queues={"q": spec})
    byhand.register(pass_on, byhand.AddArguments)
    byhand.on_requested[:] = [ignore]
    byhand.on_ended[:] = [ignore]
    contestants = [
        Contestant(OURS, _all_at_once(lambda: free.call("pass_on", ARGUMENTS)), _nothing),
        Contestant(BY_HAND, _all_at_once(_in_semaphore(lambda: byhand.call("pass_on", ARGUMENTS))), _nothing),
        Contestant(BARE, _all_at_once(_in_semaphore(lambda: pass_on(1, 2))), _nothing),
        Contestant(BOUNDED, _all_at_once(lambda: bounded.call("pass_on", ARGUMENTS)), _nothing),
    ]
    timings = await race(contestants, rounds=4)
    report = Report(f"{CALLS:,} calls at once, {SLOTS} at a time")
    report.ratio("against the stages by hand in a semaphore", timings.ratio(OURS, BY_HAND))
    report.ratio("with maxWaiting, against without", timings.ratio(BOUNDED, OURS))
    for one in contestants:
        report.figure(one.name, CALLS / timings.best(one.name), "calls/s")
    return report


def _all_at_once(call: Callable[[], Awaitable[Any]]) -> Batch:
    async def batch(_: int) -> None:
        await asyncio.gather(*(call() for _ in range(CALLS)))

    return batch


def _in_semaphore(call: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    semaphore = asyncio.Semaphore(SLOTS)

    async def guarded() -> None:
        async with semaphore:
            await call()

    return guarded


def _nothing() -> None:
    """Marks a contestant that is run once a round."""

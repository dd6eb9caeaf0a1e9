"""Measure, for information: 10,000 calls at once through a queue of 10, against a semaphore."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import hand_written_call
from benchmarks.harness import Batch, Contestant, Report, race
from benchmarks.workloads import ARGUMENTS, create_toolspace, ignore
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
    toolspace = create_toolspace([tool(queue="q")(pass_on)], queues={"q": QueueSpec(concurrent=SLOTS)})
    spec = QueueSpec(concurrent=SLOTS, max_waiting=CALLS)
    bounded_toolspace = create_toolspace([tool(queue="q")(pass_on)], queues={"q": spec})
    hand_written_call.register(pass_on, hand_written_call.AddArguments)
    hand_written_call.on_requested[:] = [ignore]
    hand_written_call.on_ended[:] = [ignore]
    contestants = [
        Contestant(OURS, _all_at_once(lambda: toolspace.call("pass_on", ARGUMENTS)), _once_per_round),
        Contestant(
            BY_HAND, _all_at_once(_in_semaphore(lambda: hand_written_call.call("pass_on", ARGUMENTS))), _once_per_round
        ),
        Contestant(BARE, _all_at_once(_in_semaphore(lambda: pass_on(1, 2))), _once_per_round),
        Contestant(BOUNDED, _all_at_once(lambda: bounded_toolspace.call("pass_on", ARGUMENTS)), _once_per_round),
    ]
    timings = await race(contestants, rounds=4)
    report = Report(f"{CALLS:,} calls at once, {SLOTS} at a time")
    report.ratio("against the stages by hand in a semaphore", timings.ratio(OURS, BY_HAND))
    report.ratio("with maxWaiting, against without", timings.ratio(BOUNDED, OURS))
    for contestant in contestants:
        report.figure(contestant.name, CALLS / timings.best(contestant.name), "calls/s")
    return report


def _all_at_once(call: Callable[[], Awaitable[Any]]) -> Batch:
    async def batch(_: int) -> None:
        await asyncio.gather(*(call() for _ in range(CALLS)))

    return batch


def _in_semaphore(call: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    semaphore = asyncio.Semaphore(SLOTS)

    async def call_in_semaphore() -> None:
        async with semaphore:
            await call()

    return call_in_semaphore


def _once_per_round() -> None:
    """Marks a contestant that is run once a round."""

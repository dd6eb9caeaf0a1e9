"""Measure, for information: a plain function, which runs in a thread, and a tool that suspends."""

from __future__ import annotations

import asyncio

from benchmarks import hand_written_call
from benchmarks.harness import Contestant, Report, race, repeat
from benchmarks.workloads import ARGUMENTS, create_toolspace, ignore

THREAD, TO_THREAD = "Toolspace.call of a plain function", "asyncio.to_thread of the function"
SUSPENDS, BY_HAND = "Toolspace.call of a tool that suspends", "the stages by hand, of a tool that suspends"


def plain_add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add two numbers, after everyone else had a turn."""
    await asyncio.sleep(0)
    return a + b


async def measure() -> Report:
    ts = create_toolspace([plain_add, slow_add])
    hand_written_call.register(slow_add, hand_written_call.AddArguments)
    hand_written_call.on_requested[:] = [ignore]
    hand_written_call.on_ended[:] = [ignore]
    contestants = [
        Contestant(THREAD, repeat(ts.call, "plain_add", ARGUMENTS)),
        Contestant(TO_THREAD, repeat(asyncio.to_thread, plain_add, 1, 2)),
        Contestant(SUSPENDS, repeat(ts.call, "slow_add", ARGUMENTS)),
        Contestant(BY_HAND, repeat(hand_written_call.call, "slow_add", ARGUMENTS)),
    ]
    timings = await race(contestants, rounds=60)
    report = Report("Calls that leave the loop's turn: a thread, a suspension")
    report.ratio("a plain function, against asyncio.to_thread", timings.ratio(THREAD, TO_THREAD))
    report.ratio("a tool that suspends, against the stages by hand", timings.ratio(SUSPENDS, BY_HAND))
    report.times(timings, [contestant.name for contestant in contestants])
    return report

"""Measure: finding and calling the last of 10,000 tools, against the last of 10."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness import Contestant, Report, race, repeat
from benchmarks.workloads import create_toolspace, make_functions

MANY, FEW = 10_000, 10


async def measure() -> Report:
    contestants = [Contestant(f"of {count:,}", repeat(_last_of(count))) for count in (MANY, FEW)]
    timings = await race(contestants, rounds=80)
    report = Report(f"Find and call the last tool of {MANY:,}")
    report.ratio(f"against the last of {FEW}", timings.ratio(f"of {MANY:,}", f"of {FEW}"), must=1.25)
    report.times(timings, [contestant.name for contestant in contestants])
    return report


def _last_of(count: int) -> Callable[[], Awaitable[Any]]:
    ts = create_toolspace(make_functions(count))
    name = f"search_{count - 1:05d}"

    async def find_and_call() -> None:
        tool = ts.find_tool(name)
        assert tool is not None
        result = await ts.call(tool.name, '{"query":"x"}')
        assert result.ok, result.error

    return find_and_call

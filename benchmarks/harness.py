"""Times contestants in turns and compares the results with targets. Depends on no measured library."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

Batch = Callable[[int], Awaitable[None]]
"""Runs the measured operation `count` times."""


@dataclass(frozen=True)
class Contestant:
    name: str
    batch: Batch
    prepare: Callable[[], None] | None = None
    """Runs before each round, outside the measured time. A contestant with `prepare` runs once per round."""


def repeat(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Batch:
    """A batch that awaits the function so many times."""

    async def batch(count: int) -> None:
        for _ in range(count):
            await function(*arguments)

    return batch


def concurrently(callers: int, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Batch:
    """A batch in which so many callers await the function side by side, each again and again."""

    async def batch(count: int) -> None:
        remaining = count

        async def caller() -> None:
            nonlocal remaining
            while remaining > 0:
                remaining -= 1
                await function(*arguments)

        await asyncio.gather(*(caller() for _ in range(min(callers, count))))

    return batch


class Timings:
    """Seconds per call of each contestant, one figure per round."""

    def __init__(self, rounds: dict[str, list[float]]) -> None:
        self._rounds = rounds

    def __contains__(self, name: str) -> bool:
        return name in self._rounds

    def best(self, name: str) -> float:
        return min(self._rounds[name])

    def ratio(self, name: str, other_name: str) -> Ratio:
        """Best against best: what other processes steal only ever adds time. The spread is over the rounds."""
        each = [
            time / other_time for time, other_time in zip(self._rounds[name], self._rounds[other_name], strict=True)
        ]
        low, _, high = statistics.quantiles(each, n=4)
        return Ratio(self.best(name) / self.best(other_name), low, high)

    def ratio_of_rounds(self, name: str, other_name: str) -> Ratio:
        """The median over the rounds. For what waits more than it works: how long a core that slept takes to wake
        varies between rounds, and is the same for both within one round."""
        each = [
            time / other_time for time, other_time in zip(self._rounds[name], self._rounds[other_name], strict=True)
        ]
        return Ratio(*(statistics.quantiles(each, n=4)[place] for place in (1, 0, 2)))


@dataclass(frozen=True)
class Ratio:
    value: float
    low: float
    """A quarter of the rounds was below this, and a quarter above `high`: how noisy the run was."""
    high: float


QUICK = "TOOLSPACE_BENCH_QUICK"
"""Set where a look is enough: a third of the rounds, so the figures are noisier."""


def round_count(rounds: int) -> int:
    return max(rounds // 3, 3) if os.environ.get(QUICK) else rounds


async def race(contestants: Sequence[Contestant], *, rounds: int, slice_ms: float = 8.0) -> Timings:
    """Gives the contestants turns of one time slice each, so that noise affects all of them."""
    sizes = {contestant.name: await _calls_per_slice(contestant, slice_ms / 1000) for contestant in contestants}
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    # What is loaded by now stays: without this each collection would walk every imported library's objects.
    gc.collect()
    gc.freeze()
    try:
        for turn in range(round_count(rounds)):
            # Backwards every other time: nobody always follows the same neighbour.
            for contestant in contestants if turn % 2 == 0 else reversed(contestants):
                if contestant.prepare is not None:
                    contestant.prepare()
                count = sizes[contestant.name]
                started_at = perf_counter()
                await contestant.batch(count)
                times[contestant.name].append((perf_counter() - started_at) / count)
    finally:
        gc.unfreeze()
    return Timings(times)


async def _calls_per_slice(contestant: Contestant, seconds: float) -> int:
    """How many calls fill a slice. The first call is not asked: it loads and compiles what the others find ready."""
    if contestant.prepare is not None:
        contestant.prepare()
    await contestant.batch(1)
    if contestant.prepare is not None:
        return 1
    count = 1
    while True:
        started_at = perf_counter()
        await contestant.batch(count)
        took = perf_counter() - started_at
        if took >= seconds / 2:
            return max(1, round(count * seconds / took))
        count *= 2


@dataclass(frozen=True)
class Row:
    """One figure with its must and its aim. Without targets it is information."""

    label: str
    value: float
    unit: str = "×"
    must: float | None = None
    aim: float | None = None
    spread: tuple[float, float] | None = None
    more_is_better: bool = False
    """Whether more is better: then the targets are what it should at least be."""

    @property
    def is_pass(self) -> bool | None:
        return self._meets(self.must)

    @property
    def is_reached(self) -> bool | None:
        return self._meets(self.aim)

    @property
    def sign(self) -> str:
        return "≥" if self.more_is_better else "≤"

    def _meets(self, target: float | None) -> bool | None:
        if target is None:
            return None
        return self.value >= target if self.more_is_better else self.value <= target

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.label,
            "value": round(self.value, 4),
            "unit": self.unit,
            "spread": None if self.spread is None else [round(bound, 4) for bound in self.spread],
            "sign": self.sign,
            "must": self.must,
            "passed": self.is_pass,
            "aim": self.aim,
            "reached": self.is_reached,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        spread = data["spread"]
        low_high = None if spread is None else (spread[0], spread[1])
        more = data["sign"] == "≥"
        return cls(data["what"], data["value"], data["unit"], data["must"], data["aim"], low_high, more)


@dataclass
class Report:
    """The figures of one measure."""

    title: str
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])

    def ratio(
        self,
        label: str,
        ratio: Ratio,
        *,
        must: float | None = None,
        aim: float | None = None,
        more_is_better: bool = False,
    ) -> None:
        self.rows.append(Row(label, ratio.value, "×", must, aim, (ratio.low, ratio.high), more_is_better))

    def figure(
        self, label: str, value: float, unit: str, *, must: float | None = None, aim: float | None = None
    ) -> None:
        self.rows.append(Row(label, value, unit, must, aim))

    def times(self, timings: Timings, names: Sequence[str]) -> None:
        """The absolute times, for information: they mean nothing on another machine or another day."""
        for name in names:
            if name in timings:
                self.rows.append(Row(name, timings.best(name) * 1e6, "µs"))

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": [row.to_dict() for row in self.rows], "notes": self.notes}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        return cls(data["title"], [Row.from_dict(row) for row in data["rows"]], data["notes"])


def format_report(report: Report) -> str:
    """The report as lines of text."""
    cells = [_cells(row) for row in report.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)] if cells else []
    lines = [report.title]
    for row in cells:
        aligned_cells = (
            row[0].ljust(widths[0]),
            row[1].rjust(widths[1]),
            row[2].ljust(widths[2]),
            row[3].ljust(widths[3]),
        )
        lines.append("  " + "  ".join((*aligned_cells, row[4])).rstrip())
    lines.extend(f"  ({note})" for note in report.notes)
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    spread = "" if row.spread is None else f"({row.spread[0]:.3g} to {row.spread[1]:.3g})"
    must = "" if row.must is None else f"must {row.sign} {row.must:g}: {'PASS' if row.is_pass else 'MISS'}"
    aim = "" if row.aim is None else f"aim {row.sign} {row.aim:g}: {'reached' if row.is_reached else 'not reached'}"
    return (
        row.label,
        f"{row.value:.3g} {row.unit}" if row.value < 1000 else f"{row.value:.0f} {row.unit}",
        spread,
        must,
        aim,
    )


def run_python(*arguments: str, **environment: str) -> str:
    """The output of a fresh interpreter, for measures that would disturb each other in one process."""
    process = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if process.returncode != 0:
        raise RuntimeError(f"python {' '.join(arguments)} failed:\n{process.stderr}")
    return process.stdout

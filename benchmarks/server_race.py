"""Races MCP servers over HTTP: the same calls to each, in turns, so many callers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Contestant, Report, Timings, race
from benchmarks.load import Load
from benchmarks.processes import Server


@dataclass(frozen=True)
class ServerContestant:
    name: str
    server: Server
    tool: str = "add"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """What its callers send besides, such as a key."""


@dataclass(frozen=True)
class RaceOutcome:
    timings: Timings
    cpu: dict[str, float]
    """Seconds of work in the server's process for each call, over the whole race."""
    calls: dict[str, int]
    faults: dict[str, list[str]]

    callers: int

    def show(self, report: Report) -> None:
        """The absolute figures, for information: what a caller sees, and what the server's process works for it."""
        for name, work in self.cpu.items():
            best = self.timings.best(name)
            if self.callers == 1:
                report.figure(f"{name}, contestant at a time", best * 1e6, "µs")
            else:
                report.figure(f"{name}, {self.callers} at once", 1 / best, "calls/s")
            report.figure("      work in its process for each call", work * 1e6, "µs")


async def race_servers(
    rivals: Sequence[ServerContestant], *, callers: int, rounds: int, slice_ms: float
) -> RaceOutcome:
    loads = {
        contestant.name: await Load.open(
            contestant.server.url, contestant.tool, callers=callers, headers=contestant.headers
        )
        for contestant in rivals
    }
    try:
        for load in loads.values():
            await load(2 * callers)  # What is compiled or opened by the first calls is not measured.
        counts_before = {
            contestant.name: (contestant.server.cpu(), loads[contestant.name].answer_count) for contestant in rivals
        }
        contestants = [Contestant(name, load) for name, load in loads.items()]
        timings = await race(contestants, rounds=rounds, slice_ms=slice_ms)
        cpu = {
            contestant.name: (contestant.server.cpu() - counts_before[contestant.name][0])
            / (loads[contestant.name].answer_count - counts_before[contestant.name][1])
            for contestant in rivals
        }
    finally:
        for load in loads.values():
            load.close()
    return RaceOutcome(
        timings,
        cpu,
        {name: load.answer_count for name, load in loads.items()},
        {name: load.faults for name, load in loads.items()},
        callers,
    )

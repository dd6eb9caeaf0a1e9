"""Measure, for information: what OpenTelemetry costs a call while it is on, and once it is off again."""

from __future__ import annotations

from benchmarks.harness import Contestant, Report, race, repeat
from benchmarks.workloads import ARGUMENTS, add, create_toolspace

NEVER, OFF, ON = "Toolspace.call, never instrumented", "Toolspace.call, off again", "Toolspace.call, on"


async def measure() -> Report:
    report = Report("A call with OpenTelemetry, without an SDK behind its API")
    never, off, on = create_toolspace([add]), create_toolspace([add]), create_toolspace([add])
    try:
        from toolspace.integrations.opentelemetry import instrument

        instrument(off)()
        instrument(on)
    except (ImportError, AttributeError) as error:
        report.notes.append(f"left out: {type(error).__name__}: {error}")
        return report
    contestants = [
        Contestant(NEVER, repeat(never.call, "add", ARGUMENTS)),
        Contestant(OFF, repeat(off.call, "add", ARGUMENTS)),
        Contestant(ON, repeat(on.call, "add", ARGUMENTS)),
    ]
    timings = await race(contestants, rounds=60)
    report.ratio("off again, against never instrumented", timings.ratio(OFF, NEVER))
    report.ratio("on, against never instrumented", timings.ratio(ON, NEVER))
    report.times(timings, [contestant.name for contestant in contestants])
    return report

"""Measure, for information: what OpenTelemetry costs a call while it is on, and once it is off again."""

from __future__ import annotations

from benchmarks.harness import Contestant, Report, race, repeat
from benchmarks.subjects import ARGUMENTS, add, toolspace_of

NEVER, OFF, ON = "Toolspace.call, never instrumented", "Toolspace.call, off again", "Toolspace.call, on"


async def measure() -> Report:
    report = Report("A call with OpenTelemetry, without an SDK behind its API")
    never, off, on = toolspace_of([add]), toolspace_of([add]), toolspace_of([add])
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
    report.times(timings, [one.name for one in contestants])
    return report

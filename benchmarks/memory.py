"""Measure: the memory that a registered tool takes once it was listed for a model."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, run_python

COUNT = 10_000


async def measure() -> Report:
    extra = _run("tools") - _run("functions")
    report = Report(f"Memory for each of {COUNT:,} registered functions, after one listing")
    report.figure("resident", extra / COUNT / 1024, "KiB", must=8.0, aim=5.0)
    report.figure("allocated by Python (tracemalloc)", _run("traced") / COUNT / 1024, "KiB")
    report.notes.append("without the functions themselves: a process that only makes them is subtracted")
    return report


def _run(subject: str) -> int:
    return int(run_python("-m", "benchmarks.memory", subject))


def main(subject: str) -> None:
    """What runs in the fresh interpreter: prints how many bytes were added, by the functions alone or with tools."""
    from benchmarks.workloads import create_toolspace, make_functions

    live_objects: list[Any] = [
        create_toolspace(make_functions(10)).to_llm_tools()
    ]  # Loads what is loaded on first use.
    before = resident()
    functions = make_functions(COUNT)
    if subject == "traced":
        tracemalloc.start()
    if subject != "functions":
        ts = create_toolspace(functions)
        ts.to_llm_tools()
        live_objects.append(ts)
    gc.collect()
    print(tracemalloc.get_traced_memory()[0] if subject == "traced" else resident() - before)


def resident(field: str = "VmRSS", *, pid: int | str = "self") -> int:
    """Bytes of a process in memory now; with `VmHWM`, at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}")


if __name__ == "__main__":
    main(*sys.argv[1:])

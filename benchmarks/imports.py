"""Measure: how long an import takes in a fresh interpreter."""

from __future__ import annotations

import tempfile
from time import perf_counter

from benchmarks.harness import Report, Timings, run_python

ROUNDS = 15
PYDANTIC = "import pydantic"
TOOLSPACE = "import toolspace"
NAMES = "from toolspace import Toolspace, tool"
PYDANTIC_NAMES = "from pydantic import BaseModel, TypeAdapter"
ASYNCIO = "import asyncio"
BARE = "start the interpreter (wall time)"

_TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


async def measure() -> Report:
    statements = [TOOLSPACE, NAMES, PYDANTIC, PYDANTIC_NAMES, ASYNCIO]
    times: dict[str, list[float]] = {name: [] for name in (*statements, BARE)}
    with tempfile.TemporaryDirectory() as bytecode:
        for turn in range(ROUNDS + 1):
            for statement in statements:
                times[statement].append(float(_fresh(_TIMED.format(statement), bytecode)))
            started_at = perf_counter()
            _fresh("", bytecode)
            times[BARE].append(perf_counter() - started_at)
            if turn == 0:  # It compiled the bytecode of everything.
                for each in times.values():
                    each.clear()
    timings = Timings(times)
    report = Report("Imports, in a fresh interpreter")
    report.ratio("import toolspace", timings.ratio(TOOLSPACE, PYDANTIC), must=2.0, aim=1.3)
    report.ratio(NAMES, timings.ratio(NAMES, PYDANTIC), must=2.0, aim=1.3)
    report.ratio(f"{NAMES}, against {PYDANTIC_NAMES}", timings.ratio(NAMES, PYDANTIC_NAMES))
    for name in times:
        report.figure(name, timings.best(name) * 1000, "ms")
    report.notes.append(
        "against `import pydantic`; times are of the statement alone, after the interpreter has started"
    )
    return report


def _fresh(code: str, bytecode: str) -> str:
    # One place for all bytecode: where Python is told to write none, only what pip installed would have any.
    return run_python("-c", code, PYTHONPYCACHEPREFIX=bytecode, PYTHONDONTWRITEBYTECODE="")

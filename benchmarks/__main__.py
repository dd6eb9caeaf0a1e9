"""Runs the measures: all, or those that are named. `python -m benchmarks call cache --json`"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import sys
from time import perf_counter

from benchmarks.harness import QUICK, Report, Row, format_report, run_python

MEASURES = (
    "call", "cache", "imports", "register", "many", "memory", "stream", "queues", "threads", "telemetry", "policies",
    "quotas",
    "mcp", "serve", "proxy", "rest", "openapi", "startup", "first_answer",
    "gateway_results", "gateway_events", "gateway_memory", "gateway_mcp",
    "agent_rounds", "agent_durable", "agent_models", "agent_many",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures Toolspace, as ratios.")
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; all if none")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a must is missed")
    parser.add_argument("--quick", action="store_true", help="a third of the rounds, for a first look")
    options = parser.parse_args()
    if options.quick:
        os.environ[QUICK] = "1"
    names: list[str] = options.measures or list(MEASURES)
    if unknown := [name for name in names if name not in MEASURES]:
        parser.error(f"no measure is called {unknown[0]!r}; there are {', '.join(MEASURES)}")

    started_at = perf_counter()
    if not options.json:
        print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {_load()}\n", flush=True)
    reports: dict[str, Report] = {}
    for name in names:
        report = reports[name] = _measure(name) if len(names) == 1 else _measure_apart(name)
        if not options.json:
            print(format_report(report) + "\n", flush=True)
    rows = [row for report in reports.values() for row in report.rows]
    miss_count = sum(row.is_pass is False for row in rows)
    if options.json:
        print(json.dumps({
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "seconds": round(perf_counter() - started_at, 1),
            "measures": {name: report.to_dict() for name, report in reports.items()},
        }, indent=2, ensure_ascii=False))  # fmt: skip
    else:
        _summarise(rows, perf_counter() - started_at)
    return 1 if miss_count and options.strict else 0


def _measure(name: str) -> Report:
    measure = importlib.import_module(f"benchmarks.{name}")
    # One that only loads servers takes the fastest loop that there is: it must not be what is measured.
    with asyncio.Runner(loop_factory=getattr(measure, "loop_factory", None)) as runner:
        return runner.run(measure.measure())


def _measure_apart(name: str) -> Report:
    """In a process of its own: what one measure leaves behind (threads, memory, garbage) must not weigh on the next."""
    return Report.from_dict(json.loads(run_python("-m", "benchmarks", name, "--json"))["measures"][name])


def _summarise(rows: list[Row], seconds: float) -> None:
    musts = [row.is_pass for row in rows if row.is_pass is not None]
    aims = [row.is_reached for row in rows if row.is_reached is not None]
    print(f"{sum(musts)} of {len(musts)} musts pass, {sum(aims)} of {len(aims)} aims are reached; {seconds:.0f} s")


def _load() -> str:
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


if __name__ == "__main__":
    sys.exit(main())

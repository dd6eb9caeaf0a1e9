"""Measure: ten stdio servers of which one hangs; how long until all good tools can be listed."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Report
from toolspace import Toolspace

GOOD = 9
_HANGING = ("-c", "import time; time.sleep(3600)")


class Start(NamedTuple):
    entered: float
    """Seconds until the toolspace could be used."""
    slowest: float
    """Seconds until the last of the good servers was ready, in the same run."""


async def measure() -> Report:
    report = Report(f"{GOOD + 1} stdio servers, one of them hanging: until every good tool is listed")
    await _judge(report, "servers of the MCP SDK", ("-m", "benchmarks.serving", "stdio"), rounds=2)
    tiny = str(Path(__file__).with_name("tinyserver.py"))
    await _judge(report, "servers that start at once", ("-IS", tiny), rounds=5)
    return report


async def _judge(report: Report, what: str, good: tuple[str, ...], *, rounds: int) -> None:
    starts: list[Start] = []
    without: list[Start] = []
    for _ in range(rounds):
        starts.append(await _start(good, hanging=True))
        without.append(await _start(good, hanging=False))
    ratio = statistics.median(one.entered / one.slowest for one in starts)
    entered = statistics.median(one.entered for one in starts)
    report.figure(f"{what}, against the slowest good one", ratio, "×", must=1.3)
    entered_without = statistics.median(one.entered for one in without)
    report.figure(f"{what}, against the same without the hanging one", entered / entered_without, "×")
    report.figure(
        f"{what}: the slowest good one is ready", statistics.median(one.slowest for one in starts) * 1e3, "ms"
    )
    report.figure(f"{what}: all good tools are listed", entered * 1e3, "ms")


async def _start(good: tuple[str, ...], *, hanging: bool) -> Start:
    commands = {f"good{number}": good for number in range(GOOD)}
    if hanging:  # First: those behind it must not wait for it.
        commands = {"hangs": _HANGING, **commands}
    servers = {name: {"command": sys.executable, "args": list(args)} for name, args in commands.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = _written(Path(folder), servers)
        began, began_at = time.perf_counter(), time.time()
        async with Toolspace.open(path) as ts:
            names = {tool.name for tool in ts.list_tools()}
            entered = time.perf_counter() - began
            if missing := [f"good{number}" for number in range(GOOD) if f"good{number}__add" not in names]:
                raise RuntimeError(f"entered without the tools of {', '.join(missing)}")
            ready = [
                status.since for status in ts.list_servers() if status.name != "hangs" and status.since is not None
            ]
            return Start(entered, max(ready) - began_at)


def _written(folder: Path, servers: dict[str, Any]) -> Path:
    path = folder / "toolspace.json"
    path.write_text(json.dumps({"mcpServers": servers, "storage": {"dir": str(folder)}}))
    return path

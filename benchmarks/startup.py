"""Measure: ten stdio servers one of which hangs: how long until the tools of the others are listed."""

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
    usable_after: float
    """Seconds until the toolspace could be used."""
    slowest_server_after: float
    """Seconds until the last of the good servers was ready, in the same run."""


async def measure() -> Report:
    report = Report(f"{GOOD + 1} stdio servers, start of them hanging: until every good tool is listed")
    await _judge(report, "servers of the MCP SDK", ("-m", "benchmarks.server_roles", "stdio"), rounds=2)
    tiny = str(Path(__file__).with_name("minimal_mcp_server.py"))
    await _judge(report, "servers that start at once", ("-IS", tiny), rounds=5)
    return report


async def _judge(report: Report, label: str, good: tuple[str, ...], *, rounds: int) -> None:
    starts: list[Start] = []
    starts_without: list[Start] = []
    for _ in range(rounds):
        starts.append(await _start(good, with_hanging_server=True))
        starts_without.append(await _start(good, with_hanging_server=False))
    ratio = statistics.median(start.usable_after / start.slowest_server_after for start in starts)
    median_usable_after = statistics.median(start.usable_after for start in starts)
    report.figure(f"{label}, against the slowest good one", ratio, "×", must=1.3)
    entered_without = statistics.median(start.usable_after for start in starts_without)
    report.figure(f"{label}, against the same without the hanging one", median_usable_after / entered_without, "×")
    report.figure(
        f"{label}: the slowest good one is ready",
        statistics.median(start.slowest_server_after for start in starts) * 1e3,
        "ms",
    )
    report.figure(f"{label}: all good tools are listed", median_usable_after * 1e3, "ms")


async def _start(good: tuple[str, ...], *, with_hanging_server: bool) -> Start:
    commands = {f"good{number}": good for number in range(GOOD)}
    if with_hanging_server:  # First, because the others must not wait for it.
        commands = {"hangs": _HANGING, **commands}
    servers = {name: {"command": sys.executable, "args": list(args)} for name, args in commands.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = _write_config(Path(folder), servers)
        started_at, began_at = time.perf_counter(), time.time()
        async with Toolspace.open(path) as ts:
            names = {tool.name for tool in ts.list_tools()}
            usable_after = time.perf_counter() - started_at
            if missing := [f"good{number}" for number in range(GOOD) if f"good{number}__add" not in names]:
                raise RuntimeError(f"entered without the tools of {', '.join(missing)}")
            ready = [
                status.since for status in ts.list_servers() if status.name != "hangs" and status.since is not None
            ]
            return Start(usable_after, max(ready) - began_at)


def _write_config(folder: Path, servers: dict[str, Any]) -> Path:
    path = folder / "toolspace.json"
    path.write_text(json.dumps({"mcpServers": servers, "storage": {"dir": str(folder)}}))
    return path

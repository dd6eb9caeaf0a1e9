"""Measure: one function served over MCP by `toolspace mcp --http`, 50 callers at once."""

from __future__ import annotations

from contextlib import ExitStack

import uvloop

from benchmarks.harness import Report
from benchmarks.processes import start_server, start_toolspace
from benchmarks.server_race import ServerContestant, race_servers

loop_factory = uvloop.new_event_loop
CALLERS = 50
OURS = "toolspace mcp --http"
FASTMCP = "FastMCP"
SDK = "the MCP SDK's MCPServer"
BY_HAND = "JSON-RPC by hand"


async def measure() -> Report:
    report = Report(f"One function served over MCP and HTTP, {CALLERS} callers at once")
    with ExitStack() as servers:
        rivals = [
            ServerContestant(OURS, servers.enter_context(start_toolspace())),
            ServerContestant(BY_HAND, servers.enter_context(start_server("byhand"))),
            ServerContestant(SDK, servers.enter_context(start_server("sdk"))),
        ]
        try:
            rivals.append(ServerContestant(FASTMCP, servers.enter_context(start_server("fastmcp"))))
        except RuntimeError as error:
            report.notes.append(f"FastMCP is left out: {error}")
        outcome = await race_servers(rivals, callers=CALLERS, rounds=14, slice_ms=150)
    timings = outcome.timings
    if FASTMCP in timings:
        throughput = timings.ratio(FASTMCP, OURS)
        report.ratio(
            "calls per second, against FastMCP serving it", throughput, must=2.0, aim=10.0, more_is_better=True
        )
    report.ratio("calls per second, against the MCP SDK serving it", timings.ratio(SDK, OURS), more_is_better=True)
    report.ratio("time per call, against JSON-RPC by hand", timings.ratio(OURS, BY_HAND), aim=3.0)
    work = outcome.cpu
    report.figure("work in the server's process, against JSON-RPC by hand", work[OURS] / work[BY_HAND], "×")
    faults = outcome.faults[OURS]
    report.figure(f"wrong answers in {outcome.calls[OURS]:,} calls", len(faults), "", must=0)
    report.notes.extend(faults[:1])
    outcome.show(report)
    return report

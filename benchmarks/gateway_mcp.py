"""Measure: one function served over MCP by the gateway, with a key and in the books, 50 callers at once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import uvloop

from benchmarks.gateway_process import gateway_serving, secret
from benchmarks.harness import Report
from benchmarks.processes import start_server, start_toolspace
from benchmarks.server_race import ServerContestant, race_servers

loop_factory = uvloop.new_event_loop
CALLERS = 50
OURS = "the gateway's /mcp"
PLAIN = "toolspace mcp --http"
FASTMCP = "FastMCP, bare"


async def measure() -> Report:
    report = Report(f"One function served over MCP by the gateway, {CALLERS} callers at once")
    with ExitStack() as servers:
        gateway = servers.enter_context(gateway_serving())
        rivals = [
            ServerContestant(OURS, replace(gateway, url=f"{gateway.url}/mcp"), headers=secret()),
            ServerContestant(PLAIN, servers.enter_context(start_toolspace())),
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
            "calls per second, against FastMCP serving it bare", throughput, must=2.0, aim=8.0, more_is_better=True
        )
    report.ratio("calls per second, against toolspace mcp --http", timings.ratio(PLAIN, OURS), more_is_better=True)
    faults = outcome.faults[OURS]
    report.figure(f"wrong answers in {outcome.calls[OURS]:,} calls", len(faults), "", must=0)
    report.notes.extend(faults[:1])
    outcome.show(report)
    return report

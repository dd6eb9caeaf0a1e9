"""Measure: a call through Toolspace to an MCP server behind it, HTTP in and HTTP out; alone, at once, of many tools."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import uvloop

from benchmarks.harness import Report
from benchmarks.processes import Server, serving, toolspace_serving
from benchmarks.rivals import Outcome, Rival, race_servers

loop_factory = uvloop.new_event_loop
CALLERS, MANY = 50, 10_000
OURS = "toolspace mcp --http"
OURS_MANY = f"toolspace mcp --http, {MANY:,} tools"
FASTMCP = "FastMCP's proxy"
FORWARDER = "a forwarder by hand"
AIOHTTP = "a forwarder by hand, over aiohttp"


async def measure() -> Report:
    report = Report("A call through a proxy, from HTTP to HTTP")
    with ExitStack() as servers:
        upstream = servers.enter_context(serving("byhand"))
        large = servers.enter_context(serving("byhand", str(MANY)))
        rivals = [
            Rival(OURS, servers.enter_context(_toolspace_before(upstream)), "up__add"),
            Rival(FORWARDER, servers.enter_context(serving("forwarder", upstream.url))),
            Rival(AIOHTTP, servers.enter_context(serving("aiohttp-forwarder", upstream.url))),
        ]
        try:
            rivals.append(Rival(FASTMCP, servers.enter_context(serving("fastmcp-proxy", upstream.url))))
        except RuntimeError as error:
            report.notes.append(f"FastMCP is left out: {error}")
        alone = await race_servers(rivals, callers=1, rounds=16, slice_ms=60)
        _judge_alone(report, alone)
        rivals.append(Rival(OURS_MANY, servers.enter_context(_toolspace_before(large)), "up__add"))
        at_once = await race_servers(rivals, callers=CALLERS, rounds=12, slice_ms=120)
        _judge_at_once(report, at_once)
    alone.show(report)
    at_once.show(report)
    return report


def _toolspace_before(upstream: Server) -> AbstractContextManager[Server]:
    return toolspace_serving(f'mcpServers: {{up: {{url: "{upstream.url}"}}}}')


def _judge_alone(report: Report, outcome: Outcome) -> None:
    timings, work = outcome.timings, outcome.cpu
    if FASTMCP in timings:
        ratio = timings.ratio(OURS, FASTMCP)
        report.ratio("one at a time, against FastMCP's proxy with a connected client", ratio, must=0.25)
    report.ratio("one at a time, against a forwarder by hand", timings.ratio(OURS, FORWARDER), aim=3.0)
    report.ratio("one at a time, against a forwarder by hand over aiohttp", timings.ratio(OURS, AIOHTTP))
    report.figure("the same, work in the proxy's process", work[OURS] / work[AIOHTTP], "×")


def _judge_at_once(report: Report, outcome: Outcome) -> None:
    timings = outcome.timings
    if FASTMCP in timings:
        ratio = timings.ratio(FASTMCP, OURS)
        report.ratio(f"{CALLERS} at once, calls per second against FastMCP's proxy", ratio, must=5.0, more=True)
    report.ratio(f"{CALLERS} at once, against a forwarder by hand", timings.ratio(OURS, FORWARDER))
    report.ratio(f"{MANY:,} tools listed, against one", timings.ratio(OURS_MANY, OURS), must=1.1)
    for name in (OURS, OURS_MANY):
        faults = outcome.faults[name]
        report.figure(f"{name}: wrong answers in {outcome.calls[name]:,} calls", len(faults), "", must=0)
        report.notes.extend(faults[:1])

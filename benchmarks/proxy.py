"""Measure: a call through Toolspace to an MCP server behind it, HTTP in and HTTP out; alone, at once, of many tools."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import uvloop

from benchmarks.harness import Report
from benchmarks.processes import Server, start_server, start_toolspace
from benchmarks.server_race import RaceOutcome, ServerContestant, race_servers

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
        upstream = servers.enter_context(start_server("byhand"))
        large = servers.enter_context(start_server("byhand", str(MANY)))
        rivals = [
            ServerContestant(OURS, servers.enter_context(_toolspace_before(upstream)), "up__add"),
            ServerContestant(FORWARDER, servers.enter_context(start_server("forwarder", upstream.url))),
            ServerContestant(AIOHTTP, servers.enter_context(start_server("aiohttp-forwarder", upstream.url))),
        ]
        try:
            rivals.append(ServerContestant(FASTMCP, servers.enter_context(start_server("fastmcp-proxy", upstream.url))))
        except RuntimeError as error:
            report.notes.append(f"FastMCP is left out: {error}")
        alone = await race_servers(rivals, callers=1, rounds=16, slice_ms=60)
        crowd = await race_servers(rivals, callers=CALLERS, rounds=12, slice_ms=120)
        behind_many = ServerContestant(OURS_MANY, servers.enter_context(_toolspace_before(large)), "up__add")
        many = await race_servers([rivals[0], behind_many], callers=CALLERS, rounds=30, slice_ms=60)
    _judge_alone(report, alone)
    _judge_crowd(report, crowd)
    # The same tolerance as for the last of 10,000 functions.
    report.ratio(f"{MANY:,} tools listed, against one", many.timings.ratio(OURS_MANY, OURS), must=1.25)
    _count_faults(report, OURS, alone, crowd, many)
    _count_faults(report, OURS_MANY, many)
    alone.show(report)
    crowd.show(report)
    return report


def _toolspace_before(upstream: Server) -> AbstractContextManager[Server]:
    return start_toolspace(f'mcpServers: {{up: {{url: "{upstream.url}"}}}}')


def _judge_alone(report: Report, outcome: RaceOutcome) -> None:
    timings, work = outcome.timings, outcome.cpu
    if FASTMCP in timings:
        ratio = timings.ratio(OURS, FASTMCP)
        report.ratio("one at a time, against FastMCP's proxy with a connected client", ratio, must=0.25)
    report.ratio("one at a time, against a forwarder by hand", timings.ratio(OURS, FORWARDER), aim=3.0)
    report.ratio("one at a time, against a forwarder by hand over aiohttp", timings.ratio(OURS, AIOHTTP))
    report.figure("the same, work in the proxy's process", work[OURS] / work[AIOHTTP], "×")


def _judge_crowd(report: Report, outcome: RaceOutcome) -> None:
    timings = outcome.timings
    if FASTMCP in timings:
        ratio = timings.ratio(FASTMCP, OURS)
        report.ratio(
            f"{CALLERS} at once, calls per second against FastMCP's proxy", ratio, must=5.0, more_is_better=True
        )
    report.ratio(f"{CALLERS} at once, against a forwarder by hand", timings.ratio(OURS, FORWARDER))


def _count_faults(report: Report, name: str, *outcomes: RaceOutcome) -> None:
    faults = [fault for outcome in outcomes for fault in outcome.faults[name]]
    calls = sum(outcome.calls[name] for outcome in outcomes)
    report.figure(f"{name}: wrong answers in {calls:,} calls", len(faults), "", must=0)
    report.notes.extend(faults[:1])

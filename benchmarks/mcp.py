"""Measure: a call to a connected MCP server through the orchestrator, against the MCP SDK's own client."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from mcp import Client, StdioServerParameters

from benchmarks.harness import Contestant, Report, concurrently, race, repeat
from benchmarks.processes import start_server
from benchmarks.workloads import create_toolspace
from toolspace import Toolspace
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import ServerSpec

ARGUMENTS = {"a": 1, "b": 2}
_STDIO = ("-m", "benchmarks.server_roles", "stdio")
CALLERS = 50


async def measure() -> Report:
    async with AsyncExitStack() as stack:
        urls = {
            name: stack.enter_context(start_server(role)).url for name, role in (("http", "sdk"), ("byhand", "byhand"))
        }
        specs = {name: ServerSpec(url=url) for name, url in urls.items()}
        specs["stdio"] = ServerSpec(command=sys.executable, args=_STDIO)
        ts = create_toolspace([], providers=[McpProvider(name, spec) for name, spec in specs.items()])
        await stack.enter_async_context(ts)
        targets: dict[str, Any] = {**urls, "stdio": StdioServerParameters(command=sys.executable, args=list(_STDIO))}
        clients = {name: await stack.enter_async_context(Client(target)) for name, target in targets.items()}
        calls = {f"Toolspace, {name}": await _through(ts, name) for name in specs}
        calls |= {f"mcp.Client, {name}": await _bare(client) for name, client in clients.items()}
        timings = await race([Contestant(name, repeat(call)) for name, call in calls.items()], rounds=30, slice_ms=30)
        many = [
            Contestant(name, concurrently(CALLERS, call)) for name, call in calls.items() if not name.endswith("byhand")
        ]
        crowd = await race(many, rounds=8, slice_ms=120)
    report = Report("A call to a connected MCP server, through the orchestrator")
    against = "against the SDK's client"
    report.ratio(f"stdio, {against}", timings.ratio("Toolspace, stdio", "mcp.Client, stdio"), must=1.1)
    report.ratio(f"HTTP, {against}", timings.ratio("Toolspace, http", "mcp.Client, http"), must=1.1, aim=0.4)
    report.ratio(f"HTTP, a server by hand, {against}", timings.ratio("Toolspace, byhand", "mcp.Client, byhand"))
    report.ratio(f"stdio, {CALLERS} at once, {against}", crowd.ratio("Toolspace, stdio", "mcp.Client, stdio"))
    report.ratio(f"HTTP, {CALLERS} at once, {against}", crowd.ratio("Toolspace, http", "mcp.Client, http"))
    report.times(timings, list(calls))
    report.notes.append("the servers are the MCP SDK's, one process for both clients over HTTP; its share is in both")
    return report


async def _through(ts: Toolspace, server: str) -> Callable[[], Awaitable[Any]]:
    name = f"{server}__add"
    result = await ts.call(name, ARGUMENTS)
    if result.encoded != "3":
        raise RuntimeError(f"{name} answered {result!r}")
    return lambda: ts.call(name, ARGUMENTS)


async def _bare(client: Client) -> Callable[[], Awaitable[Any]]:
    await client.list_tools()
    result = await client.call_tool("add", ARGUMENTS)
    if getattr(result.content[0], "text", None) != "3":
        raise RuntimeError(f"the server answered {result!r}")
    return lambda: client.call_tool("add", ARGUMENTS)

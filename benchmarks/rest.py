"""Measure: a REST tool's call, against the bare request of two HTTP clients; one at a time and 50 at once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx2

from benchmarks.harness import Contestant, Report, concurrently, race, repeat
from benchmarks.processes import start_server
from benchmarks.workloads import create_toolspace
from toolspace.providers.rest.provider import RestProvider, RestSpec

CALLERS = 50
OURS, HTTPX, AIOHTTP = "Toolspace.call of a REST tool", "httpx2, bare", "aiohttp, bare"
_ARGUMENTS = json.dumps({"id": 7, "lang": "en"})


async def measure() -> Report:
    async with AsyncExitStack() as stack:
        url = stack.enter_context(start_server("rest")).url
        spec = RestSpec(
            name="item",
            description="An item of the shop.",
            url=f"{url}/items/${{parameters.id}}",
            query={"lang": "${parameters.lang}"},
            parameters_schema={
                "type": "object",
                "properties": {"id": {"type": "integer"}, "lang": {"type": "string"}},
                "required": ["id"],
            },
        )
        ts = await stack.enter_async_context(create_toolspace([], providers=[RestProvider([spec])]))
        httpx_client = await stack.enter_async_context(httpx2.AsyncClient())
        aiohttp_session = await stack.enter_async_context(aiohttp.ClientSession())

        async def call_tool() -> Any:
            return (await ts.call("rest__item", _ARGUMENTS)).unwrap()

        async def with_httpx() -> Any:
            return (await httpx_client.get(f"{url}/items/7", params={"lang": "en"})).json()

        async def with_aiohttp() -> Any:
            async with aiohttp_session.get(f"{url}/items/7", params={"lang": "en"}) as response:
                return await response.json()

        calls: dict[str, Callable[[], Awaitable[Any]]] = {OURS: call_tool, HTTPX: with_httpx, AIOHTTP: with_aiohttp}
        for name, call in calls.items():
            if (await call())["name"] != "kettle":
                raise RuntimeError(f"{name} does not give the answer")
        alone = await race([Contestant(name, repeat(call)) for name, call in calls.items()], rounds=40, slice_ms=25)
        crowd = await race(
            [Contestant(name, concurrently(CALLERS, call)) for name, call in calls.items()], rounds=16, slice_ms=120
        )
    report = Report("A REST tool's call")
    report.ratio("against a bare httpx2 request", alone.ratio(OURS, HTTPX), must=1.0)
    report.ratio("against a bare aiohttp request, which it is made with", alone.ratio(OURS, AIOHTTP), aim=1.3)
    throughput = crowd.ratio(HTTPX, OURS)
    report.ratio(f"{CALLERS} at once, calls per second against httpx2", throughput, must=3.0, more_is_better=True)
    report.ratio(f"{CALLERS} at once, against bare aiohttp", crowd.ratio(OURS, AIOHTTP), aim=1.3)
    report.times(alone, list(calls))
    for name in calls:
        report.figure(f"{name}, {CALLERS} at once", 1 / crowd.best(name), "calls/s")
    return report

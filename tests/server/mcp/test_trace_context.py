"""The trace context of a caller reaches the servers and services behind, and never those of another call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.providers.mcp.test_http_loss import REFUSALS, Sessions, run_service
from tests.providers.mcp.transports.test_stateless_http import StatelessServer, web_service
from tests.server.mcp.conftest import META, Serve, Served
from tests.server.mcp.test_proxy_fidelity import Request, request_by, wait_for_tools
from toolspace import Toolspace
from toolspace.integrations.opentelemetry import instrument
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.rest.provider import RestProvider, RestSpec

__all__ = ["request_by"]
pytestmark = [pytest.mark.spec("12.3"), pytest.mark.spec("25.5")]
KEYS = ("traceparent", "tracestate", "baggage")


def create_trace(number: int = 1) -> dict[str, str]:
    return {
        "traceparent": f"00-{number:032x}-{number:016x}-01",
        "tracestate": f"vendor={number}",
        "baggage": f"user={number},tenant=a%20b",
    }


def select(fields: Any) -> dict[str, str]:
    return {key: fields[key] for key in KEYS if key in fields}


async def test_trace_in_meta_reaches_the_server_behind(request_by: Request) -> None:
    await wait_for_tools(request_by)

    async def call(trace_fields: dict[str, str]) -> dict[str, str]:
        params = {"name": "up__show", "arguments": {"kind": "meta"}, "_meta": trace_fields}
        response = await request_by("tools/call", params)
        return select(json.loads(response["result"]["content"][0]["text"]))

    for trace_fields in (create_trace(1), {}, {"baggage": "only=1"}, create_trace(2)):
        assert await call(trace_fields) == trace_fields


class HandshakeServer(Sessions):
    """Records the headers and the `_meta` of calls."""

    def __init__(self) -> None:
        super().__init__(REFUSALS["bare-404"]())
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            self.requests.append((dict(request.headers), await request.json()))
        return await super().handle(request)


@asynccontextmanager
async def run_rest_service() -> AsyncIterator[tuple[str, list[dict[str, str]]]]:
    requests: list[dict[str, str]] = []

    async def handle(request: web.Request) -> web.Response:
        requests.append(dict(request.headers))
        return web.json_response({"ok": True})

    app = web.Application()
    app.router.add_get("/weather", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/weather", requests
    finally:
        await runner.cleanup()


class Backends:
    """Servers behind of both eras, a REST service, and a toolspace that serves them all."""

    def __init__(
        self, modern: StatelessServer, old: HandshakeServer, rest: list[dict[str, str]], front: Served
    ) -> None:
        self.front = front
        self._servers = (modern, old)
        self._rest = rest

    async def call_all(self, headers: dict[str, str]) -> list[dict[str, str]]:
        """Calls each backend with these headers. Returns what each received: `_meta` and headers, or headers."""
        for name in ("modern__t", "old__t", "rest__weather"):
            response = await self.front.request("tools/call", {"name": name, "arguments": {}}, **headers)
            assert response.json["result"]["isError"] is False, response
        received_fields: list[dict[str, str]] = []
        for server in self._servers:
            request_headers, message = server.requests[-1]
            received_fields += (select(message["params"].get("_meta", {})), select(request_headers))
        return [*received_fields, select(self._rest[-1])]


@pytest.fixture
async def backends(serve: Serve) -> AsyncIterator[Backends]:
    async with web_service() as modern, run_service(HandshakeServer()) as old, run_rest_service() as (url, requests):
        assert isinstance(old, HandshakeServer)
        providers = [
            McpProvider("modern", ServerSpec(url=modern.url)),
            McpProvider("old", ServerSpec(url=old.url)),
            RestProvider([RestSpec(name="weather", url=url)]),
        ]
        front = await serve(Toolspace(providers=providers))
        yield Backends(modern, old, requests, front)


async def test_trace_in_headers_reaches_servers_of_both_eras_and_rest_services(backends: Backends) -> None:
    for trace_fields in (create_trace(1), {}, create_trace(2)):
        assert await backends.call_all(trace_fields) == [trace_fields] * 5


@pytest.mark.parametrize(
    "traceparent",
    [
        "nonsense",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
    ],
)
async def test_malformed_traceparent_is_ignored(backends: Backends, traceparent: str) -> None:
    trace_fields = {"traceparent": traceparent, "tracestate": "a=1"}
    assert await backends.call_all(trace_fields) == [{}] * 5


async def test_meta_counts_more_than_headers_and_malformed_meta_does_not(backends: Backends) -> None:
    headers = create_trace(1)
    for meta, expected in ((create_trace(2), create_trace(2)), ({"traceparent": 5, "baggage": ["x"]}, create_trace(1))):
        params = {"name": "rest__weather", "arguments": {}, "_meta": {**META, **meta}}
        await backends.front.request("tools/call", params, **headers)
        assert select(backends._rest[-1]) == expected


async def test_concurrent_calls_keep_their_own_traces(backends: Backends) -> None:
    server: Any = backends._servers[1]
    session = await backends.front.open_session()

    async def call(number: int) -> None:
        meta = create_trace(number) if number % 2 else {}
        params = {"name": "old__t", "arguments": {"number": number}, "_meta": meta}
        body = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
        await backends.front.post(body, headers=session)

    await asyncio.gather(*map(call, range(1, 41)))
    calls = [message["params"] for _, message in server.requests if message["method"] == "tools/call"]
    traces = {params["arguments"]["number"]: select(params.get("_meta", {})) for params in calls}
    assert traces == {number: create_trace(number) if number % 2 else {} for number in range(1, 41)}


async def test_own_span_is_passed_on_as_a_child_of_the_callers(backends: Backends) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(backends.front.toolspace, provider)
    received_fields = await backends.call_all(create_trace(7))
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [
        f"execute_tool {name}" for name in ("modern__t", "old__t", "rest__weather")
    ]
    for span in spans:
        assert span.context is not None
        assert span.parent is not None
        assert (span.context.trace_id, span.parent.span_id, span.parent.is_remote) == (7, 7, True)
    ids = [span.context.span_id for span in spans if span.context is not None]
    expected = [ids[0], ids[0], ids[1], ids[1], ids[2]]
    assert received_fields == [
        {**create_trace(7), "traceparent": f"00-{7:032x}-{own_id:016x}-01"} for own_id in expected
    ]

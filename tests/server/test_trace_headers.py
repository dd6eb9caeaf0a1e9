"""The trace context of HTTP API requests, and of the Python client that sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.trace import TracerProvider

from tests.server.gateway_api import SECRET, open_api, write_config
from toolspace.client.client import ToolspaceClient
from toolspace.server.gateway import Gateway

pytestmark = pytest.mark.spec("25.5")
TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
    "baggage": "user=7",
}
TOOLS = """
from toolspace import ToolContext, tool


@tool
async def show_trace(context: ToolContext) -> dict[str, str]:
    return context.trace.to_fields() if context.trace is not None else {}


@tool
async def show_trace_of_child(context: ToolContext) -> dict[str, str]:
    return (await context.call("show_trace")).unwrap()
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return write_config(tmp_path, functions=["./tools.py"])


async def test_trace_headers_of_a_request_reach_its_call_only(config: Path) -> None:
    async with Gateway.open(config) as gateway, open_api(gateway) as api:

        async def call(name: str, headers: dict[str, str]) -> Any:
            response = await api.request("POST", f"/api/tools/{name}/call", {"args": {}}, headers=headers)
            return response.data["result"]

        assert await call("show_trace", TRACE) == TRACE
        assert await call("show_trace_of_child", TRACE) == TRACE
        assert await call("show_trace", {}) == {}
        assert await call("show_trace", {**TRACE, "traceparent": "nonsense"}) == {"baggage": TRACE["baggage"]}
        assert await call("show_trace", {"baggage": "x" * 8_193}) == {}


async def test_client_passes_on_the_current_opentelemetry_context(config: Path) -> None:
    tracer = TracerProvider().get_tracer("test")
    async with (
        Gateway.open(config) as gateway,
        open_api(gateway) as api,
        ToolspaceClient(api.url, secret_key=SECRET) as client,
    ):
        with tracer.start_as_current_span("step") as span:
            token = context.attach(baggage.set_baggage("user", "7"))
            fields = (await client.tools.call("show_trace")).result
            context.detach(token)
        fields_outside = (await client.tools.call("show_trace")).result
    ids = span.get_span_context()
    traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
    assert fields == {"traceparent": traceparent, "baggage": "user=7"}
    assert fields_outside == {}

"""Streamed calls whose client does not read."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.gateway_api import ApiClient
from toolspace.core.extension_points import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.server import sse_responses
from toolspace.server.gateway import Gateway


class Flood(ToolProvider):
    """A tool that produces output without end."""

    kind = "flood"
    namespace = ""

    def __init__(self) -> None:
        super().__init__()
        self.end_event = asyncio.Event()

    def list_tools(self) -> list[Tool]:
        return [Tool("flood", input_schema={"type": "object", "properties": {}}, timeout=60)]

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        try:
            while True:
                context.emit_partial("x" * 100_000)
                await asyncio.sleep(0)
        finally:
            self.end_event.set()


@pytest.mark.spec("8.3")
@pytest.mark.spec("12.2")
async def test_a_streamed_call_is_cancelled_if_the_client_does_not_read(
    gateway: Gateway, api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse_responses, "STALL_SECONDS", 0.05)
    flood = Flood()
    gateway.toolspace.orchestrator.register(flood)
    address = urlsplit(api.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.transport.pause_reading()
    head = ["POST /api/tools/flood/call HTTP/1.1", "Host: 127.0.0.1", "Accept: text/event-stream", "Content-Length: 0"]
    head += [f"{name}: {value}" for name, value in api.headers.items()]
    writer.write("\r\n".join([*head, "", ""]).encode())
    async with asyncio.timeout(30):
        await flood.end_event.wait()
    writer.transport.abort()

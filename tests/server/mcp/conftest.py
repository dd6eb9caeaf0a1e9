"""Fixtures: a toolspace with many kinds of tools, served over HTTP on loopback."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from typing_extensions import TypedDict

from toolspace import Annotations, ImagePart, ResourcePart, TextPart, Tool, ToolContext, Toolspace, tool
from toolspace.server.mcp.http_endpoint import McpEndpoint, serve_mcp

VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}


class Weather(TypedDict):
    city: str
    degrees: float


@dataclass
class Signals:
    """Events that the tool `waits` sets, in the event loop of the test."""

    started: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


def make_tools(signals: Signals) -> list[Tool]:
    @tool(annotations=Annotations(read_only=True, idempotent=True))
    async def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @tool
    async def weather(city: str) -> Weather:
        """Returns the weather."""
        return {"city": city, "degrees": 21.5}

    @tool
    async def echo(data: Any = None) -> Any:
        """Returns its argument."""
        return data

    @tool
    async def fails() -> None:
        """Fails."""
        raise ValueError("the printer is on fire")

    @tool
    async def waits() -> str:
        """Waits until `go_on` is set, or the call is cancelled."""
        signals.started.set()
        try:
            await signals.go_on.wait()
        finally:
            await asyncio.sleep(0)  # A cleanup that takes a turn of the event loop.
            signals.stopped.set()
        return "continued"

    @tool
    async def steps(context: ToolContext, count: int = 3) -> dict[str, int]:
        """Reports progress."""
        for number in range(count):
            context.report_progress(number + 1, count, f"step {number + 1}")
            await asyncio.sleep(0)
        return {"steps": count}

    @tool
    async def hang(context: ToolContext) -> str:
        """Reports the same progress repeatedly."""
        for _ in range(3):
            context.report_progress(1, 2, "hm")
            await asyncio.sleep(0)
        return "done"

    @tool
    async def words() -> AsyncIterator[str]:
        """Streams words."""
        for word in ("one ", "two ", "three"):
            yield word
            await asyncio.sleep(0)

    @tool
    async def big(lines: int = 50_000) -> str:
        """Returns a result that is too large."""
        return "\n".join(f"line {number} ü" for number in range(lines)) + "\n"

    @tool
    async def big_weather(city: str) -> Weather:
        """Returns structured content that is too large."""
        return {"city": city * 200_000, "degrees": 1.0}

    @tool
    async def picture() -> list[Any]:
        """Returns several kinds of content parts."""
        return [
            TextPart(text="look"),
            ImagePart(data="aGVsbG8="),
            ResourcePart(uri="file:///a.txt", text="inside", mime_type="text/plain"),
            ResourcePart(uri="https://example.org/b"),
        ]

    return [add, weather, echo, fails, waits, steps, hang, words, big, big_weather, picture]


@dataclass
class Served:
    """A toolspace that is served over HTTP."""

    url: str
    toolspace: Toolspace
    http: aiohttp.ClientSession
    signals: Signals

    async def post(self, body: Any, *, headers: dict[str, str] | None = None, raw: bytes | None = None) -> RawResponse:
        all_headers = {
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            **(headers or {}),
        }
        data = raw if raw is not None else json.dumps(body).encode()
        headers = {name: value for name, value in all_headers.items() if value}
        async with self.http.post(self.url, data=io.BytesIO(data), headers=headers) as response:
            return RawResponse(response.status, response.headers, await response.read())

    async def request(self, method: str, params: dict[str, Any] | None = None, **headers: str) -> RawResponse:
        """Sends a request of the stateless era with its required headers."""
        params = params or {}
        all_headers = {"mcp-protocol-version": VERSION, "mcp-method": method}
        if name := params.get("name") or params.get("uri"):
            all_headers["mcp-name"] = name
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": META, **params}}
        return await self.post(body, headers={**all_headers, **{k.replace("_", "-"): v for k, v in headers.items()}})

    async def open_session(self, **headers: str) -> dict[str, str]:
        """Opens a session of the handshake era. Returns the headers of its requests."""
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        answer = await self.post(
            {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}, headers=dict(headers)
        )
        assert answer.status == 200, answer
        session = {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25", **headers}
        await self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session)
        return session


@dataclass
class RawResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The last message of the response, from JSON or server-sent events."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            events = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
            return json.loads(events[-1])
        return json.loads(self.body)


Serve = Callable[..., Awaitable[Served]]


@asynccontextmanager
async def serve_tools(toolspace: Toolspace, signals: Signals, **options: Any) -> AsyncGenerator[Served]:
    endpoint = McpEndpoint(toolspace, **options)
    async with (
        toolspace,
        serve_mcp(endpoint) as url,
        endpoint,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as http,
    ):
        yield Served(url, toolspace, http, signals)


@pytest.fixture
async def serve() -> AsyncGenerator[Serve]:
    """Serves a toolspace until the test ends: `await serve()`, or with another toolspace and options."""
    async with AsyncExitStack() as stack:

        async def start(toolspace: Toolspace | None = None, **options: Any) -> Served:
            signals = Signals()
            served_toolspace = toolspace or Toolspace(make_tools(signals))
            return await stack.enter_async_context(serve_tools(served_toolspace, signals, **options))

        yield start


@pytest.fixture
async def mcp_server(serve: Serve) -> Served:
    return await serve()

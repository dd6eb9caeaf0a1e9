"""A toolspace with tools of every temper, served over real HTTP on loopback."""

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
from toolspace.server.mcp.endpoint import McpEndpoint
from toolspace.server.web_server import serve_mcp

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
    """What the waiting tool did, as events of the test's own loop."""

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
        """Tells the weather."""
        return {"city": city, "degrees": 21.5}

    @tool
    async def echo(data: Any = None) -> Any:
        """Gives its argument back."""
        return data

    @tool
    async def fails() -> None:
        """Fails."""
        raise ValueError("the printer is on fire")

    @tool
    async def waits() -> str:
        """Waits until it is let go, or stopped."""
        signals.started.set()
        try:
            await signals.go_on.wait()
        finally:
            await asyncio.sleep(0)  # Cleaning up takes a turn of the loop.
            signals.stopped.set()
        return "let go"

    @tool
    async def steps(context: ToolContext, count: int = 3) -> dict[str, int]:
        """Says how far it is."""
        for number in range(count):
            context.report_progress(number + 1, count, f"step {number + 1}")
            await asyncio.sleep(0)
        return {"steps": count}

    @tool
    async def stuck(context: ToolContext) -> str:
        """Says the same again and again."""
        for _ in range(3):
            context.report_progress(1, 2, "hm")
            await asyncio.sleep(0)
        return "done"

    @tool
    async def words() -> AsyncIterator[str]:
        """Gives word after word."""
        for word in ("one ", "two ", "three"):
            yield word
            await asyncio.sleep(0)

    @tool
    async def big(lines: int = 50_000) -> str:
        """Gives more than a model wants."""
        return "\n".join(f"line {number} ü" for number in range(lines)) + "\n"

    @tool
    async def big_weather(city: str) -> Weather:
        """Tells more of the weather than a model wants."""
        return {"city": city * 200_000, "degrees": 1.0}

    @tool
    async def picture() -> list[Any]:
        """Gives parts of several kinds."""
        return [
            TextPart(text="look"),
            ImagePart(data="aGVsbG8="),
            ResourcePart(uri="file:///a.txt", text="inside", mime_type="text/plain"),
            ResourcePart(uri="https://example.org/b"),
        ]

    return [add, weather, echo, fails, waits, steps, stuck, words, big, big_weather, picture]


@dataclass
class Served:
    """A served toolspace."""

    url: str
    toolspace: Toolspace
    http: aiohttp.ClientSession
    signals: Signals

    async def post(self, body: Any, *, headers: dict[str, str] | None = None, raw: bytes | None = None) -> Answer:
        sent = {"accept": "application/json, text/event-stream", "content-type": "application/json", **(headers or {})}
        data = raw if raw is not None else json.dumps(body).encode()
        headers = {name: value for name, value in sent.items() if value}
        async with self.http.post(self.url, data=io.BytesIO(data), headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def ask(self, method: str, params: dict[str, Any] | None = None, **headers: str) -> Answer:
        """A request of the stateless era, with the headers it has to have."""
        params = params or {}
        sent = {"mcp-protocol-version": VERSION, "mcp-method": method}
        if name := params.get("name") or params.get("uri"):
            sent["mcp-name"] = name
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": META, **params}}
        return await self.post(body, headers={**sent, **{k.replace("_", "-"): v for k, v in headers.items()}})

    async def open_session(self, **headers: str) -> dict[str, str]:
        """Opens a session of the handshake era; the headers of its requests."""
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        answer = await self.post(
            {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}, headers=dict(headers)
        )
        assert answer.status == 200, answer
        session = {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25", **headers}
        await self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session)
        return session


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The one message of the answer, whether it came as JSON or as an event."""
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
    """Serves a toolspace until the test ends: `await serve()`, or with a toolspace and options of its own."""
    async with AsyncExitStack() as stack:

        async def start(toolspace: Toolspace | None = None, **options: Any) -> Served:
            signals = Signals()
            served_toolspace = toolspace or Toolspace(make_tools(signals))
            return await stack.enter_async_context(serve_tools(served_toolspace, signals, **options))

        yield start


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve()

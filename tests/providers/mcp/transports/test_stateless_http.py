"""Stateless HTTP, with the MCP SDK's server and with a hand-written one."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.providers.mcp.conftest import open_toolspace, until
from toolspace.core.events import EventType
from toolspace.providers.mcp.open_connection import ConnectionOptions
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import ServerSpec

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
DISCOVERED = {
    "supportedVersions": ["2026-07-28"],
    "capabilities": {"tools": {}},
    "resultType": "complete",
    "ttlMs": 0,
    "cacheScope": "public",
    "instructions": "Mind the gap.",
}


class StatelessServer:
    """A hand-written stateless server. `on_call` answers calls; requests are recorded."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.tools: list[dict[str, Any]] = [{"name": "t", "inputSchema": {"type": "object"}}]
        self.capabilities: dict[str, Any] = {"tools": {}}
        self.on_call: Answer = self._text
        self.handle_instead: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.moves = False
        """Whether it redirects to another path."""
        self.url = ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [message["params"] for _, message in self.requests if message["method"] == "tools/call"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.handle_instead is not None:
            return await self.handle_instead(request)
        if self.moves and request.path == "/mcp":
            raise web.HTTPTemporaryRedirect("/mcp2")
        message = await request.json()
        self.requests.append((dict(request.headers), message))
        if message["method"] == "server/discover":
            return reply(message, {**DISCOVERED, "capabilities": self.capabilities})
        if message["method"] == "tools/list":
            return reply(message, {"tools": self.tools, "resultType": "complete", "ttlMs": 0, "cacheScope": "public"})
        return await self.on_call(request, message)

    async def _text(self, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return reply(message, text("hello"))


def reply(message: dict[str, Any], result: dict[str, Any]) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})


def text(value: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}], "resultType": "complete"}


@pytest.fixture
async def service() -> AsyncIterator[StatelessServer]:
    async with web_service() as service:
        yield service


@asynccontextmanager
async def web_service() -> AsyncIterator[StatelessServer]:
    service = StatelessServer()
    app = web.Application()
    app.router.add_route("*", "/mcp", service.handle)
    app.router.add_post("/mcp2", service.handle)

    async def redirect(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(request.query.get("to", "/mcp"))

    app.router.add_post("/moved", redirect)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    service.url = f"http://{host}:{port}/mcp"
    try:
        yield service
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(
    service: StatelessServer, *, options: ConnectionOptions | None = None, **fields: Any
) -> AsyncIterator[Any]:
    provider = McpProvider("w", ServerSpec(url=fields.pop("url", service.url), **fields), options)
    async with open_toolspace(provider) as ts:
        assert provider.status().era == "stateless", provider.status()
        yield ts


@pytest.mark.spec("3.10")
async def test_request_has_the_headers_and_meta_of_the_era(service: StatelessServer) -> None:
    async with connected(service, headers={"x-team": "blue"}) as ts:
        assert (await ts.call("w__t", {"a": 1})).result == "hello"
        assert "<server_instructions>\nMind the gap.\n</server_instructions>" in ts.orchestrator.instructions()
    headers, message = service.requests[-1]
    assert (
        headers["Mcp-Protocol-Version" if "Mcp-Protocol-Version" in headers else "mcp-protocol-version"] == "2026-07-28"
    )
    lower = {name.lower(): value for name, value in headers.items()}
    assert (lower["mcp-method"], lower["mcp-name"], lower["x-team"]) == ("tools/call", "t", "blue")
    meta = message["params"]["_meta"]
    assert meta["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    assert meta["io.modelcontextprotocol/clientInfo"]["name"] == "toolspace"
    assert message["params"]["arguments"] == {"a": 1}


async def test_arguments_are_repeated_in_headers_if_the_tool_asks(service: StatelessServer) -> None:
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    service.tools = [{"name": "t", "inputSchema": schema}]
    async with connected(service) as ts:
        await ts.call("w__t", {"region": "Zürich\r\nX-Evil: 1"})
    lower = {name.lower(): value for name, value in service.requests[-1][0].items()}
    assert lower["mcp-param-region"].startswith("=?base64?")
    assert "x-evil" not in lower


async def test_tool_with_invalid_header_arguments_is_left_out(service: StatelessServer) -> None:
    service.tools.append({"name": "bad", "inputSchema": {"type": "object", "x-mcp-header": "No"}})
    async with connected(service) as ts:
        assert [tool.name for tool in ts.list_tools()] == ["w__t"]
        assert ts.list_servers()[0].left_out[0].startswith("bad: ")


@pytest.mark.spec("3.14")
async def test_event_stream_gives_progress_and_the_result(service: StatelessServer) -> None:
    async def stream(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        token = message["params"]["_meta"]["progressToken"]
        note = {"method": "notifications/progress", "params": {"progressToken": token, "progress": 1, "total": 2}}
        await response.write(b": a comment\r\n\r\n")
        data = json.dumps({"jsonrpc": "2.0", **note}).encode()
        await response.write(b"event: message\r\ndata: " + data[:20])
        await response.write(data[20:] + b"\r\n\r\n")
        result = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": text("über")}, indent=1)
        for line in result.splitlines():
            await response.write(f"data: {line}\n".encode())
        await response.write(b"\n")
        return response

    service.on_call = stream
    reports: list[float] = []
    async with connected(service) as ts:
        ts.bus.subscribe(lambda event: reports.append(event.progress), EventType.TOOL_CALL_PROGRESS)
        assert (await ts.call("w__t")).result == "über"
    assert reports == [1]


async def test_progress_is_requested_only_with_a_listener(service: StatelessServer) -> None:
    async with connected(service) as ts:
        await ts.call("w__t")
    assert "progressToken" not in service.calls[0]["_meta"]


@pytest.mark.spec("3.14")
async def test_cancellation_closes_the_request(service: StatelessServer) -> None:
    arrival, closed = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        arrival.set()
        try:
            await asyncio.sleep(60)
        finally:
            closed.set()
        raise AssertionError

    service.on_call = hang
    async with connected(service) as ts:
        call = asyncio.ensure_future(ts.call("w__t", call_id="mine"))
        await arrival.wait()
        ts.cancel("mine")
        assert (await call).error_kind == "canceled"
        await asyncio.wait_for(closed.wait(), 10)
        service.on_call = service._text
        assert (await ts.call("w__t")).ok


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        (web.Response(status=502, text="<html>proxy</html>", content_type="text/html"), "execution_error", "HTTP 502"),
        (web.Response(text="{not json", content_type="application/json"), "execution_error", "not JSON"),
        (web.Response(text="[1]", content_type="application/json"), "execution_error", "not a JSON-RPC message"),
        (web.Response(text="{}", content_type="application/json"), "execution_error", "neither a result nor an error"),
        (web.Response(text="hello", content_type="text/plain"), "execution_error", "text/plain"),
        (web.Response(text="data: 5\n\n", content_type="text/event-stream"), "execution_error", "not a JSON-RPC"),
        (web.Response(text=": nothing\n\n", content_type="text/event-stream"), "transport_error", "before the result"),
        (
            web.json_response({"jsonrpc": "2.0", "error": {"code": -32602, "message": "no such tool"}}, status=400),
            "execution_error",
            "no such tool",
        ),
    ],
    ids=["proxy", "half-json", "array", "empty", "plain", "number-event", "no-event", "rpc-error"],
)  # fmt: skip
async def test_invalid_response_is_a_failure_with_its_reason(
    service: StatelessServer, answer: web.Response, kind: str, word: str
) -> None:
    async def odd(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=answer.status, body=answer.body, headers={"content-type": answer.content_type})

    service.on_call = odd
    async with connected(service) as ts:
        result = await ts.call("w__t")
        assert (result.ok, result.error_kind) == (False, kind)
        assert word in result.error
        service.on_call = service._text
        assert (await ts.call("w__t")).ok


@pytest.mark.parametrize(
    ("content_type", "start"), [("application/json", b""), ("text/event-stream", b"data: ")], ids=["json", "events"]
)
async def test_compressed_answers_are_limited_by_their_decompressed_size(
    service: StatelessServer, content_type: str, start: bytes
) -> None:
    async def answer_with_a_bomb(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        headers = {"content-type": content_type, "content-encoding": "gzip"}
        return web.Response(body=gzip.compress(start + b" " * 80_000_000), headers=headers)

    service.on_call = answer_with_a_bomb
    async with connected(service) as ts:
        result = await ts.call("w__t")
        assert result.error == "the server's answer is larger than 64 MiB"
        service.on_call = service._text
        assert (await ts.call("w__t")).ok


async def test_only_redirects_within_the_origin_are_followed(service: StatelessServer) -> None:
    base = service.url.removesuffix("/mcp")
    async with connected(service, url=f"{base}/moved") as ts:
        assert (await ts.call("w__t")).ok
    provider = McpProvider("w", ServerSpec(url=f"{base}/moved?to=http://elsewhere.invalid/mcp", headers={"key": "k"}))
    async with open_toolspace(provider) as ts:
        assert "elsewhere.invalid" in ts.orchestrator.unavailable_providers()["w"]


@pytest.mark.spec("3.13")
async def test_restarted_server_answers_again(service: StatelessServer) -> None:
    """Nothing listens at first. After the server starts, the next call is answered."""
    provider = McpProvider("w", ServerSpec(url="http://127.0.0.1:9/mcp"))
    async with open_toolspace(provider) as ts:
        assert "cannot connect" in ts.orchestrator.unavailable_providers()["w"]
        provider._connection.spec = ServerSpec(url=service.url)
        await until(lambda: provider.status().state == "ready")
        assert (await ts.call("w__t")).ok


@pytest.mark.spec("3.16")
async def test_question_is_answered_within_the_call(service: StatelessServer) -> None:
    from toolspace.core.tool_context import ToolContext
    from toolspace.providers.mcp.server_spec import ElicitationRequest, McpCallbacks
    from toolspace.providers.mcp.server_spec import ElicitationResult as Said

    async def ask(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        params = message["params"]
        if "inputResponses" not in params:
            question = {"mode": "form", "message": "Which?", "requestedSchema": {"type": "object", "properties": {}}}
            return reply(
                message,
                {
                    "resultType": "input_required",
                    "requestState": "s1",
                    "inputRequests": {"q": {"method": "elicitation/create", "params": question}},
                },
            )
        assert params["requestState"] == "s1"
        return reply(message, text(json.dumps(params["inputResponses"]["q"])))

    questions: list[tuple[str, str | None]] = []

    async def elicit(question: ElicitationRequest, context: ToolContext | None) -> Said:
        assert context is not None
        questions.append((question.message, context.user_id))
        return Said(action="accept", content={"colour": "red"})

    service.on_call = ask
    async with connected(service, options=ConnectionOptions(callbacks=McpCallbacks(elicit=elicit))) as ts:
        result = await ts.call("w__t", context=ToolContext(user_id="ann"))
    assert json.loads(result.result) == {"action": "accept", "content": {"colour": "red"}}
    assert questions == [("Which?", "ann")]


@pytest.mark.spec("4.11")
async def test_trace_of_stateless_http_masks_secrets(
    service: StatelessServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "toolspace.mcp"):
        async with connected(service, options=ConnectionOptions(trace=True)) as ts:
            await ts.call("w__t", {"password": "hunter2hunter2"})
    lines = [record.getMessage() for record in caplog.records if record.name == "toolspace.mcp"]
    assert any(line.startswith("w → ") and "tools/call" in line for line in lines)
    assert any(line.startswith("w ← ") and "hello" in line for line in lines)
    assert not any("hunter2" in line for line in lines)

"""HTTP servers that break, restart, lose sessions, or change during calls."""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

from tests.providers.mcp.conftest import open_toolspace, until
from tests.providers.mcp.transports.test_http_and_sse import serve
from tests.providers.mcp.transports.test_stateless_http import StatelessServer, connected, reply, text, web_service
from toolspace.core.events import EventType
from toolspace.core.tool_context import ToolContext
from toolspace.providers.mcp import session
from toolspace.providers.mcp.open_connection import ConnectionOptions
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import ElicitationRequest, ElicitationResult, McpCallbacks, ServerSpec
from toolspace.providers.mcp.session import SessionOptions, open_session
from toolspace.providers.mcp.transports import stateless_http
from toolspace.providers.mcp.transports.base import ServerUnreachable


@pytest.fixture
async def service() -> AsyncIterator[StatelessServer]:
    async with web_service() as service:
        yield service


class Sessions:
    """A hand-written server of the handshake era with sessions. `forget` simulates a restart."""

    def __init__(self, refusal: web.Response) -> None:
        self.refusal = refusal
        self.session_ids: set[str] = set()
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.arrival = asyncio.Event()
        self.url = ""

    def forget(self) -> None:
        self.session_ids.clear()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        headers = {}
        if message["method"] == "initialize":
            self.session_ids.add(key := uuid.uuid4().hex)
            headers["mcp-session-id"] = key
            result: dict[str, Any] = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "by hand", "version": "1"},
            }
        elif request.headers.get("mcp-session-id") not in self.session_ids:
            body = json.loads(self.refusal.text or "null")
            if body is None:
                return web.Response(status=self.refusal.status)
            return web.json_response(body, status=self.refusal.status)
        elif "id" not in message:
            return web.Response(status=202)
        elif message["method"] == "tools/list":
            result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("t", "wait", "tear")]}
        elif message["method"] == "tools/call":
            name = message["params"]["name"]
            self.calls.append(name)
            if name == "wait":
                self.arrival.set()
                await self.gate.wait()
            if name == "tear":
                assert request.transport is not None
                request.transport.abort()
            if message["params"]["arguments"].get("complain"):
                fault = {"code": -32000, "message": "your session at the shop has expired"}
                return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": fault})
            result = text("fine")
        else:
            result = {}
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=headers)


@asynccontextmanager
async def run_service(service: Sessions) -> AsyncIterator[Sessions]:
    app = web.Application()
    app.router.add_route("*", "/mcp", service.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
        yield service
    finally:
        await runner.cleanup()


def rpc_error(code: int, message: str, status: int) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}, status=status)


REFUSALS = {
    "bare-404": lambda: web.Response(status=404, text="null"),
    "library": lambda: rpc_error(-32600, "Session not found", 404),
    "public": lambda: rpc_error(-32001, "Session not found", 404),
    "method": lambda: rpc_error(-32601, "Method not found", 404),
    "typescript": lambda: rpc_error(-32000, "Bad Request: No valid session ID provided", 400),
    "uninitialized": lambda: rpc_error(-32000, "Bad Request: Server not initialized", 400),
}


@pytest.mark.spec("3.13")
@pytest.mark.parametrize("how", list(REFUSALS))
async def test_unknown_session_is_opened_again_and_the_call_runs_once(how: str) -> None:
    async with run_service(Sessions(REFUSALS[how]())) as server:
        provider = McpProvider("w", ServerSpec(url=server.url))
        async with open_toolspace(provider) as ts:
            assert provider.status().era == "handshake"
            assert (await ts.call("w__t")).ok
            server.forget()
            assert (await ts.call("w__t")).result == "fine"
            assert provider.status().restarts == 1
        assert server.calls == ["t", "t"]


async def test_tool_error_about_sessions_does_not_repeat_the_call() -> None:
    async with run_service(Sessions(REFUSALS["typescript"]())) as server:
        provider = McpProvider("w", ServerSpec(url=server.url))
        async with open_toolspace(provider) as ts:
            result = await ts.call("w__t", {"complain": True})
            assert (result.error_kind, result.error) == ("execution_error", "your session at the shop has expired")
            assert provider.status().restarts == 0
        assert server.calls == ["t"]


@pytest.mark.spec("3.13")
async def test_broken_response_fails_only_its_call_in_the_handshake_era() -> None:
    async with run_service(Sessions(REFUSALS["bare-404"]())) as server:
        async with open_toolspace(McpProvider("w", ServerSpec(url=server.url))) as ts:
            waiting_call = asyncio.ensure_future(ts.call("w__wait"))
            await server.arrival.wait()
            torn = await ts.call("w__tear")
            assert (torn.error_kind, torn.executed) == ("transport_error", True)
            assert (await ts.call("w__t")).ok
            server.gate.set()
            assert (await waiting_call).result == "fine"
        assert server.calls == ["wait", "tear", "t"]


@pytest.mark.spec("3.13")
async def test_broken_response_fails_only_its_call(service: StatelessServer) -> None:
    arrival, gate = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        if message["params"]["arguments"].get("tear"):
            assert request.transport is not None
            request.transport.abort()
        if message["params"]["arguments"].get("wait"):
            arrival.set()
            await gate.wait()
        return reply(message, text("fine"))

    service.on_call = answer
    async with connected(service) as ts:
        waiting_call = asyncio.ensure_future(ts.call("w__t", {"wait": True}))
        await arrival.wait()
        torn = await ts.call("w__t", {"tear": True})
        assert (torn.error_kind, torn.executed) == ("transport_error", True)
        assert (await ts.call("w__t")).ok
        gate.set()
        assert (await waiting_call).result == "fine"


@pytest.mark.spec("3.13")
async def test_server_replaced_by_one_of_the_other_era_is_negotiated_again(service: StatelessServer) -> None:
    provider = McpProvider("w", ServerSpec(url=service.url))
    async with open_toolspace(provider) as ts:
        assert provider.status().era == "stateless"
        other_service = Sessions(REFUSALS["uninitialized"]())
        service.handle_instead = other_service.handle
        assert (await ts.call("w__t")).result == "fine"
        assert provider.status().era == "handshake"
        assert other_service.calls == ["t"]


async def test_close_ends_http_calls(service: StatelessServer) -> None:
    arrival = asyncio.Event()

    async def hang(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        arrival.set()
        await asyncio.sleep(60)
        raise AssertionError

    service.on_call = hang
    async with asyncio.timeout(10):
        async with connected(service) as ts:
            call = asyncio.ensure_future(ts.call("w__t"))
            await arrival.wait()
        assert (await call).error_kind == "canceled"


async def test_concurrent_calls_follow_a_redirect(service: StatelessServer) -> None:
    async with connected(service) as ts:
        service.moves = True
        results = await asyncio.gather(*(ts.call("w__t", {"n": n}) for n in range(10)))
    assert [result.result for result in results] == ["hello"] * 10


@pytest.mark.parametrize(
    "questions",
    [{"q": {"method": "nonsense/ask"}}, {"q": 5}, {"q": {"method": "elicitation/create", "params": {"message": 1}}}],
    ids=["method", "number", "params"],
)
async def test_invalid_question_fails_the_call(service: StatelessServer, questions: dict[str, Any]) -> None:
    async def ask(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        return reply(message, {"resultType": "input_required", "inputRequests": questions})

    async def elicit(question: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
        raise AssertionError

    service.on_call = ask
    async with connected(service, options=ConnectionOptions(callbacks=McpCallbacks(elicit=elicit))) as ts:
        result = await ts.call("w__t")
    assert (result.error_kind, result.error) == ("execution_error", "the server's question cannot be understood")


async def test_too_long_tool_list_is_cut(service: StatelessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_TOOLS", 10)
    task = {"execution": {"taskSupport": "required"}}
    service.tools = [{"name": f"t{n}", "inputSchema": {"type": "object"}, **(task if n % 2 else {})} for n in range(50)]
    async with connected(service) as ts:
        status = ts.list_servers()[0]
    assert (status.tools, len(status.left_out)) == (5, 5)


class ColourAnswer(BaseModel):
    colour: str


@pytest.mark.spec("3.16")
async def test_concurrent_questions_reach_their_own_users() -> None:
    server = MCPServer("asks")

    @server.tool()
    async def ask(user: str, ctx: Context) -> str:
        result = await ctx.elicit(user, ColourAnswer)
        return f"{user}: {result.data.colour if result.action == 'accept' else result.action}"

    both = asyncio.Barrier(2)
    questions: list[tuple[str, str | None]] = []

    async def elicit(question: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
        async with asyncio.timeout(10):
            await both.wait()
        user = context.user_id if context is not None else None
        questions.append((question.message, user))
        return ElicitationResult(action="accept", content={"colour": f"{user}'s"})

    async with serve(server.streamable_http_app()) as base:
        provider = McpProvider(
            "w", ServerSpec(url=f"{base}/mcp"), ConnectionOptions(callbacks=McpCallbacks(elicit=elicit))
        )
        provider._connection._handshake = True
        async with open_toolspace(provider) as ts:
            assert provider.status().era == "handshake"
            results = await asyncio.gather(
                *(ts.call("w__ask", {"user": user}, context=ToolContext(user_id=user)) for user in ("ann", "bob"))
            )
    assert sorted(questions) == [("ann", "ann"), ("bob", "bob")]
    assert [result.result for result in results] == [{"result": "ann: ann's"}, {"result": "bob: bob's"}]


@pytest.mark.spec("3.14")
async def test_tool_change_of_an_sdk_server_is_noticed() -> None:
    server = MCPServer("grows")

    @server.tool()
    async def grow(ctx: Context) -> str:
        server.add_tool(lambda: "new", name="grown")
        await ctx.notify_tools_changed()
        return "grown"

    async with serve(server.streamable_http_app()) as base:
        provider = McpProvider("w", ServerSpec(url=f"{base}/mcp"))
        async with open_toolspace(provider) as ts:
            assert provider.status().era == "stateless"
            with ts.bus.open_queue(EventType.TOOLS_CHANGED) as changes:
                assert (await ts.call("w__grow")).ok
                await asyncio.wait_for(changes.get(), 10)
            assert (await ts.call("w__grown")).ok


async def test_connect_timeout_counts_as_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateless_http, "CONNECT_SECONDS", 0.3)
    peer = SessionOptions(name="w", callbacks=McpCallbacks(), version="0", on_tools_changed=lambda: None)
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):  # More than its backlog.
            waiting_call = stack.enter_context(socket.socket())
            waiting_call.setblocking(False)
            waiting_call.connect_ex(full.getsockname())
        way = stateless_http.StatelessHttpDispatcher(f"http://127.0.0.1:{full.getsockname()[1]}/mcp", {})
        async with open_session(peer, way):
            with pytest.raises(ServerUnreachable, match="cannot connect") as error_info:
                await way.send_raw_request("tools/call", {})
    assert not error_info.value.was_sent


@pytest.mark.spec("3.14")
async def test_stateless_tool_change_is_noticed_again_after_the_stream_ended(service: StatelessServer) -> None:
    service.capabilities = {"tools": {"listChanged": True}}
    streams: list[tuple[web.StreamResponse, str]] = []

    async def listen(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        if message["method"] != "subscriptions/listen":
            return reply(message, text("hello"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        meta = {"io.modelcontextprotocol/subscriptionId": message["id"]}
        params = {"_meta": meta, "notifications": {"toolsListChanged": True}}
        await send(response, "notifications/subscriptions/acknowledged", params)
        streams.append((response, message["id"]))
        while (response, message["id"]) in streams:  # noqa: ASYNC110 - until it is taken out
            await asyncio.sleep(0.01)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def send(response: web.StreamResponse, method: str, params: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", "method": method, "params": params})
        await response.write(f"data: {data}\n\n".encode())

    service.on_call = listen
    async with connected(service) as ts:
        await until(lambda: streams)
        response, key = streams[0]
        with ts.bus.open_queue(EventType.TOOLS_CHANGED) as changes:
            service.tools = [*service.tools, {"name": "u", "inputSchema": {"type": "object"}}]
            params = {"_meta": {"io.modelcontextprotocol/subscriptionId": key}}
            await send(response, "notifications/tools/list_changed", params)
            await asyncio.wait_for(changes.get(), 10)
            assert ts.find_tool("w__u") is not None
            service.tools = service.tools[1:]
            streams.clear()
            await until(lambda: streams)
            await asyncio.wait_for(changes.get(), 10)
            assert ts.find_tool("w__t") is None
        assert (await ts.call("w__u")).ok
        streams.clear()

"""HTTP servers that answer 404 to a session they have forgotten: the session is opened again, each call runs once."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.providers.mcp.conftest import SERVERS, ServerLog, open_toolspace, until
from tests.providers.mcp.test_http_loss import REFUSALS, Sessions, run_service
from toolspace import Toolspace
from toolspace.core.result import ToolResult
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import ServerSpec

CALLS = 500
ERRORS = {
    "public": {"code": -32001, "message": "Session not found"},
    "library": {"code": -32600, "message": "Session not found"},
    "no-json": None,
}


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def run_forgetful(port: int, log: ServerLog, *words: str) -> AsyncIterator[None]:
    """Runs the server process until the block ends, from the moment it accepts connections."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVERS / "forgetful.py"), str(port), str(log.path), *words
    )
    try:
        await until(lambda: is_open(port), seconds=60)
        yield
    finally:
        process.kill()
        await process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def call_often(ts: Toolspace) -> list[ToolResult]:
    """Calls 50 at once, as often as needed."""
    results: list[ToolResult] = []
    for start in range(0, CALLS, 50):
        calls = (ts.call("w__order", {"number": n}) for n in range(start, start + 50))
        results += await asyncio.gather(*calls)
    return results


def check_effects(log: ServerLog, results: list[ToolResult]) -> None:
    assert [result.result for result in results] == [{"result": f"ordered {n}"} for n in range(CALLS)]
    orders = Counter(line for line in log.lines if line.startswith("order"))
    assert orders == {f"order {n}": 1 for n in range(CALLS)}


@pytest.mark.spec("3.13")
@pytest.mark.parametrize("kind", list(ERRORS))
async def test_calls_run_once_each_while_the_server_keeps_forgetting_sessions(kind: str, server_log: ServerLog) -> None:
    port, error = find_free_port(), ERRORS[kind]
    words = ("120", *([json.dumps(error)] if error is not None else []))
    async with run_forgetful(port, server_log, *words):
        provider = McpProvider("w", ServerSpec(url=f"http://127.0.0.1:{port}/mcp"))
        async with open_toolspace(provider) as ts:
            assert provider.status().era == "handshake"
            check_effects(server_log, await call_often(ts))
            assert provider.status().restarts == 4
    assert server_log.lines.count("session") == 5


@pytest.mark.spec("3.13")
async def test_concurrent_calls_after_a_restart_share_one_new_session(server_log: ServerLog) -> None:
    port = find_free_port()
    provider = McpProvider("w", ServerSpec(url=f"http://127.0.0.1:{port}/mcp"))
    async with open_toolspace(provider) as ts:
        async with run_forgetful(port, server_log):
            await provider.restart()
        async with run_forgetful(port, server_log):
            check_effects(server_log, await call_often(ts))
    assert server_log.lines.count("session") == 2


class ForgetfulSessions(Sessions):
    """Answers what the test says to GET, and counts requests."""

    def __init__(self) -> None:
        super().__init__(REFUSALS["bare-404"]())
        self.get_status = 405
        self.requests: list[str] = []
        self.is_forgetting_calls = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.requests.append("GET")
            return web.Response(status=self.get_status)
        message = await request.json() if request.method == "POST" else {"method": "end"}
        self.requests.append(message["method"])
        if message["method"] == "tools/call" and self.is_forgetting_calls:
            self.forget()
        return await super().handle(request)


@pytest.mark.spec("3.13")
async def test_call_whose_new_session_is_unknown_too_fails_and_did_not_run() -> None:
    async with run_service(ForgetfulSessions()) as server:
        assert isinstance(server, ForgetfulSessions)
        async with open_toolspace(McpProvider("w", ServerSpec(url=server.url))) as ts:
            server.is_forgetting_calls = True
            result = await ts.call("w__t")
            assert (result.error_kind, result.executed) == ("transport_error", False)
            assert "404" in (result.error or "")
            server.is_forgetting_calls = False
            assert (await ts.call("w__t")).result == "fine"
    assert server.calls == ["t"]
    assert server.requests.count("tools/call") in (3, 4)  # The session may be open again before the last call.


@pytest.mark.spec("3.13")
async def test_running_call_ends_in_order_while_another_opens_a_new_session() -> None:
    async with run_service(Sessions(REFUSALS["bare-404"]())) as server:
        provider = McpProvider("w", ServerSpec(url=server.url))
        async with open_toolspace(provider) as ts:
            waiting_call = asyncio.ensure_future(ts.call("w__wait"))
            await server.arrival.wait()
            server.forget()
            assert (await ts.call("w__t")).result == "fine"
            assert provider.status().restarts == 1
            server.gate.set()
            assert (await waiting_call).result == "fine"
        assert server.calls == ["wait", "t"]


@pytest.mark.spec("3.13")
async def test_refused_event_stream_opens_an_unknown_session_again_without_a_call() -> None:
    async with run_service(ForgetfulSessions()) as server:
        assert isinstance(server, ForgetfulSessions)
        server.get_status = 404
        provider = McpProvider("w", ServerSpec(url=server.url))
        async with open_toolspace(provider):
            await until(lambda: server.requests.count("ping") == 1)
            assert provider.status().restarts == 0  # The server knows the session: it only has no event stream.
            server.forget()
            await until(lambda: provider.status().restarts == 1)  # It is asked for the stream a second time.


@pytest.mark.spec("3.13")
async def test_refused_notification_opens_an_unknown_session_again() -> None:
    async with run_service(ForgetfulSessions()) as server:
        assert isinstance(server, ForgetfulSessions)
        provider = McpProvider("w", ServerSpec(url=server.url))
        async with open_toolspace(provider) as ts:
            waiting_call = asyncio.ensure_future(ts.call("w__wait"))
            await server.arrival.wait()
            server.forget()
            waiting_call.cancel()  # The server is told.
            await until(lambda: provider.status().restarts == 1)
            assert (await ts.call("w__t")).result == "fine"

"""Streamable HTTP and SSE, with the MCP SDK's servers and with hand-written ones."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import uvicorn
from aiohttp import web
from mcp.client.client import Client
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest
from starlette.applications import Starlette

from tests.providers.mcp.conftest import until
from tests.providers.mcp.processes import open_files
from toolspace import McpProvider, Toolspace
from toolspace.errors import ProviderError
from toolspace.providers.mcp.open_connection import open_transport
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports import http_client
from toolspace.providers.mcp.transports.base import OpenTransport

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def library_server() -> MCPServer:
    server = MCPServer("library")

    @server.tool()
    def double(x: int) -> int:
        return 2 * x

    @server.tool()
    def big(size: int) -> str:
        return "x" * size

    return server


@asynccontextmanager
async def serve(app: Starlette) -> AsyncIterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", ws="none", timeout_graceful_shutdown=1, lifespan="on")
    )
    server_task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await server_task


@asynccontextmanager
async def run_server(answer: Answer) -> AsyncIterator[str]:
    """A server that answers every request in the same way."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class HandshakeServer:
    """A hand-written server of the handshake era. `on_call` answers the first call."""

    def __init__(self, on_call: Answer | None = None) -> None:
        self.on_call = on_call
        self.headers: list[dict[str, str]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if message.get("method") == "initialize":
            result: dict[str, Any] = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "by hand", "version": "1"},
            }
        elif message.get("method") == "tools/list":
            result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
        elif "id" not in message:
            return web.Response(status=202)
        elif message["method"] == "tools/call" and self.on_call is not None:
            self.on_call, on_call = None, self.on_call  # Only for the first call.
            return await on_call(request)
        else:
            result = {"content": [{"type": "text", "text": "fine"}]}
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})


async def only_sse(request: web.Request) -> web.StreamResponse:
    """Offers an SSE stream, and refuses POST requests to its URL."""
    if request.path == "/messages":
        return web.Response(status=202)
    if request.method != "GET":
        return web.Response(status=405)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"event: endpoint\ndata: /messages\n\n")
    await asyncio.Event().wait()
    return response


def sockets() -> int:
    return sum("socket:" in target for target in open_files())


def client(transport: OpenTransport) -> Client:
    return Client(transport, cache=None, mode="legacy")


def http(url: str, **fields: Any) -> ServerSpec:
    return ServerSpec(url=url, **fields)


@pytest.mark.spec("3.10")
@pytest.mark.parametrize("json_response", [True, False], ids=["json", "events"])
async def test_streamable_http_server_works(json_response: bool) -> None:
    before = sockets()
    async with (
        serve(library_server().streamable_http_app(json_response=json_response)) as url,
        open_transport("web", http(f"{url}/mcp")) as transport,
        client(transport) as session,
    ):
        assert transport.transport == "http"
        assert transport.pid is None
        assert (await session.call_tool("double", {"x": 21})).structured_content == {"result": 42}
        big = await session.call_tool("big", {"size": 3_000_000})  # More than the SDK's default limit.
        assert len(big.content[0].text) == 3_000_000  # type: ignore[union-attr]
        assert not transport.lost_event.is_set()
    assert sockets() == before


@pytest.mark.spec("3.10")
async def test_http_falls_back_to_sse_and_remembers_it() -> None:
    async with serve(library_server().sse_app()) as url:
        for expected in ("http", "sse"):
            async with open_transport("old", http(f"{url}/sse")) as transport:
                assert transport.transport == expected
                async with client(transport) as session:
                    assert transport.transport == "sse"
                    assert (await session.call_tool("double", {"x": 4})).structured_content == {"result": 8}


@pytest.mark.spec("3.10")
async def test_discovery_falls_back_to_sse() -> None:
    async with (
        serve(library_server().sse_app()) as url,
        open_transport("old", http(f"{url}/sse")) as transport,
        Client(transport, cache=None) as session,
    ):
        assert transport.transport == "sse"
        assert (await session.call_tool("double", {"x": 4})).structured_content == {"result": 8}


@pytest.mark.spec("3.10")
async def test_sse_is_used_if_configured() -> None:
    async with (
        serve(library_server().sse_app()) as url,
        open_transport("old", http(f"{url}/sse", transport="sse")) as transport,
        client(transport) as session,
    ):
        assert transport.transport == "sse"
        big = await session.call_tool("big", {"size": 3_000_000})
        assert len(big.content[0].text) == 3_000_000  # type: ignore[union-attr]
        many = await asyncio.gather(*(session.call_tool("double", {"x": n}) for n in range(20)))
        assert [result.structured_content for result in many] == [{"result": 2 * n} for n in range(20)]


@pytest.mark.spec("3.10")
async def test_server_that_gave_up_sse_is_reached_over_http() -> None:
    current: Answer = only_sse

    async def answer(request: web.Request) -> web.StreamResponse:
        return await current(request)

    async with run_server(answer) as url:
        async with open_transport("old", http(url)) as transport:
            await transport.streams[1].send(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=1, method="ping")))
            await until(lambda: transport.transport == "sse")
        current = HandshakeServer()
        async with open_transport("new", http(url)) as transport, client(transport) as session:
            assert transport.transport == "http"
            assert (await session.call_tool("t", {})).content[0].text == "fine"  # type: ignore[union-attr]


@pytest.mark.spec("3.13")
async def test_end_of_an_sse_stream_is_noticed_without_a_call() -> None:
    hang_up = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"event: endpoint\ndata: /messages?id=1\n\n")
        await hang_up.wait()
        return response

    async with run_server(answer) as url, open_transport("old", http(url, transport="sse")) as transport:
        hang_up.set()
        await transport.lost_event.wait()
        assert transport.loss_reason == "the server closed its event stream"
        assert [item async for item in transport.streams[0]] == []


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"event: endpoint\ndata: http://elsewhere.example/messages\n\n", "names no endpoint of the same origin"),
        (b"event: message\ndata: {}\n\n", "names no endpoint of the same origin"),
        (b"", "before the first event"),
    ],
    ids=["other-origin", "no-endpoint", "nothing"],
)
async def test_invalid_start_of_an_sse_stream_is_refused(first: bytes, expected: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=first, content_type="text/event-stream")

    async with run_server(answer) as url:
        with pytest.raises(ProviderError, match=expected):
            async with open_transport("old", http(url, transport="sse")):
                pass


async def test_failed_sse_post_fails_one_call() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return web.Response(status=503)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"event: endpoint\ndata: /messages?id=1\n\n")
        await asyncio.Event().wait()
        return response

    async with run_server(answer) as url, open_transport("old", http(url, transport="sse")) as transport:
        with pytest.raises(BaseExceptionGroup) as error_info:
            await client(transport).__aenter__()
        assert "HTTP 503" in str(error_info.value.exceptions[0])
        assert not transport.lost_event.is_set()


async def _breaks(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _breaks_in_the_middle(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"jsonrpc": ')
    assert request.transport is not None
    request.transport.close()
    return response


async def _refuse_authorization(request: web.Request) -> web.StreamResponse:
    return web.Response(status=401, text="who are you? ?token=abcdefgh12345")


async def _broken(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="<html>oops</html>", content_type="text/html")


async def _huge(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b" " * 200_000, content_type="application/json")


async def _bomb(request: web.Request) -> web.StreamResponse:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    return web.Response(body=gzip.compress(b" " * 50_000_000), headers=headers)


async def _bomb_of_events(request: web.Request) -> web.StreamResponse:
    headers = {"content-encoding": "gzip", "content-type": "text/event-stream"}
    return web.Response(body=gzip.compress(b"data: " + b" " * 50_000_000), headers=headers)


async def _nonsense(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"]", content_type="application/json")


async def _redirects(request: web.Request) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://elsewhere.example/"})


async def test_compressed_events_are_limited_by_their_decompressed_size() -> None:
    async with (
        run_server(HandshakeServer(_bomb_of_events)) as url,
        open_transport("web", http(url), max_message_bytes=100_000) as transport,
        client(transport) as session,
    ):
        with pytest.raises(MCPError):
            await session.call_tool("t", {})


@pytest.mark.parametrize(
    ("answer", "expected", "data"),
    [
        (_breaks, "the connection to 127.0.0.1 broke", {"sent": True}),
        (_breaks_in_the_middle, "the connection to 127.0.0.1 broke", {"sent": True}),
        (_refuse_authorization, "HTTP 401 Unauthorized: who are you? ?token=[hidden]", {"status": 401}),
        (_broken, "the server answered with HTTP 500 Internal Server Error", {"status": 500}),
        (_huge, "the server's answer is larger than 100,000 bytes", {"sent": True}),
        (_bomb, "the server's answer is larger than 100,000 bytes", {"sent": True}),
        (_nonsense, "the server's answer is not a JSON-RPC message", {"status": 200}),
        (_redirects, "not followed", None),
    ],
    ids=["breaks", "breaks-in-the-middle", "401", "500", "huge", "bomb", "nonsense", "redirects"],
)
@pytest.mark.spec("3.13")
async def test_failed_request_fails_only_itself(answer: Answer, expected: str, data: Any) -> None:
    async with (
        run_server(HandshakeServer(answer)) as url,
        open_transport("web", http(url), max_message_bytes=100_000) as transport,
        client(transport) as session,
    ):
        with pytest.raises(MCPError) as error_info:
            await session.call_tool("t", {})
        assert expected in error_info.value.message
        assert error_info.value.data == data
        assert (await session.call_tool("t", {})).content[0].text == "fine"  # type: ignore[union-attr]
        assert not transport.lost_event.is_set()


async def test_refused_connection_counts_as_not_sent() -> None:
    async with run_server(HandshakeServer()) as url:
        pass
    async with open_transport("gone", http(f"{url}/?api_key=hunter2hunter2")) as transport:
        with pytest.raises(BaseExceptionGroup) as error_info:
            await client(transport).__aenter__()
    error = error_info.value.exceptions[0]
    assert isinstance(error, MCPError)
    assert error.message.startswith("cannot connect to 127.0.0.1")
    assert error.data == {"sent": False}
    assert "hunter2" not in str(error)


async def test_headers_and_auth_are_sent_to_one_origin_only() -> None:
    other_service = HandshakeServer()

    class Login(httpx2.Auth):
        def auth_flow(self, request: httpx2.Request) -> Any:
            request.headers["x-login"] = "me"
            yield request

    async with run_server(other_service) as elsewhere:

        async def redirect_away(request: web.Request) -> web.StreamResponse:
            return web.Response(status=307, headers={"location": f"{elsewhere}/"})

        service = HandshakeServer(redirect_away)
        async with (
            run_server(service) as url,
            open_transport("web", http(url, headers={"X-Api-Key": "k"}), auth=Login()) as transport,
            client(transport) as session,
        ):
            with pytest.raises(MCPError, match="not followed"):
                await session.call_tool("t", {})
    assert {(headers["x-api-key"], headers["x-login"]) for headers in service.headers} == {("k", "me")}
    assert other_service.headers == []


async def test_redirect_within_the_origin_is_followed() -> None:
    service = HandshakeServer()

    async def redirect(request: web.Request) -> web.StreamResponse:
        if request.path == "/mcp":
            return web.Response(status=308, headers={"location": "/mcp/"})
        return await service(request)

    async with (
        run_server(redirect) as url,
        open_transport("web", http(f"{url}/mcp")) as transport,
        client(transport) as session,
    ):
        assert (await session.call_tool("t", {})).content[0].text == "fine"  # type: ignore[union-attr]


async def test_failed_auth_fails_the_request_with_its_message() -> None:
    class Login(httpx2.Auth):
        async def async_auth_flow(self, request: httpx2.Request) -> Any:
            raise ProviderError("server 'web' needs a login")
            yield request

    async with run_server(HandshakeServer()) as url, open_transport("web", http(url), auth=Login()) as transport:
        with pytest.raises(BaseExceptionGroup) as error_info:
            await client(transport).__aenter__()
    assert "server 'web' needs a login" in str(error_info.value.exceptions[0])


async def test_hanging_server_does_not_delay_closing() -> None:
    hung = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        hung.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def hold(url: str) -> None:
        async with open_transport("web", http(url)) as transport, client(transport) as session:
            await session.call_tool("t", {})

    async with run_server(HandshakeServer(hang)) as url:
        task = asyncio.create_task(hold(url))
        await hung.wait()
        task.cancel()
        await asyncio.wait((task,))


async def test_libraries_log_neither_urls_nor_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        run_server(HandshakeServer()) as url,
        open_transport("web", http(f"{url}/?api_key=hunter2hunter2")) as transport,
        client(transport) as session,
    ):
        await session.call_tool("t", {"password": "hunter2hunter2"})
    assert "hunter2" not in json.dumps(
        [record.getMessage() for record in caplog.records if record.name != "aiohttp.access"]
    )


def test_certificates_are_loaded_once() -> None:
    assert http_client.tls_context() is http_client.tls_context()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ServerSpec(url="ftp://host/"), "must be http:// or https://host/…"),
        (ServerSpec(url="file:///etc/passwd"), "must be http:// or https://host/…"),
        (ServerSpec(url="http://host/a b"), "must be http:// or https://host/…"),
        (ServerSpec(url="http://host:port/"), "must be http:// or https://host/…"),
        (ServerSpec(url="http://"), "must be http:// or https://host/…"),
        (ServerSpec(url="http://host/", transport="websocket"), "must be ws:// or wss://host/…"),
        (ServerSpec(transport="http"), "has no url; give it one that begins with http:// or https://"),
    ],
    ids=["ftp", "file", "space", "port", "no-host", "websocket", "none"],
)
async def test_invalid_url_is_reported_without_showing_it(spec: ServerSpec, expected: str) -> None:
    with pytest.raises(ProviderError) as error_info:
        async with open_transport("web", spec):
            pass
    assert expected in str(error_info.value)
    assert "passwd" not in str(error_info.value)


@pytest.mark.parametrize(
    "headers",
    [{"X-Key": "hunter2\r\nHost: x"}, {"X-Key": "hünter2"}, {"X Key": "hunter2"}, {"X-Key": "hunter2\n"}],
    ids=["newline", "letter", "name", "end"],
)
async def test_invalid_header_is_reported_without_its_value(headers: dict[str, str]) -> None:
    with pytest.raises(ProviderError, match="characters that HTTP does not allow") as error_info:
        async with open_transport("web", http("http://127.0.0.1:1/", headers=headers)):
            pass
    assert "nter2" not in str(error_info.value)


@pytest.mark.spec("3.10")
async def test_a_server_configured_as_sse_is_reached_over_streamable_http_if_it_supports_that() -> None:
    for app, transport in ((library_server().streamable_http_app(), "http"), (library_server().sse_app(), "sse")):
        path = "/mcp" if transport == "http" else "/sse"
        async with serve(app) as url:
            provider = McpProvider("old", http(f"{url}{path}", transport="sse"))
            async with Toolspace(providers=[provider]) as ts:
                assert (await ts.call("old__double", {"x": 4})).ok
                assert provider.status().transport == transport

"""Results of REST tools: parsed, typed and limited, whatever the server sends."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.http_servers import http_server, raw_server
from tests.providers.rest.rest_tools import call, rest_spec, rest_toolspace
from toolspace import ToolContext
from toolspace.core.result import AudioPart, ImagePart, ResourcePart
from toolspace.core.secret_masking import register_secrets
from toolspace.providers.rest.client import HttpClient, HttpLimits
from toolspace.providers.rest.request_builder import compile_request
from toolspace.providers.rest.response import decode_text, parse_content_type

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def respond_with(body: bytes, content_type: str | None, status: int = 200, **headers: str) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.Response(status=status, body=body, headers=headers)
        if content_type is not None:
            response.headers["Content-Type"] = content_type
        return response

    return answer


async def result_of(
    body: bytes, content_type: str | None, status: int = 200, method: str = "GET", **headers: str
) -> Any:
    async with http_server(respond_with(body, content_type, status, **headers)) as server:
        return await call(rest_spec(server.url(), method=method))


@pytest.mark.spec("3.21")
@pytest.mark.parametrize(
    ("body", "content_type", "value"),
    [
        (b'{"a": [1, null]}', "application/json", {"a": [1, None]}),
        (b"[1]", "application/vnd.api+json; charset=utf-8", [1]),
        (b'\xef\xbb\xbf{"bom": 1}', "application/json", {"bom": 1}),
        ('"ä"'.encode("utf-16"), "application/json; charset=utf-16", "ä"),
        (b"", "application/json", None),
        (b"{broken", "application/json", "{broken"),
        (b'{"big": 123456789012345678901234567890}', "application/json", {"big": 123456789012345678901234567890}),
        (b"5", "text/plain", "5"),
        ("grüß".encode(), "text/html", "grüß"),
        ("grüß".encode("latin-1"), "text/plain; charset=ISO-8859-1", "grüß"),
        ("grüß".encode("cp1252"), "text/plain", "grüß"),
        ("grüß".encode(), "text/plain; charset=no-such", "grüß"),
        (b"<svg/>", "image/svg+xml", "<svg/>"),
        (b"plain words", "application/octet-stream", "plain words"),
        (b"", "text/plain", ""),
    ],
    ids=["json", "plus-json", "bom", "utf-16", "empty-json", "broken-json", "big-integer", "text", "html", "latin-1",
         "undeclared", "unknown-charset", "svg", "octets-of-text", "empty-text"],
)  # fmt: skip
async def test_a_response_is_its_json_or_text(body: bytes, content_type: str, value: object) -> None:
    result = await result_of(body, content_type)
    assert result.ok, result.error
    assert result.result == value
    assert result.extras["status"] == 200


@pytest.mark.spec("3.21")
async def test_json_is_recognized_without_a_content_type() -> None:
    async with raw_server(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}') as server:
        assert (await call(rest_spec(server.url()))).result == {"a": 1}


@pytest.mark.spec("3.21")
async def test_no_content_is_null() -> None:
    result = await result_of(b"", None, 204)
    assert result.ok
    assert result.result is None


@pytest.mark.spec("3.21")
async def test_a_head_request_returns_status_and_headers() -> None:
    result = await result_of(b"{}", "application/json", method="HEAD", ETag="x")
    assert result.result["status"] == 200
    assert result.result["headers"]["etag"] == "x"


@pytest.mark.spec("3.21")
@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        ("image/png", ImagePart),
        ("audio/mpeg", AudioPart),
        ("application/zip", ResourcePart),
        (None, ResourcePart),
        ("image/png;charset=UTF-8", ImagePart),
        ("application/zip;charset=UTF-8", ResourcePart),
    ],
    ids=["image", "audio", "zip", "unsaid", "image-with-charset", "zip-with-charset"],
)
async def test_binary_content_is_a_typed_part(content_type: str | None, kind: type) -> None:
    result = await result_of(PNG, content_type)
    (part,) = result.content
    assert isinstance(part, kind)
    data = part.blob if isinstance(part, ResourcePart) else part.data
    assert base64.b64decode(data) == PNG
    assert result.text.startswith("[")


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("status", [400, 404, 500, 304, 302])
async def test_a_status_outside_2xx_is_an_execution_error_with_status_and_body(status: int) -> None:
    result = await result_of(b'{"reason": "no such city"}', "application/json", status, **{"X-Request-Id": "r1"})
    assert not result.ok
    assert result.error_kind == "execution_error"
    assert result.executed
    assert result.error.startswith(f"HTTP {status} ")
    assert result.extras["status"] == status
    assert result.extras["headers"]["x-request-id"] == "r1"
    if status != 304:
        assert "no such city" in result.error
        assert result.extras["body"] == {"reason": "no such city"}


@pytest.mark.spec("3.21")
async def test_a_failed_response_is_shortened_and_shows_no_secret() -> None:
    register_secrets(["hush-hush-hush"])
    body = json.dumps({"you sent": "hush-hush-hush", "password": "p4", "token": "t", "long": "x" * 200_000}).encode()
    async with http_server(
        respond_with(body, "application/json", 403, **{"WWW-Authenticate": "Bearer hush-hush-hush"})
    ) as at:
        result = await call(rest_spec(at.url("/?key=hush-hush-hush"), headers={"X-Key": "hush-hush-hush"}))
    assert "hush" not in json.dumps(result.to_dict())
    assert len(result.error or "") < 3_000
    assert len(json.dumps(result.extras)) < 100_000


async def test_secrets_that_a_service_sends_back_are_masked() -> None:
    async def echo(request: web.Request) -> web.Response:
        fields = {
            "key": request.headers["X-Key"],
            "asked": request.raw_path,
            "said": request.headers["Authorization"],
        }
        return web.json_response({**fields, "access_token": "its-own-token"}, status=403)

    async with http_server(echo) as at:
        spec = rest_spec(
            at.url("/?appid=blossom-1"), headers={"X-Key": "blossom-2", "Authorization": "Bearer blossom-3"}
        )
        result = await call(spec)
    assert "HTTP 403" in (result.error or "")
    text = json.dumps(result.to_dict())
    assert "blossom" not in text
    assert "its-own-token" not in text


@pytest.mark.spec("3.21")
@pytest.mark.spec("4.6")
async def test_a_large_response_is_stored() -> None:
    text = "\n".join(f"line {number}" for number in range(150_000))
    async with (
        http_server(respond_with(text.encode(), "text/plain")) as server,
        rest_toolspace(rest_spec(server.url())) as toolspace,
    ):
        assert (await toolspace.call("rest__t", {})).result == text
        result = await toolspace.orchestrator.execute("rest__t", {})
        stored_output = result.result["tool_output"]
        assert stored_output["bytes"] == len(text)
        assert result.extras["status"] == 200
        read = await toolspace.call(
            "agent__read_output", {"handle": stored_output["handle"], "pattern": "^line 149999$"}
        )
    assert "line 149999" in read.text


@pytest.mark.spec("4.6")
async def test_a_large_json_response_is_data_for_a_program() -> None:
    value = [{"number": number, "text": "x" * 100} for number in range(20_000)]
    async with (
        http_server(respond_with(json.dumps(value).encode(), "application/json")) as server,
        rest_toolspace(rest_spec(server.url())) as toolspace,
    ):
        assert (await toolspace.call("rest__t", {})).result == value
        stored_output = (await toolspace.run().call("rest__t", {})).result["tool_output"]
    assert stored_output["bytes"] > 2_000_000


@pytest.mark.spec("3.21")
async def test_large_json_within_the_limit_is_parsed() -> None:
    value = [{"n": number, "text": "ä" * 10} for number in range(60_000)]
    body = json.dumps(value).encode()
    assert len(body) > 2 << 20
    async with http_server(respond_with(body, "application/json")) as server, HttpClientOf(server.url()) as send:
        result = await send(HttpLimits())
    assert result.result == value


class HttpClientOf:
    """Sends requests to one URL without a toolspace."""

    def __init__(self, url: str) -> None:
        self._request = compile_request(rest_spec(url))({})
        self._client = HttpClient()

    async def __aenter__(self) -> Any:
        return lambda limits: self._client.send(self._request, ToolContext(), limits=limits)

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "application/zip", "application/x-ndjson"])
async def test_a_response_beyond_the_limit_is_an_error(content_type: str) -> None:
    body = b'"' + b"x" * (3 << 20) + b'"'
    async with http_server(respond_with(body, content_type)) as server, HttpClientOf(server.url()) as send:
        with pytest.raises(Exception, match=r"has more than 2,097,152 bytes") as error_info:
            await send(HttpLimits(max_text_bytes=2 << 20, max_binary_bytes=2 << 20))
    assert error_info.value.kind == "limit_exceeded"  # pyright: ignore
    assert error_info.value.executed  # pyright: ignore


@pytest.mark.spec("3.21")
async def test_a_decompression_bomb_is_stopped() -> None:
    compressed_body = gzip.compress(bytes(64 << 20))
    assert len(compressed_body) < 100_000
    answer = respond_with(compressed_body, "application/zip", **{"Content-Encoding": "gzip"})
    async with http_server(answer) as server, HttpClientOf(server.url()) as send:
        with pytest.raises(Exception, match=r"has more than 1,048,576 bytes"):
            await send(HttpLimits(max_binary_bytes=1 << 20))


@pytest.mark.spec("3.21")
async def test_a_compressed_response_is_decompressed() -> None:
    result = await result_of(gzip.compress(b'{"a": 1}'), "application/json", **{"Content-Encoding": "gzip"})
    assert result.result == {"a": 1}


@pytest.mark.spec("1.7")
async def test_a_refused_connection_is_not_executed() -> None:
    with socket.socket() as bound_socket:  # Bound, and never listening.
        bound_socket.bind(("127.0.0.1", 0))
        result = await call(
            rest_spec(f"http://127.0.0.1:{bound_socket.getsockname()[1]}/?key=hush", method="POST"), {"a": 1}
        )
    assert result.error_kind == "transport_error"
    assert not result.executed
    assert "cannot connect to 127.0.0.1:" in (result.error or "")
    assert "hush" not in (result.error or "")


@pytest.mark.spec("1.7")
async def test_an_unknown_host_is_not_executed() -> None:
    result = await call(rest_spec("http://nowhere.invalid/"))
    assert result.error_kind == "transport_error"
    assert not result.executed


@pytest.mark.spec("1.7")
async def test_a_failed_tls_handshake_is_not_executed() -> None:
    async with http_server() as server:
        result = await call(rest_spec(server.url("/x").replace("http:", "https:")))
    assert result.error_kind == "transport_error"
    assert not result.executed
    assert not server.requests


@pytest.mark.spec("1.7")
@pytest.mark.parametrize(
    "sent_bytes",
    [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
     b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nContent-Length: 100\r\n\r\n{}\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nContent-Encoding: gzip\r\n\r\nnot gzip!",
     b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"],
    ids=["nothing", "garbage", "half", "half-a-stream", "broken-gzip", "endless-header"],
)  # fmt: skip
async def test_an_invalid_response_counts_as_executed(sent_bytes: bytes) -> None:
    async with raw_server(sent_bytes) as server:
        result = await call(rest_spec(server.url("/?key=hush"), method="POST"), {"a": 1})
    assert result.error_kind == "transport_error"
    assert result.executed
    assert "hush" not in (result.error or "")


@pytest.mark.spec("4.4")
@pytest.mark.parametrize("has_started", [False, True], ids=["before-the-answer", "inside-the-answer"])
async def test_a_timeout_closes_the_connection(has_started: bool) -> None:
    closed = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        try:
            if has_started:
                await response.prepare(request)
                await response.write(b"x")
            await asyncio.Event().wait()
        finally:
            closed.set()
        return response

    async with http_server(answer) as server:
        result = await call(rest_spec(server.url(), timeout=0.2))
        assert result.error_kind == "timeout"
        async with asyncio.timeout(20):
            await closed.wait()


@pytest.mark.spec("4.5")
async def test_cancelling_closes_the_connection() -> None:
    arrival, closed = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        arrival.set()
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()
        return web.Response()

    async with http_server(answer) as server, rest_toolspace(rest_spec(server.url())) as toolspace:
        call_task = asyncio.create_task(toolspace.call("rest__t", {}))
        async with asyncio.timeout(20):
            await arrival.wait()
            call_task.cancel()
            await asyncio.wait((call_task,))
            await closed.wait()


async def test_connections_are_reused_without_cookies() -> None:
    ports: set[int] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        response = web.json_response({"cookie": request.headers.get("Cookie")})
        response.set_cookie("session", "of the first user")
        return response

    async with http_server(answer) as server, rest_toolspace(rest_spec(server.url())) as toolspace:
        results = [await toolspace.call("rest__t", {}) for _ in range(3)]
    assert [result.result for result in results] == [{"cookie": None}] * 3
    assert len(ports) == 1


def test_one_client_serves_one_event_loop_after_another() -> None:
    client = HttpClient()

    async def once() -> Any:
        async with http_server(respond_with(b"{}", "application/json", Connection="close")) as server:
            return await client.send(compile_request(rest_spec(server.url()))({}), ToolContext())

    assert asyncio.run(once()).result == asyncio.run(once()).result == {}
    asyncio.run(client.aclose())


@given(header=st.text(max_size=60), body=st.binary(max_size=200))
def test_any_content_type_is_handled(header: str, body: bytes) -> None:
    media = parse_content_type(header)
    assert isinstance(decode_text(body, media), str | None)


@given(
    charset=st.sampled_from(["utf-8", "utf-16", "idna", "punycode", "unicode_escape", "rot13", "zlib", "hex", "utf-7"])
)
def test_unsafe_charsets_are_ignored(charset: str) -> None:
    media = parse_content_type(f"text/plain; charset={charset}")
    assert media.charset == (charset if charset.startswith("utf") else None)

"""The network tools: HTTP requests through the guarded client, against real servers on loopback."""

from __future__ import annotations

import asyncio
import base64
import gzip
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http_servers import Respond, http_server, raw_server
from toolspace import Settings, Toolspace
from toolspace.builtin.http_client import GuardedHttpClient, parse_url
from toolspace.builtin.network import http_get, http_post, http_request, network_tools
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import (
    ToolExecutionError,
    ToolPermissionError,
    ToolTransportError,
    ToolValidationError,
)

pytestmark = pytest.mark.spec("10.3")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolates toolspaces from the user's state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


async def call(tool: Tool, arguments: dict[str, Any], *allowed_hosts: str) -> Any:
    """The result of a call; raises the exception of a failure."""
    context = ToolContext(allowed_hosts=allowed_hosts)
    settings = Settings(tool_response_max_bytes=50_000_000)
    async with Toolspace(tools=network_tools, context=context, settings=settings) as toolspace:
        return (await toolspace.call(tool.name, arguments)).unwrap()


def respond_with(*args: Any, **kwargs: Any) -> Respond:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(*args, **kwargs)

    return answer


def redirect_to(status: int, location: str) -> Respond:
    return respond_with(status=status, headers={"location": location})


def redirecting_from(path: str, status: int, location: str) -> Respond:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == path:
            return web.Response(status=status, headers={"location": location})
        return web.Response(text=f"arrived at {request.path}")

    return answer


async def test_http_get_returns_status_headers_and_body():
    answer = respond_with(text="hello", headers=[("X-Kind", "a"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")])
    async with http_server(answer) as server:
        result = await call(http_get, {"url": server.url("/x?y=1"), "headers": {"X-Ask": "me"}}, server.address)
    assert result.keys() == {"status", "headers", "body"}
    assert (result["status"], result["body"]) == (200, "hello")
    assert result["headers"]["x-kind"] == "a"
    assert result["headers"]["set-cookie"] == "a=1, b=2"
    assert server.requests[0].method == "GET"
    assert server.requests[0].query == {"y": "1"}
    assert server.requests[0].headers["x-ask"] == "me"


@pytest.mark.parametrize("status", [404, 401, 500, 304])
async def test_any_status_is_a_result(status: int):
    async with http_server(respond_with(status=status)) as server:
        assert (await call(http_get, {"url": server.url()}, server.address))["status"] == status


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        ("grün".encode(), "text/plain", "grün"),
        ("grün".encode("latin-1"), "text/plain; charset=iso-8859-1", "grün"),
        ("grün".encode("cp1252"), "text/plain", "grün"),
        ("зима".encode("koi8-r"), 'text/html; charset="koi8-r"', "зима"),
        ('<meta charset="shift_jis">雪'.encode("shift_jis"), "text/html", '<meta charset="shift_jis">雪'),
        ("snow".encode("utf-16"), "text/plain", "snow"),
        (b'{"a": 1}', "application/json", '{"a": 1}'),
        (b"key: value", "application/octet-stream", "key: value"),
        (b"<svg/>", "image/svg+xml", "<svg/>"),
        (b"abc", "text/plain; charset=no-such", "abc"),
        (b"abc", "text/plain; charset=punycode", "abc"),
        (b"616263", "text/plain; charset=hex", "616263"),
        (b"a\\x41", "text/plain; charset=unicode_escape", "a\\x41"),
        (b"", "image/png", ""),
    ],
)
async def test_text_is_decoded_with_its_declared_charset(body: bytes, content_type: str, text: str):
    async with http_server(respond_with(body=body, headers={"content-type": content_type})) as server:
        result = await call(http_get, {"url": server.url()}, server.address)
    assert result["body"] == text
    assert "encoding" not in result


async def test_a_binary_body_is_marked_as_base64():
    image = b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe"
    async with http_server(respond_with(body=image, content_type="image/png")) as server:
        result = await call(http_get, {"url": server.url()}, server.address)
    assert result["encoding"] == "base64"
    assert base64.b64decode(result["body"]) == image


@pytest.mark.parametrize(
    ("body", "sent_body", "content_type"),
    [
        ({"a": [1, "ü"]}, '{"a":[1,"ü"]}', "application/json"),
        ([1, 2], "[1,2]", "application/json"),
        ('{"a": 1}', '{"a": 1}', "application/json"),
        ("{not json", "{not json", "text/plain; charset=utf-8"),
        ("[" * 100_000, "[" * 100_000, "text/plain; charset=utf-8"),
        ("grün", "grün", "text/plain; charset=utf-8"),
    ],
)
async def test_post_sends_objects_as_json_and_strings_unchanged(body: Any, sent_body: str, content_type: str):
    async with http_server(respond_with()) as server:
        await call(http_post, {"url": server.url(), "body": body}, server.address)
    assert server.requests[0].method == "POST"
    assert server.requests[0].body.decode() == sent_body
    assert server.requests[0].headers["content-type"] == content_type


async def test_content_type_of_the_caller_is_kept():
    arguments: dict[str, Any] = {"body": {"a": 1}, "headers": {"content-TYPE": "application/ld+json"}}
    async with http_server(respond_with()) as server:
        await call(http_post, {"url": server.url(), **arguments}, server.address)
    assert server.requests[0].headers["content-type"] == "application/ld+json"


async def test_post_without_a_body_has_content_length_zero():
    async with http_server(respond_with()) as server:
        await call(http_post, {"url": server.url()}, server.address)
    assert server.requests[0].headers["content-length"] == "0"


@pytest.mark.parametrize("method", ["GET", "put", "PATCH", "DELETE", "OPTIONS", "HEAD"])
async def test_http_request_sends_any_method(method: str):
    async with http_server(respond_with(text="body")) as server:
        result = await call(http_request, {"method": method, "url": server.url(), "body": "x"}, server.address)
    assert server.requests[0].method == method.upper()
    assert result["body"] == ("" if method == "HEAD" else "body")


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "", "GET /x HTTP/1.1\r\nHost: evil\r\n\r\nGET", "GÉT"])
async def test_an_invalid_method_is_rejected(method: str):
    with pytest.raises(ToolValidationError, match="method"):
        await call(http_request, {"method": method, "url": "http://127.0.0.1:9/"}, "127.0.0.1")


@pytest.mark.parametrize(
    "headers",
    [
        {"x": "a\r\nHost: evil"},
        {"x": "a\nb"},
        {"x": "a\x00b"},
        {"x\r\ny": "a"},
        {"x y": "a"},
        {"": "a"},
        {"x": "\ud800"},
        {"Host": "evil"},
        {"host": "evil"},
        {"Content-Length": "1"},
        {"Transfer-Encoding": "chunked"},
        {"Connection": "upgrade"},
        {"Proxy-Authorization": "x"},
    ],
)
async def test_framing_headers_are_rejected(headers: dict[str, str]):
    with pytest.raises(ToolValidationError, match="headers"):
        await GuardedHttpClient(["127.0.0.1"]).send("GET", "http://127.0.0.1:9/", headers=headers)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "//example.com/",
        "file:///etc/passwd",
        "ftp://example.com/",
        "gopher://127.0.0.1:70/_x",
        "javascript:alert(1)",
        "http://",
        "http:///path",
        "http://exa mple.com/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://example.com\\@127.0.0.1/",
        "http://127.0.0.1%2f@example.com/",
        "http://example.com/a\r\nb",
        "http://127%2e0.0.1/",
        "http://[fe80::1%25eth0]/",
        "http://[::1",
        "http://1.2.3.4.5/",
        "http://xn--/",
        "http://\ud800/",
    ],
)
async def test_an_invalid_url_is_rejected(url: str):
    with pytest.raises(ToolValidationError, match="url"):
        await GuardedHttpClient(["*"]).send("GET", url)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_url_or_a_validation_error(text: str):
    for candidate in (text, f"http://{text}", f"http://127.0.0.1{text}", f"http://a.example/{text}"):
        try:
            url = parse_url(candidate)
        except ToolValidationError:
            continue
        assert url.scheme in ("http", "https")
        assert parse_url(str(url)).raw_host == url.raw_host


async def test_a_password_in_a_url_is_rejected_and_not_shown():
    with pytest.raises(ToolValidationError, match="Authorization") as refusal:
        await call(http_get, {"url": "http://me:s3cret@example.com/?token=s3cret"})
    assert "s3cret" not in str(refusal.value)


async def test_a_loopback_server_is_refused_unless_allowed():
    async with http_server(respond_with()) as server:
        with pytest.raises(ToolPermissionError, match=r"127\.0\.0\.1 is a loopback address; add it to allowedHosts"):
            await call(http_get, {"url": server.url()})
        with pytest.raises(ToolPermissionError, match="localhost resolves to the loopback address"):
            await call(http_get, {"url": f"http://localhost:{server.port}/"}, f"127.0.0.1:{server.port + 1}")
    assert server.requests == []


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0177.0.0.1",
        "0x7f.1",
        "127.0.0.1.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "0",
        "0.0.0.0",
        "１２７.0.0.1",
        "127。0。0。1",
        "localhost",
        "localhost.",
        "LOCALHOST",
        "169.254.169.254",
        "[fd00:ec2::254]",
        "0xA9FEA9FE",
        "metadata.google.internal",
        "10.0.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
    ],
)
async def test_every_spelling_of_a_refused_address_is_refused(host: str):
    with pytest.raises(ToolPermissionError, match="allowedHosts"):
        await call(http_get, {"url": f"http://{host}/"})


async def test_an_unusual_spelling_of_an_allowed_address_works():
    async with http_server(respond_with(text="here")) as server:
        result = await call(http_get, {"url": f"http://127.1:{server.port}/"}, server.address)
    assert result["body"] == "here"
    assert server.requests[0].headers["host"] == server.address


class Names:
    """A resolver that returns the given answers one after the other."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.resolved_hosts: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.resolved_hosts.append(host)
        return self.answers.pop(0)


async def test_a_name_that_resolves_to_a_private_address_is_refused():
    names = Names(["10.0.0.1"])
    with pytest.raises(ToolPermissionError) as refusal:
        await GuardedHttpClient(resolve=names).send("GET", "http://db.example/")
    assert str(refusal.value) == (
        "Permission denied: db.example resolves to the private address 10.0.0.1; "
        "add the host to allowedHosts to allow it"
    )


@pytest.mark.parametrize("address", ["::ffff:10.0.0.1", "64:ff9b::a00:1", "fe80::1%lo", "::1", "169.254.169.254"])
async def test_a_name_that_resolves_to_a_mapped_private_address_is_refused(address: str):
    with pytest.raises(ToolPermissionError):
        await GuardedHttpClient(resolve=Names([address])).send("GET", "http://db.example/")


async def test_the_connection_uses_the_checked_address():
    names = Names(["10.0.0.1", "127.0.0.1", "127.0.0.1"])
    async with http_server(respond_with(text="here")) as server:
        client = GuardedHttpClient([server.address], resolve=names)
        response = await client.send("GET", f"http://made-up.example:{server.port}/")
    assert response.body == b"here"
    assert names.resolved_hosts == ["made-up.example"]
    assert server.requests[0].headers["host"] == f"made-up.example:{server.port}"


async def test_a_redirect_resolves_and_checks_the_host_again():
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    async with http_server(redirect_to(302, "/again")) as server:
        with pytest.raises(ToolPermissionError, match=r"redirects to .*/again.* resolves to the private address"):
            await GuardedHttpClient([server.address], resolve=names).send(
                "GET", f"http://rebind.example:{server.port}/"
            )
    assert len(server.requests) == 1


async def test_an_allowed_host_may_resolve_to_any_address():
    async with http_server(respond_with(text="here")) as server:
        client = GuardedHttpClient(["*.corp.example"], resolve=Names(["127.0.0.1"]))
        response = await client.send("GET", f"http://wiki.corp.example:{server.port}/")
    assert response.status == 200


@pytest.mark.parametrize("answer", [[], OSError("no such host")])
async def test_a_name_without_an_address_is_a_transport_error(answer: list[str] | OSError):
    async def resolve(host: str, port: int) -> list[str]:
        if isinstance(answer, OSError):
            raise answer
        return answer

    with pytest.raises(ToolTransportError, match=r"cannot find the address of gone\.example"):
        await GuardedHttpClient(resolve=resolve).send("GET", "http://gone.example/")


async def test_redirects_are_followed_and_the_final_url_is_returned():
    async with http_server(redirecting_from("/old", 301, "new?x=1#part")) as server:
        result = await call(http_get, {"url": server.url("/old")}, server.address)
    assert result["body"] == "arrived at /new"
    assert result["url"] == server.url("/new?x=1")


@pytest.mark.parametrize("location", ["http://127.0.0.1:{port}/", "//localhost:{port}/", "http://169.254.169.254/x"])
async def test_a_redirect_to_a_host_that_is_not_allowed_is_refused(location: str):
    async with (
        http_server(respond_with()) as second_server,
        http_server(redirect_to(302, location.format(port=second_server.port))) as server,
    ):
        with pytest.raises(ToolPermissionError, match="redirects to"):
            await call(http_get, {"url": server.url()}, server.address)
    assert len(server.requests) == 1
    assert second_server.requests == []


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x.example/", "http://[::1", "http://u:p@x.example/"])
async def test_a_redirect_to_an_invalid_url_fails(location: str):
    async with http_server(redirect_to(302, location)) as server:
        with pytest.raises(ToolExecutionError, match="redirects, but"):
            await call(http_get, {"url": server.url()}, server.address)


async def test_a_refused_redirect_of_a_post_counts_as_executed():
    async with http_server(redirect_to(307, "http://10.0.0.1/")) as server:
        with pytest.raises(ToolPermissionError, match=r"Permission denied: .* redirects to") as error_info:
            await call(http_post, {"url": server.url()}, server.address)
    assert error_info.value.executed


async def test_a_redirect_without_a_location_is_returned():
    async with http_server(respond_with(status=302)) as server:
        assert (await call(http_get, {"url": server.url()}, server.address))["status"] == 302


async def test_too_many_redirects_are_an_error():
    async with http_server(redirect_to(302, "/again")) as server:
        with pytest.raises(ToolExecutionError, match="more than 10 times"):
            await call(http_get, {"url": server.url()}, server.address)
    assert len(server.requests) == 11


@pytest.mark.parametrize(
    ("status", "method", "becomes"),
    [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "POST", "GET"),
        (303, "PUT", "GET"),
        (301, "PUT", "PUT"),
        (302, "DELETE", "DELETE"),
        (307, "POST", "POST"),
        (308, "PUT", "PUT"),
        (303, "HEAD", "HEAD"),
    ],
)
async def test_the_redirect_status_decides_the_method(status: int, method: str, becomes: str):
    async with http_server(redirecting_from("/old", status, "/new")) as server:
        arguments = {"method": method, "url": server.url("/old"), "body": {"a": 1}}
        await call(http_request, arguments, server.address)
    second_request = server.requests[1]
    assert second_request.method == becomes
    assert second_request.body == (b"" if becomes == "GET" else b'{"a":1}')
    assert ("content-type" in second_request.headers) == (becomes != "GET")


async def test_another_origin_receives_no_secret_headers():
    secrets = {"Authorization": "Bearer s", "Cookie": "c=s", "X-Api-Key": "s"}
    async with (
        http_server(respond_with()) as second_server,
        http_server(redirect_to(307, second_server.url())) as server,
    ):
        arguments = {"url": server.url(), "headers": {**secrets, "Accept": "text/x"}}
        await call(http_get, arguments, server.address, second_server.address)
    assert {name.lower() for name in secrets} <= server.requests[0].headers.keys()
    assert not {name.lower() for name in secrets} & second_server.requests[0].headers.keys()
    assert second_server.requests[0].headers["accept"] == "text/x"


async def test_a_redirect_within_the_origin_keeps_the_headers():
    async with http_server(redirecting_from("/old", 302, "/new")) as server:
        arguments = {"url": server.url("/old"), "headers": {"Authorization": "Bearer s"}}
        await call(http_get, arguments, server.address)
    assert server.requests[1].headers["authorization"] == "Bearer s"


async def test_cookies_are_not_kept_between_requests():
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/new":
            return web.Response()
        return web.Response(status=302, headers={"location": "/new", "set-cookie": "a=1"})

    async with http_server(answer) as server:
        await call(http_get, {"url": server.url("/old")}, server.address)
    assert "cookie" not in server.requests[1].headers


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with http_server(respond_with(text="here")) as server:
        assert (await call(http_get, {"url": server.url()}, server.address))["body"] == "here"


async def test_a_large_body_is_truncated_and_marked():
    async with http_server(respond_with(body="é".encode() * 5_500_000, content_type="text/plain")) as server:
        result = await call(http_get, {"url": server.url()}, server.address)
    assert result["truncated"] is True
    assert result["body"] == "é" * 5_000_000


async def test_truncation_inside_a_character_drops_the_character():
    async with http_server(respond_with(body=("x" + "é" * 6_000_000).encode())) as server:
        result = await call(http_get, {"url": server.url()}, server.address)
    assert result["body"][-1] == "é"


async def test_a_decompression_bomb_is_truncated():
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    compressed_body = (
        b"".join(packer.compress(bytes(1_000_000).replace(b"\0", b"a")) for _ in range(100)) + packer.flush()
    )
    async with http_server(respond_with(body=compressed_body, headers={"content-encoding": "gzip"})) as server:
        result = await call(http_get, {"url": server.url()}, server.address)
    assert len(compressed_body) < 200_000
    assert result["truncated"] is True
    assert len(result["body"]) == 10_000_000


async def test_an_endless_compressed_body_is_truncated():
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
    async with raw_server(head + gzip.compress(b"") * 50_000) as server:
        response = await GuardedHttpClient([server.address], max_body_bytes=100_000).send("GET", server.url())
    assert response.truncated
    assert response.body == b""


@pytest.mark.parametrize(("members", "is_truncated"), [(1_000, False), (1_001, True), (200_000, True)])
async def test_a_body_of_many_gzip_members_is_truncated(members: int, is_truncated: bool):
    body = gzip.compress(b"a") + gzip.compress(b"") * (members - 2) + gzip.compress(b"b")
    async with http_server(respond_with(body=body, headers={"content-encoding": "gzip"})) as server:
        result = await call(http_get, {"url": server.url()}, server.address)
    assert (result["body"], result.get("truncated", False)) == ("a" if is_truncated else "ab", is_truncated)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "compressed_body"),
    [
        ("gzip", gzip.compress(b"hello", mtime=0)),
        ("x-gzip", gzip.compress(b"hello", mtime=0)),
        ("gzip", gzip.compress(b"hel", mtime=0) + gzip.compress(b"lo", mtime=0)),
        ("gzip", gzip.compress(b"hello", mtime=0) + b"trailing"),
        ("deflate", zlib.compress(b"hello")),
        ("deflate", raw_deflate(b"hello")),
        ("identity", b"hello"),
    ],
)
async def test_a_compressed_body_is_decompressed(encoding: str, compressed_body: bytes):
    async with http_server(respond_with(body=compressed_body, headers={"content-encoding": encoding})) as server:
        assert (await call(http_get, {"url": server.url()}, server.address))["body"] == "hello"


async def test_an_invalid_compressed_body_is_a_transport_error():
    async with http_server(respond_with(body=b"no gzip", headers={"content-encoding": "gzip"})) as server:
        with pytest.raises(ToolTransportError, match="cannot be decompressed"):
            await call(http_get, {"url": server.url()}, server.address)


async def test_a_refused_connection_is_a_transport_error():
    async with http_server(respond_with()) as server:
        pass
    with pytest.raises(ToolTransportError, match=f"cannot connect to {server.address}"):
        await call(http_get, {"url": server.url("/?key=s3cret")}, server.address)


async def test_a_server_without_tls_is_a_transport_error():
    async with http_server(respond_with()) as server:
        with pytest.raises(ToolTransportError, match="TLS"):
            await call(http_get, {"url": f"https://{server.address}/"}, server.address)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "without an answer"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "did not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "in the middle of its answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "did not answer in HTTP"),
    ],
)
async def test_an_invalid_response_is_a_transport_error_without_the_query(answer: bytes, message: str):
    async with raw_server(answer) as server:
        with pytest.raises(ToolTransportError, match=message) as failure:
            await call(http_get, {"url": server.url("/?key=s3cret")}, server.address)
    assert "s3cret" not in str(failure.value)
    assert failure.value.__cause__ is None


async def test_invalid_bytes_in_headers_are_replaced():
    async with raw_server(b"HTTP/1.1 200 OK\r\nX: a\xffb\r\nContent-Length: 0\r\n\r\n") as server:
        result = await call(http_get, {"url": server.url()}, server.address)
    assert result["headers"]["x"] == "a\ufffdb"


async def test_cancelling_closes_the_connection():
    request_event, disconnect_event = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        request_event.set()
        try:
            await asyncio.Event().wait()
        finally:
            disconnect_event.set()
        return web.Response()

    async with http_server(answer) as server:
        task = asyncio.create_task(call(http_get, {"url": server.url()}, server.address))
        await request_event.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await disconnect_event.wait()


async def test_a_body_with_half_a_surrogate_pair_is_rejected():
    with pytest.raises(ToolValidationError, match="surrogate"):
        await http_post.function("http://example.com/", "\ud800", context=ToolContext())


def test_listing_the_tools_does_not_import_aiohttp():
    script = (
        "import sys, toolspace.builtin.network as n; [t.input_schema for t in n.network_tools];"
        "print([m for m in ('aiohttp', 'yarl', 'pydantic', 'ssl') if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_the_tools_have_annotations_and_descriptions():
    assert [tool.name for tool in network_tools] == ["http_get", "http_post", "http_request", "web_search"]
    assert all(tool.category == "network" and tool.annotations.open_world for tool in network_tools)
    assert [bool(tool.annotations.read_only) for tool in network_tools] == [True, False, False, True]

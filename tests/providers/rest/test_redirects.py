"""Redirects of REST tools, and the headers that follow them."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from tests.http_servers import http_server
from tests.providers.rest.rest_tools import call, rest_spec, rest_toolspace
from toolspace.core.network_addresses import Address
from toolspace.errors import ToolPermissionError
from toolspace.providers.rest.client import HttpClient, HttpRequest
from toolspace.providers.rest.redirects_and_retries import redirect_request

KEYS = {"Authorization": "Bearer hush", "Cookie": "a=hush", "X-Api-Key": "hush", "Accept-Language": "fr"}


def redirect_to(location: str, status: int = 302) -> Any:
    """Redirects `/` to a location and answers all other paths."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/":
            return web.Response(status=status, headers={"Location": location})
        return web.json_response({"at": request.path_qs})

    return answer


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_a_safe_request_follows_redirects_and_keeps_its_headers(method: str, status: int) -> None:
    async with http_server(redirect_to("there?x=1", status)) as server:
        result = await call(rest_spec(server.url(), method=method, headers=KEYS))
    assert result.ok, result.error
    assert [request.target for request in server.requests] == ["/", "/there?x=1"]
    assert server.requests[1].method == method
    assert server.requests[1].headers["x-api-key"] == "hush"


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_an_unsafe_request_does_not_follow_redirects(method: str) -> None:
    async with http_server(redirect_to("/there")) as server:
        result = await call(rest_spec(server.url(), method=method))
    assert result.error == f"HTTP 302 Found: redirects to /there; redirects are not followed for {method}"
    assert len(server.requests) == 1


@pytest.mark.spec("3.21")
async def test_another_server_receives_no_secrets() -> None:
    async with http_server() as other_server, http_server(redirect_to(other_server.url("/there"))) as server:
        result = await call(rest_spec(server.url(), headers=KEYS))
    assert result.ok, result.error
    (request,) = other_server.requests
    assert request.headers["accept-language"] == "fr"
    assert not {"authorization", "cookie", "x-api-key"} & set(request.headers)
    assert "hush" not in str(request)


@pytest.mark.spec("3.21")
async def test_circular_redirects_end() -> None:
    async with http_server(redirect_to("/")) as server:
        result = await call(rest_spec(server.url()))
    assert "redirected more than 5 times" in (result.error or "")
    assert len(server.requests) == 6


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("location", ["ftp://x/", "javascript:1", "http://[::1", "file:///etc/passwd"])
async def test_a_location_that_is_no_http_url_is_an_error(location: str) -> None:
    async with http_server(redirect_to(location)) as server:
        result = await call(rest_spec(server.url()))
    assert result.error_kind == "execution_error"
    assert len(server.requests) == 1


@pytest.mark.spec("3.21")
def test_a_redirect_from_https_to_http_is_refused() -> None:
    request = HttpRequest("GET", URL("https://api.example/a?key=hush"))
    with pytest.raises(ToolPermissionError, match=r"from https to http$") as error_info:
        redirect_request(request, "http://api.example/a")
    assert "hush" not in str(error_info.value)
    assert redirect_request(request, "//other.example/b").url == URL("https://other.example/b")


def test_an_upgrade_to_https_keeps_the_headers() -> None:
    request = HttpRequest("GET", URL("http://api.example/a"), {"X-Key": "k"})
    assert redirect_request(request, "https://api.example/a").headers == {"X-Key": "k"}
    assert list(redirect_request(request, "https://api.example:8443/a").headers) == []
    assert str(redirect_request(request, "https://u:p@other.example/a#f").url) == "https://other.example/a"


def special(address: Address) -> str | None:
    """In these tests 127.0.0.2 counts as public; all other addresses are private."""
    return None if str(address) == "127.0.0.2" else "private"


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"])
async def test_a_public_server_cannot_redirect_to_a_private_address(host: str) -> None:
    client = HttpClient(classify_address=special)
    async with http_server() as private:
        location = f"http://{host}:{private.port}/there"
        async with http_server(redirect_to(location), host="127.0.0.2") as public:
            async with rest_toolspace(rest_spec(public.url()), client=client) as toolspace:
                result = await toolspace.call("rest__t", {})
            await client.aclose()
    assert result.error_kind == "not_permitted", result.error
    assert not result.executed
    assert not private.requests


@pytest.mark.spec("3.21")
async def test_a_configured_private_server_may_redirect_to_another() -> None:
    client = HttpClient(classify_address=special)
    async with (
        http_server(host="127.0.0.3") as other_server,
        http_server(redirect_to(other_server.url("/there"))) as server,
    ):
        async with rest_toolspace(rest_spec(server.url()), client=client) as toolspace:
            result = await toolspace.call("rest__t", {})
        await client.aclose()
    assert result.ok, result.error
    assert len(other_server.requests) == 1


@pytest.mark.spec("3.21")
async def test_a_public_server_may_redirect_to_another_public_one() -> None:
    client = HttpClient(classify_address=lambda address: None)
    async with (
        http_server(host="127.0.0.3") as other_server,
        http_server(redirect_to(other_server.url("/there"))) as server,
    ):
        async with rest_toolspace(rest_spec(server.url()), client=client) as toolspace:
            result = await toolspace.call("rest__t", {})
        await client.aclose()
    assert result.ok, result.error

"""The application around all routes: how it reads requests, refuses invalid ones, and sends responses and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.server.gateway_api import ApiClient, ApiResponse, open_app_api
from toolspace.errors import RefusedError, StorageUnavailable
from toolspace.server import requests
from toolspace.server.api_types import JsonRequestBody, Name, QueryParameters
from toolspace.server.authorization import Access
from toolspace.server.gateway import Gateway
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, Response
from toolspace.server.routing import Route

LIMIT = 10_000


class Thing(JsonRequestBody, frozen=True, kw_only=True):
    name: Name
    count: int = 1
    data: Any = None


class ThingQuery(QueryParameters, frozen=True, kw_only=True):
    limit: int = 10
    loud: bool = False


async def create(request: Request) -> dict[str, Any]:
    thing = await request.json(Thing)
    return {"name": thing.name, "count": thing.count, "by": request.caller.subject}


async def look(request: Request) -> dict[str, Any]:
    query = request.query(ThingQuery)
    return {"id": request.params["thingId"], "limit": query.limit, "loud": query.loud}


async def fail(request: Request) -> None:
    faults: dict[str, Exception] = {
        "storage": StorageUnavailable("connection to 10.0.0.5 refused"),
        "refused": RefusedError("conflict", "it is there already", name="x"),
        "problem": Problem(418, "short and stout", hint="tea"),
        "bug": KeyError("the-inner-secret"),
        "invalid": msgspec.ValidationError("Expected `int`, got `str` - at `$.a[0]`"),
    }
    raise faults[request.params["how"]]


async def empty(_: Request) -> Response:
    return Response(status=204)


def route(method: str, path: str, handler: Any, access: Access = Access.OPEN) -> Route:
    return Route(method=method, path=path, handler=handler, access=access, summary="", tag="test")


ROUTES = [
    route("POST", "/things", create, Access.SECRET),
    route("GET", "/things/{thingId}", look),
    route("GET", "/fail/{how}", fail),
    route("DELETE", "/things/{thingId}", empty),
]


@pytest.fixture
async def frame(gateway: Gateway) -> AsyncIterator[ApiClient]:
    async with open_app_api(gateway, ROUTES, max_body=LIMIT) as api:
        yield api


async def raw(api: ApiClient, *pieces: bytes, end: bool = True) -> bytes:
    """Sends raw bytes to the server; returns everything until the connection closes."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    if not end:
        writer.close()
        await writer.wait_closed()
        return b""
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.spec("12.1")
async def test_the_value_that_a_handler_returns_is_sent_as_json(frame: ApiClient) -> None:
    reply = await frame.post("/things", {"name": "Ann", "count": 3})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.data == {"name": "Ann", "count": 3, "by": "key_configured"}
    assert reply.headers["cache-control"] == "no-store"


@pytest.mark.spec("12.1")
async def test_an_unknown_path_is_404_and_names_the_openapi_document(frame: ApiClient) -> None:
    reply = await frame.get("/nowhere")
    assert reply.status == 404
    assert reply.data["title"] == "Not Found"
    assert "/openapi.json" in reply.detail
    assert "remove the slash at the end" in (await frame.get("/things/")).detail


async def test_a_method_that_is_not_allowed_is_405_with_the_allowed_ones(frame: ApiClient) -> None:
    reply = await frame.put("/things/a")
    assert (reply.status, reply.headers["allow"]) == (405, "DELETE, GET, HEAD, OPTIONS")
    reply = await frame.request("OPTIONS", "/things/a")
    assert (reply.status, reply.headers["allow"], reply.body) == (204, "DELETE, GET, HEAD, OPTIONS", b"")


async def test_head_responds_like_get_without_the_body(frame: ApiClient) -> None:
    get_response = await frame.get("/things/a")
    head = await frame.request("HEAD", "/things/a")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == get_response.headers["content-length"]
    assert (await frame.request("HEAD", "/nowhere")).status == 404


async def test_a_204_response_has_no_body(frame: ApiClient) -> None:
    reply = await frame.delete("/things/a")
    assert (reply.status, reply.body) == (204, b"")
    assert "content-length" not in reply.headers


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        (b'{"name": 7}', "$.name", "expected `str`, got `int`"),
        (b'{"name": ""}', "$.name", "length >= 1"),
        (b'{"name": "a\\u0000b"}', "$.name", "regex"),
        (b'{"count": 1}', "$", "Invalid body: object missing required field `name`"),
        (b'{"name": "a", "coumt": 2}', "$.coumt", 'did you mean "count"'),
        (b'{"name": "a", "count": 1.5}', "$.count", "expected `int`"),
        (b'{"name": "a", "data": 1e999}', "$.data", "out of range"),
        (b"[]", "$", "expected `object`"),
        (b"", "$", "missing required field `name`"),
    ],
)
async def test_an_invalid_body_is_400_with_the_path_of_the_value(
    frame: ApiClient, body: bytes, path: str, words: str
) -> None:
    reply = await frame.post("/things", raw=body)
    assert (reply.status, reply.data["path"]) == (400, path)
    assert words in reply.detail


async def test_an_invalid_enum_value_is_400_with_the_valid_values(api: ApiClient) -> None:
    reply = await api.get("/api/runs?status=done")
    assert (reply.status, reply.data["path"]) == (400, "$.status")
    assert "'done'; expected one of canceled, completed, failed, queued, running, waiting_tool" in reply.detail
    reply = await api.post("/api/entities", {"type": "person", "name": "Ann"})
    assert "'person'; expected one of agent, human, service" in reply.detail


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b"{'name': 1}",
        b'{"name": "\\ud800"}',
        b'{"name": NaN}',
        b'{"name": "a", "data": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"name": "a", "data": ' + b"[" * 150 + b"]" * 150 + b"}",
        b'{"name": "a", "data": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
async def test_a_body_that_is_not_json_or_nested_too_deeply_is_refused(frame: ApiClient, body: bytes) -> None:
    reply = await frame.post("/things", raw=body[:LIMIT])
    assert reply.status == 400
    assert "body" in reply.detail
    assert "jSON" not in reply.detail


async def test_a_wide_body_is_accepted(frame: ApiClient) -> None:
    data = [{"a": [1]} for _ in range(500)]
    assert (await frame.post("/things", {"name": "a", "data": data})).status == 200


async def test_other_media_types_are_415(frame: ApiClient) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=latin-1"):
        reply = await frame.post("/things", raw=b'{"name":"a"}', headers={"content-type": kind})
        assert reply.status == 415, kind
    for kind in ("application/json; charset=utf-8", "application/merge-patch+json", "Application/JSON"):
        assert (await frame.post("/things", raw=b'{"name":"a"}', headers={"content-type": kind})).status == 200


@pytest.mark.spec("8.3")
async def test_a_body_beyond_the_limit_is_413_with_or_without_content_length(frame: ApiClient) -> None:
    reply = await frame.post("/things", raw=b" " * (LIMIT + 1))
    assert reply.status == 413
    assert str(LIMIT) in reply.detail
    head = b"POST /things HTTP/1.1\r\nhost: localhost\r\nx-secret-key: " + frame.headers["x-secret-key"].encode()
    chunk = b"%x\r\n%b\r\n" % (6_000, b" " * 6_000)
    answer = await raw(frame, head + b"\r\ntransfer-encoding: chunked\r\n\r\n", chunk, chunk, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    answer = await raw(frame, head + b"\r\ncontent-length: 99999999999999999999999\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))


@pytest.mark.spec("8.3")
async def test_a_body_that_does_not_arrive_is_408(frame: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_TIMEOUT_SECONDS", 0.05)
    head = b"POST /things HTTP/1.1\r\nhost: localhost\r\nx-secret-key: " + frame.headers["x-secret-key"].encode()
    answer = await raw(frame, head + b'\r\ncontent-length: 100\r\n\r\n{"na')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer


async def test_a_client_that_disconnects_during_its_body_does_not_affect_others(frame: ApiClient) -> None:
    head = b"POST /things HTTP/1.1\r\nhost: localhost\r\nx-secret-key: " + frame.headers["x-secret-key"].encode()
    await raw(frame, head + b'\r\ncontent-length: 100\r\n\r\n{"name":"a"', end=False)
    assert (await frame.post("/things", {"name": "b"})).status == 200


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("limit=x", "$.limit"),
        ("limit=1&limit=2", "more than once"),
        ("limt=1", 'did you mean "limit"'),
        ("loud=maybe", "$.loud"),
        ("limit=%ff", "Invalid query string"),
        ("limit=%00", "NUL"),
        ("&".join(f"a{n}=1" for n in range(80)), "Invalid query string"),
    ],
)
async def test_an_invalid_query_is_400_with_the_parameter(frame: ApiClient, query: str, words: str) -> None:
    reply = await frame.get(f"/things/a?{query}")
    assert reply.status == 400
    assert words in reply.detail


async def test_query_parameters_are_converted_to_their_types(frame: ApiClient) -> None:
    assert (await frame.get("/things/a?limit=25&loud=true")).data == {"id": "a", "limit": 25, "loud": True}


async def test_an_invalid_id_in_the_path_is_404(frame: ApiClient) -> None:
    for odd in ("a%20b", "a%00b", "%F0%9F%98%80", "a" * 129, "a%2Fb"):
        assert (await frame.get(f"/things/{odd}")).status == 404, odd


async def test_an_internal_error_hides_its_details_and_is_logged_under_its_id(
    frame: ApiClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "toolspace.server"):
        reply = await frame.get("/fail/bug")
    assert reply.status == 500
    assert b"inner-secret" not in reply.body
    assert b"KeyError" not in reply.body
    assert reply.data["errorId"] in caplog.text
    assert "the-inner-secret" in caplog.text


@pytest.mark.spec("15.3")
async def test_an_unavailable_database_is_503_with_retry_after(frame: ApiClient) -> None:
    reply = await frame.get("/fail/storage")
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert "10.0.0.5" not in reply.detail


async def test_refused_errors_and_problems_keep_their_status_and_detail(frame: ApiClient) -> None:
    reply = await frame.get("/fail/refused")
    assert (reply.status, reply.detail, reply.data["name"]) == (409, "it is there already", "x")
    reply = await frame.get("/fail/problem")
    assert (reply.status, reply.data["hint"], reply.data["title"]) == (418, "tea", "I'm a Teapot")
    assert list(reply.data) == ["type", "title", "status", "detail", "hint"]  # The standard members come first.
    reply = await frame.get("/fail/invalid")
    assert (reply.status, reply.data["path"]) == (400, "$.a[0]")


@pytest.mark.spec("8.1")
async def test_credentials_are_checked_before_the_body_and_the_query(frame: ApiClient) -> None:
    anonymous_client = frame.with_headers()
    reply = await anonymous_client.post("/things", raw=b"{")
    assert (reply.status, reply.headers["content-type"]) == (401, "application/problem+json")


async def test_a_repeated_header_is_refused(frame: ApiClient) -> None:
    head = b"POST /things HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-secret-key: "
    head += frame.headers["x-secret-key"].encode()
    both = b"\r\ncontent-type: application/json\r\ncontent-type: text/plain\r\ncontent-length: 12\r\n\r\n"
    answer = await raw(frame, head + both + b'{"name":"a"}')
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"more than once" in answer


async def test_the_observer_gets_the_route_and_the_status(gateway: Gateway) -> None:
    observations: list[tuple[str | None, int]] = []

    def observe(matched_route: Route | None, status: int, seconds: float) -> None:
        assert seconds >= 0
        observations.append((matched_route.path if matched_route is not None else None, status))

    async with open_app_api(gateway, ROUTES, observe=observe) as api:
        replies: list[ApiResponse] = [await api.get("/things/a"), await api.get("/nowhere"), await api.get("/fail/bug")]
    assert [reply.status for reply in replies] == [200, 404, 500]
    assert observations == [("/things/{thingId}", 200), (None, 404), ("/fail/{how}", 500)]


async def test_a_problem_quotes_at_most_a_part_of_a_long_value(api: ApiClient) -> None:
    long = "x" * 100_000
    for body in (
        {long: 1},
        {"type": long, "name": "Ann"},
        {"type": "human", "name": "Ann", "metadata": {}, "id": long},
    ):
        reply = await api.post("/api/entities", body)
        assert reply.status == 400
        assert len(reply.body) < 2_000

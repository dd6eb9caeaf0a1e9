"""Requests as the server receives them: path, query, header, cookie and body."""

from __future__ import annotations

import base64
import email.parser
import email.policy
import json
from typing import Any
from urllib.parse import parse_qs, parse_qsl

import pytest
from aiohttp import web

from tests.http_servers import ReceivedRequest
from tests.providers.openapi.services import Json, document, operation, parameter, service

pytestmark = pytest.mark.spec("3.22")

LIST = ["blue", "black", "brown"]
OBJECT = {"R": 100, "G": 200}


async def capture_request(path: str, parameter_json: Json, value: Any) -> ReceivedRequest:
    """The request of a call with one argument, as the server received it."""
    async with service(document(operation(path, parameters=[parameter_json]))) as api:
        return await api.capture_request(**{parameter_json["name"]: value})


@pytest.mark.parametrize(
    ("style", "explode", "value", "expected"),
    [
        ("simple", False, "blue", "blue"),
        ("simple", False, LIST, "blue,black,brown"),
        ("simple", True, LIST, "blue,black,brown"),
        ("simple", False, OBJECT, "R,100,G,200"),
        ("simple", True, OBJECT, "R=100,G=200"),
        ("label", False, "blue", ".blue"),
        ("label", False, LIST, ".blue,black,brown"),
        ("label", True, LIST, ".blue.black.brown"),
        ("label", False, OBJECT, ".R,100,G,200"),
        ("label", True, OBJECT, ".R=100.G=200"),
        ("matrix", False, "blue", ";color=blue"),
        ("matrix", False, LIST, ";color=blue,black,brown"),
        ("matrix", True, LIST, ";color=blue;color=black;color=brown"),
        ("matrix", False, OBJECT, ";color=R,100,G,200"),
        ("matrix", True, OBJECT, ";R=100;G=200"),
        ("simple", False, True, "true"),
        ("simple", False, 3.0, "3"),
        ("simple", False, "a/b c,d?", "a%2Fb%20c%2Cd%3F"),
        ("simple", False, "ä", "%C3%A4"),
    ],
)
async def test_paths_in_every_style(style: str, explode: bool, value: Any, expected: str) -> None:
    request = await capture_request("/c/{color}/x", parameter("color", "path", style=style, explode=explode), value)
    assert request.target == f"/v1/c/{expected}/x"


@pytest.mark.parametrize(
    "value", ["..", ".", "", "a/../../b", "..\\x", "%2e%2e", "a\nb", [], [".."], None, [None], {"a": None}]
)
async def test_a_path_value_that_leaves_its_segment_is_rejected(value: Any) -> None:
    async with service(document(operation("/c/{color}", parameters=[parameter("color", "path")]))) as api:
        result = await api.call(color=value)
        assert (result.error_kind, result.executed) == ("invalid_parameters", False)
        assert "color" in (result.error or "")
        assert api.server.requests == []


async def test_values_cannot_form_dot_dot_together() -> None:
    parameter_json = parameter("color", "path", style="label")
    async with service(document(operation("/c/{color}/{a}{b}", parameters=[parameter_json]))) as api:
        assert (await api.call(color="x", a=".", b=".")).error_kind == "invalid_parameters"
        assert (await api.capture_request(color="x", a="a", b="b")).target == "/v1/c/.x/ab"


@pytest.mark.parametrize(
    ("fields", "value", "expected"),
    [
        ({}, "blue", "color=blue"),
        ({}, "", "color="),
        ({}, None, ""),
        ({}, False, "color=false"),
        ({}, LIST, "color=blue&color=black&color=brown"),
        ({"explode": False}, LIST, "color=blue,black,brown"),
        ({}, OBJECT, "R=100&G=200"),
        ({"explode": False}, OBJECT, "color=R,100,G,200"),
        ({}, [], ""),
        ({}, ["a,b", None, "&"], "color=a%2Cb&color=%26"),
        ({"style": "spaceDelimited"}, LIST, "color=blue%20black%20brown"),
        ({"style": "spaceDelimited", "explode": True}, LIST, "color=blue&color=black&color=brown"),
        ({"style": "pipeDelimited"}, LIST, "color=blue%7Cblack%7Cbrown"),
        ({"style": "pipeDelimited"}, OBJECT, "color=R%7C100%7CG%7C200"),
        ({"style": "deepObject"}, OBJECT, "color[R]=100&color[G]=200"),
        ({"style": "deepObject"}, {"a": {"b": [1, 2]}, "c": None}, "color[a][b]=1&color[a][b]=2"),
        ({}, "a b&c=d#+/?:", "color=a%20b%26c%3Dd%23%2B%2F%3F%3A"),
        ({"allowReserved": True}, "a b&c=d#+/?:", "color=a%20b%26c=d%23%2B/?:"),
        ({}, [{"a": 1}], "color=%7B%22a%22%3A1%7D"),
    ],
)
async def test_queries_in_every_style(fields: Json, value: Any, expected: str) -> None:
    request = await capture_request("/c", parameter("color", "query", **fields), value)
    assert request.target == f"/v1/c{'?' if expected else ''}{expected}"


async def test_a_parameter_with_content_is_sent_as_json() -> None:
    parameter_json = {"name": "filter", "in": "query", "content": {"application/json": {"schema": {"type": "object"}}}}
    request = await capture_request("/c", parameter_json, {"a": [1, True]})
    assert parse_qs(request.target.partition("?")[2]) == {"filter": ['{"a":[1,true]}']}


async def test_a_parameter_may_be_allowed_to_be_empty() -> None:
    async with service(document(operation(parameters=[parameter("n", "query", {"type": "integer"})]))) as api:
        assert (await api.call(n="")).error_kind == "invalid_parameters"
    allowed = parameter("n", "query", {"type": "integer"}, allowEmptyValue=True)
    assert (await capture_request("/c", allowed, "")).target == "/v1/c?n="


@pytest.mark.parametrize(
    ("explode", "value", "expected"),
    [
        (False, "blue", "blue"),
        (False, LIST, "blue,black,brown"),
        (False, OBJECT, "R,100,G,200"),
        (True, OBJECT, "R=100,G=200"),
        (False, 5, "5"),
    ],
)
async def test_headers(explode: bool, value: Any, expected: str) -> None:
    request = await capture_request("/c", parameter("X-Color", "header", explode=explode), value)
    assert request.headers["x-color"] == expected


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\0", ["x\ny"], {"k\r\n": 1}])
async def test_a_header_value_is_one_line(value: Any) -> None:
    async with service(document(operation(parameters=[parameter("X-Color", "header")]))) as api:
        result = await api.call(**{"X-Color": value})
        assert (result.error_kind, api.server.requests) == ("invalid_parameters", [])


@pytest.mark.parametrize(
    ("explode", "value", "expected"),
    [
        (True, "b; c=d", "color=b%3B%20c%3Dd"),
        (True, LIST, "color=blue; color=black; color=brown"),
        (False, LIST, "color=blue,black,brown"),
        (True, OBJECT, "R=100; G=200"),
        (False, OBJECT, "color=R,100,G,200"),
    ],
)
async def test_cookies(explode: bool, value: Any, expected: str) -> None:
    request = await capture_request("/c", parameter("color", "cookie", explode=explode), value)
    assert request.headers["cookie"] == expected


def body(media: Json, **fields: Any) -> Json:
    return document(operation("/b", "post", requestBody={"required": True, "content": media, **fields}))


async def test_json_is_preferred_and_its_fields_arrive_unchanged() -> None:
    fields = {"type": "object", "properties": {"n": {"type": "integer"}, "who": {"type": "string", "nullable": True}}}
    media = {"text/xml": {}, "multipart/form-data": {"schema": fields}, "application/vnd.x+json": {"schema": fields}}
    async with service(body(media)) as api:
        request = await api.capture_request(n="5", who=None)
        assert (request.headers["content-type"], json.loads(request.body)) == (
            "application/vnd.x+json",
            {"n": 5, "who": None},
        )
        assert json.loads((await api.capture_request()).body) == {}


async def test_a_missing_body_is_not_sent() -> None:
    fields = {"type": "object", "properties": {"n": {"type": "integer"}}}
    async with service(body({"application/json": {"schema": fields}}, required=False)) as api:
        assert (await api.capture_request()).body == b""


async def test_a_whole_body_is_an_argument() -> None:
    async with service(body({"application/json": {"schema": {"type": "array"}}})) as api:
        assert json.loads((await api.capture_request(body=[1, {"a": None}])).body) == [1, {"a": None}]
        assert (await api.call()).error_kind == "invalid_parameters"


async def test_forms() -> None:
    fields: Json = {"name": "a b&c", "list": [1, 2], "joined": ["x", "y"], "deep": {"k": {"l": 1}}}
    fields |= {"plain": {"p": 1}, "json": [3]}
    schema = {"type": "object", "properties": {name: {} for name in fields}}
    encoding = {
        "joined": {"style": "form", "explode": False},
        "deep": {"style": "deepObject", "explode": True},
        "json": {"contentType": "application/json"},
    }
    media = {"application/x-www-form-urlencoded": {"schema": schema, "encoding": encoding}}
    async with service(body(media)) as api:
        request = await api.capture_request(**fields)
    assert request.headers["content-type"] == "application/x-www-form-urlencoded"
    assert parse_qsl(request.body.decode()) == [
        ("name", "a b&c"),
        ("list", "1"),
        ("list", "2"),
        ("joined", "x,y"),
        ("deep[k][l]", "1"),
        ("plain", '{"p":1}'),
        ("json", "[3]"),
    ]


def parts_of(request: ReceivedRequest) -> list[tuple[Any, ...]]:
    """Name, file name, type and content of each part, read by an independent parser."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + request.body)
    return [
        (
            part.get_param("name", header="content-disposition"),
            part.get_filename(),
            part.get_content_type(),
            part.get_payload(decode=True),
        )
        for part in message.iter_parts()  # type: ignore[attr-defined]
    ]


async def test_multipart() -> None:
    binary = {"type": "string", "format": "binary"}
    schema = {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"$ref": "#/components/schemas/File"},
            "more": {"type": "array", "items": binary},
            "photo": {"type": "string"},
            "note": {"type": "string"},
            "count": {"type": "integer"},
            "meta": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    }
    encoding = {"photo": {"contentType": "image/png, image/jpeg"}, "meta": {"contentType": "application/merge+json"}}
    parameter_json = body({"multipart/form-data": {"schema": schema, "encoding": encoding}})
    parameter_json["components"] = {"schemas": {"File": binary}}
    data = bytes(range(256))
    text = base64.b64encode(data).decode()
    async with service(parameter_json) as api:
        request = await api.capture_request(
            file={"data": text, "filename": '../etc/"x\r\n.bin', "contentType": "application/zip"},
            more=[text, {"data": ""}],
            photo=text,
            note="é\r\n--",
            count=3,
            meta={"a": 1},
            tags=["x", "y"],
        )
        assert parts_of(request) == [
            ("file", "%22x%0D%0A.bin", "application/zip", data),
            ("more", "more", "application/octet-stream", data),
            ("more", "more", "application/octet-stream", b""),
            ("photo", "photo", "image/png", data),
            ("note", None, "text/plain", "é\r\n--".encode()),
            ("count", None, "text/plain", b"3"),
            ("meta", None, "application/merge+json", b'{"a":1}'),
            ("tags", None, "text/plain", b"x"),
            ("tags", None, "text/plain", b"y"),
        ]
        assert "base64" in ((await api.call(file="no base64!")).error or "")
        evil = {"data": text, "contentType": "a/b\r\nX: 1"}
        assert (await api.call(file=evil)).error_kind == "invalid_parameters"


async def test_text_and_binary_bodies() -> None:
    async with service(body({"text/plain": {"schema": {"type": "string"}}})) as api:
        request = await api.capture_request(body="plain, ü")
        assert (request.headers["content-type"], request.body.decode()) == ("text/plain", "plain, ü")
    async with service(body({"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}})) as api:
        request = await api.capture_request(body=base64.b64encode(b"\0\xff").decode())
        assert (request.headers["content-type"], request.body) == ("application/octet-stream", b"\0\xff")
    async with service(body({"image/*": {}})) as api:
        request = await api.capture_request(body={"data": "AA==", "contentType": "image/gif"})
        assert (request.headers["content-type"], request.body) == ("image/gif", b"\0")


async def test_configured_headers_override_others() -> None:
    async with service(document(operation()), headers={"ACCEPT": "text/csv", "X-Api": "2"}) as api:
        request = await api.capture_request()
        assert (request.headers["accept"], request.headers["x-api"]) == ("text/csv", "2")
    async with service(document(operation())) as api:
        assert "application/json" in (await api.capture_request()).headers["accept"]


async def test_arguments_are_validated_and_corrected_before_sending() -> None:
    parameter_json = parameter("n", "query", {"type": "integer"}, required=True)
    async with service(document(operation(parameters=[parameter_json]))) as api:
        assert (await api.capture_request(n="5")).target == "/v1/x?n=5"
        assert "required" in ((await api.call()).error or "")
        assert "no such parameter" in ((await api.call(n=1, m=2)).error or "")
        assert len(api.server.requests) == 1


async def test_a_response_is_a_result_and_a_failed_status_a_failure() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"no": "such pet"}, status=404)

    async with service(document(operation())) as api:
        assert (await api.call()).result == {}
    async with service(document(operation()), answer) as api:
        result = await api.call()
        assert (result.error_kind, result.extras["status"], result.extras["body"]) == (
            "execution_error",
            404,
            {"no": "such pet"},
        )

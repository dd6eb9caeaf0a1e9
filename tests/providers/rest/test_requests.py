"""Requests of REST tools: filled templates, and arguments that cannot change anything else."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.http_servers import http_server
from tests.providers.rest.rest_tools import call, rest_spec
from toolspace.errors import ToolDefinitionError, ToolValidationError
from toolspace.providers.rest.provider import RestSpec
from toolspace.providers.rest.request_builder import build_input_schema, compile_request

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.spec("3.20")
async def test_parameters_fill_url_headers_query_and_body() -> None:
    async with http_server() as server:
        spec = rest_spec(
            server.url("/users/${parameters.user.id}/files/${parameters.names[1]}?page=${parameters.page}"),
            method="POST",
            headers={"X-Trace": "t-${parameters.trace}"},
            query={"limit": "${parameters.limit}", "fixed": 7, "q": "repo:${parameters.repo}"},
            body={"title": "${parameters.title}", "text": "says ${parameters.title}", "tags": ["${parameters.tag}"]},
        )
        arguments = {
            "user": {"id": 5}, "names": ["a", "b c"], "page": 2, "trace": "x", "limit": [1, 2], "repo": "a/b",
            "title": {"en": "Hi"}, "tag": 1.5,
        }  # fmt: skip
        result = await call(spec, arguments)

    assert result.ok, result.error
    (request,) = server.requests
    assert request.method == "POST"
    assert request.target == "/users/5/files/b%20c?page=2&limit=1&limit=2&fixed=7&q=repo%3Aa%2Fb"
    assert request.headers["x-trace"] == "t-x"
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.body) == {"title": {"en": "Hi"}, "text": 'says {"en":"Hi"}', "tags": [1.5]}


@pytest.mark.spec("3.20")
@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD"])
async def test_unused_parameters_go_to_the_query(method: str) -> None:
    async with http_server() as server:
        spec = rest_spec(server.url("/a/${parameters.id}?k=1"), method=method)
        await call(spec, {"id": 1, "text": "ä&b=c", "list": [1, "x"], "flag": True, "none": None, "data": {"a": 1}})

    (request,) = server.requests
    assert request.target == "/a/1?k=1&text=%C3%A4%26b%3Dc&list=1&list=x&flag=true&data=%7B%22a%22%3A1%7D"
    assert request.body == b""


@pytest.mark.spec("3.20")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_unused_parameters_go_to_the_json_body(method: str) -> None:
    async with http_server() as server:
        spec = rest_spec(server.url("/a/${parameters.id}"), method=method, body={"fixed": 1, "of": "${parameters.id}"})
        await call(spec, {"id": 1, "more": [None, "x"], "none": None})
        await call(rest_spec(server.url(), method=method), {"only": 1})
        await call(rest_spec(server.url(), method=method), {})

    merged_request, lone_request, empty_request = server.requests
    assert merged_request.target == "/a/1"
    assert json.loads(merged_request.body) == {"fixed": 1, "of": 1, "more": [None, "x"], "none": None}
    assert json.loads(lone_request.body) == {"only": 1}
    assert empty_request.body == b""
    assert "content-type" not in empty_request.headers or method != "GET"


@pytest.mark.spec("3.20")
async def test_missing_arguments_are_left_out() -> None:
    async with http_server() as server:
        spec = rest_spec(
            server.url("/?a=${parameters.a}&b=x-${parameters.b}"),
            method="POST",
            headers={"X-A": "${parameters.a}", "Authorization": "Bearer ${parameters.token}"},
            query={"c": "${parameters.c}", "d": ["${parameters.d}", 1], "e": "${parameters.e:-5}"},
            body={"f": "${parameters.f}", "g": {"h": "${parameters.h}"}, "null": "${parameters.null}"},
        )
        await call(spec, {"c": None, "null": None})

    (request,) = server.requests
    assert request.target == "/?d=1&e=5"
    assert "x-a" not in request.headers
    assert "authorization" not in request.headers
    assert json.loads(request.body) == {"g": {}, "null": None}


@pytest.mark.spec("3.20")
async def test_a_missing_path_value_is_named_and_nothing_is_sent() -> None:
    async with http_server() as server:
        result = await call(rest_spec(server.url("/users/${parameters.user.id}")), {"user": {}})

    assert result.error == "Parameter validation failed: user.id: required, but missing: it is a part of the URL"
    assert result.error_kind == "invalid_parameters"
    assert not result.executed
    assert not server.requests


@pytest.mark.spec("3.20")
@pytest.mark.parametrize(
    "value",
    ["", ".", "..", "../admin", "a/../../b", "..\\b", "%2e%2e", "%2e%2e%2fadmin", "%252e%252e", "..;/x", ".. ", "a\nb",
     "\0", "\ud800"],
)  # fmt: skip
async def test_a_path_value_that_leaves_its_segment_is_rejected(value: str) -> None:
    build = compile_request(rest_spec("https://api.example/files/${parameters.id}/raw"))
    with pytest.raises(ToolValidationError, match=r"^Parameter validation failed: id: "):
        build({"id": value})


@pytest.mark.spec("3.20")
@pytest.mark.parametrize(
    ("value", "encoded_value"),
    [("a/b", "a%2Fb"), ("a?b#c", "a%3Fb%23c"), ("a@b:80", "a%40b%3A80"), ("50%", "50%25"), ("ä", "%C3%A4"),
     ("...", "..."), ("v1.2", "v1.2"), (True, "true"), ([1, 2], "1%2C2"), ("a\\b", "a%5Cb")],
)  # fmt: skip
async def test_a_path_value_is_percent_encoded(value: object, encoded_value: str) -> None:
    async with http_server() as server:
        await call(rest_spec(server.url("/files/${parameters.id}/raw")), {"id": value})
    assert server.requests[0].target == f"/files/{encoded_value}/raw"


@pytest.mark.spec("3.20")
def test_literal_text_and_value_cannot_form_dot_dot() -> None:
    build = compile_request(rest_spec("https://api.example/a/.${parameters.x}/${parameters.y}${parameters.z}/b"))
    with pytest.raises(ToolValidationError):
        build({"x": ".", "y": "a", "z": "b"})
    with pytest.raises(ToolValidationError):
        build({"x": "x", "y": "%2", "z": "e"})


@pytest.mark.spec("3.20")
@given(value=st.text(alphabet=st.one_of(st.sampled_from("./\\%2eE5fF;?#@:&= \r\n\0a"), st.characters()), max_size=12))
def test_no_path_value_leaves_its_segment_or_changes_the_origin(value: str) -> None:
    build = compile_request(rest_spec("https://api.example:8443/one/${parameters.x}/v-${parameters.x}/two?k=1"))
    try:
        request = build({"x": value})
    except ToolValidationError:
        return
    url = str(request.url)
    assert url.startswith("https://api.example:8443/one/")
    assert url.endswith("/two?k=1")
    assert url.count("/") == 6
    assert url.count("?") == 1
    assert "#" not in url
    path = request.url.raw_path
    for _ in range(4):
        # No segment is `..`, however often a server decodes.
        assert not {".", ".."} & {part.partition(";")[0].strip() for part in path.replace("\\", "/").split("/")}
        path = unquote(path)


@pytest.mark.spec("3.20")
@given(value=json_values)
def test_no_query_value_changes_anything_but_its_own_entry(value: Any) -> None:
    build = compile_request(rest_spec("https://api.example/a?x=${parameters.x}", query={"key": "secret"}))
    try:
        url = build({"x": value, "y": value}).url
    except ToolValidationError:
        return
    assert str(url).startswith(("https://api.example/a?x=", "https://api.example/a?key=secret"))
    assert set(url.query) <= {"x", "y", "key"}
    assert url.query.getall("key") == ["secret"]
    if isinstance(value, str):
        assert url.query.getall("x") == [value]


@pytest.mark.spec("3.20")
@given(value=st.text(alphabet=st.one_of(st.sampled_from("\r\n\0: a"), st.characters()), max_size=8))
def test_no_value_adds_a_header(value: str) -> None:
    build = compile_request(rest_spec("https://api.example/", headers={"X-A": "a ${parameters.x}", "X-B": "b"}))
    try:
        headers = dict(build({"x": value}).headers)
    except ToolValidationError:
        assert any(character < " " or character == "\x7f" or "\ud800" <= character <= "\udfff" for character in value)
        return
    assert headers["X-A"] == f"a {value}"
    assert headers["X-B"] == "b"
    assert not set("\r\n\0") & set(headers["X-A"])


@pytest.mark.spec("3.20")
@given(value=json_values)
def test_a_value_cannot_break_out_of_json_text(value: Any) -> None:
    body = '{"raw": ${parameters.x}, "text": "<${parameters.x}>", "quote": "\\"${parameters.s}"}'
    build = compile_request(rest_spec("https://api.example/", method="POST", body=body))
    sent_body = build({"x": value, "s": '","admin":true,"'}).body
    assert isinstance(sent_body, bytes)
    read = json.loads(sent_body)
    assert list(read) == ["raw", "text", "quote"]
    assert read["raw"] == value
    assert read["quote"] == '"","admin":true,"'
    if isinstance(value, str):
        assert read["text"] == f"<{value}>"


@pytest.mark.spec("3.20")
@pytest.mark.parametrize(
    ("content_type", "body", "sent_body"),
    [
        ("application/x-www-form-urlencoded", {"a": "${parameters.x}", "b": [1, 2]}, b"a=%22%3C%26&b=1&b=2"),
        ("application/x-www-form-urlencoded", "a=${parameters.x}&b=1", b"a=%22%3C%26&b=1"),
        ("application/xml", "<a b='${parameters.x}'/>", b"<a b='&quot;&lt;&amp;'/>"),
        ("text/plain", "${parameters.x}", b'"<&'),
        ("text/plain", "x ${parameters.x}", b'x "<&'),
        ("application/json", "${parameters.x}", b'"\\"<&"'),
    ],
)
async def test_a_body_is_escaped_by_its_content_type(content_type: str, body: Any, sent_body: bytes) -> None:
    async with http_server() as server:
        spec = rest_spec(server.url(), method="POST", headers={"Content-Type": content_type}, body=body)
        await call(spec, {"x": '"<&'})
    assert server.requests[0].body == sent_body
    assert server.requests[0].headers["content-type"] == content_type


@pytest.mark.spec("3.20")
async def test_an_argument_cannot_override_the_configuration() -> None:
    async with http_server() as server:
        query = await call(rest_spec(server.url("/?tenant=1"), query={"key": "k"}), {"tenant": 2, "key": "x"})
        body = await call(rest_spec(server.url(), method="POST", body={"tenant": 1}), {"tenant": 2})
        text = await call(rest_spec(server.url(), method="POST", body="hello"), {"extra": 2})
    assert query.error == "Parameter validation failed: key, tenant: set by the tool's configuration; leave it out"
    assert body.error_kind == text.error_kind == "invalid_parameters"
    assert not server.requests


@pytest.mark.spec("3.20")
def test_a_placeholder_in_the_host_is_one_label_of_a_fixed_domain() -> None:
    build = compile_request(rest_spec("https://${parameters.tenant}.api.example:8443/x"))
    assert str(build({"tenant": "acme"}).url) == "https://acme.api.example:8443/x"
    for value in ("evil.org/", "a.b", "a@evil", "", "-a", "a:1", "x#", "ä", "a" * 64):
        with pytest.raises(ToolValidationError):
            build({"tenant": value})


@pytest.mark.spec("3.20")
@pytest.mark.parametrize(
    "fields",
    [
        {"url": "${parameters.url}"},
        {"url": "ftp://api.example/"},
        {"url": "${parameters.scheme}://api.example/"},
        {"url": "https://${parameters.host}/"},
        {"url": "https://${parameters.host}.com/"},
        {"url": "https://api.example:${parameters.port}/"},
        {"url": "https://${parameters.user}@api.example/"},
        {"url": "https://api.example/#${parameters.x}"},
        {"url": "https://api.example/?${parameters.x}=1"},
        {"url": "https:///x"},
        {"url": "https://api.example/${parameters.}"},
        {"url": "https://api.example/${parameters[0]}"},
        {"url": "https://api.example/", "headers": {"Content-Length": "5"}},
        {"url": "https://api.example/", "headers": {"X": "a\nb"}},
        {"url": "https://api.example/", "headers": {"Host": "${parameters.x}"}},
        {"url": "https://api.example/", "headers": {"A b": "x"}},
        {"url": "https://api.example/", "query": {"a": "${parameters..x}"}},
        {"url": "https://api.example/", "body": {"a": "${parameters.x y}"}},
        {"url": "https://api.example/", "method": "CONNECT"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())).encode("unicode_escape").decode(),
)
def test_an_unsafe_template_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match=r"^REST tool 't': (url|headers|query|body|method): "):
        compile_request(rest_spec(**fields))


@pytest.mark.spec("3.20")
async def test_a_user_in_the_url_becomes_a_header() -> None:
    async with http_server() as server:
        await call(rest_spec(server.url("/").replace("//", "//me:p%40ss@", 1)))
    assert server.requests[0].headers["authorization"] == "Basic bWU6cEBzcw=="


def test_repr_of_specs_and_requests_shows_no_secret() -> None:
    spec = rest_spec("https://api.example/a?key=hush", headers={"X-Key": "hush"}, body="hush", method="POST")
    assert "hush" not in repr(spec)
    assert "hush" not in repr(compile_request(spec)({}))


@pytest.mark.spec("3.20")
def test_the_schema_is_built_from_the_placeholders() -> None:
    spec = RestSpec(
        name="t",
        method="POST",
        url="https://api.example/${parameters.id}?q=${parameters.q}",
        headers={"X": "${parameters.trace}"},
        body={"limit": "${parameters.limit}", "of": "${parameters.filter.name}", "at": "${parameters.list[0]}"},
    )
    assert build_input_schema(spec) == {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "q": {"type": "string"},
            "trace": {"type": "string"},
            "limit": {},
            "filter": {"type": "object", "properties": {"name": {}}},
            "list": {"type": "array"},
        },
        "required": ["id"],
        "additionalProperties": False,
    }

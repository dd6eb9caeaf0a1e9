"""Any value round-trips through paths, queries, headers and cookies, and stays in its place."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from tests.providers.openapi.services import Json, document, operation, parameter, read
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.request_builder import compile_operation
from toolspace.providers.openapi.security import OperationCredentials
from toolspace.providers.rest.client import HttpRequest

pytestmark = pytest.mark.spec("3.22")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
HOSTILE = TEXT | st.sampled_from(
    ["..", "../..", "a/../b", "%2e%2e/", "\\..\\", "?x=1", "#f", "&a=b", "\r\nX: y", ";", ""]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | HOSTILE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HOSTILE, inner, max_size=4),
    max_leaves=8,
)
SERVER = URL("https://api.example.com/v1")


def request(path: str, parameter_json: Json, value: Any) -> HttpRequest:
    [openapi_operation] = read(document(operation(path, parameters=[parameter_json]))).operations
    return compile_operation(openapi_operation, SERVER, {}, OperationCredentials())({parameter_json["name"]: value})


@settings(deadline=None)
@given(value=VALUES, style=st.sampled_from(["simple", "label", "matrix"]), explode=st.booleans())
def test_no_value_of_a_path_leaves_its_segment(value: Any, style: str, explode: bool) -> None:
    parameter_json = parameter("id", "path", style=style, explode=explode)
    try:
        sent_url = str(request("/a/{id}/z", parameter_json, value).url)
    except ToolValidationError:
        return
    parts = urlsplit(sent_url)
    assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("https", "api.example.com", "", "")
    segments = parts.path.split("/")
    assert (len(segments), segments[:3], segments[4]) == (5, ["", "v1", "a"], "z")
    assert not {".", ".."} & set(unquote(segments[3]).replace("\\", "/").split("/"))
    assert sent_url.isascii()
    assert sent_url.isprintable()


@settings(deadline=None)
@given(value=HOSTILE, allow_reserved=st.booleans())
def test_a_text_in_a_query_round_trips(value: str, allow_reserved: bool) -> None:
    sent_url = str(request("/a", parameter("q", "query", allowReserved=allow_reserved), value).url)
    assert parse_qsl(urlsplit(sent_url).query, keep_blank_values=True, strict_parsing=True) == [("q", value)]
    assert urlsplit(sent_url).fragment == ""


@settings(deadline=None)
@given(
    value=VALUES,
    style=st.sampled_from(["form", "spaceDelimited", "pipeDelimited", "deepObject"]),
    explode=st.booleans(),
)
def test_values_cannot_break_out_of_the_query(value: Any, style: str, explode: bool) -> None:
    sent_url = str(request("/a", parameter("q", "query", style=style, explode=explode), value).url)
    parts = urlsplit(sent_url)
    assert (parts.netloc, parts.path, parts.fragment) == ("api.example.com", "/v1/a", "")
    assert sent_url.isascii()
    assert sent_url.isprintable()
    assert " " not in sent_url


@settings(deadline=None)
@given(values=st.lists(TEXT.filter(bool), min_size=1, max_size=5), explode=st.booleans())
def test_a_list_in_a_query_round_trips(values: list[str], explode: bool) -> None:
    sent_url = str(request("/a", parameter("q", "query", explode=explode), values).url)
    raw = urlsplit(sent_url).query
    pieces = [pair.partition("=")[2] for pair in raw.split("&")] if explode else raw.partition("=")[2].split(",")
    assert [unquote(piece) for piece in pieces] == values


@settings(deadline=None)
@given(value=VALUES, place=st.sampled_from(["header", "cookie"]), explode=st.booleans())
def test_a_header_and_a_cookie_are_one_line(value: Any, place: str, explode: bool) -> None:
    try:
        headers = dict(request("/a", parameter("X-One", place, explode=explode), value).headers)
    except ToolValidationError:
        return
    assert set(headers) <= {"Accept", "X-One", "Cookie"}
    for text in headers.values():
        assert not any((ord(character) < 32 and character != "\t") or ord(character) == 127 for character in text)
    if "Cookie" in headers:
        assert headers["Cookie"].isascii()
        assert " " not in headers["Cookie"].replace("; ", "")

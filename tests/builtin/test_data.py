"""The data tools: JSON and base64 with any input of a model."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.spec("10.4")
async def test_json_parse_returns_the_data(tools: Any) -> None:
    assert await tools.ok("json_parse", {"text": '\ufeff {"a": [1, 2.5, null, "ü"]} '}) == {
        "data": {"a": [1, 2.5, None, "ü"]}
    }


@pytest.mark.parametrize("source", ["null", "false", "0", '""'])
async def test_json_parse_accepts_any_value(tools: Any, source: str) -> None:
    assert await tools.ok("json_parse", {"text": source}) == {"data": json.loads(source)}


@pytest.mark.spec("10.4")
async def test_a_json_error_has_line_and_column(tools: Any) -> None:
    await tools.call_fails("json_parse", {"text": '{\n  "a": 1,\n  b: 2}'}, "invalid_parameters", "line 3, column 3")


@pytest.mark.parametrize("source", ["", "{", "NaN", "[Infinity]", "1e999", "[" * 100_000, "1" * 10_000, "'a'", "{} {}"])
async def test_invalid_json_is_rejected(tools: Any, source: str) -> None:
    await tools.call_fails("json_parse", {"text": source}, "invalid_parameters", "text")


@pytest.mark.spec("10.4")
async def test_json_stringify_keeps_unicode(tools: Any) -> None:
    data = {"ü": ["漢", "🎈", None]}
    assert await tools.ok("json_stringify", {"data": data}) == {"text": '{"ü":["漢","🎈",null]}'}
    pretty = await tools.ok("json_stringify", {"data": data, "pretty": True})
    assert pretty["text"] == '{\n  "ü": [\n    "漢",\n    "🎈",\n    null\n  ]\n}'


async def test_json_stringify_accepts_null_and_escapes_lone_surrogates(tools: Any) -> None:
    assert await tools.ok("json_stringify", {"data": None}) == {"text": "null"}
    json_result = await tools.ok("json_stringify", {"data": "a\ud800"})
    assert json_result == {"text": '"a\\ud800"'}
    assert json.loads(json_result["text"]) == "a\ud800"


async def test_json_stringify_rejects_values_without_json(tools: Any) -> None:
    await tools.call_fails("json_stringify", {"data": math.nan}, "invalid_parameters", "data")


@quick
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
        lambda inner: st.lists(inner) | st.dictionaries(text, inner),
        max_leaves=8,
    )
)
async def test_json_survives_a_round_trip(tools: Any, data: object) -> None:
    for pretty in (False, True):
        json_result = await tools.ok("json_stringify", {"data": data, "pretty": pretty})
        assert (await tools.ok("json_parse", {"text": json_result["text"]}))["data"] == data


@pytest.mark.spec("10.4")
@quick
@given(text)
async def test_base64_round_trips_unicode(tools: Any, text: str) -> None:
    encoded = (await tools.ok("base64_encode", {"text": text}))["encoded"]
    assert base64.b64decode(encoded, validate=True) == text.encode()
    for variant in (encoded, encoded.rstrip("="), base64.urlsafe_b64encode(text.encode()).decode(), f" {encoded}\n"):
        assert await tools.ok("base64_decode", {"encoded": variant}) == {"decoded": text}


@pytest.mark.parametrize("encoded", ["a", "abc!", "QQ==QQ==", "QUJD=====", "ü", "Q\0Q="])
async def test_invalid_base64_is_rejected(tools: Any, encoded: str) -> None:
    await tools.call_fails("base64_decode", {"encoded": encoded}, "invalid_parameters", "encoded", "not base64")


async def test_base64_of_binary_data_is_rejected(tools: Any) -> None:
    await tools.call_fails("base64_decode", {"encoded": "/w=="}, "invalid_parameters", "not UTF-8", "0xff")
    await tools.call_fails("base64_encode", {"text": "\udfff"}, "invalid_parameters", "text")

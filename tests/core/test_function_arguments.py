"""Arguments of function tools: what is accepted, and the messages for what is not."""

from __future__ import annotations

import json
import logging
import math
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from toolspace import Tool, ToolResult, Toolspace, ToolValidationError, tool

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Filter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    field: str
    limit: int = 1


class Other(BaseModel):
    colour: str


@tool
async def search(
    query: str,
    filters: list[Filter] | None = None,
    mode: Literal["fast", "exact"] = "fast",
    either: int | list[str] | None = None,
    by_name: dict[str, Filter | Other] | None = None,
) -> str:
    return query


RAW = Tool(
    "raw",
    "The same with a raw schema.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filters": {"type": "array", "items": {"$ref": "#/$defs/Filter"}},
            "mode": {"enum": ["fast", "exact"]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]},
        },
        "required": ["query"],
        "additionalProperties": False,
        "$defs": {
            "Filter": {
                "type": "object",
                "properties": {"field": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["field"],
                "additionalProperties": False,
            }
        },
    },
    handler=lambda parameters, context: parameters["query"],
)


@tool
async def any_value(value: Any = None) -> Any:
    return value


@tool
async def number(x: float) -> float:
    return x


def make() -> Toolspace:
    return Toolspace(tools=[search, RAW, any_value, number])


async def refusal(name: str, arguments: Any) -> str:
    """Returns the error message of a call."""
    result = await make().call(name, arguments)
    assert (result.ok, result.error_kind, result.executed) == (False, "invalid_parameters", False), result
    assert result.error is not None
    assert result.error.startswith("Parameter validation failed: ")
    assert result.text == f"(tool failed: {result.error})"
    with pytest.raises(ToolValidationError) as caught_error:
        result.unwrap()
    assert str(caught_error.value) == result.error
    return result.error


# Messages


@pytest.mark.spec("1.7")
@pytest.mark.parametrize("name", ["search", "raw"])
async def test_every_issue_is_reported_with_path_expected_and_actual_value(name: str) -> None:
    error = await refusal(
        name,
        {"filters": [{"field": "a"}, {"limit": "many"}, {"field": 5, "x": 1}], "mode": "slow", "quary": "x"},
    )
    for part in (
        "query: required, but missing",
        'quary: no such parameter; did you mean "query"?',
        "filters[1].field: required, but missing",
        "filters[1].limit: expected integer",
        'got "many"',
        "filters[2].field: expected string, got 5",
        "filters[2].x: no such parameter",
        "mode: expected ",
        '"slow"',
    ):
        assert part in error
    assert "filters[0]" not in error


@pytest.mark.spec("1.7")
@pytest.mark.parametrize("name", ["search", "raw"])
async def test_an_error_of_a_union_lists_all_options_under_the_path_of_the_value(name: str) -> None:
    error = await refusal(name, {"query": "a", "either": {"a": 1}})
    assert "either: expected integer or " in error
    assert 'got {"a":1}' in error
    assert "either.int" not in error


async def test_keys_with_any_character_are_part_of_the_path() -> None:
    error = await refusal("search", {"query": "a", "by_name": {"my-key (1)": {"field": 5}, "b": {}}})
    assert "by_name.my-key (1).field: expected string, got 5" in error
    assert "by_name.my-key (1).colour: required, but missing" in error
    assert "Filter" not in error


@pytest.mark.spec("1.7")
@pytest.mark.parametrize("name", ["search", "raw"])
async def test_an_unknown_parameter_far_from_all_known_ones_lists_them(name: str) -> None:
    error = await refusal(name, {"query": "a", "zzzzzz": 1})
    assert "zzzzzz: no such parameter; it takes query, filters, mode, either" in error


async def test_more_than_eight_issues_are_counted() -> None:
    error = await refusal("search", {"query": "a", "filters": [{}] * 50})
    assert error.count("required, but missing") == 8
    assert error.endswith("; and 42 more")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{", "truncated"),
        ("nonsense", "byte 1"),
        ('{"query": }', "byte 10"),
        ("[1]", "expected a JSON object, got [1]"),
        ("null", "expected a JSON object, got null"),
        ('"text"', 'expected a JSON object, got "text"'),
        ("5", "expected a JSON object, got 5"),
        ('{"query": "a"} trailing', "trailing"),
        ('{"query": NaN}', "byte 10"),
        ('{"query": Infinity}', "byte 10"),
        ('{"query": -Infinity}', "invalid"),
        ('{"value": 1e999}', "out of range"),
        (b'{"query": "\xff"}', "utf-8"),
        (b"\x00", "byte 0"),
        ('{"query": "\ud800"}', "surrogates"),
        ([1], "expected a JSON object, got [1]"),
        (5, "expected a JSON object, got 5"),
        ({1, 2}, "expected a JSON object, got [1,2]"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["search", "raw"])
async def test_arguments_that_are_no_json_object_are_refused_with_the_reason(
    name: str, arguments: Any, reason: str
) -> None:
    error = await refusal(name, arguments)
    assert "the arguments are not a JSON object: " in error
    if reason not in ("truncated", "byte 0", "byte 1", "byte 10", "invalid"):
        assert reason.lower() in error.lower()


@pytest.mark.spec("18")
@pytest.mark.parametrize(
    "arguments",
    [None, {}, "", " \n", b"", "{}", b"{}", bytearray(b"{}"), bytearray()],
    ids=repr,
)
async def test_missing_arguments_mean_an_empty_object(arguments: Any) -> None:
    raw = Tool("bare", handler=lambda parameters, context: parameters)
    ts = Toolspace(tools=[any_value, raw])
    assert (await ts.call("any_value", arguments)).unwrap() is None
    assert (await ts.call("bare", arguments)).unwrap() == {}


@pytest.mark.spec("18")
@pytest.mark.parametrize("name", ["search", "raw"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"query": "ü"},
        '{"query": "ü"}',
        '{"query": "ü"}'.encode(),
        '{"query": "\\u00fc"}',
        '{"query": "a", "query": "ü"}',
    ],
    ids=repr,
)
async def test_a_mapping_its_text_and_its_bytes_mean_the_same(name: str, arguments: Any) -> None:
    assert (await make().call(name, arguments)).unwrap() == "ü"


# Hostile arguments


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("name", ["search", "raw", "any_value"])
@pytest.mark.parametrize("levels", [10_000, 200_000])
async def test_text_nested_thousands_of_levels_deep_is_refused(name: str, levels: int) -> None:
    key = "value" if name == "any_value" else "query"
    for start, end in (("[", "]"), ('{"a":', "}")):
        error = await refusal(name, f'{{"{key}": {start * levels}1{end * levels}}}')
        assert "nested too deeply" in error
    assert "not a JSON object" in await refusal(name, "[" * levels)


@pytest.mark.parametrize("name", ["search", "raw"])
async def test_data_nested_thousands_of_levels_deep_is_refused(name: str) -> None:
    error = await refusal(name, {"query": _nested(10_000)})
    assert len(error) < 1_000


async def test_deeply_nested_data_is_accepted_if_the_schema_allows_anything() -> None:
    result = await make().call("any_value", {"value": _nested(10_000)})
    assert result.ok
    assert result.text.startswith("[[[[")
    json.loads(json.dumps(result.to_dict()))


@pytest.mark.parametrize("name", ["search", "raw", "any_value"])
async def test_cyclic_data_is_handled(name: str) -> None:
    loop: dict[str, Any] = {"query": "a"}
    loop["value"] = loop["filters"] = loop
    result = await make().call(name, loop)
    assert len(result.text) < 20_000
    json.dumps(result.to_dict())


@pytest.mark.parametrize("name", ["search", "raw"])
async def test_megabytes_are_accepted_if_they_fit_and_not_repeated_in_errors(name: str) -> None:
    ts = Toolspace(tools=[search, RAW])
    large = "x" * 10_000_000
    assert (await ts.call(name, json.dumps({"query": large}))).ok
    for wrong in (
        {"query": [large]},
        {"query": "a", "mode": large},
        {"query": "a", large: 1},
        {"query": "a", "filters": large},
        {"query": "a", "filters": [{"field": "a", large: 1}]},
        {"query": "a", "filters": [{"field": "a", "limit": large}]},
        {"query": "a", "either": large},
    ):
        for arguments in (wrong, json.dumps(wrong)):
            assert len(await refusal(name, arguments)) < 5_000
    assert len(await refusal(name, large)) < 5_000


@pytest.mark.parametrize("name", ["search", "raw"])
async def test_a_million_wrong_items_are_refused_without_reading_each(name: str) -> None:
    error = await refusal(name, f'{{"query": "a", "filters": [{",".join(["5"] * 1_000_000)}]}}')
    assert len(error) < 5_000


@pytest.mark.parametrize("name", ["search", "raw", "any_value"])
@pytest.mark.parametrize("text", ["\\ud800", "\\udfff\\ud800", "a\\ud83d"])
async def test_lone_surrogates_in_text_are_refused(name: str, text: str) -> None:
    key = "value" if name == "any_value" else "query"
    assert (await refusal(name, f'{{"{key}": "{text}"}}')).encode()
    assert (await refusal(name, f'{{"{key}": "a", "{text}": 1}}')).encode()


@pytest.mark.parametrize("name", ["search", "raw"])
async def test_lone_surrogates_in_keys_and_values_give_valid_error_texts(name: str) -> None:
    assert (await refusal(name, {"query": "a", "\ud800": 1})).encode()
    assert (await refusal(name, {"query": "a", "mode": "\ud800"})).encode()
    assert (await refusal(name, {"query": ["\ud800"]})).encode()


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
async def test_numbers_that_json_does_not_have_are_refused(x: float) -> None:
    assert "x: " in await refusal("number", {"x": x})
    await refusal("number", json.dumps({"x": x}))
    await refusal("number", {"x": str(x)})
    raw = Tool("raw_number", "", {"properties": {"x": {"type": "number"}}}, handler=lambda parameters, context: 1)
    for arguments in ({"x": x}, json.dumps({"x": x}), '{"x": 1e400}', '{"x": "1e400"}', {"x": str(x)}):
        result = await Toolspace(tools=[raw]).call("raw_number", arguments)
        assert result.error_kind == "invalid_parameters", arguments


@pytest.mark.parametrize("value", [b"x", {1}, object(), 1j, [b"x"], {"a": object}])
async def test_values_that_are_no_json_do_not_fit_a_raw_schema(value: Any) -> None:
    assert "not plain JSON" in await refusal("raw", {"query": value})


@pytest.mark.parametrize("key", [1, None, (1, 2), b"a"])
@pytest.mark.parametrize("name", ["search", "raw"])
async def test_non_text_keys_are_refused(name: str, key: Any) -> None:
    await refusal(name, {"query": "a", key: 1})


async def test_integers_of_any_size_arrive_whole() -> None:
    huge = 10**4000
    ts = make()
    assert (await ts.call("any_value", f'{{"value": {huge}}}')).unwrap() == huge
    assert (await ts.call("any_value", {"value": -huge})).unwrap() == -huge
    await refusal("any_value", '{"value": ' + "9" * 5000 + "}")


RECURSIVE: dict[str, dict[str, Any]] = {
    "ref": {"$ref": "#"},
    "all": {"allOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {"type": "integer"}}},
    "any": {
        "$defs": {"N": {"type": "array", "anyOf": [{"$ref": "#/$defs/N"}] * 3}},
        "properties": {"a": {"$ref": "#/$defs/N"}},
    },
    "null": {
        "$defs": {"N": {"anyOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/N"}, {"type": "integer"}]}},
        "properties": {"a": {"$ref": "#/$defs/N"}},
    },
    "each": {
        "$defs": {"N": {"oneOf": [{"type": "array", "items": {"$ref": "#/$defs/N"}}, {"$ref": "#/$defs/N"}]}},
        "properties": {"a": {"$ref": "#/$defs/N"}},
    },
}


@pytest.mark.parametrize("schema", RECURSIVE.values(), ids=list(RECURSIVE))
@pytest.mark.parametrize("value", ["x", None, [["x"], ["y", ["z"]]], {"a": {"a": "x"}}])
async def test_a_recursive_schema_ends(schema: dict[str, Any], value: Any) -> None:
    hostile = Tool("hostile", "", schema, handler=lambda parameters, context: "ran")
    result = await Toolspace(tools=[hostile]).call("hostile", {"a": value})
    assert result.ok or result.error_kind == "invalid_parameters"


async def test_a_backtracking_pattern_ends() -> None:
    schema = {"properties": {"a": {"pattern": "^(?=a)(a|a)*\\1b$"}}}
    hostile = Tool("hostile", "", schema, handler=lambda parameters, context: "ran")
    result = await Toolspace(tools=[hostile]).call("hostile", {"a": "a" * 200})
    assert result.error_kind == "invalid_parameters"


text = st.text(st.characters(exclude_categories=[]) | st.sampled_from('\ud800\udfff\0\n"\\'))
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(["query", "filters", "mode", "either", "by_name", "value", "x"]) | text


@quick
@given(
    name=st.sampled_from(["search", "raw", "any_value", "number"]),
    arguments=st.dictionaries(keys, json_like, max_size=4),
)
async def test_any_arguments_give_a_result_that_json_can_express(name: str, arguments: dict[str, Any]) -> None:
    ts = make()
    for payload in (arguments, json.dumps(arguments)):
        result: ToolResult = await ts.call(name, payload)
        assert result.ok or (result.error_kind, result.executed) == ("invalid_parameters", False), result
        result.text.encode()
        json.dumps(result.to_dict(), allow_nan=False, ensure_ascii=False).encode()


@quick
@given(text | st.binary())
async def test_any_argument_text_gives_a_result(text: str | bytes) -> None:
    result = await make().call("search", text)
    assert result.error_kind == "invalid_parameters"
    result.text.encode()


@pytest.mark.spec("4.11")
async def test_hostile_arguments_are_logged_safely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="toolspace")
    loop: dict[str, Any] = {}
    loop["value"] = [loop]
    ts = make()
    for arguments in ({"value": _nested(10_000)}, loop, {"value": {1: {b"x", 2}}}, {"value": "\ud800"}, "[" * 10_000):
        result = await ts.call("any_value", arguments)
        assert result.ok or result.error_kind == "invalid_parameters"
    assert caplog.text.count("tool request") == 5
    assert max(map(len, caplog.text.splitlines())) < 3_000

"""Coercion of arguments: obvious mistakes are corrected, and valid values are never changed."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from toolspace import Tool, Toolspace, tool
from toolspace.core.argument_validation import InvalidArguments, SchemaValidator, coerce

quick = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def coerce_one(schema: dict[str, Any], value: Any) -> Any:
    return coerce({"properties": {"a": schema}}, {"a": value})


INTEGER = {"type": "integer"}
TREE = {
    "$defs": {"Node": {"properties": {"n": INTEGER, "next": {"$ref": "#/$defs/Node"}}, "required": ["n"]}},
    "properties": {"a": {"$ref": "#/$defs/Node"}},
}


@pytest.mark.spec("3.15")
@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (INTEGER, "5", 5),
        (INTEGER, " -5 ", -5),
        (INTEGER, 5.0, 5),
        ({"type": "number"}, "1.5e3", 1500.0),
        ({"type": "number"}, "-.5", -0.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "null"}, "null", None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": "array", "items": INTEGER}, "[1, 2]", [1, 2]),
        ({"type": "array", "items": INTEGER}, '["1", 2]', [1, 2]),
        ({"type": "array", "items": INTEGER}, ["1", "2"], [1, 2]),
        ({"type": "object", "properties": {"b": INTEGER}}, '{"b": "1"}', {"b": 1}),
        ({"type": "object", "additionalProperties": INTEGER}, {"b": "1"}, {"b": 1}),
        ({"type": "object", "properties": {"b": {"properties": {"c": INTEGER}}}}, {"b": {"c": "1"}}, {"b": {"c": 1}}),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "5", 5),
        ({"oneOf": [{"type": "null"}, {"type": "array", "items": INTEGER}]}, '["5"]', [5]),
        ({"allOf": [{"type": "object"}, {"properties": {"b": INTEGER}}]}, {"b": "5"}, {"b": 5}),
        ({"properties": {"b": INTEGER}, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, {"b": "5"}, {"b": 5}),
    ],
    ids=repr,
)  # fmt: skip
def test_an_obvious_mistake_is_coerced(schema: dict[str, Any], value: Any, expected: Any) -> None:
    result = coerce_one(schema, value)["a"]
    assert (result, type(result)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (INTEGER, "five"),
        (INTEGER, "5.5"),
        (INTEGER, "5 apples"),
        (INTEGER, "0x10"),
        (INTEGER, "1_000"),
        (INTEGER, "٥"),
        (INTEGER, ""),
        (INTEGER, "9" * 5000),
        (INTEGER, 5.5),
        (INTEGER, True),
        (INTEGER, [5]),
        ({"type": "number"}, "1e999"),
        ({"type": "number"}, "nan"),
        ({"type": "number"}, "inf"),
        ({"type": "boolean"}, "yes"),
        ({"type": "boolean"}, 1),
        ({"type": "string"}, 5),
        ({"type": "string"}, True),
        ({"type": "array"}, "a,b"),
        ({"type": "array"}, "[1,"),
        ({"type": "array"}, "[" * 20_000),
        ({"type": "array"}, '{"a": 1}'),
        ({"type": "object"}, "[1]"),
        ({"type": "object"}, "{'a': 1}"),
        ({"enum": [1, 2]}, "1"),
        ({}, "5"),
        (True, "5"),
        ({"$ref": "#/nowhere"}, "5"),
    ],
    ids=lambda item: repr(item)[:40],
)
def test_values_without_an_obvious_meaning_are_left_unchanged(schema: dict[str, Any], value: Any) -> None:
    assert coerce_one(schema, value) == {"a": value}


@pytest.mark.spec("3.15")
async def test_null_for_an_optional_parameter_means_omitted() -> None:
    @tool
    def take(query: str, limit: int = 10, note: str | None = "n") -> list[Any]:
        return [query, limit, note]

    raw = Tool(
        "raw",
        "",
        {"properties": {"limit": INTEGER, "note": {"type": ["string", "null"]}, "must": {}}, "required": ["must"]},
        handler=lambda parameters, context: parameters,
    )
    ts = Toolspace(tools=[take, raw])
    assert (await ts.call("take", '{"query": "a", "limit": null, "note": null}')).unwrap() == ["a", 10, None]
    assert (await ts.call("take", {"query": None})).error_kind == "invalid_parameters"
    result = await ts.call("raw", {"limit": None, "note": None, "must": None})
    assert result.unwrap() == {"note": None, "must": None}


@pytest.mark.spec("3.15")
def test_references_are_followed_however_deep_the_value_is() -> None:
    value: Any = {"n": "0"}
    for level in range(1, 10):
        value = {"n": str(level), "next": value}
    fixed = coerce(TREE, {"a": value})
    assert jsonschema_rs.is_valid(TREE, fixed)
    assert json.dumps(fixed).count('"n": "') == 0


def test_among_options_the_plausible_one_is_used() -> None:
    option_a = {"properties": {"kind": {"const": "a"}, "x": INTEGER}, "required": ["kind"]}
    option_b = {"properties": {"kind": {"const": "b"}, "x": {"type": "string"}, "y": INTEGER}, "required": ["kind"]}
    schema = {"properties": {"v": {"anyOf": [option_a, option_b]}}}
    assert SchemaValidator(schema, tool="t").from_mapping({"v": {"kind": "b", "x": "5", "y": "6"}}) == {
        "v": {"kind": "b", "x": "5", "y": 6}
    }


class Query(BaseModel):
    text: str
    limit: int = 1
    tags: dict[str, str | None] = {}


@pytest.mark.spec("3.15")
async def test_a_function_accepts_json_text_for_models_lists_and_dicts() -> None:
    @tool
    def take(query: Query, ids: list[int], options: dict[str, bool] | None = None) -> list[Any]:
        return [query.text, query.limit, ids, options]

    ts = Toolspace(tools=[take])
    result = await ts.call(
        "take", {"query": '{"text": "a", "limit": null}', "ids": '["1", 2]', "options": '{"x": "true"}'}
    )
    assert result.unwrap() == ["a", 1, [1, 2], {"x": True}]


async def test_coercing_one_part_leaves_null_elsewhere() -> None:
    @tool
    def take(query: Query, ids: list[int]) -> Any:
        return query.tags

    result = await Toolspace(tools=[take]).call("take", {"query": {"text": "a", "tags": {"k": None}}, "ids": "[1]"})
    assert result.unwrap() == {"k": None}


# Properties

leaf = st.sampled_from(
    [
        {"type": "string"}, INTEGER, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {},
        {"type": ["integer", "string"]}, {"type": ["boolean", "null"]}, {"enum": ["a", "5", None]}, {"const": "true"},
        {"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 3},
    ]
)  # fmt: skip


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    return st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(
            lambda properties, required, rest: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                "additionalProperties": rest,
            },
            objects,
            st.lists(st.sampled_from("abc"), unique=True),
            st.booleans() | inner,
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda options: {"oneOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda options: {"allOf": options}, st.lists(inner, min_size=1, max_size=2)),
    )


schemas = st.recursive(leaf, _wider, max_leaves=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-3, 3)
    | st.sampled_from(["", "5", "-2.5", "true", "null", "a", "[1]", '["2"]', '{"a": "1"}', "{}", "[", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@quick
@given(schemas, values)
def test_valid_arguments_are_returned_unchanged(schema: Any, value: Any) -> None:
    root_schema = {"properties": {"v": schema}}
    assume(jsonschema_rs.is_valid(root_schema, {"v": value}))
    assert SchemaValidator(root_schema, tool="t").from_mapping({"v": value}) == {"v": value}


@pytest.mark.spec("3.15")
@quick
@given(schemas, values)
def test_a_valid_part_stays_unchanged_while_another_is_coerced(schema: Any, value: Any) -> None:
    assume(jsonschema_rs.is_valid({"properties": {"v": schema}}, {"v": value}))
    root_schema = {"properties": {"v": schema, "n": INTEGER}, "required": ["n"]}
    values = SchemaValidator(root_schema, tool="t").from_mapping({"v": value, "n": "5"})
    assert values == {"v": value, "n": 5}
    assert json.dumps(values["v"]) == json.dumps(value)


@quick
@given(schemas, values)
def test_coercion_gives_valid_data_or_an_error_and_does_not_change_the_arguments(schema: Any, value: Any) -> None:
    root_schema = {"properties": {"v": schema}}
    before = copy.deepcopy(value)
    check = SchemaValidator(root_schema, tool="t")
    try:
        values = check.from_mapping({"v": value})
    except InvalidArguments as error:
        paths = [issue.path for issue in error.issues]
    else:
        assert jsonschema_rs.is_valid(root_schema, values)
        paths = ["v"]
    assert paths
    assert all(path.startswith("v") for path in paths)
    assert json.dumps(value) == json.dumps(before)


@quick
@given(schemas, values)
def test_coercion_is_idempotent(schema: Any, value: Any) -> None:
    once = coerce({"properties": {"v": schema}}, {"v": value})
    assert coerce({"properties": {"v": schema}}, copy.deepcopy(once)) == once

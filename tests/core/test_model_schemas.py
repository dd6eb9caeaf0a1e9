"""Schemas for models: within the rules of every provider, under names that all models accept, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from tests.core.provider_schema_rules import definition_schema, find_violations
from toolspace import Tool, Toolspace, explain_export, tool
from toolspace.core.argument_names import ArgumentNames, StreamedNames

pytestmark = pytest.mark.spec("1.9")

FORMATS = ("openai", "openai-responses", "anthropic", "gemini")
NAMES = st.one_of(
    st.sampled_from(
        [
            "filter[x]",
            "filter(x)",
            "filter_x",
            "$top",
            "top",
            "@id",
            "größe",
            "名前",
            "",
            "a b",
            "x" * 70,
            "x" * 71,
            "ok",
        ]
    ),
    st.text(max_size=8),
)
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=3), st.just([]), st.just({}), st.just([1, "a"])
)


def echo(schema: Any) -> Tool:
    return Tool("echo", "Returns its arguments.", schema, handler=lambda parameters, context: parameters)


def schemas() -> st.SearchStrategy[Any]:
    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        maps = st.dictionaries(NAMES, inner, max_size=3)
        lists = st.lists(inner, min_size=1, max_size=3)
        name_lists = st.lists(NAMES, max_size=3)
        optional: dict[str, st.SearchStrategy[Any]] = {
            "type": st.sampled_from(
                ["object", "object", "array", "string", "integer", "null", ["string", "null"], "file", ["object"], 3]
            ),
            "properties": maps,
            "required": name_lists,
            "items": st.one_of(inner, lists, st.booleans()),
            "prefixItems": lists,
            "anyOf": lists,
            "oneOf": lists,
            "allOf": lists,
            "not": inner,
            "if": inner,
            "then": inner,
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(st.just("^x"), inner, max_size=1),
            "propertyNames": st.fixed_dictionaries({}, optional={"enum": name_lists, "pattern": st.just("^f")}),
            "dependentRequired": st.dictionaries(NAMES, name_lists, max_size=2),
            "dependentSchemas": maps,
            "enum": st.lists(JUNK, max_size=3),
            "const": JUNK,
            "default": JUNK,
            "minimum": JUNK,
            "exclusiveMinimum": JUNK,
            "pattern": st.sampled_from(["^a", "(?=a)b", 3]),
            "format": st.sampled_from(["date", "uri", None]),
            "minLength": JUNK,
            "uniqueItems": JUNK,
            "description": st.one_of(st.text(max_size=5), st.none()),
            "nullable": st.booleans(),
            "$ref": st.sampled_from(
                ["#", "#/$defs/A", "#/definitions/B[x]", "#/properties/ok", "#anchor", "nowhere", 1]
            ),
            "$defs": st.fixed_dictionaries({}, optional={"A": inner, "B[x]": inner}),
            "definitions": st.fixed_dictionaries({}, optional={"B[x]": inner}),
            "$schema": st.just("http://json-schema.org/draft-07/schema#"),
            "$anchor": st.just("anchor"),
        }
        return st.fixed_dictionaries({}, optional=optional)

    leaf = st.one_of(
        st.sampled_from([{}, {"type": "string"}, {"type": "object"}, {"$ref": "#/$defs/A"}]), st.booleans()
    )
    return st.recursive(leaf, extend, max_leaves=12).filter(lambda schema: isinstance(schema, dict))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas())
def test_no_schema_makes_a_provider_refuse_the_request(schema: dict[str, Any]) -> None:
    assert find_violations(Toolspace(tools=[echo(schema)])) == []


def values_with_schemas() -> st.SearchStrategy[tuple[Any, Any]]:
    """Pairs of a schema and a value that fits it."""

    def objects(inner: st.SearchStrategy[tuple[Any, Any]]) -> st.SearchStrategy[tuple[Any, Any]]:
        return st.dictionaries(NAMES, inner, max_size=4).map(
            lambda fields: (
                {
                    "type": "object",
                    "properties": {name: schema for name, (schema, _) in fields.items()},
                    "required": [name for name, (_, value) in fields.items() if value is not None],
                    "additionalProperties": False,
                },
                {name: value for name, (_, value) in fields.items() if value is not None},
            )
        )

    def extend(inner: st.SearchStrategy[tuple[Any, Any]]) -> st.SearchStrategy[tuple[Any, Any]]:
        arrays = st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: (
                {"type": "array", "items": pair[0][0]},
                [pair[0][1]] * pair[1] if pair[0][1] is not None else [],
            )
        )
        unions = inner.map(lambda pair: ({"anyOf": [{"type": "null"}, pair[0]]}, pair[1]))
        return st.one_of(objects(inner), arrays, unions)

    leaf = st.one_of(
        st.integers(-5, 5).map(lambda number: ({"type": "integer"}, number)),
        st.text(max_size=5).map(lambda text: ({"type": "string"}, text)),
        st.just(({"type": "string"}, None)),  # Optional, and left out.
    )
    return objects(st.recursive(leaf, extend, max_leaves=8))


def as_model(value: Any, schema: Any, names: Mapping[str, str], *, fills_nulls: bool = False) -> Any:
    """The value as a model writes it: under its names, and in strict mode with null for what it leaves out."""
    if "anyOf" in schema:
        return as_model(value, schema["anyOf"][1], names, fills_nulls=fills_nulls) if value is not None else None
    if isinstance(value, dict):
        keys = schema["properties"] if fills_nulls else value
        return {
            names.get(key, key): as_model(value[key], schema["properties"][key], names, fills_nulls=fills_nulls)
            if key in value
            else None
            for key in keys
        }
    if isinstance(value, list):
        return [as_model(item, schema["items"], names, fills_nulls=fills_nulls) for item in value]
    return value


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values_with_schemas(), st.data())
async def test_arguments_under_the_names_of_models_come_back_under_the_names_of_the_tool(
    pair: tuple[Any, Any], data: st.DataObject
) -> None:
    schema, value = pair
    echo_tool = echo(schema)
    names = echo_tool.argument_names
    model_names = names.model_names if names is not None else {}
    model_arguments = as_model(value, schema, model_names)
    async with Toolspace(tools=[echo_tool]) as ts:
        assert (await ts.call("echo", model_arguments)).unwrap() == value
        assert (await ts.call("echo", json.dumps(model_arguments))).unwrap() == value
        assert (await ts.call("echo", value)).unwrap() == value
    if names is not None:
        text = json.dumps(
            model_arguments, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1]))
        )
        stream, pieces, rest = StreamedNames(names), "", text
        while rest:
            size = data.draw(st.integers(1, 7))
            pieces, rest = pieces + stream.feed(rest[:size]), rest[size:]
        assert json.loads(pieces) == value


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(values_with_schemas())
async def test_nulls_that_strict_mode_forces_are_left_out_again(pair: tuple[Any, Any]) -> None:
    schema, value = pair
    echo_tool = echo(schema)
    async with Toolspace(tools=[echo_tool]) as ts:
        [definition] = ts.to_llm_tools("openai", strict=True)
        if not definition["function"].get("strict"):
            return
        names = echo_tool.argument_names
        model_arguments = as_model(value, schema, names.model_names if names is not None else {}, fills_nulls=True)
        result = (await ts.call("echo", model_arguments)).unwrap()
    assert drop_nulls(result) == drop_nulls(value)


def drop_nulls(value: Any) -> Any:
    """Where the schema itself allows null, a null stays: it means the same as a property that is left out."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


async def test_a_property_that_really_has_the_name_wins() -> None:
    schema = {
        "type": "object",
        "properties": {
            "filter[x]": {"type": "integer"},
            "filter_x": {"type": "string"},
            "free": {"type": "object"},
            "one": {"type": "object", "properties": {"@id": {"type": "integer"}}},
        },
    }
    async with Toolspace(tools=[echo(schema)]) as ts:
        [definition] = ts.to_llm_tools("anthropic")
        model_name = next(name for name in definition["input_schema"]["properties"] if name.startswith("filter_x_"))
        arguments = {"filter_x": "real", model_name: 3, "free": {"id": 1, model_name: 2}, "one": {"id": 5}}
        result = (await ts.call("echo", arguments)).unwrap()
        both = (await ts.call("echo", {"filter[x]": 1, model_name: 2})).unwrap()
    assert result == {
        "filter_x": "real",
        "filter[x]": 3,
        "free": {"id": 1, model_name: 2},  # A free object: its keys are data.
        "one": {"@id": 5},
    }
    assert both == {"filter[x]": 1, model_name: 2}


async def test_nested_arguments_as_json_text_come_back_under_the_names_of_the_tool() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b[]": {"type": "integer"}}}}}
    async with Toolspace(tools=[echo(schema)]) as ts:
        assert (await ts.call("echo", {"a": '{"b": "1"}'})).unwrap() == {"a": {"b[]": 1}}


def test_names_do_not_depend_on_the_order_of_the_schema() -> None:
    names = ["filter[x]", "filter(x)", "ok", "$top", "名前"]
    schemas = [{"properties": {name: {} for name in order}} for order in (names, names[::-1])]
    first, second = (ArgumentNames.of(schema) for schema in schemas)
    assert first is not None
    assert second is not None
    assert first.model_names == second.model_names
    assert first.model_names["$top"] == "top"


def test_all_keywords_that_name_properties_agree_in_the_export() -> None:
    schema = {
        "type": "object",
        "properties": {"a[1]": {"type": "string"}, "b": {"type": "object", "properties": {"c d": {}}}},
        "required": ["a[1]"],
        "dependentRequired": {"a[1]": ["b"], "b": ["a[1]"]},
        "propertyNames": {"enum": ["a[1]", "b"]},
        "discriminator": {"propertyName": "a[1]"},
        "allOf": [{"required": ["a[1]"]}],
        "$defs": {"X": {"$ref": "#/properties/b/properties/c d"}},
    }
    [definition] = Toolspace(tools=[echo(schema)]).to_llm_tools("anthropic")
    text = json.dumps(definition)
    assert "a[1]" not in text.replace('called \\"a[1]\\"', "")
    assert definition["input_schema"]["required"] == ["a_1"]
    assert definition["input_schema"]["dependentRequired"] == {"a_1": ["b"], "b": ["a_1"]}


def test_mcp_keeps_the_names_of_the_tool() -> None:
    schema = {"type": "object", "properties": {"filter[x]": {"type": "integer"}}}
    [definition] = Toolspace(tools=[echo(schema)]).to_llm_tools("mcp")
    assert definition["inputSchema"] == schema


async def test_functions_with_aliases_have_names_for_models_too() -> None:
    class Page(BaseModel):
        size: Annotated[int, Field(alias="page[size]")] = 10

    @tool
    def list_items(page: Page) -> int:
        return page.size

    async with Toolspace(tools=[list_items]) as ts:
        assert find_violations(ts) == []
        assert (await ts.call("list_items", {"page": {"page_size": 3}})).unwrap() == 3


@pytest.mark.parametrize("format", FORMATS)
def test_alternatives_at_the_top_become_one_object_in_every_format(format: Any) -> None:
    schema = {
        "oneOf": [{"$ref": "#/$defs/ById"}, {"$ref": "#/$defs/ByName"}],
        "$defs": {
            "ById": {
                "type": "object",
                "properties": {"kind": {"const": "id"}, "id": {"type": "integer"}},
                "required": ["kind", "id"],
            },
            "ByName": {
                "type": "object",
                "properties": {"kind": {"const": "name"}, "name": {"type": "string"}},
                "required": ["kind", "name"],
            },
        },
    }
    ts = Toolspace(tools=[echo(schema)])
    parameters = definition_schema(format, ts.to_llm_tools(format)[0])
    assert set(parameters["properties"]) == {"kind", "id", "name"}
    assert parameters["properties"]["kind"]["enum"] == ["id", "name"]
    assert parameters["required"] == ["kind"]
    assert parameters["description"] == "give one of these sets of parameters: id, kind; kind, name"
    [changes] = explain_export(ts.list_tools(), format).values()
    assert "oneOf at the top became one object with the properties of all options" in changes


def test_what_a_format_cannot_express_is_said() -> None:
    schema = {
        "type": "object",
        "properties": {"filter[x]": {"type": "string", "minLength": 2, "format": "uri", "description": "A URL."}},
    }
    ts = Toolspace(tools=[echo(schema)])
    [definition] = ts.to_llm_tools("openai", strict=True)
    assert definition["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "filter_x": {
                "type": ["string", "null"],
                "description": 'A URL. (called "filter[x]") (minLength: 2, format: uri)',
            }
        },
        "required": ["filter_x"],
        "additionalProperties": False,
    }
    assert explain_export(ts.list_tools(), "openai", strict=True) == {
        "echo": [
            'the property "filter[x]" is called "filter_x"',
            "the arguments.filter_x: only in the description: minLength: 2, format: uri",
        ]
    }
    assert explain_export(Toolspace(tools=[echo({"type": "object", "properties": {}})]).list_tools(), "gemini") == {}


def test_a_schema_that_strict_mode_cannot_express_is_exported_without_it_and_says_why() -> None:
    ts = Toolspace(tools=[echo({"type": "object", "properties": {"data": {"type": "object"}}})])
    [chat] = ts.to_llm_tools("openai", strict=True)
    [responses] = ts.to_llm_tools("openai-responses", strict=True)
    assert "strict" not in chat["function"]
    assert responses["strict"] is False
    assert explain_export(ts.list_tools(), "openai", strict=True) == {
        "echo": ["not strict: the arguments.data may have any keys"]
    }


def test_strict_is_only_for_openai() -> None:
    with pytest.raises(ValueError, match=r"strict is for the formats openai and openai-responses, not for 'gemini'"):
        Toolspace(tools=[]).to_llm_tools("gemini", strict=True)

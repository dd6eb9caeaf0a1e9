"""The size of schemas with references followed, and the work that wrong arguments may cause."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace import Tool, Toolspace
from toolspace.core.argument_validation import InvalidArguments, SchemaValidator
from toolspace.core.schema_size import MAX_SCHEMA_SIZE, SchemaSize, SchemaTooLarge, measure_schema

Json = dict[str, Any]


def doubling_schema(keyword: str, levels: int = 40) -> Json:
    """A schema of a few kilobytes that has 2^levels parts when its references are followed."""
    definitions: Json = {
        f"d{level}": {keyword: [{"$ref": f"#/$defs/d{level + 1}"}, {"$ref": f"#/$defs/d{level + 1}"}]}
        for level in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "string"}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}


def fan(levels: int = 6, width: int = 20) -> Json:
    definitions: Json = {
        f"d{level}": {"properties": {f"p{index}": {"$ref": f"#/$defs/d{level + 1}"} for index in range(width)}}
        for level in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {}}}


def anchors(levels: int = 40) -> Json:
    definitions = [
        {"$anchor": f"d{level}", "allOf": [{"$ref": f"#d{level + 1}"}, {"$ref": f"#d{level + 1}"}]}
        for level in range(levels)
    ]
    return {"$ref": "#d0", "$defs": {str(index): definition for index, definition in enumerate(definitions)}}


@pytest.mark.parametrize(
    "schema",
    [
        doubling_schema("allOf"),
        doubling_schema("anyOf"),
        doubling_schema("oneOf"),
        fan(),
        anchors(),
        {**doubling_schema("allOf"), "$id": "https://example.com/s"},
        {"enum": list(range(MAX_SCHEMA_SIZE))},
    ],
    ids=["allOf", "anyOf", "oneOf", "fan", "anchors", "id", "enum"],
)
def test_a_schema_that_grows_beyond_the_limit_is_refused(schema: Json) -> None:
    with pytest.raises(SchemaTooLarge, match="more than 100,000 values when its references are followed"):
        measure_schema(schema)


def test_references_are_followed_wherever_they_point() -> None:
    target = {"properties": {"$ref": {"type": "string"}, "default": {"$ref": "#/$defs/n"}}}
    schema = {"allOf": [{"$ref": "#/$defs/a%20b~1c"}, {"$ref": "#/allOf/0"}], "$defs": {"a b/c": target, "n": {}}}
    target_size = measure_schema({**target, "$defs": {"n": {}}}).values
    assert target_size == 6
    assert measure_schema(schema).values == 1 + 1 + (1 + target_size) + (1 + 1 + target_size)


def test_a_recursive_schema_has_a_size() -> None:
    node: Json = {"anyOf": [{"type": "null"}, {"properties": {"next": {"$ref": "#/$defs/n"}}}]}
    size = measure_schema({"$ref": "#/$defs/n", "$defs": {"n": node}})
    assert size == SchemaSize(values=9, union_values=7, is_recursive=True)


def test_data_in_a_schema_has_no_references() -> None:
    assert measure_schema({"const": {"$ref": "#"}, "default": [{"$id": "x"}]}) == SchemaSize(6, 0, False)


def test_an_id_inside_a_schema_with_references_is_refused() -> None:
    with pytest.raises(SchemaTooLarge, match=r"part \$id 'inner'"):
        measure_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "inner"}}})
    assert measure_schema({"properties": {"$id": {"type": "string"}, "a": {"$ref": "#/properties/$id"}}}).values > 0


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Json = {}
    for _ in range(5000):
        schema = {"not": schema}
    with pytest.raises(SchemaTooLarge, match="nested too deeply"):
        measure_schema(schema)


def issues(schema: Json, arguments: Json) -> list[str]:
    with pytest.raises(InvalidArguments) as refusal:
        SchemaValidator(schema, tool="t").from_mapping(arguments)
    return [str(issue) for issue in refusal.value.issues]


WIDE = {f"k{index}": 1 for index in range(5500)}
"""60 kB."""


def test_large_wrong_arguments_report_the_first_issue_only() -> None:
    """Each of these errors has a copy of all arguments: finding all of them took a minute."""
    assert issues({"required": [f"r{index}" for index in range(2000)]}, WIDE) == ["r0: required, but missing"]


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_large_arguments_that_fit_no_option_are_refused_without_details(keyword: str) -> None:
    schema = {keyword: [{"required": [f"r{index}"]} for index in range(2000)]}
    assert issues(schema, WIDE) == [
        "the arguments do not fit the schema; send smaller or less nested ones to see what is wrong"
    ]


def test_deep_arguments_of_a_recursive_union_are_refused_without_details() -> None:
    reference = {"$ref": "#/$defs/n"}
    node = {"type": "object", "properties": {"c": {"anyOf": [reference, reference]}}, "required": ["c"]}
    arguments: Json = {}
    for _ in range(24):
        arguments = {"c": arguments}
    assert len(issues({"properties": {"c": reference}, "$defs": {"n": node}}, arguments)) == 1


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"required": [f"r{index}" for index in range(50)]}, {}),
        ({"properties": {"x": {}}, "additionalProperties": False}, {f"k{index}": 1 for index in range(50)}),
    ],
    ids=["missing", "unknown"],
)
def test_at_most_eight_issues_are_kept_and_the_others_counted(schema: Json, arguments: Json) -> None:
    with pytest.raises(InvalidArguments) as refusal:
        SchemaValidator(schema, tool="t").from_mapping(arguments)
    assert len(refusal.value.issues) == 8
    assert str(refusal.value).endswith("; and 42 more")


async def test_large_wrong_arguments_are_still_coerced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    sum_tool = Tool("sum", "Adds.", schema, handler=lambda parameters, context: sum(parameters["a"]))
    async with Toolspace(tools=[sum_tool]) as toolspace:
        assert (await toolspace.call("sum", {"a": ["1"] * 14_000})).result == 14_000

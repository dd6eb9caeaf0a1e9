"""Schemas are self-contained, valid JSON Schema 2020-12, and describe requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.providers.openapi.services import Json, document, operation, parameter, read, schema_of, service
from toolspace.core.argument_validation import compile_schema

pytestmark = pytest.mark.spec("3.22")


def of(schema: Any, *, version: str = "3.0.3", **schemas: Any) -> Json:
    """A converted schema: that of the query parameter `x`."""
    document_json = document(
        operation(parameters=[parameter("x", "query", schema)]), version=version, components={"schemas": schemas}
    )
    input_schema = schema_of(document_json)
    compile_schema(input_schema, owner="test")
    return input_schema["properties"]["x"]


def with_body(schema: Any, *, required: bool = True, media: str = "application/json", **schemas: Any) -> Json:
    body = {"required": required, "content": {media: {"schema": schema}}}
    input_schema = schema_of(document(operation("/a/{id}", "put", requestBody=body), components={"schemas": schemas}))
    compile_schema(input_schema, owner="test")
    return input_schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        (
            {"nullable": True, "description": "d", "oneOf": [{"type": "string"}]},
            {"description": "d", "anyOf": [{"oneOf": [{"type": "string"}]}, {"type": "null"}]},
        ),
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"maximum": 9, "exclusiveMaximum": False}, {"maximum": 9}),
        ({"type": "string", "example": "x"}, {"type": "string", "examples": ["x"]}),
        ({"type": "file"}, {"type": "string", "format": "binary"}),
        ({"type": "any", "pattern": "(", "required": True, "enum": 3, "minLength": -1, "x-y": 1, "xml": {}}, {}),
        ({"pattern": "^a+$", "discriminator": {"propertyName": "p"}}, {"pattern": "^a+$"}),
        ({"items": [{"type": "string"}], "allOf": []}, {"prefixItems": [{"type": "string"}]}),
        ({"properties": {"example": {"type": "string"}}}, {"properties": {"example": {"type": "string"}}}),
    ],
    ids=["null", "null-enum", "null-one", "strict", "loose", "example", "file", "invalid", "kept", "tuple", "names"],
)
def test_a_schema_of_3_0_becomes_one_of_2020_12(schema: Json, expected: Json) -> None:
    assert of(schema) == expected


def test_a_schema_of_3_1_keeps_its_keywords() -> None:
    schema = {"type": ["string", "null"], "const": "a", "exclusiveMinimum": 3, "if": True, "then": {"minLength": 1}}
    assert of(schema, version="3.1.0") == schema
    sibling_schema = of({"$ref": "#/components/schemas/A", "description": "d"}, version="3.1.0", A={"type": "string"})
    assert sibling_schema == {"$ref": "#/$defs/A", "description": "d"}


def test_a_tool_has_only_the_definitions_it_uses_even_if_circular() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/components/schemas/Node"}, "p": {"$ref": "#/components/schemas/P"}},
    }
    input_schema = with_body({"$ref": "#/components/schemas/Node"}, Node=node, P={"type": "integer"}, Unused={})
    assert set(input_schema["$defs"]) == {"Node", "P"}
    assert set(input_schema["properties"]) == {"id", "next", "p"}
    check = compile_schema(input_schema, owner="test")
    assert check.is_valid({"id": "1", "next": {"next": {"p": 3}}})
    assert not check.is_valid({"id": "1", "next": {"next": {"p": "x"}}})


def test_definitions_have_unique_names() -> None:
    document_json = document(
        operation(
            parameters=[
                parameter("a", "query", {"$ref": "#/components/schemas/A%20b~1c"}),
                parameter("b", "query", {"$ref": "#/components/schemas/A/properties/deep"}),
            ]
        ),
        components={"schemas": {"A b/c": {"type": "string"}, "A": {"properties": {"deep": {"type": "integer"}}}}},
    )
    input_schema = schema_of(document_json)
    check = compile_schema(input_schema, owner="test")
    assert check.is_valid({"a": "x", "b": 1})
    assert not check.is_valid({"a": 1})
    assert not check.is_valid({"b": "x"})


def test_definitions_are_shared_by_the_tools_that_use_them() -> None:
    ref = {"$ref": "#/components/schemas/A"}
    paths = {f"/{n}": {"get": {"parameters": [parameter("a", "query", ref)], "responses": {}}} for n in range(2)}
    first, second = read(document(paths, components={"schemas": {"A": {"type": "string"}}})).operations
    assert first.inputs.schema["$defs"]["A"] is second.inputs.schema["$defs"]["A"]


def test_read_only_properties_are_left_out_of_requests() -> None:
    schema = {
        "type": "object",
        "required": ["made", "name", "by"],
        "properties": {
            "made": {"type": "string", "readOnly": True},
            "by": {"$ref": "#/components/schemas/By"},
            "name": {"type": "string"},
            "secret": {"type": "string", "writeOnly": True},
        },
    }
    input_schema = with_body(schema, By={"type": "string", "readOnly": True})
    assert (set(input_schema["properties"]), input_schema["required"]) == ({"id", "name", "secret"}, ["id", "name"])
    parts = {"allOf": [{"$ref": "#/components/schemas/Base"}, {"required": ["made"], "properties": {"n": {}}}]}
    base = {"type": "object", "properties": {"made": {"readOnly": True}, "x": {}}}
    assert with_body(parts, Base=base)["required"] == ["id"]


def test_the_fields_of_a_plain_body_are_arguments() -> None:
    input_schema = with_body({"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}})
    assert (set(input_schema["properties"]), input_schema["required"]) == ({"id", "name"}, ["id", "name"])


def test_an_optional_body_needs_all_its_required_fields() -> None:
    fields = {"name": {"type": "string"}, "tag": {"type": "string"}}
    input_schema = with_body({"type": "object", "required": ["name"], "properties": fields}, required=False)
    check = compile_schema(input_schema, owner="test")
    assert check.is_valid({"id": "1"})
    assert check.is_valid({"id": "1", "name": "n"})
    assert not check.is_valid({"id": "1", "tag": "t"})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"id": {"type": "string"}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "array", "items": {}},
        {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "string"}]},
        {"type": "object"},
        {},
    ],
    ids=["collides", "free", "open", "array", "choice", "bare", "any"],
)
def test_any_other_body_is_one_argument(schema: Json) -> None:
    input_schema = with_body(schema)
    assert set(input_schema["properties"]) == {"id", "body"}
    assert input_schema["required"] == ["id", "body"]


def test_allof_parts_form_one_object_and_circular_parts_end() -> None:
    def ref(name: str) -> Json:
        return {"$ref": f"#/components/schemas/{name}"}

    a = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    input_schema = with_body({"allOf": [ref("A"), {"properties": {"b": ref("B")}}]}, A=a, B={"type": "integer"})
    assert (set(input_schema["properties"]), set(input_schema["$defs"])) == ({"id", "a", "b"}, {"B"})
    many = {f"N{n}": {"allOf": [ref(f"N{n + 1}")] * 5} for n in range(5)}  # Larger ones are left out.
    assert set(with_body(ref("N0"), **many, N5=a)["properties"]) == {"id", "body"}
    assert set(with_body(ref("Me"), Me={"allOf": [ref("Me")]})["properties"]) == {"id", "body"}


def test_an_argument_called_body_keeps_its_name() -> None:
    body = {"content": {"application/json": {"schema": {"type": "array"}}}}
    schema = schema_of(document(operation("/a", "put", parameters=[parameter("body", "query")], requestBody=body)))
    assert set(schema["properties"]) == {"body", "request_body"}


async def test_the_output_schema_is_that_of_the_only_success() -> None:
    def answers(*statuses: str, schema: Any = None, media: str = "application/json") -> Json:
        content = {media: {"schema": schema or {"$ref": "#/components/schemas/Pet"}}}
        return {"responses": {**{status: {"content": content} for status in statuses}, "404": {"content": content}}}

    document_json = document(
        {
            "/one": {"get": {"operationId": "one", **answers("200")}},
            "/two": {"get": {"operationId": "two", **answers("200", "201")}},
            "/xml": {"get": {"operationId": "xml", **answers("200", media="application/xml")}},
            "/bad": {"get": {"operationId": "bad", **answers("200", schema={"$ref": "#/nowhere"})}},
            "/big": {"get": {"operationId": "big", **answers("200", schema={"enum": ["x" * 99] * 999})}},
        },
        components={
            "schemas": {
                "Pet": {
                    "type": "object",
                    "required": ["id", "key"],
                    "properties": {"id": {"readOnly": True}, "key": {"writeOnly": True}},
                }
            }
        },
    )
    async with service(document_json) as api:
        output = api.tools["one"].output_schema
        assert output == {
            "$ref": "#/$defs/Pet",
            "$defs": {"Pet": {"type": "object", "required": ["id"], "properties": {"id": {"readOnly": True}}}},
        }
        compile_schema(output, owner="test")
        assert [api.tools[name].output_schema for name in ("two", "xml", "bad", "big")] == [None] * 4


KEYWORDS = """type properties required allOf anyOf items enum $ref nullable pattern minimum exclusiveMinimum format
additionalProperties readOnly example examples description default $defs $id $anchor not patternProperties
multipleOf const"""
LEAVES = st.sampled_from([None, True, False, -1, 0, 2, "string", "object", "a", "(", "#/components/schemas/A"])
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS.split()), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=200, deadline=None)
@given(schema=JSON, other_schema=JSON, version=st.sampled_from(["3.0.3", "3.1.0"]), as_body=st.booleans())
def test_any_document_gives_valid_schemas_or_warnings(
    schema: Any, other_schema: Any, version: str, as_body: bool
) -> None:
    body = {"requestBody": {"content": {"multipart/form-data" if as_body else "application/json": {"schema": schema}}}}
    fields = {"parameters": [{"name": "x", "in": "query", "schema": schema}], **body}
    operation_list = read(
        document(operation(method="post", **fields), version=version, components={"schemas": {"A": other_schema}})
    )
    assert len(operation_list.operations) + len(operation_list.warnings) == 1
    for entry in operation_list.operations:
        compile_schema(entry.inputs.schema, owner="test")

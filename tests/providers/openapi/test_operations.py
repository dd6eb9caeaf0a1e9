"""Every operation becomes a tool: names, filters, descriptions, parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.providers.openapi.services import Json, document, operation, parameter, read, schema_of, service
from toolspace.core.names import qualify_all

pytestmark = pytest.mark.spec("3.22")

PETS = document(
    {
        "/pets": {
            "get": {"operationId": "list-pets", "tags": ["Pets", "read"], "responses": {}},
            "post": {"tags": ["pets"], "responses": {}},
        },
        "/pets/{id}": {"delete": {"operationId": "deletePet", "tags": ["pets"], "responses": {}}},
        "/petshops": {"get": {"operationId": "shops", "responses": {}}},
    }
)


def names(document_json: Json, **spec: Any) -> list[str]:
    return [entry.name for entry in read(document_json, **spec).operations]


async def test_a_tool_is_named_by_operation_id_or_method_and_path() -> None:
    async with service(PETS) as api:
        names = [tool.name for tool in api.toolspace.list_tools() if tool.name.startswith("api__")]
        assert names == ["api__list_pets", "api__post__pets", "api__deletePet", "api__shops"]
        assert (await api.capture_request("list-pets")).target == "/v1/pets"
        assert (await api.capture_request("post_/pets")).method == "POST"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"tags": ("PETS",)}, ["list-pets", "post_/pets", "deletePet"]),
        ({"tags": ("re*",)}, ["list-pets"]),
        ({"methods": ("GET",)}, ["list-pets", "shops"]),
        ({"paths": ("/pets",)}, ["list-pets", "post_/pets", "deletePet"]),
        ({"paths": ("/pets/*",)}, ["deletePet"]),
        ({"operations": ("*pet*",)}, ["list-pets", "post_/pets", "deletePet"]),
        ({"operations": ("LIST-pets", "shops"), "methods": ("get",), "paths": ("/petshops",)}, ["shops"]),
    ],
    ids=["tag", "tag-glob", "method", "path", "path-glob", "operation", "all-hold"],
)
def test_filters_choose_operations(spec: Json, expected: list[str]) -> None:
    assert names(PETS, **spec) == expected


def test_filters_that_accept_nothing_are_a_warning() -> None:
    assert read(PETS, tags=("cats",)).warnings == ["the filters accept none of its 4 operations"]


def test_colliding_names_are_unique_and_independent_of_filters() -> None:
    document_json = document(
        {
            "/a": {
                "get": {"operationId": "get-it", "responses": {}},
                "post": {"operationId": "get_it", "responses": {}},
            },
            "/b": {"get": {"operationId": "get-it", "responses": {}}, "put": {"operationId": "other", "responses": {}}},
        }
    )
    all_names = names(document_json)
    assert len(set(all_names)) == 4
    assert len(set(qualify_all("api", all_names).values())) == 4
    assert "other" in all_names
    assert names(document_json, methods=("post",)) == [all_names[1]]
    assert names(document_json, paths=("/b",)) == all_names[2:]


def test_an_invalid_operation_is_left_out_with_a_warning() -> None:
    broken: Json = {
        "ref": {"parameters": [{"$ref": "#/components/parameters/none"}]},
        "loop": {"parameters": [{"$ref": "#/components/parameters/loop"}]},
        "place": {"parameters": [{"name": "x", "in": "body"}]},
        "style": {"parameters": [parameter("x", "query", style="matrix")]},
        "header": {"parameters": [parameter("a\r\nb", "header")]},
        "schema": {"parameters": [{"name": "x", "in": "query", "schema": 5}]},
        "number": {"parameters": [7]},
        "body": {"requestBody": 5},
        "security": {"security": {"key": []}},
    }
    paths = {f"/{name}": {"get": {"operationId": name, "responses": {}, **entry}} for name, entry in broken.items()}
    paths["/nothing"] = 5  # type: ignore[assignment]
    paths["/fine"] = {"get": {"operationId": "fine", "responses": None}}
    components = {"parameters": {"loop": {"$ref": "#/components/parameters/loop"}}}
    operation_list = read(document(paths, components=components))
    assert [entry.name for entry in operation_list.operations] == ["fine"]
    assert [warning.split('"')[1] for warning in operation_list.warnings] == ["/nothing", *broken]


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_an_operation_with_a_schema_that_doubles_is_left_out_with_a_warning(keyword: str) -> None:
    schemas: Json = {
        f"d{level}": {keyword: [{"$ref": f"#/components/schemas/d{level + 1}"}] * 50} for level in range(40)
    }
    schemas["d40"] = {"type": "string"}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/d0"}}}}
    paths = {
        "/bad": {"post": {"operationId": "bad", "requestBody": body, "responses": {}}},
        "/fine": {"get": {"operationId": "fine", "responses": {}}},
    }
    operation_list = read(document(paths, components={"schemas": schemas}))
    assert [entry.name for entry in operation_list.operations] == ["fine"]
    assert operation_list.warnings == [
        'operation "bad" (POST /bad) is left out: '
        "its schema has more than 100,000 values when its references are followed"
    ]


def test_operation_parameters_override_path_parameters() -> None:
    document_json = document(
        {
            "/a/{id}": {
                "parameters": [{"$ref": "#/components/parameters/id"}, parameter("n", "query", {"type": "string"})],
                "get": {
                    "operationId": "op",
                    "parameters": [parameter("n", "query", {"type": "integer"})],
                    "responses": {},
                },
            },
            "/b": {"$ref": "#/components/pathItems/b"},
        },
        components={
            "parameters": {"id": parameter("id", "path", {"type": "integer"}, description="Which one.")},
            "pathItems": {"b": {"get": {"operationId": "b", "responses": {}}}},
        },
    )
    assert names(document_json) == ["op", "b"]
    schema = read(document_json).operations[0].inputs.schema
    assert schema["properties"] == {
        "id": {"type": "integer", "description": "Which one."},
        "n": {"type": "integer"},
    }
    assert (schema["required"], schema["additionalProperties"]) == (["id"], False)


def test_an_undescribed_path_placeholder_is_an_argument() -> None:
    assert schema_of(document(operation("/a/{id}")))["required"] == ["id"]


def test_parameters_with_the_same_name_get_unique_arguments() -> None:
    parameters = [parameter("id", place, {"type": "string"}) for place in ("cookie", "header", "query", "path")]
    parameters.append(parameter("id_query", "query"))
    schema = schema_of(document(operation("/a/{id}", parameters=parameters)))
    assert set(schema["properties"]) == {"id", "id_query", "id_query_", "id_header", "id_cookie"}


def test_client_headers_are_no_arguments() -> None:
    header_names = ["Accept", "content-type", "AUTHORIZATION", "Host", "Content-Length", "X-Tenant", "X-Trace"]
    document_json = document(operation(parameters=[parameter(name, "header") for name in header_names]))
    assert list(schema_of(document_json, headers={"x-tenant": "us"})["properties"]) == ["X-Trace"]


async def test_the_description_comes_from_the_operation() -> None:
    fields: Json = {"summary": "List pets", "description": "All of them.", "deprecated": True, "tags": ["pets"]}
    document_json = document({"/p": {m: {"operationId": m, "responses": {}, **fields} for m in ("get", "put", "post")}})
    document_json["paths"]["/p"]["post"]["description"] = "long " * 1000
    async with service(document_json) as api:
        get, put, post = (api.tools[name] for name in ("get", "put", "post"))
        assert get.description == "Deprecated. List pets\n\nAll of them."
        assert (get.category, get.tags) == ("rest", ("pets",))
        assert (get.annotations.read_only, put.annotations.read_only) == (True, False)
        assert (put.annotations.idempotent, post.annotations.idempotent) == (True, False)
        assert len(post.description) <= 1000
        assert api.toolspace.find_tool("api__get") is not None


@pytest.mark.parametrize("path", ["/../admin", "/a/./b", "/a/%2e%2e/b", "/a?b={id}"])
def test_an_unsafe_path_is_left_out(path: str) -> None:
    operation_list = read(document({**operation(path), "/fine": {"get": {"operationId": "fine", "responses": {}}}}))
    assert [entry.name for entry in operation_list.operations] == ["fine"]
    assert path in operation_list.warnings[0]

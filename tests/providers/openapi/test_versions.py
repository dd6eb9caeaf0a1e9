"""Swagger 2.0 and OpenAPI 3.2 documents, and servers without a scheme, against a real HTTP server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.http_servers import http_server
from toolspace import OpenApiProvider, OpenApiSpec, Toolspace

pytestmark = pytest.mark.spec("3.22")


def write(folder: Path, document: dict[str, Any]) -> str:
    file = folder / "api.json"
    file.write_text(json.dumps(document))
    return str(file)


async def call(spec: OpenApiSpec, name: str, /, **arguments: Any) -> OpenApiProvider:
    provider = OpenApiProvider("api", spec)
    async with Toolspace(providers=[provider]) as ts:
        (await ts.call(f"api__{name}", arguments)).unwrap()
    return provider


async def test_swagger_2_has_its_host_path_styles_files_and_security(tmp_path: Path) -> None:
    async with http_server() as server:
        document = {
            "swagger": "2.0",
            "info": {"title": "t", "version": "1"},
            "host": server.address,
            "basePath": "/v2",
            "schemes": ["http"],
            "consumes": ["application/json"],
            "securityDefinitions": {"login": {"type": "basic"}},
            "security": [{"login": []}],
            "parameters": {"page": {"name": "page", "in": "query", "type": "integer"}},
            "definitions": {"Item": {"type": "object", "properties": {"next": {"$ref": "#/definitions/Item"}}}},
            "responses": {"Item": {"description": "ok", "schema": {"$ref": "#/definitions/Item"}}},
            "paths": {
                "/items/{ids}": {
                    "parameters": [
                        {"name": "ids", "in": "path", "required": True, "type": "array", "items": {"type": "integer"}},
                        {"$ref": "#/parameters/page"},
                    ],
                    "get": {
                        "operationId": "find",
                        "parameters": [
                            {
                                "name": "tags",
                                "in": "query",
                                "type": "array",
                                "items": {"type": "string"},
                                "collectionFormat": "pipes",
                            },
                            {"name": "many", "in": "query", "type": "array", "items": {}, "collectionFormat": "multi"},
                        ],
                        "responses": {"200": {"$ref": "#/responses/Item"}},
                    },
                    "put": {
                        "operationId": "replace",
                        "parameters": [
                            {"name": "item", "in": "body", "required": True, "schema": {"$ref": "#/definitions/Item"}}
                        ],
                        "responses": {"204": {"description": "done"}},
                    },
                },
                "/files": {
                    "post": {
                        "operationId": "upload",
                        "consumes": ["multipart/form-data"],
                        "parameters": [
                            {"name": "file", "in": "formData", "type": "file", "required": True},
                            {"name": "note", "in": "formData", "type": "string"},
                        ],
                        "responses": {"200": {"description": "ok"}},
                    }
                },
                "/tabs": {
                    "get": {
                        "operationId": "tabs",
                        "parameters": [
                            {"name": "t", "in": "query", "type": "array", "items": {}, "collectionFormat": "tsv"}
                        ],
                        "responses": {},
                    }
                },
            },
        }
        spec = OpenApiSpec(spec=write(tmp_path, document), auth={"login": "me:pw"})
        provider = await call(spec, "find", ids=[1, 2], page=3, tags=["a", "b"], many=["x", "y"])
        await call(spec, "replace", ids=[1], next={})
        await call(spec, "upload", file="aGVsbG8=", note="n")
    find, replace, upload = server.requests
    assert find.target == "/v2/items/1,2?page=3&tags=a%7Cb&many=x&many=y"
    assert find.headers["authorization"] == "Basic bWU6cHc="
    assert (replace.method, replace.target, replace.body) == ("PUT", "/v2/items/1", b'{"next":{}}')
    assert upload.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert b'name="file"' in upload.body
    [warning] = provider.warnings
    assert warning == (
        "operation \"tabs\" (GET /tabs) is left out: the query parameter 't' has the style 'tabDelimited'; "
        "use form or spaceDelimited or pipeDelimited or deepObject"
    )


async def test_openapi_3_2_has_query_additional_operations_and_the_whole_query_string(tmp_path: Path) -> None:
    async with http_server() as server:
        name_reference = server.url("/docs/api.json") + "#/components/schemas/Name"
        document = {
            "openapi": "3.2.0",
            "$self": server.url("/docs/api.json"),
            "info": {"title": "t", "version": "1"},
            "servers": [{"url": "/v3", "name": "main"}],
            "tags": [{"name": "items", "kind": "nav", "parent": "all"}],
            "components": {
                "schemas": {"Name": {"type": "string"}},
                "securitySchemes": {
                    "device": {
                        "type": "oauth2",
                        "flows": {"deviceAuthorization": {"deviceAuthorizationUrl": "/d", "tokenUrl": "/t"}},
                    }
                },
            },
            "paths": {
                "/items": {
                    "query": {
                        "operationId": "search",
                        "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}},
                        "responses": {"200": {"content": {"application/jsonl": {"itemSchema": {"type": "object"}}}}},
                    },
                    "get": {
                        "operationId": "list",
                        "parameters": [
                            {
                                "name": "q",
                                "in": "querystring",
                                "content": {
                                    "application/x-www-form-urlencoded": {
                                        "schema": {
                                            "type": "object",
                                            "properties": {
                                                "name": {"$ref": name_reference},
                                                "tags": {"type": "array", "items": {"type": "string"}},
                                            },
                                            "required": ["name"],
                                        }
                                    }
                                },
                            }
                        ],
                        "responses": {},
                    },
                    "put": {
                        "operationId": "odd",
                        "parameters": [{"name": "q", "in": "querystring", "content": {"application/json": {}}}],
                        "responses": {},
                    },
                    "additionalOperations": {"COPY": {"operationId": "copy", "responses": {}}},
                }
            },
        }
        spec = OpenApiSpec(spec=write(tmp_path, document))
        provider = await call(spec, "search", body={"a": 1})
        await call(spec, "list", name="x", tags=["a", "b"])
        await call(spec, "copy")
    search, listing, copy = server.requests
    assert (search.method, search.target, search.body) == ("QUERY", "/v3/items", b'{"a":1}')
    assert listing.target == "/v3/items?name=x&tags=a&tags=b"
    assert copy.method == "COPY"
    [warning] = provider.warnings
    assert "operation \"odd\" (PUT /items) is left out: the parameter 'q' is the whole query string" in warning


async def test_a_server_without_a_scheme_uses_that_of_the_document_and_says_so(tmp_path: Path) -> None:
    documents: list[bytes] = []

    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=documents[0], content_type="application/json")

    async with http_server(respond) as server:
        document = {
            "openapi": "3.0.0",
            "info": {"title": "t", "version": "1"},
            "servers": [{"url": f"//{server.address}/v1"}],
            "paths": {"/a": {"get": {"operationId": "a", "responses": {}}}},
        }
        documents.append(json.dumps(document).encode())
        fetched_provider = await call(OpenApiSpec(spec=server.url("/openapi.json")), "a")
        file_provider = OpenApiProvider("api", OpenApiSpec(spec=write(tmp_path, document)))
        await file_provider.warmup()
        await file_provider.aclose()
    assert server.requests[-1].target == "/v1/a"
    server_name = f'the server "//{server.address}/v1"'
    assert fetched_provider.warnings == (f"{server_name} has no scheme; using http, as the document",)
    assert file_provider.warnings == (f"{server_name} has no scheme; using https, because the document names none",)

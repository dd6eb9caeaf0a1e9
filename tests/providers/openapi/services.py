"""OpenAPI services on loopback: a document of the test, a real server and a toolspace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.http_servers import HttpTestServer, ReceivedRequest, Respond, http_server
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.providers.openapi.document import OpenApiDocument
from toolspace.providers.openapi.operations import OperationList, read_operations
from toolspace.providers.openapi.provider import OpenApiProvider, OpenApiSpec
from toolspace.providers.openapi.security import SecuritySchemes
from toolspace.providers.rest.client import HttpClient
from toolspace.toolspace import Toolspace

Json = dict[str, Any]


def document(paths: Json, *, version: str = "3.0.3", **more: Any) -> Json:
    return {"openapi": version, "info": {"title": "t", "version": "1"}, "paths": paths, **more}


def operation(path: str = "/x", method: str = "get", **fields: Any) -> Json:
    """The paths of a document with one operation, `op`."""
    return {path: {method: {"operationId": "op", "responses": {}, **fields}}}


def parameter(name: str, place: str, schema: Json | None = None, **fields: Any) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": schema or {}, **fields}


def read(document_json: Json, **spec: Any) -> OperationList:
    """Reads the operations of a document without a file or a server."""
    openapi_document = OpenApiDocument(document_json)
    openapi_spec = OpenApiSpec(spec="test", **spec)
    return read_operations(
        openapi_document,
        openapi_spec,
        SecuritySchemes(openapi_document, "api", openapi_spec.auth, openapi_spec.headers, HttpClient()),
    )


def schema_of(document_json: Json, **spec: Any) -> Json:
    """The input schema of the document's only operation."""
    operation_list = read(document_json, **spec)
    assert operation_list.warnings == []
    return operation_list.operations[0].inputs.schema


class OpenApiService:
    """A toolspace with one OpenAPI service, `api`, and the server that its calls reach."""

    def __init__(self, server: HttpTestServer, toolspace: Toolspace, provider: OpenApiProvider) -> None:
        self.server = server
        self.toolspace = toolspace
        self.provider = provider

    @property
    def tools(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in self.provider.list_tools()}

    async def call(self, name: str = "op", /, **arguments: Any) -> ToolResult:
        return await self.toolspace.call(f"api__{name}", arguments)

    async def capture_request(self, name: str = "op", /, **arguments: Any) -> ReceivedRequest:
        """The request of a successful call, as the server received it."""
        result = await self.call(name, **arguments)
        assert result.ok, result.error
        return self.server.requests[-1]


@asynccontextmanager
async def service(document_json: Json, answer: Respond | None = None, **spec: Any) -> AsyncIterator[OpenApiService]:
    """The service of a document in a file. Calls go to the test server, unless the document has servers."""
    async with http_server(answer) as server:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "openapi.json"
            text = json.dumps(document_json).replace("http://server", server.url("").rstrip("/"))
            await asyncio.to_thread(file.write_text, text)
            if "servers" not in document_json:
                spec.setdefault("base_url", server.url("/v1"))
            provider = OpenApiProvider("api", OpenApiSpec(spec=str(file), **spec))
            async with Toolspace(providers=[provider]) as toolspace:
                yield OpenApiService(server, toolspace, provider)

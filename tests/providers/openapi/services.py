"""OpenAPI services on loopback: a document of the test's own, a real server behind it, and a toolspace before it."""

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
    """The paths of a document whose one operation is called `op`."""
    return {path: {method: {"operationId": "op", "responses": {}, **fields}}}


def parameter(name: str, place: str, schema: Json | None = None, **fields: Any) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": schema or {}, **fields}


def read(described: Json, **spec: Any) -> OperationList:
    """What is read from a document, without a file or a server."""
    opened = OpenApiDocument(described)
    said = OpenApiSpec(spec="test", **spec)
    return read_operations(opened, said, SecuritySchemes(opened, "api", said.auth, said.headers, HttpClient()))


def schema_of(described: Json, **spec: Any) -> Json:
    """The schema of the arguments of the document's one operation."""
    reading = read(described, **spec)
    assert reading.warnings == []
    return reading.operations[0].inputs.schema


class Service:
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

    async def sent(self, name: str = "op", /, **arguments: Any) -> ReceivedRequest:
        """The request that a call makes, as it arrives."""
        result = await self.call(name, **arguments)
        assert result.ok, result.error
        return self.server.requests[-1]


@asynccontextmanager
async def service(described: Json, answer: Respond | None = None, **spec: Any) -> AsyncIterator[Service]:
    """The service of a document, which is a file. Its server is the test's, unless the document is to say it."""
    async with http_server(answer) as server:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "openapi.json"
            text = json.dumps(described).replace("http://server", server.url("").rstrip("/"))
            await asyncio.to_thread(file.write_text, text)
            if "servers" not in described:
                spec.setdefault("base_url", server.url("/v1"))
            provider = OpenApiProvider("api", OpenApiSpec(spec=str(file), **spec))
            async with Toolspace(providers=[provider]) as toolspace:
                yield Service(server, toolspace, provider)

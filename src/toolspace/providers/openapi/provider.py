"""A service that an OpenAPI document describes, as a provider: every operation is a tool."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from yarl import URL

from toolspace.core import json_text
from toolspace.core.extension_points import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.schema_size import SchemaTooLarge, measure_schema
from toolspace.core.secret_masking import mask_secrets
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, Tool, ToolCategory
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolExecutionError, ToolNotFoundError
from toolspace.providers.openapi.document import (
    JsonObject,
    OpenApiDocument,
    OpenApiError,
    as_object,
    fetch_document,
    is_url,
    load_document,
)
from toolspace.providers.openapi.inputs import is_json_type
from toolspace.providers.openapi.operations import OpenApiOperation, OperationList, read_operations
from toolspace.providers.openapi.request_builder import compile_operation
from toolspace.providers.openapi.schemas import Refs, SchemaConverter, add_definitions
from toolspace.providers.openapi.security import AccessTokens, SecuritySchemes
from toolspace.providers.rest.client import BuildRequest, HttpClient, HttpRequest
from toolspace.providers.rest.provider import method_annotations
from toolspace.providers.rest.request_builder import register_request_secrets

_log = logging.getLogger("toolspace.providers")
_MAX_LOGGED_WARNINGS = 20
MAX_OUTPUT_SCHEMA_BYTES = 16_000
"""A larger output schema costs every reader of the tool list more than it is worth."""


class OpenApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One service described by an OpenAPI document.

    `OpenApiSpec(spec="https://example.com/openapi.json", auth={"bearerAuth": token}, methods=("GET",))`
    """

    spec: str
    """The document: a URL or the path of a file."""
    base_url: str | None = None
    """The URL of the service, if it differs from the document's servers."""
    headers: Mapping[str, str] = {}
    """Sent with every call. Parameters with one of these names are not offered to the model."""
    auth: Mapping[str, Any] = {}
    """Credentials by the name of the document's security scheme.

    A text is the key or the token, or `user:password` for basic authentication. A mapping has `username` and
    `password`; or `token`; or `clientId` and `clientSecret`, optionally `scopes`, `tokenUrl` and `clientAuth` (`basic`
    or `body`).
    """
    tags: tuple[str, ...] | None = None
    """Only operations with one of these tags. All filters are globs and ignore case."""
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    """Only operations at or below these paths."""
    operations: tuple[str, ...] | None = None
    """Only operations with one of these `operationId`s, or names if they have none."""

    def __repr__(self) -> str:
        return "OpenApiSpec(…)"  # A URL, a header and a credential may each hold a secret.


class OpenApiTool(Tool):
    """The tool of an operation. Its output schema is converted when it is first read, which is rare."""

    __slots__ = ("_is_converted", "_operation", "_schemas")

    def __init__(self, operation: OpenApiOperation, schemas: SchemaConverter) -> None:
        super().__init__(
            operation.name,
            operation.description,
            operation.inputs.schema,
            category=ToolCategory.REST,
            annotations=_cached_annotations(operation.method),
            tags=operation.tags,
        )
        self._operation = operation
        self._schemas = schemas
        self._is_converted = False

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        if self._output_schema is None and not self._is_converted:
            self._output_schema = _convert_output_schema(self._operation, self._schemas)
            self._is_converted = True
        return self._output_schema


def _convert_output_schema(operation: OpenApiOperation, schemas: SchemaConverter) -> JsonObject | None:
    """The schema of the only successful response, if it is JSON and not too large. None otherwise."""
    responses = as_object(operation.responses) or {}
    successes = [node for status, node in responses.items() if status.startswith("2")]
    if len(successes) != 1:
        return None
    try:
        reference = operation.file.follow(successes[0])
        content = as_object((as_object(reference.node) or {}).get("content")) or {}
        if len(content) != 1:
            return None
        ((media_type, node),) = content.items()
        media = as_object(node)
        if not is_json_type(media_type) or not media or "schema" not in media:
            return None
        refs: Refs = {}
        schema = as_object(schemas.convert(media["schema"], reference.file, refs))
        if schema is None:
            return None
        schema = add_definitions(schema, schemas.collect_definitions(refs))
        if json_text.encoded_size(schema) > MAX_OUTPUT_SCHEMA_BYTES:
            return None
        measure_schema(schema)
    except (OpenApiError, SchemaTooLarge, RecursionError):
        return None  # The tool works without it.
    return schema


@functools.cache
def _cached_annotations(method: str) -> Annotations:
    return method_annotations(method, NO_ANNOTATIONS)


class _CompiledOperation(NamedTuple):
    """An operation that has been called, compiled."""

    build_request: BuildRequest
    tokens: AccessTokens | None
    public_only: bool
    """Whether a document from the web decides where requests go."""


class OpenApiProvider(ToolProvider):
    """`OpenApiProvider("petstore", OpenApiSpec(spec="petstore.yaml"))`

    Closes the client only if it created it.
    """

    kind = "openapi"

    def __init__(self, name: str, spec: OpenApiSpec, client: HttpClient | None = None) -> None:
        super().__init__()
        self.namespace = name
        self.warnings: tuple[str, ...] = ()
        """The parts of the document that are left out, and why."""
        self._spec = spec
        self._client = client or HttpClient()
        self._owns_client = client is None
        self._tools: Sequence[Tool] = ()
        self._operations: dict[str, OpenApiOperation] = {}
        self._compiled_operations: dict[str, _CompiledOperation] = {}
        self._security: SecuritySchemes | None = None
        self._public_host: str | None = None
        """The host of a document from the web. Such a document must not lead to addresses that only we can reach."""

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def has_tool(self, name: str) -> bool:
        return name in self._operations

    def describe_execution(self, name: str) -> object:
        operation = self._operations.get(name)
        return self._spec, operation and (operation.method, operation.path, str(operation.server.url))

    async def warmup(self) -> None:
        """Reads the document. Raises `ProviderError` if it cannot be read."""
        content, url = None, None
        if is_url(self._spec.spec):
            content, url = await fetch_document(self._spec, self._client)
            host = url.raw_host or ""
            self._public_host = host if await self._client.is_public(host) else None
        # In a thread: parsing a large document takes a second, and other providers start meanwhile.
        await self._install(*await asyncio.to_thread(self._read, content, url))

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        build_request, tokens, public_only = self._compiled_operations.get(name) or self._compile(name)
        request = build_request(parameters)
        if public_only:
            request = msgspec.structs.replace(request, public_only=True)
        if tokens is None:
            return await self._client.send(request, context)
        token = await tokens.get()
        result = await self._client.send(_add_token(request, token), context)
        if not result.ok and result.extras.get("status") == 401:
            # The token may have been revoked. A rejected call has no effect, so it can be sent again.
            tokens.discard(token)
            result = await self._client.send(_add_token(request, await tokens.get()), context)
        return result

    async def aclose(self) -> None:
        if self._security is not None:
            await self._security.aclose()
        if self._owns_client:
            await self._client.aclose()

    def _read(self, content: bytes | None, url: URL | None) -> tuple[OperationList, SecuritySchemes, list[Tool]]:
        register_request_secrets(self._spec.base_url or "", self._spec.headers)
        document = load_document(content, self._spec.spec, url)
        security = SecuritySchemes(document, self.namespace, self._spec.auth, self._spec.headers, self._client)
        operation_list = read_operations(document, self._spec, security)
        operation_list.warnings.extend(security.warnings())
        _drop_unused_components(document)
        responses = SchemaConverter(document, "response")
        tools: list[Tool] = [OpenApiTool(operation, responses) for operation in operation_list.operations]
        return operation_list, security, tools

    async def _install(self, operation_list: OperationList, security: SecuritySchemes, tools: list[Tool]) -> None:
        if self._security is not None:
            await self._security.aclose()
        self._security = security
        self._tools = tools
        operations, warnings = operation_list
        self._operations = {operation.name: operation for operation in operations}
        self._compiled_operations = {}
        without_server = next((operation for operation in operations if operation.server.url is None), None)
        if without_server is not None:
            warnings.append(f"{without_server.server.reason}; set openapi.{self.namespace}.baseUrl")
        self.warnings = tuple(warnings)
        for warning in warnings[:_MAX_LOGGED_WARNINGS]:
            _log.warning("openapi %s: %s", self.namespace, mask_secrets(warning))
        if len(warnings) > _MAX_LOGGED_WARNINGS:
            _log.warning("openapi %s: and %d more warnings", self.namespace, len(warnings) - _MAX_LOGGED_WARNINGS)
        self.notify_changed()

    def _compile(self, name: str) -> _CompiledOperation:
        operation = self._operations.get(name)
        if operation is None or self._security is None:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        server = operation.server
        if server.url is None:
            raise ToolExecutionError(
                f"the server is unknown: {server.reason}; set openapi.{self.namespace}.baseUrl", executed=False
            )
        credentials = self._security.get_credentials(operation.security, server.url)
        build_request = compile_operation(operation, server.url, self._spec.headers, credentials)
        public_only = self._spec.base_url is None and self._public_host not in (None, server.url.raw_host)
        compiled_operation = _CompiledOperation(build_request, credentials.tokens, public_only)
        self._compiled_operations[name] = compiled_operation
        return compiled_operation


def _add_token(request: HttpRequest, token: str) -> HttpRequest:
    headers = {**dict(request.headers), "Authorization": f"Bearer {token}"}
    return msgspec.structs.replace(request, headers=headers)


def _drop_unused_components(document: OpenApiDocument) -> None:
    """Frees what no tool needs: examples are most of the memory of a large document."""
    components = as_object(document.data.get("components")) or {}
    for name in ("examples", "links", "callbacks"):
        components.pop(name, None)

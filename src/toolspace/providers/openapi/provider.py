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
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import mask_secrets
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, Tool, ToolCategory
from toolspace.errors import ToolExecutionError, ToolNotFoundError
from toolspace.providers.openapi.bodies import is_json_type
from toolspace.providers.openapi.document import (
    JsonObject,
    OpenApiDocument,
    OpenApiError,
    as_object,
    fetch_document,
    is_url,
    load_document,
)
from toolspace.providers.openapi.operations import OpenApiOperation, OperationList, read_operations
from toolspace.providers.openapi.request_builder import compile_operation
from toolspace.providers.openapi.schemas import Refs, SchemaConverter, add_definitions
from toolspace.providers.openapi.security import AccessTokens, SecuritySchemes
from toolspace.providers.rest.client import BuildRequest, HttpClient, HttpRequest
from toolspace.providers.rest.provider import method_annotations
from toolspace.providers.rest.request_builder import register_request_secrets

# MERGED from outputs: The output schema of an operation: what its one successful answer holds, where that is simpl…

MAX_OUTPUT_SCHEMA_BYTES = 16_000
"""A schema larger than this costs every reader of the list more than it tells."""


class LazyOutputSchema:
    """Makes the schema when someone asks for it: of a large document, few ever do."""

    __slots__ = ("_made", "_operation", "_schema", "_schemas")

    def __init__(self, operation: OpenApiOperation, schemas: SchemaConverter) -> None:
        self._operation = operation
        self._schemas = schemas
        self._made = False
        self._schema: JsonObject | None = None

    @property
    def schema(self) -> JsonObject | None:
        if not self._made:
            try:
                self._schema = self._make()
            except (OpenApiError, RecursionError):
                self._schema = None  # The call works without it.
            self._made = True
        return self._schema

    def _make(self) -> JsonObject | None:
        node = self._success()
        if node is None:
            return None
        refs: Refs = {}
        target = self._operation.source.follow(node)
        content = as_object((as_object(target.node) or {}).get("content")) or {}
        media = [as_object(one) for name, one in content.items() if is_json_type(name)]
        if len(media) != 1 or len(content) != 1 or not media[0] or "schema" not in media[0]:
            return None
        schema = as_object(self._schemas.convert(media[0]["schema"], target.source, refs))
        if schema is None:
            return None
        whole = add_definitions(schema, self._schemas.collect_definitions(refs))
        return whole if json_text.encoded_size(whole) <= MAX_OUTPUT_SCHEMA_BYTES else None

    def _success(self) -> Any:
        """The one answer that means success; with several, no schema would hold."""
        responses = as_object(self._operation.responses) or {}
        found = [node for status, node in responses.items() if status.startswith("2")]
        return found[0] if len(found) == 1 else None


# MERGED from spec: Which service to import, and how to reach it. Data only: nothing here reads a document or conne…


class OpenApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One service described by an OpenAPI document.

    `OpenApiSpec(spec="https://example.com/openapi.json", auth={"bearerAuth": token}, methods=("GET",))`
    """

    spec: str
    """The document: a URL, or the path of a file."""
    base_url: str | None = None
    """Where the service is, if not where the document says."""
    headers: Mapping[str, str] = {}
    """Sent with every call. A parameter of one of these names is not offered to the model."""
    auth: Mapping[str, Any] = {}
    """Credentials by the name of the document's security scheme.

    A text is the key or the token, and `user:password` for basic. A mapping has `username` and `password`, or `token`,
    or `clientId`, `clientSecret` and perhaps `scopes`, `tokenUrl` and `clientAuth` (`basic` or `body`).
    """
    tags: tuple[str, ...] | None = None
    """Only operations with one of these tags. Globs, as in all filters; their case does not matter."""
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    """Only operations at or below these paths."""
    operations: tuple[str, ...] | None = None
    """Only these operations, by `operationId`, else by their name."""

    def __repr__(self) -> str:
        return "OpenApiSpec(…)"  # A URL, a header and a credential may each carry a key.


_log = logging.getLogger("toolspace.providers")
_SHOWN = 20
"""Warnings in the log; the rest is counted."""


class OpenApiTool(Tool):
    """A tool whose output schema is made when someone asks for it."""

    __slots__ = ("_output",)

    def __init__(self, operation: OpenApiOperation, schemas: SchemaConverter) -> None:
        super().__init__(
            operation.name,
            operation.description,
            operation.inputs.schema,
            category=ToolCategory.REST,
            annotations=_annotations(operation.method),
            tags=operation.tags,
        )
        self._output = LazyOutputSchema(operation, schemas)

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        return self._output_schema if self._output_schema is not None else self._output.schema


@functools.cache
def _annotations(method: str) -> Annotations:
    return method_annotations(method, NO_ANNOTATIONS)


class _Compiled(NamedTuple):
    """How one operation is called, once someone has called it."""

    build: BuildRequest
    tokens: AccessTokens | None
    public: bool
    """Whether a stranger's document says where it goes."""


class OpenApiProvider(ToolProvider):
    """`OpenApiProvider("petstore", OpenApiSpec(spec="petstore.yaml"))`

    Without a client it makes one of its own, and closes it.
    """

    kind = "openapi"

    def __init__(self, name: str, spec: OpenApiSpec, client: HttpClient | None = None) -> None:
        super().__init__()
        self.namespace = name
        self.warnings: tuple[str, ...] = ()
        """What of the document is left out, and why."""
        self._spec = spec
        self._client = client or HttpClient()
        self._owns_client = client is None
        self._tools: Sequence[Tool] = ()
        self._operations: dict[str, OpenApiOperation] = {}
        self._compiled: dict[str, _Compiled] = {}
        self._security: SecuritySchemes | None = None
        self._public_host: str | None = None
        """Where the document is from, if that is on the web: it must not lead to places that only we can reach."""

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def has_tool(self, name: str) -> bool:
        return name in self._operations

    async def warmup(self) -> None:
        """Reads the document. Raises `ProviderError` where that fails."""
        content, url = None, None
        if is_url(self._spec.spec):
            content, url = await fetch_document(self._spec, self._client)
            host = url.raw_host or ""
            self._public_host = host if await self._client.is_public(host) else None
        # In a thread: a large document takes a second to parse, and others start meanwhile.
        await self._take(*await asyncio.to_thread(self._read, content, url))

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        build, tokens, public = self._compiled.get(name) or self._compile(name)
        request = build(parameters)
        if public:
            request = msgspec.structs.replace(request, public_only=True)
        if tokens is None:
            return await self._client.send(request, context)
        token = await tokens.get()
        result = await self._client.send(_with_token(request, token), context)
        if not result.ok and result.extras.get("status") == 401:
            # It may have been revoked. Refused calls have no effect, so this one may be sent again.
            tokens.discard(token)
            result = await self._client.send(_with_token(request, await tokens.get()), context)
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
        reading = read_operations(document, self._spec, security)
        reading.warnings.extend(security.warnings())
        _forget_examples(document)
        responses = SchemaConverter(document, "response")
        return reading, security, [OpenApiTool(one, responses) for one in reading.operations]

    async def _take(self, reading: OperationList, security: SecuritySchemes, tools: list[Tool]) -> None:
        if self._security is not None:
            await self._security.aclose()
        self._security = security
        self._tools = tools
        self._operations = {one.name: one for one in reading.operations}
        self._compiled = {}
        warnings = reading.warnings
        if unreachable := [one for one in reading.operations if one.server.url is None]:
            warnings.append(f"{unreachable[0].server.reason}; set openapi.{self.namespace}.baseUrl")
        self.warnings = tuple(warnings)
        for warning in warnings[:_SHOWN]:
            _log.warning("openapi %s: %s", self.namespace, mask_secrets(warning))
        if len(warnings) > _SHOWN:
            _log.warning("openapi %s: and %d more warnings", self.namespace, len(warnings) - _SHOWN)
        self.notify_changed()

    def _compile(self, name: str) -> _Compiled:
        operation = self._operations.get(name)
        if operation is None or self._security is None:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        server = operation.server
        if server.url is None:
            raise ToolExecutionError(
                f"nobody knows where to send it: {server.reason}; set openapi.{self.namespace}.baseUrl", executed=False
            )
        credentials = self._security.get_credentials(operation.security, server.url)
        build = compile_operation(operation, server.url, self._spec.headers, credentials)
        led = self._spec.base_url is None and self._public_host not in (None, server.url.raw_host)
        self._compiled[name] = compiled = _Compiled(build, credentials.tokens, led)
        return compiled


def _with_token(request: HttpRequest, token: str) -> HttpRequest:
    headers = {**dict(request.headers), "Authorization": f"Bearer {token}"}
    return msgspec.structs.replace(request, headers=headers)


def _forget_examples(document: OpenApiDocument) -> None:
    """Lets go of what no tool needs: of a large document, examples are most of the memory."""
    components = as_object(document.data.get("components")) or {}
    for name in ("examples", "links", "callbacks"):
        components.pop(name, None)

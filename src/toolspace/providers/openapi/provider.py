"""A service that an OpenAPI document describes, as a provider: every operation is a tool."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from yarl import URL

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import redact
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, Tool, ToolCategory
from toolspace.errors import ToolExecutionError, ToolNotFoundError
from toolspace.providers.openapi.build import compile_operation
from toolspace.providers.openapi.document import Document, fetch, is_url, mapping, open_document
from toolspace.providers.openapi.operations import Operation, Reading, read_operations
from toolspace.providers.openapi.outputs import Output
from toolspace.providers.openapi.schemas import Schemas
from toolspace.providers.openapi.security import Security
from toolspace.providers.openapi.spec import OpenApiSpec
from toolspace.providers.openapi.tokens import Tokens
from toolspace.providers.rest.client import HttpClient
from toolspace.providers.rest.provider import annotations_of
from toolspace.providers.rest.request import Build, Request
from toolspace.providers.rest.secrets import remember_request_secrets

_log = logging.getLogger("toolspace.providers")
_SHOWN = 20
"""Warnings in the log; the rest is counted."""


class OpenApiTool(Tool):
    """A tool whose output schema is made when someone asks for it."""

    __slots__ = ("_output",)

    def __init__(self, operation: Operation, schemas: Schemas) -> None:
        super().__init__(
            operation.name,
            operation.description,
            operation.inputs.schema,
            category=ToolCategory.REST,
            annotations=_annotations(operation.method),
            tags=operation.tags,
        )
        self._output = Output(operation, schemas)

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        return self._output_schema if self._output_schema is not None else self._output.schema


@functools.cache
def _annotations(method: str) -> Annotations:
    return annotations_of(method, NO_ANNOTATIONS)


class _Compiled(NamedTuple):
    """How one operation is called, once someone has called it."""

    build: Build
    tokens: Tokens | None
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
        self._operations: dict[str, Operation] = {}
        self._compiled: dict[str, _Compiled] = {}
        self._security: Security | None = None
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
            content, url = await fetch(self._spec, self._client)
            host = url.raw_host or ""
            self._public_host = host if await self._client.is_public(host) else None
        # In a thread: a large document takes a second to parse, and others start meanwhile.
        await self._take(*await asyncio.to_thread(self._read, content, url))

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        build, tokens, public = self._compiled.get(name) or self._compile(name)
        request = build(parameters)
        if public:
            request = msgspec.structs.replace(request, public=True)
        if tokens is None:
            return await self._client.send(request, context)
        token = await tokens.get()
        result = await self._client.send(_with_token(request, token), context)
        if not result.ok and result.extras.get("status") == 401:
            # It may have been revoked. Refused calls have no effect, so this one may be sent again.
            tokens.forget(token)
            result = await self._client.send(_with_token(request, await tokens.get()), context)
        return result

    async def aclose(self) -> None:
        if self._security is not None:
            await self._security.aclose()
        if self._owns_client:
            await self._client.aclose()

    def _read(self, content: bytes | None, url: URL | None) -> tuple[Reading, Security, list[Tool]]:
        remember_request_secrets(self._spec.base_url or "", self._spec.headers)
        document = open_document(content, self._spec.spec, url)
        security = Security(document, self.namespace, self._spec.auth, self._spec.headers, self._client)
        reading = read_operations(document, self._spec, security)
        reading.warnings.extend(security.warnings())
        _forget_examples(document)
        responses = Schemas(document, "response")
        return reading, security, [OpenApiTool(one, responses) for one in reading.operations]

    async def _take(self, reading: Reading, security: Security, tools: list[Tool]) -> None:
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
            _log.warning("openapi %s: %s", self.namespace, redact(warning))
        if len(warnings) > _SHOWN:
            _log.warning("openapi %s: and %d more warnings", self.namespace, len(warnings) - _SHOWN)
        self.changed()

    def _compile(self, name: str) -> _Compiled:
        operation = self._operations.get(name)
        if operation is None or self._security is None:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        server = operation.server
        if server.url is None:
            raise ToolExecutionError(
                f"nobody knows where to send it: {server.reason}; set openapi.{self.namespace}.baseUrl", executed=False
            )
        credentials = self._security.credentials(operation.security, server.url)
        build = compile_operation(operation, server.url, self._spec.headers, credentials)
        led = self._spec.base_url is None and self._public_host not in (None, server.url.raw_host)
        self._compiled[name] = compiled = _Compiled(build, credentials.tokens, led)
        return compiled


def _with_token(request: Request, token: str) -> Request:
    headers = {**dict(request.headers), "Authorization": f"Bearer {token}"}
    return msgspec.structs.replace(request, headers=headers)


def _forget_examples(document: Document) -> None:
    """Lets go of what no tool needs: of a large document, examples are most of the memory."""
    components = mapping(document.data.get("components")) or {}
    for name in ("examples", "links", "callbacks"):
        components.pop(name, None)

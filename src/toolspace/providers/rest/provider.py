"""The provider of REST tools, such as `rest__weather`. Requests are built by `request_builder` and sent by `client`.

Configured tools of type `gateway` use `build_request_handler`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from toolspace.core.extension_points import ToolProvider
from toolspace.core.http_messages import IDEMPOTENT_METHODS, SAFE_METHODS
from toolspace.core.result import ToolResult
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, CacheScope, Tool, ToolCategory, to_annotations
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolDefinitionError, ToolNotFoundError
from toolspace.providers.rest.client import BuildRequest, HttpClient
from toolspace.providers.rest.request_builder import build_input_schema, compile_request

RequestHandler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, ToolResult]]


class RestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One REST tool: a request whose URL, headers, query and body are templates with `${parameters.x}`."""

    name: str
    url: str
    description: str = ""
    method: str = "GET"
    headers: Mapping[str, str] = {}
    query: Mapping[str, Any] = {}
    body: Any = None
    parameters_schema: Mapping[str, Any] | None = None
    """None: built from the parameters that the templates name."""
    output_schema: Mapping[str, Any] | None = None
    queue: str | None = None
    cache: float | None = None
    cache_scope: CacheScope | None = None
    priority: int | None = None
    approval: Literal["required", "none"] | None = None
    timeout: float | None = None
    annotations: Annotations | Mapping[str, bool] = NO_ANNOTATIONS
    """Annotations that are not set follow from the method."""
    tags: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"RestSpec({self.name!r})"  # Every other field may hold a secret.


class RestProvider(ToolProvider):
    """Tools that are one HTTP request each. Closes the client only if it created it."""

    kind = "rest"
    namespace = "rest"
    circuit_scope = "tool"  # Each tool may be a service of its own.

    def __init__(self, specs: Iterable[RestSpec], *, client: HttpClient | None = None) -> None:
        """Raises `ToolDefinitionError` if a template is invalid or two tools have the same name."""
        super().__init__()
        self._client = client or HttpClient()
        self._owns_client = client is None
        self._builders: dict[str, BuildRequest] = {}
        self._tools: list[Tool] = []
        self._specs: dict[str, RestSpec] = {}
        for spec in specs:
            if spec.name in self._builders:
                raise ToolDefinitionError(f"there are two REST tools {spec.name!r}; rename one")
            self._specs[spec.name] = spec
            self._builders[spec.name] = compile_request(spec)
            self._tools.append(build_tool(spec))

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def has_tool(self, name: str) -> bool:
        return name in self._builders

    def describe_execution(self, name: str) -> object:
        return self._specs.get(name)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        build_request = self._builders.get(name)
        if build_request is None:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await self._client.send(build_request(parameters), context)

    async def aclose(self) -> None:
        if self._owns_client:
            await self._client.aclose()


def build_tool(spec: RestSpec) -> Tool:
    """The tool definition of a spec."""
    return Tool(
        spec.name,
        spec.description,
        build_input_schema(spec),
        output_schema=spec.output_schema,
        category=ToolCategory.REST,
        timeout=spec.timeout,
        queue=spec.queue,
        cache=spec.cache,
        cache_scope=spec.cache_scope,
        priority=spec.priority,
        approval=spec.approval,
        annotations=method_annotations(spec.method, to_annotations(spec.annotations, spec.name)),
        tags=spec.tags,
    )


def method_annotations(method: str, annotations: Annotations) -> Annotations:
    """The annotations, completed by what an HTTP method implies."""
    method = method.upper()
    implied_values = {
        "read_only": method in SAFE_METHODS,
        "destructive": method == "DELETE",
        "idempotent": method in IDEMPOTENT_METHODS,
        "open_world": True,
    }
    unset = {name: value for name, value in implied_values.items() if getattr(annotations, name) is None}
    return msgspec.structs.replace(annotations, **unset)


def build_request_handler(
    name: str, execution: Mapping[str, Any], client: HttpClient
) -> tuple[RequestHandler, Mapping[str, Any]]:
    """The handler of a configured tool whose `execution` has a `url`, by the rules of REST tools; and its input schema.

    The schema has the parameters that the templates name.
    """
    spec = RestSpec(
        name=name,
        url=str(execution["url"]),
        method=str(execution.get("method") or "POST"),
        headers=execution.get("headers") or {},
        query=execution.get("query") or {},
        body=execution.get("body"),
    )
    build_request = compile_request(spec)

    async def handle(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return await client.send(build_request(parameters), context)

    return handle, build_input_schema(spec)

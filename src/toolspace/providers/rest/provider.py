"""REST tools as a provider: `rest__weather`. Knows tools and specs; how requests are made and sent is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, Tool, ToolCategory
from toolspace.errors import ToolDefinitionError, ToolNotFoundError
from toolspace.providers.rest.client import IDEMPOTENT_METHODS, SAFE_METHODS, BuildRequest, HttpClient
from toolspace.providers.rest.request_builder import build_input_schema, compile_request

# MERGED from spec: What describes one REST tool: plain data, from configuration or from code.


class RestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One request to one service. `${parameters.x}` stands in its templates; variables are filled in already."""

    name: str
    url: str
    description: str = ""
    method: str = "GET"
    headers: Mapping[str, str] = {}
    query: Mapping[str, Any] = {}
    body: Any = None
    parameters_schema: Mapping[str, Any] | None = None
    """None: made from the parameters that the templates name."""
    output_schema: Mapping[str, Any] | None = None
    queue: str | None = None
    cache: float | None = None
    cache_per_user: bool = False
    timeout: float | None = None
    annotations: Annotations = NO_ANNOTATIONS
    """What it leaves open is known from the method."""
    tags: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"RestSpec({self.name!r})"  # Keys may be in every other field.


class RestProvider(ToolProvider):
    """Tools that are one HTTP request each. A client that it was given stays its owner's to close."""

    kind = "rest"
    namespace = "rest"

    def __init__(self, specs: Iterable[RestSpec], *, client: HttpClient | None = None) -> None:
        """Raises `ToolDefinitionError` where a template cannot be compiled."""
        super().__init__()
        self._client = client or HttpClient()
        self._owns_client = client is None
        self._builds: dict[str, BuildRequest] = {}
        self._tools: list[Tool] = []
        for spec in specs:
            if spec.name in self._builds:
                raise ToolDefinitionError(f"there are two REST tools {spec.name!r}; rename one")
            self._builds[spec.name] = compile_request(spec)
            self._tools.append(build_tool(spec))

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def has_tool(self, name: str) -> bool:
        return name in self._builds

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        build = self._builds.get(name)
        if build is None:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await self._client.send(build(parameters), context)

    async def aclose(self) -> None:
        if self._owns_client:
            await self._client.aclose()


def build_tool(spec: RestSpec) -> Tool:
    """The tool that a spec describes."""
    return Tool(
        spec.name,
        spec.description,
        build_input_schema(spec),
        output_schema=spec.output_schema,
        category=ToolCategory.REST,
        timeout=spec.timeout,
        queue=spec.queue,
        cache=spec.cache,
        cache_per_user=spec.cache_per_user,
        annotations=method_annotations(spec.method, spec.annotations),
        tags=spec.tags,
    )


def method_annotations(method: str, given: Annotations) -> Annotations:
    """What a method does to the world, where nobody has said otherwise."""
    method = method.upper()
    known = {
        "read_only": method in SAFE_METHODS,
        "destructive": method == "DELETE",
        "idempotent": method in IDEMPOTENT_METHODS,
        "open_world": True,
    }
    return msgspec.structs.replace(given, **{key: value for key, value in known.items() if getattr(given, key) is None})


RequestHandler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, ToolResult]]


def build_request_handler(name: str, execution: Mapping[str, Any], client: HttpClient) -> RequestHandler:
    """What runs a configured tool whose `execution` has a `url`. The same rules hold as for REST tools."""
    build = compile_request(_spec(name, execution))

    async def handle(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return await client.send(build(parameters), context)

    return handle


def build_request_schema(name: str, execution: Mapping[str, Any]) -> Mapping[str, Any]:
    """What such a tool takes, by the parameters that its templates name."""
    spec = _spec(name, execution)
    compile_request(spec)  # For its faults, which are told better there.
    return build_input_schema(spec)


def _spec(name: str, execution: Mapping[str, Any]) -> RestSpec:
    return RestSpec(
        name=name,
        url=str(execution["url"]),
        method=str(execution.get("method") or "POST"),
        headers=execution.get("headers") or {},
        query=execution.get("query") or {},
        body=execution.get("body"),
    )

"""REST tools as a provider: `rest__weather`. Knows tools and specs; how requests are made and sent is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Annotations, Tool, ToolCategory
from toolspace.errors import ToolDefinitionError, ToolNotFoundError
from toolspace.providers.rest.build import compile_request, schema_of
from toolspace.providers.rest.client import HttpClient
from toolspace.providers.rest.request import IDEMPOTENT, SAFE, Build
from toolspace.providers.rest.spec import RestSpec


class RestProvider(ToolProvider):
    """Tools that are one HTTP request each. A client that it was given stays its owner's to close."""

    kind = "rest"
    namespace = "rest"

    def __init__(self, specs: Iterable[RestSpec], *, client: HttpClient | None = None) -> None:
        """Raises `ToolDefinitionError` where a template cannot be compiled."""
        super().__init__()
        self._client = client or HttpClient()
        self._owns_client = client is None
        self._builds: dict[str, Build] = {}
        self._tools: list[Tool] = []
        for spec in specs:
            if spec.name in self._builds:
                raise ToolDefinitionError(f"there are two REST tools {spec.name!r}; rename one")
            self._builds[spec.name] = compile_request(spec)
            self._tools.append(tool_of(spec))

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


def tool_of(spec: RestSpec) -> Tool:
    """The tool that a spec describes."""
    return Tool(
        spec.name,
        spec.description,
        schema_of(spec),
        output_schema=spec.output_schema,
        category=ToolCategory.REST,
        timeout=spec.timeout,
        queue=spec.queue,
        cache=spec.cache,
        cache_per_user=spec.cache_per_user,
        annotations=annotations_of(spec.method, spec.annotations),
        tags=spec.tags,
    )


def annotations_of(method: str, given: Annotations) -> Annotations:
    """What a method does to the world, where nobody has said otherwise."""
    method = method.upper()
    known = {
        "read_only": method in SAFE,
        "destructive": method == "DELETE",
        "idempotent": method in IDEMPOTENT,
        "open_world": True,
    }
    return msgspec.structs.replace(given, **{key: value for key, value in known.items() if getattr(given, key) is None})


Handler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, ToolResult]]


def request_handler(name: str, execution: Mapping[str, Any], client: HttpClient) -> Handler:
    """What runs a configured tool whose `execution` has a `url`. The same rules hold as for REST tools."""
    build = compile_request(_spec(name, execution))

    async def handle(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return await client.send(build(parameters), context)

    return handle


def request_schema(name: str, execution: Mapping[str, Any]) -> Mapping[str, Any]:
    """What such a tool takes, by the parameters that its templates name."""
    spec = _spec(name, execution)
    compile_request(spec)  # For its faults, which are told better there.
    return schema_of(spec)


def _spec(name: str, execution: Mapping[str, Any]) -> RestSpec:
    return RestSpec(
        name=name,
        url=str(execution["url"]),
        method=str(execution.get("method") or "POST"),
        headers=execution.get("headers") or {},
        query=execution.get("query") or {},
        body=execution.get("body"),
    )

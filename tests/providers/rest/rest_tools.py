"""REST tools and toolspaces with one REST tool, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from toolspace.core.result import ToolResult
from toolspace.providers.rest.client import HttpClient
from toolspace.providers.rest.provider import RestProvider, RestSpec
from toolspace.toolspace import Toolspace


def rest_spec(url: str, **fields: Any) -> RestSpec:
    """The spec of a tool `t` that accepts any arguments."""
    fields.setdefault("parameters_schema", {"type": "object"})
    return RestSpec(name="t", url=url, **fields)


def rest_toolspace(spec: RestSpec, *, client: HttpClient | None = None, **options: Any) -> Toolspace:
    """A toolspace with only the tool `rest__t`."""
    return Toolspace(providers=[RestProvider([spec], client=client)], **options)


async def call(spec: RestSpec, arguments: dict[str, Any] | None = None) -> ToolResult:
    """Calls the tool in a new toolspace."""
    async with rest_toolspace(spec) as toolspace:
        return await toolspace.call("rest__t", arguments or {})

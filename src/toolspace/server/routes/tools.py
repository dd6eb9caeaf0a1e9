"""Routes that show tools. Calling one is in `calling`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from toolspace.core.statistics import ToolStats
from toolspace.core.tool import Tool, ToolCategory
from toolspace.server.body_types import Page, Paging, Shape, page
from toolspace.server.callers import Access
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.routing import Route


class ToolShape(Shape, frozen=True, kw_only=True):
    """A tool as callers see it; how it is executed is not a part of that."""

    name: str
    description: str
    input_schema: dict[str, Any]
    category: str
    execution_type: str
    visible: bool
    is_async: bool


class ToolList(Paging, frozen=True, kw_only=True):
    category: ToolCategory | None = None
    search: (
        Annotated[str, Meta(min_length=1, max_length=500, description="The best matches for these words.")] | None
    ) = None


def shown(tool: Tool) -> dict[str, Any]:
    """The definition, without how the tool is executed: that may name hosts and carry secrets."""
    data = tool.to_dict()
    data.pop("execution", None)
    return data


async def list_tools(request: Request) -> Page[dict[str, Any]]:
    query = request.query(ToolList)
    toolspace = request.gateway.toolspace
    tools = toolspace.list_tools(context=request.gateway.tool_keys.context(request.caller))
    if query.category is not None:
        tools = [tool for tool in tools if tool.category == query.category]
    if query.search is not None:
        allowed = {tool.name for tool in tools}
        ranked = toolspace.search(query.search, limit=len(allowed) + query.limit)
        found = [tool for tool, _ in ranked if tool.name in allowed][: query.limit]
        return Page(items=[shown(tool) for tool in found], next=None)
    after = query.cursor or ""
    tools = sorted((tool for tool in tools if tool.name > after), key=lambda tool: tool.name)
    return page([shown(tool) for tool in tools[: query.limit + 1]], query.limit, lambda tool: tool["name"])


async def get_tool(request: Request) -> dict[str, Any]:
    name = request.params["name"]
    tool = request.gateway.toolspace.get(name)
    if tool is None:
        raise Problem(404, f'there is no tool "{name[:200]}"; GET /api/tools lists what there is')
    if not request.gateway.tool_keys.permits(request.caller, tool.name):
        raise Problem(403, f'this key may not use the tool "{tool.name}"')
    return shown(tool)


async def get_stats(request: Request) -> ToolStats:
    return request.gateway.toolspace.stats()


ROUTES = [
    Route(
        method="GET",
        path="/api/tools",
        handler=list_tools,
        access=Access.TOOLS,
        tag="tools",
        summary="List tools, by name; those that the key may use",
        query=ToolList,
        answer=Page[ToolShape],
    ),
    Route(
        method="GET",
        path="/api/tools/stats",
        handler=get_stats,
        access=Access.SECRET,
        tag="tools",
        summary="How often tools were called here, how they ended and how long they took",
        answer=ToolStats,
    ),
    Route(
        method="GET",
        path="/api/tools/{name}",
        handler=get_tool,
        access=Access.TOOLS,
        tag="tools",
        summary="One tool",
        answer=ToolShape,
    ),
]

"""Routes that show tools. Calling one is in `calling`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from toolspace.core.statistics import ToolStats
from toolspace.core.tool import Tool, ToolCategory
from toolspace.server.api_types import PageQuery, ResponseBody, ResultPage, build_page
from toolspace.server.authorization import Access
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.routing import Route


class ToolShape(ResponseBody, frozen=True, kw_only=True):
    """A tool as callers see it; how it is executed is not a part of that."""

    name: str
    description: str
    input_schema: dict[str, Any]
    category: str
    execution_type: str
    visible: bool
    is_async: bool


class ToolListQuery(PageQuery, frozen=True, kw_only=True):
    category: ToolCategory | None = None
    search: (
        Annotated[str, Meta(min_length=1, max_length=500, description="The best matches for these words.")] | None
    ) = None


def describe_tool(tool: Tool) -> dict[str, Any]:
    """The definition, without how the tool is executed: that may name hosts and carry secrets."""
    data = tool.to_dict()
    data.pop("execution", None)
    return data


async def list_tools(request: Request) -> ResultPage[dict[str, Any]]:
    query = request.query(ToolListQuery)
    toolspace = request.gateway.toolspace
    tools = toolspace.list_tools(context=request.gateway.tool_key_policy.context_for(request.caller))
    if query.category is not None:
        tools = [tool for tool in tools if tool.category == query.category]
    if query.search is not None:
        allowed = {tool.name for tool in tools}
        ranked = toolspace.search(query.search, limit=len(allowed) + query.limit)
        found = [tool for tool, _ in ranked if tool.name in allowed][: query.limit]
        return ResultPage(items=[describe_tool(tool) for tool in found], next=None)
    after = query.cursor or ""
    tools = sorted((tool for tool in tools if tool.name > after), key=lambda tool: tool.name)
    return build_page(
        [describe_tool(tool) for tool in tools[: query.limit + 1]], query.limit, lambda tool: tool["name"]
    )


async def get_tool(request: Request) -> dict[str, Any]:
    name = request.params["name"]
    tool = request.gateway.toolspace.find_tool(name)
    if tool is None:
        raise Problem(404, f'there is no tool "{name[:200]}"; GET /api/tools lists what there is')
    if not request.gateway.tool_key_policy.may_use(request.caller, tool.name):
        raise Problem(403, f'this key may not use the tool "{tool.name}"')
    return describe_tool(tool)


async def get_stats(request: Request) -> ToolStats:
    return request.gateway.toolspace.get_stats()


ROUTES = [
    Route(
        method="GET",
        path="/api/tools",
        handler=list_tools,
        access=Access.TOOLS,
        tag="tools",
        summary="List tools, by name; those that the key may use",
        query=ToolListQuery,
        response=ResultPage[ToolShape],
    ),
    Route(
        method="GET",
        path="/api/tools/stats",
        handler=get_stats,
        access=Access.SECRET,
        tag="tools",
        summary="How often tools were called here, how they ended and how long they took",
        response=ToolStats,
    ),
    Route(
        method="GET",
        path="/api/tools/{name}",
        handler=get_tool,
        access=Access.TOOLS,
        tag="tools",
        summary="One tool",
        response=ToolShape,
    ),
]

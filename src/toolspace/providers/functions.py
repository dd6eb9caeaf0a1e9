"""Runs a tool that is Python code, by itself: without stages, for callers that have no orchestrator."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.function import FunctionTool
from toolspace.core.result import ToolResult, content_of, result_of_parts
from toolspace.core.signature import style_of
from toolspace.core.tool import Tool
from toolspace.errors import ToolExecutionError


async def run_tool(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
    """The result of a tool's function or handler. What it raises is raised."""
    value = await _value(tool, parameters, context)
    if isinstance(value, ToolResult):
        return value
    parts = content_of(value)
    return ToolResult(ok=True, result=result_of_parts(parts) if parts else value, parts=parts, tool=tool.name)


async def _value(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> Any:
    if isinstance(tool, FunctionTool):
        signature = tool.signature
        named = dict(tool.validator.from_mapping(parameters))
        if signature.context is not None:
            named[signature.context] = context
        positional = [named.pop(one) for one in signature.positional if one in named]
        function, style = tool.function, tool.style
    elif tool.handler is not None:
        function, positional, named = tool.handler, [parameters, context], {}
        style = style_of(tool.handler, tool.name)
    else:
        raise ToolExecutionError(f'tool "{tool.name}" has no function that this process could run')
    if style == "stream":
        async with aclosing(function(*positional, **named)) as stream:
            values = [value async for value in stream]
        return "".join(values) if all(isinstance(value, str) for value in values) else values
    if style == "sync":
        return await asyncio.to_thread(function, *positional, **named)
    return await function(*positional, **named)

"""Holds the tools that this process runs itself: functions, tools with a handler, built-ins.

The toolspace and the orchestrator use it; tools can be added and removed while calls run. `run_tool` runs one tool
without the stages of the orchestrator.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.function_tool import FunctionTool, as_tool
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult, get_content_parts, join_parts
from toolspace.core.signature import execution_style
from toolspace.core.statistics import StatsCollector, ToolStats
from toolspace.core.tool import Tool, ToolCategory, check_local_name
from toolspace.core.tool_formats import ToolFormat, export_tools
from toolspace.errors import ToolExecutionError, ToolNameConflict, ToolNotFoundError


async def run_tool(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
    """Runs a tool's function or handler and returns its result. Exceptions of the function propagate."""
    value = await _run_function(tool, parameters, context)
    if isinstance(value, ToolResult):
        return value
    parts = get_content_parts(value)
    return ToolResult(ok=True, result=join_parts(parts) if parts else value, parts=parts, tool=tool.name)


async def _run_function(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> Any:
    if isinstance(tool, FunctionTool):
        signature = tool.signature
        keywords = dict(tool.validator.from_mapping(parameters))
        if signature.context_parameter is not None:
            keywords[signature.context_parameter] = context
        positional = [keywords.pop(name) for name in signature.positional_only if name in keywords]
        function, style = tool.function, tool.style
    elif tool.handler is not None:
        function, positional, keywords = tool.handler, [parameters, context], {}
        style = execution_style(tool.handler, tool.name)
    else:
        raise ToolExecutionError(f'tool "{tool.name}" has no function that this process can run')
    if style == "stream":
        async with aclosing(function(*positional, **keywords)) as stream:
            values = [value async for value in stream]
        return "".join(values) if all(isinstance(value, str) for value in values) else values
    if style == "sync":
        return await asyncio.to_thread(function, *positional, **keywords)
    return await function(*positional, **keywords)


class ToolRegistry(ToolProvider):
    """Tools under bare names, without a namespace. An orchestrator runs them through its stages."""

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        kind: str = "local",
        stats: StatsCollector | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self._tools: dict[str, Tool] = {}
        self._stats = stats or StatsCollector()
        self.register_many(tools)

    def register(self, tool: Tool | Callable[..., Any]) -> Tool:
        """Adds a tool, or a function as a tool. Raises `ToolNameConflict` if the name is in use."""
        new_tool = as_tool(tool)
        self.register_many([new_tool])
        return new_tool

    def register_many(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        """Adds all tools, or none of them if one cannot be added."""
        new_tools: dict[str, Tool] = {}
        for item in tools:
            tool = as_tool(item)
            check_local_name(tool.name)
            _ = tool.input_schema  # Built now: an unsupported type hint is reported when the tool is added.
            existing_tool = self._tools.get(tool.name) or new_tools.get(tool.name)
            if existing_tool is not None:
                raise ToolNameConflict(
                    f'"{tool.name}" is offered by {_origin(existing_tool)} and {_origin(tool)}; rename one with name=…'
                )
            new_tools[tool.name] = tool
        if new_tools:
            self._tools.update(new_tools)
            self.notify_changed()

    def unregister(self, name: str) -> Tool:
        """Removes a tool. Raises `ToolNotFoundError`. Running calls continue."""
        try:
            tool = self._tools.pop(name)
        except KeyError:
            raise ToolNotFoundError(f'Tool "{name}" not found{did_you_mean(name, self._tools)}') from None
        self.notify_changed()
        return tool

    def replace_all(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        """Replaces all tools, or none if one cannot be added."""
        self._tools = ToolRegistry(tools)._tools
        self.notify_changed()

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def has(self, name: str) -> bool:
        return name in self._tools

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def list(self) -> list[Tool]:
        return [*self._tools.values()]

    def list_tools(self) -> Sequence[Tool]:
        return self.list()

    def list_by_category(self, category: ToolCategory | str) -> Sequence[Tool]:
        return [tool for tool in self._tools.values() if tool.category == category]

    def to_llm_tools(self, format: ToolFormat = "openai") -> Sequence[dict[str, Any]]:
        """The tool definitions in the format of a model API."""
        return export_tools(self._tools.values(), format)

    def get_stats(self) -> ToolStats:
        return self._stats.summary(self._tools.values())

    def update_call_stats(self, name: str, duration: float, success: bool) -> None:
        """Adds a call to the statistics that this registry did not run itself. `duration` is in milliseconds."""
        self._stats.add(name, duration, success)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        """Runs a tool without stages, for callers without an orchestrator."""
        tool = self._tools.get(name)
        if tool is None:
            raise ToolNotFoundError(f'Tool "{name}" not found{did_you_mean(name, self._tools)}')
        return await run_tool(tool, parameters, context)


def _origin(tool: Tool) -> str:
    """Describes a tool in an error message: the function with its file and line."""
    if isinstance(tool, FunctionTool):
        code = getattr(inspect.unwrap(tool.function), "__code__", None)
        name = getattr(tool.function, "__qualname__", tool.name)
        return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
    return f"the tool {tool.name!r}"

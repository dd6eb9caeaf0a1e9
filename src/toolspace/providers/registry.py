"""Local tools under bare names: functions, raw schemas with a handler, the built-ins. Added and removed at run time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.export import ToolFormat, export_tools
from toolspace.core.function_tool import FunctionTool, as_tool
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult, get_content_parts, join_parts
from toolspace.core.signature import execution_style
from toolspace.core.statistics import StatsCollector, ToolStats
from toolspace.core.tool import Tool, ToolCategory, check_local_name
from toolspace.errors import ToolExecutionError, ToolNameConflict, ToolNotFoundError

# MERGED from functions: Runs a tool that is Python code, by itself: without stages, for callers that have no orche…


async def run_tool(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
    """The result of a tool's function or handler. What it raises is raised."""
    value = await _value(tool, parameters, context)
    if isinstance(value, ToolResult):
        return value
    parts = get_content_parts(value)
    return ToolResult(ok=True, result=join_parts(parts) if parts else value, parts=parts, tool=tool.name)


async def _value(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> Any:
    if isinstance(tool, FunctionTool):
        signature = tool.signature
        named = dict(tool.validator.from_mapping(parameters))
        if signature.context_parameter is not None:
            named[signature.context_parameter] = context
        positional = [named.pop(one) for one in signature.positional_only if one in named]
        function, style = tool.function, tool.style
    elif tool.handler is not None:
        function, positional, named = tool.handler, [parameters, context], {}
        style = execution_style(tool.handler, tool.name)
    else:
        raise ToolExecutionError(f'tool "{tool.name}" has no function that this process could run')
    if style == "stream":
        async with aclosing(function(*positional, **named)) as stream:
            values = [value async for value in stream]
        return "".join(values) if all(isinstance(value, str) for value in values) else values
    if style == "sync":
        return await asyncio.to_thread(function, *positional, **named)
    return await function(*positional, **named)


class ToolRegistry(ToolProvider):
    """The tools that this process runs itself. An orchestrator runs them through all its stages."""

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
        """Adds a tool, or a plain function as one. A name that is taken is an error."""
        made = as_tool(tool)
        self.register_many([made])
        return made

    def register_many(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        """Adds all of them or, where one cannot be added, none."""
        added: dict[str, Tool] = {}
        for item in tools:
            tool = as_tool(item)
            check_local_name(tool.name)
            _ = (
                tool.input_schema
            )  # Read now: a hint that no schema can be made of is this tool's fault, not the list's.
            existing = self._tools.get(tool.name) or added.get(tool.name)
            if existing is not None:
                raise ToolNameConflict(
                    f'"{tool.name}" is offered by {_origin(existing)} and {_origin(tool)}; rename one with name=…'
                )
            added[tool.name] = tool
        if added:
            self._tools.update(added)
            self.notify_changed()

    def unregister(self, name: str) -> Tool:
        """Takes a tool out. Calls in flight end as they end."""
        try:
            tool = self._tools.pop(name)
        except KeyError:
            raise ToolNotFoundError(f'Tool "{name}" not found{did_you_mean(name, self._tools)}') from None
        self.notify_changed()
        return tool

    def replace_all(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        """Puts other tools in the place of all."""
        fresh = ToolRegistry(tools)
        self._tools = fresh._tools
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
        """The definitions as one model API takes them."""
        return export_tools(self._tools.values(), format)

    def get_stats(self) -> ToolStats:
        return self._stats.summary(self._tools.values())

    def update_call_stats(self, name: str, duration: float, success: bool) -> None:
        """Books a call that ran elsewhere. The duration is in milliseconds, as in the statistics."""
        self._stats.add(name, duration, success)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        """Runs a tool by itself, without stages: for callers that have no orchestrator."""
        tool = self._tools.get(name)
        if tool is None:
            raise ToolNotFoundError(f'Tool "{name}" not found{did_you_mean(name, self._tools)}')
        return await run_tool(tool, parameters, context)


def _origin(tool: Tool) -> str:
    """Whose tool it is, as an error message names it."""
    if isinstance(tool, FunctionTool):
        code = getattr(inspect.unwrap(tool.function), "__code__", None)
        name = getattr(tool.function, "__qualname__", tool.name)
        return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
    return f"the tool {tool.name!r}"

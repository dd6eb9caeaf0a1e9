"""What MCP asks of a toolspace, whatever the era and the transport. Knows neither HTTP nor the MCP library."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.elicitation import CallerClient
from toolspace.core.events import ToolsChanged
from toolspace.core.function_tool import FunctionTool
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.orchestrator import call as calls
from toolspace.orchestrator.call import Arguments, is_running_loop
from toolspace.server.mcp.progress import ProgressSubscriptions
from toolspace.server.mcp.results import StoredOutputs
from toolspace.server.mcp.tool_definitions import EncodedTool, ToolDefinitions, ToolPage
from toolspace.toolspace import Toolspace

_NOT_OFFERED = frozenset(("agent__final_report", "agent__task_status", "agent__find_tools"))
"""About a run, which belongs to the client here; and a search, where the client has the whole list."""
_SETTLE_SECONDS = 0.05
"""A reload changes the list many times in a row; clients are told once."""


class UnknownToolError(Exception):
    """The call names no tool. Says which names are near."""


class McpService:
    """One toolspace, offered to any number of clients. `async with` it: it listens for changes."""

    def __init__(self, toolspace: Toolspace) -> None:
        self.toolspace = toolspace
        self.progress = ProgressSubscriptions(toolspace.bus)
        self.outputs = StoredOutputs(toolspace.outputs, toolspace.orchestrator.session)
        self.on_tools_changed: Callable[[], None] = lambda: None
        self.on_outputs_changed: Callable[[], None] = lambda: None
        self._definitions = {modern: ToolDefinitions(modern=modern) for modern in (True, False)}
        self._by_name: dict[str, Tool] | None = None
        self._forget: Callable[[], None] | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> McpService:
        self._loop = asyncio.get_running_loop()
        self._forget = self.toolspace.bus.subscribe(self._changed, ToolsChanged)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._forget is not None:
            self._forget()
        self._loop = None
        if self._telling is not None:
            self._telling.cancel()

    # Tools

    def list_tools(self, context: ToolContext | None) -> list[Tool]:
        """The tools that this caller may use."""
        return [tool for tool in self.toolspace.list_tools(context=context) if tool.name not in _NOT_OFFERED]

    def list_page(self, cursor: str | None, context: ToolContext | None, *, modern: bool) -> ToolPage:
        """A page of definitions. Raises `WrongCursor`."""
        return self._definitions[modern].page(self.list_tools(context), cursor)

    def find_tool(self, name: str) -> Tool | None:
        """The tool of exactly this name. Cheap, also for names that mean nothing."""
        if self._by_name is None:
            self._by_name = {tool.name: tool for tool in self.list_tools(None)}
        tool = self._by_name.get(name)
        if tool is None and self.toolspace.orchestrator.policies:
            # That nobody in particular may use it says nothing of this caller.
            found = self.toolspace.find_tool(name)
            if found is not None and found.name == name and name not in _NOT_OFFERED:
                tool = self._by_name[name] = found
        return tool

    def get_definition(self, tool: Tool, *, modern: bool) -> EncodedTool:
        return self._definitions[modern].get(tool)

    def find_argument_schema(self, name: str) -> Mapping[str, Any] | None:
        tool = self.find_tool(name)
        return tool.input_schema if tool is not None else None

    def may_ask(self, tool: Tool) -> bool:
        """Whether a call of it could ask its caller something. A function without a context could not."""
        return not isinstance(tool, FunctionTool) or tool.signature.context_parameter is not None

    def instructions(self, context: ToolContext | None = None) -> str | None:
        return self.toolspace.orchestrator.instructions(context=context) or None

    # Calls

    def create_call_id(self) -> str:
        return next(calls.call_ids)

    async def call(
        self, name: str, arguments: Arguments, *, context: ToolContext | None, call_id: str | None = None
    ) -> ToolResult:
        """Runs one call. Raises `UnknownTool`; all other failures are results."""
        if name in _NOT_OFFERED:
            raise UnknownToolError(f'Tool "{name}" not found')
        result = await self.toolspace.call(name, arguments, context=context, call_id=call_id)
        if result.ok:
            if result.extras and result.extras.get("stored"):
                self._stored(str(result.extras.get("handle")), context)
        elif result.error_kind == "unknown_tool" and result.kind == "none":
            raise UnknownToolError(self._not_found(name, result, context))
        return result

    def cancel(self, call_id: str) -> bool:
        return self.toolspace.cancel(call_id)

    # Inside

    def _not_found(self, name: str, result: ToolResult, context: ToolContext | None) -> str:
        if not self.toolspace.orchestrator.policies:
            return result.error or f'Tool "{name}" not found'
        # Only names that this caller is shown may be proposed.
        return f'Tool "{name}" not found{did_you_mean(name, (tool.name for tool in self.list_tools(context)))}'

    def _stored(self, handle: str, context: ToolContext | None) -> None:
        first = self.outputs.remember(handle, context)
        self.on_outputs_changed()
        if first:
            self._tell_soon()  # Reading back is offered from now on.

    def _changed(self, _: ToolsChanged) -> None:
        for definitions in self._definitions.values():
            definitions.clear()
        self._by_name = None
        if self._loop is not None:
            if is_running_loop(self._loop):
                self._tell_soon()
            else:  # A program may add tools from wherever it likes.
                self._loop.call_soon_threadsafe(self._tell_soon)

    def _tell_soon(self) -> None:
        if self._telling is None and self._loop is not None:
            self._telling = self._loop.call_later(_SETTLE_SECONDS, self._tell)

    def _tell(self) -> None:
        self._telling = None
        self.on_tools_changed()


def session_context(context: ToolContext | None, session: str | None) -> ToolContext | None:
    """The context of a caller in one MCP session: what it stores is that session's, unless the caller has one.

    Hashed: handles show the session, and whoever knows the id of an MCP session can use it.
    """
    if session is None or (context is not None and context.session_id is not None):
        return context
    own = ToolContext(session_id=f"session-mcp-{hashlib.blake2s(session.encode(), digest_size=12).hexdigest()}")
    return own if context is None else context.with_defaults(own)


def with_questions(context: ToolContext | None, questions: CallerClient) -> ToolContext:
    """The context of a caller who can be asked, unless who found the caller said otherwise."""
    own = ToolContext(caller_client=questions)
    return own if context is None else context.with_defaults(own)

"""Offers a toolspace to MCP clients, independent of protocol era and transport: lists tools, runs calls, notes changes.

`sdk_server` and `fast_path` use it. It knows neither HTTP nor the MCP SDK.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from toolspace.core import json_text
from toolspace.core.context import CallerClient, ToolContext
from toolspace.core.events import ToolsChanged
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import FunctionTool, Tool, export_tools
from toolspace.core.validation import InvalidArguments, SchemaValidator
from toolspace.orchestrator import call as calls
from toolspace.orchestrator.call import Arguments, is_running_loop
from toolspace.server.mcp.progress import ProgressSubscriptions
from toolspace.server.mcp.results_and_resources import StoredOutputs
from toolspace.toolspace import Toolspace

# MERGED from tool_definitions: Converts tools to MCP tool definitions, encodes each of them once, and returns them in

PAGE_TOOLS = 1_000
PAGE_BYTES = 900_000
"""Clients refuse a server-sent event above 1 MiB, and a page may be sent as one."""
_HEADER_ARGUMENT = b'"x-mcp-header"'
_STORED_OUTPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "The handle of a result that is too large.",
    "properties": {"tool_output": {"type": "object"}},
    "required": ["tool_output"],
}
_STORED_OUTPUT_SAMPLE = {"tool_output": {"handle": "session-x/0", "reason": "size_limit_exceeded", "preview": ""}}


class InvalidCursor(Exception):
    """The client sent a cursor that no page ended with."""


class EncodedTool(NamedTuple):
    """One tool definition as JSON."""

    encoded: bytes
    has_header_arguments: bool
    """Whether HTTP headers may repeat arguments, which then have to be compared."""

    @property
    def wire(self) -> dict[str, Any]:
        """The definition as data. Decoded from the JSON, so that it holds nothing but JSON types."""
        return json_text.decode(self.encoded)


class ToolPage(NamedTuple):
    definitions: Sequence[EncodedTool]
    next_cursor: str | None


class ToolDefinitions:
    """Caches the definitions of one protocol era. `clear` it when the tools have changed."""

    def __init__(self, *, modern: bool) -> None:
        self._modern = modern
        self._cache: dict[Tool, EncodedTool] = {}

    def clear(self) -> None:
        self._cache = {}

    def get(self, tool: Tool) -> EncodedTool:
        definition = self._cache.get(tool)
        if definition is None:
            definition = self._cache[tool] = _encode_tool(tool, modern=self._modern)
        return definition

    def get_page(self, tools: Sequence[Tool], cursor: str | None) -> ToolPage:
        """Returns the page after a cursor. Sorted by name, so that changes between pages skip or repeat no tool."""
        last_name = None if cursor is None else _parse_cursor(cursor)
        remaining = sorted(
            (tool for tool in tools if last_name is None or tool.name > last_name), key=lambda tool: tool.name
        )
        definitions: list[EncodedTool] = []
        free_bytes = PAGE_BYTES
        for tool in remaining[:PAGE_TOOLS]:
            definition = self.get(tool)
            free_bytes -= len(definition.encoded)
            if free_bytes < 0 and definitions:
                break
            definitions.append(definition)
        has_more = len(definitions) < len(remaining)
        return ToolPage(definitions, _build_cursor(remaining[len(definitions) - 1].name) if has_more else None)


def _encode_tool(tool: Tool, *, modern: bool) -> EncodedTool:
    (wire,) = export_tools((tool,), "mcp")
    wire["inputSchema"] = _repair_input_schema(wire["inputSchema"])
    output_schema = wire.pop("outputSchema", None)
    if output_schema is not None and (modern or output_schema.get("type") == "object"):
        widened_schema = output_schema if tool.has_small_results else _allow_stored_output(output_schema)
        if widened_schema is not None:
            wire["outputSchema"] = widened_schema
    encoded = json_text.encode_bytes(wire)
    return EncodedTool(encoded, _HEADER_ARGUMENT in encoded)


def _repair_input_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema that every client can read: one odd schema must not make the whole list unreadable."""
    repaired = {**schema, "type": "object"}
    properties: Any = schema.get("properties")
    if isinstance(properties, Mapping):
        repaired["properties"] = {
            str(name): value if isinstance(value, Mapping | bool) else {}
            for name, value in cast("Mapping[str, Any]", properties).items()
        }
    else:
        repaired.pop("properties", None)
    required: Any = schema.get("required")
    if not (isinstance(required, list) and all(isinstance(name, str) for name in cast("list[Any]", required))):
        repaired.pop("required", None)
    if not isinstance(schema.get("$schema"), str):
        repaired.pop("$schema", None)
    return repaired


def _allow_stored_output(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns a schema that also allows the handle of a stored output; None if it cannot be widened.

    Clients validate results against the schema, and any result may be too large.
    """
    try:
        SchemaValidator(schema, tool="").from_mapping(dict(_STORED_OUTPUT_SAMPLE))
        return schema
    except InvalidArguments:
        pass
    except Exception:  # Not a valid schema: better none at all.
        return None
    if b'"#"' in (text := json_text.encode_bytes(schema)) or text.count(b'"#/') > text.count(b'"#/$defs/'):
        return None  # It refers to its root, which would change.
    own_schema = {key: value for key, value in schema.items() if key not in ("$defs", "$schema")}
    widened: dict[str, Any] = {"anyOf": [own_schema, _STORED_OUTPUT_SCHEMA]}
    if own_schema.get("type") == "object":
        widened["type"] = "object"
    return {**widened, "$defs": schema["$defs"]} if "$defs" in schema else widened


def _build_cursor(name: str) -> str:
    return base64.urlsafe_b64encode(f"after:{name}".encode()).decode()


def _parse_cursor(cursor: str) -> str:
    try:
        kind, _, name = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        kind = name = ""
    if kind != "after" or not name:
        raise InvalidCursor(f"unknown cursor {cursor[:80]!r}; omit it to start with the first page")
    return name


_NOT_OFFERED = frozenset(("agent__final_report", "agent__task_status", "agent__find_tools"))
"""Tools for a run, which the client has itself, and for a search in the list, which the client has completely."""
_NOTIFY_SECONDS = 0.05
"""A reload changes the list many times in a row; clients get one notification."""


class UnknownToolError(Exception):
    """A call names no tool. The message proposes similar names."""


class McpService:
    """One toolspace, offered to any number of clients. Use it with `async with`, because it subscribes to changes."""

    def __init__(self, toolspace: Toolspace) -> None:
        self.toolspace = toolspace
        self.progress = ProgressSubscriptions(toolspace.bus)
        self.outputs = StoredOutputs(toolspace.outputs, toolspace.orchestrator.session)
        self.on_tools_changed: Callable[[], None] = lambda: None
        self.on_outputs_changed: Callable[[], None] = lambda: None
        self._definitions = {modern: ToolDefinitions(modern=modern) for modern in (True, False)}
        self._tools_by_name: dict[str, Tool] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._notification: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> McpService:
        self._loop = asyncio.get_running_loop()
        self._unsubscribe = self.toolspace.bus.subscribe(self._handle_change, ToolsChanged)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._loop = None
        if self._notification is not None:
            self._notification.cancel()

    # Tools

    def list_tools(self, context: ToolContext | None) -> list[Tool]:
        """Returns the tools that this caller may use."""
        return [tool for tool in self.toolspace.list_tools(context=context) if tool.name not in _NOT_OFFERED]

    def list_page(self, cursor: str | None, context: ToolContext | None, *, modern: bool) -> ToolPage:
        """Returns a page of tool definitions. Raises `InvalidCursor`."""
        return self._definitions[modern].get_page(self.list_tools(context), cursor)

    def find_tool(self, name: str) -> Tool | None:
        """Returns the tool with exactly this name. Cheap for unknown names, too."""
        if self._tools_by_name is None:
            self._tools_by_name = {tool.name: tool for tool in self.list_tools(None)}
        tool = self._tools_by_name.get(name)
        if tool is None and self.toolspace.orchestrator.policies:
            # A policy may forbid it to an anonymous caller and allow it to this one.
            candidate = self.toolspace.find_tool(name)
            if candidate is not None and candidate.name == name and name not in _NOT_OFFERED:
                tool = self._tools_by_name[name] = candidate
        return tool

    def get_definition(self, tool: Tool, *, modern: bool) -> EncodedTool:
        return self._definitions[modern].get(tool)

    def find_argument_schema(self, name: str) -> Mapping[str, Any] | None:
        tool = self.find_tool(name)
        return tool.input_schema if tool is not None else None

    def may_ask(self, tool: Tool) -> bool:
        """Whether a call of the tool could ask its caller something. A function without a context cannot."""
        return not isinstance(tool, FunctionTool) or tool.signature.context_parameter is not None

    def instructions(self, context: ToolContext | None = None) -> str | None:
        return self.toolspace.orchestrator.instructions(context=context) or None

    # Calls

    def create_call_id(self) -> str:
        return next(calls.call_ids)

    async def call(
        self, name: str, arguments: Arguments, *, context: ToolContext | None, call_id: str | None = None
    ) -> ToolResult:
        """Runs one call. Raises `UnknownToolError`; all other failures are results."""
        if name in _NOT_OFFERED:
            raise UnknownToolError(f'Tool "{name}" not found')
        result = await self.toolspace.call(name, arguments, context=context, call_id=call_id)
        if result.ok:
            if result.extras and result.extras.get("stored"):
                self._add_output(str(result.extras.get("handle")), context)
        elif result.error_kind == "unknown_tool" and result.kind == "none":
            raise UnknownToolError(self._describe_unknown_tool(name, result, context))
        return result

    def cancel(self, call_id: str) -> bool:
        return self.toolspace.cancel(call_id)

    def _describe_unknown_tool(self, name: str, result: ToolResult, context: ToolContext | None) -> str:
        if not self.toolspace.orchestrator.policies:
            return result.error or f'Tool "{name}" not found'
        # Proposes only names that this caller may see.
        return f'Tool "{name}" not found{did_you_mean(name, (tool.name for tool in self.list_tools(context)))}'

    def _add_output(self, handle: str, context: ToolContext | None) -> None:
        is_first = self.outputs.add(handle, context)
        self.on_outputs_changed()
        if is_first:
            self._schedule_notification()  # The tool that reads stored outputs is offered from now on.

    # Changes of the tools

    def _handle_change(self, _: ToolsChanged) -> None:
        for definitions in self._definitions.values():
            definitions.clear()
        self._tools_by_name = None
        if self._loop is not None:
            if is_running_loop(self._loop):
                self._schedule_notification()
            else:  # A program may add tools from any thread.
                self._loop.call_soon_threadsafe(self._schedule_notification)

    def _schedule_notification(self) -> None:
        if self._notification is None and self._loop is not None:
            self._notification = self._loop.call_later(_NOTIFY_SECONDS, self._notify)

    def _notify(self) -> None:
        self._notification = None
        self.on_tools_changed()


def session_context(context: ToolContext | None, mcp_session_id: str | None) -> ToolContext | None:
    """Returns the context of a caller in an MCP session. Its outputs belong to that session, unless it has another.

    The id is hashed, because handles show it and anyone who knows an MCP session's id can use the session.
    """
    if mcp_session_id is None or (context is not None and context.session_id is not None):
        return context
    digest = hashlib.blake2s(mcp_session_id.encode(), digest_size=12).hexdigest()
    defaults = ToolContext(session_id=f"session-mcp-{digest}")
    return defaults if context is None else context.with_defaults(defaults)


def with_caller_client(context: ToolContext | None, client: CallerClient) -> ToolContext:
    """Returns the context with a way to ask the caller, unless it already has one."""
    defaults = ToolContext(caller_client=client)
    return defaults if context is None else context.with_defaults(defaults)

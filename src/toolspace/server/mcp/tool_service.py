"""The tools that a toolspace offers to MCP clients, in any protocol era and over any transport: lists and calls them.

`request_handlers` and `fast_path` use it. It knows neither HTTP nor the MCP SDK.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, cast

from toolspace.core import json_text
from toolspace.core.events import ToolsChanged
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import FunctionTool, Tool
from toolspace.core.tool_context import CallerClient, ToolContext
from toolspace.core.tool_export import export_tools
from toolspace.core.trace_context import TraceContext
from toolspace.errors import ProviderError
from toolspace.orchestrator import call as calls
from toolspace.orchestrator.call import Arguments, is_running_loop
from toolspace.orchestrator.policy_rules import compile_policy
from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.linked_resources import LinkedResources
from toolspace.server.mcp.progress import ProgressSubscriptions
from toolspace.server.mcp.results_and_resources import (
    MAX_RESOURCE_BYTES,
    OUTPUT_URI_PREFIX,
    ResourceNotFound,
    ResourceTooLarge,
    StoredOutputs,
)
from toolspace.server.redaction import conceal_addresses
from toolspace.server.tool_permissions import is_tool_key_user
from toolspace.toolspace import Toolspace

PAGE_TOOLS = 1_000
PAGE_BYTES = 900_000
"""Clients refuse a server-sent event above 1 MiB, and a page may be sent as one."""
_NOT_OFFERED = frozenset(("agent__final_report", "agent__task_status", "agent__find_tools"))
"""Tools for a run, which the client has itself, and for a search in the list, which the client has completely."""
_SERVER_META_KEY = "toolspace/server"
"""Names, in the `_meta` of `resources/read`, the server whose resource is meant if several have used the same URI."""
_RESOURCE_NOT_FOUND = -32002
"""The code of the handshake era; the stateless era uses INVALID_PARAMS."""
_INTERNAL_ERROR = -32603
_NOTIFY_SECONDS = 0.05
"""A reload changes the list many times in a row; clients get one notification."""


class UnknownToolError(Exception):
    """A call names no tool. The message proposes similar names."""


class InvalidCursor(Exception):
    """The client sent a cursor that no page ended with."""


class ReadError(Exception):
    """A resource cannot be read. The message says why."""

    def __init__(self, reason: str, code: int, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        """The JSON-RPC code. That of a missing resource is the one of the handshake era."""
        self.is_missing = is_missing


class OfferedTool:
    """A tool, with what clients and the fast path need to know of it. Each value is computed once."""

    def __init__(self, tool: Tool, *, needs_confirmation: bool = False) -> None:
        """`needs_confirmation`: a policy may ask the client to approve calls of the tool."""
        self.tool = tool
        self.name = tool.name
        self.has_output_schema = tool.output_schema is not None
        has_context = not isinstance(tool, FunctionTool) or tool.signature.context_parameter is not None
        self.may_ask = needs_confirmation or has_context
        """Whether a call could ask its caller something. A function without a context cannot."""

    @cached_property
    def definition(self) -> bytes:
        """The definition for the stateless era, as JSON."""
        return _encode_definition(self.tool, modern=True)

    @cached_property
    def handshake_definition(self) -> bytes:
        return _encode_definition(self.tool, modern=False)

    @cached_property
    def has_header_arguments(self) -> bool:
        """Whether HTTP headers may repeat arguments, which then have to be compared."""
        return b'"x-mcp-header"' in self.definition


class ToolPage(NamedTuple):
    definitions: list[bytes]
    """As JSON."""
    next_cursor: str | None


class McpService:
    """One toolspace, offered to any number of clients. Use it with `async with`, because it subscribes to changes."""

    def __init__(self, toolspace: Toolspace) -> None:
        self.toolspace = toolspace
        self.cancel = toolspace.orchestrator.cancel
        self.wait_for_lists = toolspace.orchestrator.wait_for_lists
        self.progress = ProgressSubscriptions(toolspace.bus)
        self.outputs = StoredOutputs(toolspace.outputs, toolspace.orchestrator.session)
        self.links = LinkedResources()
        self.on_tools_changed: Callable[[], None] = lambda: None
        self.on_outputs_changed: Callable[[], None] = lambda: None
        self._offered_tools: dict[Tool, OfferedTool] = {}
        self._tools_by_name: dict[str, OfferedTool] | None = None
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

    def list_page(self, cursor: str | None, context: ToolContext | None, *, modern: bool) -> ToolPage:
        """Returns the page after a cursor, of the tools that this caller may use. Raises `InvalidCursor`.

        The list is sorted by name, so that changes between pages skip or repeat no tool.
        """
        user = "" if context is None else context.user_id or ""
        last_name = "" if cursor is None else _parse_cursor(cursor, user)
        tools = sorted(
            (tool for tool in self._list_tools(context) if tool.name > last_name), key=lambda tool: tool.name
        )
        definitions: list[bytes] = []
        free_bytes = PAGE_BYTES
        for tool in tools[:PAGE_TOOLS]:
            offered_tool = self._offer(tool)
            definition = offered_tool.definition if modern else offered_tool.handshake_definition
            free_bytes -= len(definition)
            if free_bytes < 0 and definitions:
                break
            definitions.append(definition)
        has_more = len(definitions) < len(tools)
        return ToolPage(definitions, _build_cursor(tools[len(definitions) - 1].name, user) if has_more else None)

    def find_tool(self, name: str) -> OfferedTool | None:
        """Returns the tool with exactly this name. Cheap for unknown names, too."""
        if self._tools_by_name is None:
            self._tools_by_name = {tool.name: self._offer(tool) for tool in self._list_tools(None)}
        offered_tool = self._tools_by_name.get(name)
        if offered_tool is None and self.toolspace.orchestrator.services.list_policies():
            # A policy may forbid it to an anonymous caller and allow it to this one.
            tool = self.toolspace.find_tool(name)
            if tool is not None and tool.name == name and name not in _NOT_OFFERED:
                offered_tool = self._tools_by_name[name] = self._offer(tool)
        return offered_tool

    def find_argument_schema(self, name: str) -> Mapping[str, Any] | None:
        offered_tool = self.find_tool(name)
        return offered_tool.tool.input_schema if offered_tool is not None else None

    def instructions(self, context: ToolContext | None = None) -> str | None:
        return self.toolspace.orchestrator.instructions(context=context, is_fenced=False) or None

    def _list_tools(self, context: ToolContext | None) -> list[Tool]:
        """Returns the tools that this caller may use."""
        return [tool for tool in self.toolspace.list_tools(context=context) if tool.name not in _NOT_OFFERED]

    def _offer(self, tool: Tool) -> OfferedTool:
        offered_tool = self._offered_tools.get(tool)
        if offered_tool is None:
            offered_tool = self._offered_tools[tool] = OfferedTool(tool, needs_confirmation=self._may_ask_caller(tool))
        return offered_tool

    def _may_ask_caller(self, tool: Tool) -> bool:
        """Whether a policy may ask the caller to approve a call. Policies of a program say so only when they decide."""
        orchestrator = self.toolspace.orchestrator
        if orchestrator.services.policies:
            return True
        explanation = orchestrator.explain(tool.name) if orchestrator.services.policy_rules else None
        return (
            explanation is not None
            and compile_policy(orchestrator.services.policy_rules, explanation[0], explanation[1].approval).asks_caller
        )

    # Calls

    def create_call_id(self) -> str:
        return next(calls.call_ids)

    async def call(
        self, name: str, arguments: Arguments, *, context: ToolContext | None, call_id: str | None = None
    ) -> ToolResult:
        """Runs one call. Raises `UnknownToolError`; all other failures are results."""
        if name in _NOT_OFFERED:
            raise UnknownToolError(f'Tool "{name}" not found')
        result = await self.toolspace.orchestrator.execute(name, arguments, context=context, call_id=call_id)
        if context is not None and is_tool_key_user(context.user_id):
            conceal_addresses(result, arguments)
        if result.parts and result.kind == "mcp":
            self.links.add(result, self.outputs.get_reader(context))
        if result.ok:
            if result.extras and result.extras.get("stored"):
                self._add_output(str(result.extras.get("handle")), context)
        elif result.error_kind == "unknown_tool" and result.kind == "none":
            raise UnknownToolError(self._describe_unknown_tool(name, result, context))
        return result

    def _describe_unknown_tool(self, name: str, result: ToolResult, context: ToolContext | None) -> str:
        if not self.toolspace.orchestrator.services.list_policies():
            return result.error or f'Tool "{name}" not found'
        # Proposes only names that this caller may see.
        return f'Tool "{name}" not found{did_you_mean(name, (tool.name for tool in self._list_tools(context)))}'

    def _add_output(self, handle: str, context: ToolContext | None) -> None:
        is_first = self.outputs.add(handle, context)
        self.on_outputs_changed()
        if is_first:
            self._schedule_notification()  # The tool that reads stored outputs is offered from now on.

    # Resources

    async def read_resource(
        self, uri: str, context: ToolContext | None, *, server: str | None = None
    ) -> dict[str, Any]:
        """Returns the result of `resources/read`: a stored output, or a resource that a result named to this caller.

        Several servers may have named the same URI: the last one counts, or `server`. Raises `ResourceNotFound`,
        `ResourceTooLarge`, and `ProviderError` if the server behind does not return it.
        """
        try:
            return {"contents": [await self.outputs.read_resource(uri, context)]}
        except ResourceNotFound:
            links = [
                link
                for link in self.links.find(uri, self.outputs.get_reader(context))
                if server is None or link.server == server
            ]
            if not links:
                if uri.startswith(OUTPUT_URI_PREFIX):
                    raise
                message = f"no resource {uri[:200]!r} can be read here: no result has named it to you"
                raise ResourceNotFound(message) from None
        # Whoever may no longer use the tool may not read what it named either.
        tool_names = {tool.name for tool in self._list_tools(context)}
        for provider in self.toolspace.orchestrator.providers:
            if provider.namespace == links[0].server and links[0].tool in tool_names:
                result = await provider.read_resource(uri, context or ToolContext())
                if (size := len(json_text.encode_bytes(result))) > MAX_RESOURCE_BYTES:
                    raise ResourceTooLarge(
                        f"the resource has {size:,} bytes, and one answer at most {MAX_RESOURCE_BYTES:,}"
                    )
                return result
        raise ResourceNotFound(f"no resource {uri[:200]!r} can be read here any more")

    # Changes of the tools

    def _handle_change(self, _: ToolsChanged) -> None:
        self._offered_tools = {}
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


async def read_resource(
    service: McpService, uri: str, meta: Mapping[str, Any], context: ToolContext | None
) -> dict[str, Any]:
    """Returns the result of `resources/read` for a request with this `_meta`. Raises `ReadError`."""
    server = meta.get(_SERVER_META_KEY)
    try:
        return await service.read_resource(uri, context, server=server if isinstance(server, str) else None)
    except ResourceNotFound as error:
        raise ReadError(str(error), _RESOURCE_NOT_FOUND, is_missing=True) from None
    except ResourceTooLarge as error:
        raise ReadError(str(error), json_rpc.INVALID_PARAMS) from None
    except ProviderError as error:
        # The reason may name hosts and files, which tool keys must not learn.
        reason = "" if context is not None and is_tool_key_user(context.user_id) else f": {error}"
        raise ReadError(f"the server behind did not return {uri[:200]!r}{reason}", _INTERNAL_ERROR) from None


def session_context(context: ToolContext | None, mcp_session_id: str | None) -> ToolContext | None:
    """Returns the context of a caller in an MCP session. Its outputs belong to that session, unless it has another.

    The id is hashed, because handles show it and anyone who knows an MCP session's id can use the session.
    """
    if mcp_session_id is None or (context is not None and context.session_id is not None):
        return context
    digest = hashlib.blake2s(mcp_session_id.encode(), digest_size=12).hexdigest()
    defaults = ToolContext(session_id=f"session-mcp-{digest}")
    return defaults if context is None else context.with_defaults(defaults)


def with_trace(context: ToolContext | None, trace_context: TraceContext | None) -> ToolContext | None:
    """Returns the context with the trace of one request. Contexts of callers and sessions are shared by many."""
    if trace_context is None:
        return context
    own_context = ToolContext(trace=trace_context)
    return own_context if context is None else own_context.with_defaults(context)


def with_caller_client(context: ToolContext | None, client: CallerClient) -> ToolContext:
    """Returns the context with a way to ask the caller, unless it already has one."""
    defaults = ToolContext(caller_client=client)
    return defaults if context is None else context.with_defaults(defaults)


def _encode_definition(tool: Tool, *, modern: bool) -> bytes:
    (definition,) = export_tools((tool,), "mcp")
    definition["inputSchema"] = _repair_input_schema(definition["inputSchema"])
    if not modern and definition.get("outputSchema", {}).get("type") != "object":
        definition.pop("outputSchema", None)  # Earlier eras have output schemas of objects only.
    return json_text.encode_bytes(definition)


def _repair_input_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema that every client can read: one odd schema must not make the whole list unreadable."""
    result = {**schema, "type": "object"}
    properties: Any = schema.get("properties")
    if isinstance(properties, Mapping):
        result["properties"] = {
            str(name): value if isinstance(value, Mapping | bool) else {}
            for name, value in cast("Mapping[str, Any]", properties).items()
        }
    else:
        result.pop("properties", None)
    required: Any = schema.get("required")
    if not (isinstance(required, list) and all(isinstance(name, str) for name in cast("list[Any]", required))):
        result.pop("required", None)
    if not isinstance(schema.get("$schema"), str):
        result.pop("$schema", None)
    return result


def _build_cursor(name: str, user: str) -> str:
    """Returns the cursor of the page after a tool. It names the user, because lists of users are different."""
    return base64.urlsafe_b64encode(f"after:{name}:{user}".encode()).decode()


def _parse_cursor(cursor: str, user: str) -> str:
    try:
        kind, _, position = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        kind = position = ""
    name, _, owner = position.partition(":")
    if kind != "after" or not name or owner != user:
        raise InvalidCursor(f"unknown cursor {cursor[:80]!r}; omit it to start with the first page")
    return name

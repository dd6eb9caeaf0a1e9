"""One MCP server as a provider of tools: lists its tools, executes calls on it, and reports its status.

Decides which failed calls may be sent again. `connection` keeps the server running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import HEADER_MISMATCH, INVALID_PARAMS, METHOD_NOT_FOUND

from toolspace.core.extension_points import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ErrorKind, ProviderError
from toolspace.providers.mcp.connection import ConnectionOptions, ServerConnection
from toolspace.providers.mcp.conversion import (
    ServerTool,
    UnusableTool,
    limit_instructions,
    parse_resource_contents,
    parse_tool,
)
from toolspace.providers.mcp.server_spec import ServerSpec, ServerStatus
from toolspace.providers.mcp.session import McpSession, ServerToolList
from toolspace.providers.mcp.tool_cache import LastTools, ToolCacheFile
from toolspace.providers.mcp.transports.base import (
    ServerUnreachable,
    UnknownSession,
    describe_error,
    is_connection_lost,
    may_be_unknown_session,
)

READ_RESOURCE_SECONDS = 30.0
_REFRESH_CODES = frozenset((INVALID_PARAMS, METHOD_NOT_FOUND, HEADER_MISMATCH))
"""Errors of a call whose tool the server has changed or removed: the tools are listed again."""


class McpProvider(ToolProvider):
    """One MCP server.

    `McpProvider("memory", ServerSpec(command="npx", args=("-y", "@modelcontextprotocol/server-memory")))`
    """

    kind = "mcp"

    def __init__(self, name: str, spec: ServerSpec, options: ConnectionOptions | None = None) -> None:
        super().__init__()
        self.namespace = name
        self._server_tools: Mapping[str, ServerTool] = {}
        self._tools: Sequence[Tool] = ()
        self._server_version: str | None = None
        options = options or ConnectionOptions()
        self._cache = options.tool_cache
        self._cached_instructions = ""
        self._uses_cache = False
        """Whether the tools are those of an earlier start, because the server has not listed them yet."""
        self._save_task: asyncio.Task[None] | None = None
        self._connection = ServerConnection(name, spec, self._update_tools, options)

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def has_tool(self, name: str) -> bool:
        return name in self._server_tools

    def describe_execution(self, name: str) -> object:
        return self._connection.spec, self._server_version

    def get_instructions(self) -> str:
        return self._cached_instructions if self._uses_cache else self._connection.instructions

    def status(self) -> ServerStatus:
        return self._connection.status

    def last_connected_at(self) -> float:
        return self._connection.connected_at

    def is_waiting_to_start(self) -> bool:
        return self._connection.is_waiting_for_slot

    def is_reconnecting(self) -> bool:
        return self._connection.is_first_reconnect

    async def warmup(self) -> None:
        """Starts the server. Raises ProviderError if it does not start.

        Until the server is ready, the tools of its last start are listed.
        """
        self._load_cached_tools()
        try:
            await self._connection.start()
        except ServerUnreachable as error:
            if self._uses_cache:  # A server that failed offers nothing: its calls fail with the reason.
                self._replace_tools({}, None)
            raise ProviderError(str(error)) from None

    async def restart(self) -> None:
        """Stops the server and starts it again. Running calls fail. Raises ProviderError if it does not start."""
        try:
            await self._connection.restart()
        except ServerUnreachable as error:
            raise ProviderError(f"MCP server {self.namespace} did not start: {error}") from None

    async def aclose(self) -> None:
        await self._connection.aclose()
        if self._save_task is not None and not self._save_task.get_loop().is_closed():
            await asyncio.wait((self._save_task,))

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        tool = self._server_tools.get(name)
        if tool is None:
            return _failure("unknown_tool", f'the server no longer offers "{name}"', executed=False)
        is_retry = was_sent = False
        is_from_cache = self._uses_cache
        while True:
            try:
                async with self._connection.borrow_session() as session:
                    if is_from_cache and (reason := self._find_change(name, tool)):
                        return _failure("transport_error", reason, executed=False)
                    return await self._call(session, tool, parameters, context)
            except _RetryCall as retry:
                was_sent = was_sent or retry.was_sent
                if is_retry:
                    return _unreachable(str(retry), was_sent=was_sent)
                tool = self._server_tools.get(name, tool)
            except ServerUnreachable as error:
                return _unreachable(str(error), was_sent=was_sent or error.was_sent)
            except ProviderError as error:  # A login is needed.
                return _failure("transport_error", str(error), executed=False)
            except MCPError as error:
                if error.code in _REFRESH_CODES:
                    self._connection.refresh_tools()
                result = _failure("execution_error", error.message or f"MCP error {error.code}")
                result.extras["code"] = error.code
                return result
            is_retry = True

    async def read_resource(self, uri: str, context: ToolContext) -> dict[str, Any]:
        """Reads a resource of the server, once more if the connection was lost. Raises `ProviderError`."""
        is_retry = False
        while True:
            try:
                async with asyncio.timeout(READ_RESOURCE_SECONDS), self._connection.borrow_session() as session:
                    try:
                        return parse_resource_contents(await session.read_resource(uri, context))
                    except UnknownSession:
                        self._connection.report_unknown_session(session)
                        raise
            except TimeoutError:
                raise ProviderError(f"no answer within {READ_RESOURCE_SECONDS:g} s") from None
            except MCPError as error:
                if is_retry or not (isinstance(error, UnknownSession) or is_connection_lost(error)):
                    raise ProviderError(error.message or f"MCP error {error.code}") from None
            is_retry = True

    async def _call(
        self, session: McpSession, tool: ServerTool, parameters: dict[str, Any], context: ToolContext
    ) -> ToolResult:
        try:
            return await session.call_tool(tool, parameters, context)
        except (asyncio.CancelledError, GeneratorExit):
            # Most likely a timeout. The request is cancelled on the server; a probe shows whether it still lives.
            with suppress(RuntimeError):  # The event loop has ended.
                self._connection.start_probe(session)
            raise
        except MCPError as error:
            if isinstance(error, UnknownSession):
                self._connection.report_unknown_session(session)
                raise _RetryCall("the server forgets its sessions at once (HTTP 404)", was_sent=False) from None
            if is_connection_lost(error):
                raise await self._handle_loss(session, tool, error) from None
            if self._connection.spec.uses_http and may_be_unknown_session(error):
                # The server refused the call before it handled it, unless the tool's own error mentions a session.
                if not await self._connection.check_alive(session):
                    raise _RetryCall("the server forgets its sessions at once", was_sent=False) from None
            elif error.code == HEADER_MISMATCH and session.is_stateless:
                self._update_tools(await session.list_tools())
                raise _RetryCall(error.message, was_sent=False) from None
            raise

    async def _handle_loss(self, session: McpSession, tool: ServerTool, error: MCPError) -> Exception:
        """Returns the exception for a call whose response will not come: retry it, or report it."""
        if isinstance(error, ServerUnreachable):  # Only this request failed.
            was_sent, reason = error.was_sent, describe_error(error)
        else:
            was_sent, reason = True, "the server went away during the call"
        # Sent again only if that does no harm: it was not sent, or the tool is repeatable.
        can_retry = tool.is_repeatable or not was_sent
        if not isinstance(error, ServerUnreachable):
            self._connection.report_lost(session, reason)
        elif can_retry:
            await self._connection.check_alive(session)
        else:
            self._connection.start_probe(session)  # Not reported as lost: other calls are running on it.
        return _RetryCall(reason, was_sent=was_sent) if can_retry else ServerUnreachable(reason, was_sent=was_sent)

    def _describe_tool(self, tool: Tool) -> Tool:
        if not self._connection.spec.description_prefix:
            return tool
        return tool.replace(description=f"[{self.namespace}] {tool.description}".rstrip())

    def _update_tools(self, tool_list: ServerToolList) -> None:
        """Publishes and stores the tools that the server listed."""
        server_version = self._connection.status.server
        self._replace_tools(tool_list.tools, server_version)
        if self._cache is not None:
            last_tools = LastTools(
                entries=tool_list.entries,
                is_stateless=self._connection.is_stateless,
                server=server_version,
                instructions=self._connection.instructions,
            )
            save = self._save(self._cache, last_tools, self._save_task)
            self._save_task = asyncio.get_running_loop().create_task(save)

    async def _save(self, cache: ToolCacheFile, last_tools: LastTools, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait((previous,))
        await asyncio.to_thread(cache.save, last_tools)

    def _load_cached_tools(self) -> None:
        """Lists the tools of the last start, if the server has listed none yet."""
        if self._cache is None or self._server_tools or self._connection.connected_at:
            return
        last_tools = self._cache.load()
        if last_tools is None:
            return
        tools: dict[str, ServerTool] = {}
        for entry in last_tools.entries:
            with suppress(UnusableTool):
                server_tool = parse_tool(entry, stateless=last_tools.is_stateless)
                tools.setdefault(server_tool.tool.name, server_tool)
        if tools:
            self._cached_instructions = limit_instructions(last_tools.instructions)
            self._replace_tools(tools, last_tools.server, from_cache=True)

    def _find_change(self, name: str, cached_tool: ServerTool) -> str | None:
        """Returns why a call of a tool from the cache must not be sent now that the server has listed its tools.

        The caller has decided about the call, and policies have allowed it, by the definition of that time.
        """
        current_tool = self._server_tools.get(name)
        if current_tool is None:
            return f'the server no longer offers "{name}"'
        if current_tool.tool.to_dict() != cached_tool.tool.to_dict():
            return f'the definition of "{name}" has changed since the last start of the server; call it again'
        return None

    def _replace_tools(
        self, tools: Mapping[str, ServerTool], server_version: str | None, *, from_cache: bool = False
    ) -> None:
        previous, self._server_tools = self._server_tools, tools
        previous_version, self._server_version = self._server_version, server_version
        self._uses_cache = from_cache
        if (
            list(previous) != list(tools)
            or previous_version != server_version  # Results that an older version returned are not used again.
            or any(
                previous[name].tool.to_dict() != server_tool.tool.to_dict()
                or previous[name].tool.mcp_fields != server_tool.tool.mcp_fields
                for name, server_tool in tools.items()
            )
        ):
            self._tools = [self._describe_tool(server_tool.tool) for server_tool in tools.values()]
            self.notify_changed()


class _RetryCall(Exception):
    """The call may succeed if it is sent once more, which does no harm. The message says why it failed."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


def _unreachable(reason: str, *, was_sent: bool) -> ToolResult:
    suffix = "; it may have run all the same" if was_sent else ""
    return _failure("transport_error", f"{reason}{suffix}", executed=was_sent)


def _failure(kind: ErrorKind, message: str, *, executed: bool = True) -> ToolResult:
    return ToolResult(False, error=message, error_kind=kind, executed=executed)

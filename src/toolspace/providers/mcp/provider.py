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
from toolspace.providers.mcp.conversion import ServerTool, parse_resource_contents
from toolspace.providers.mcp.server_spec import ServerSpec, ServerStatus
from toolspace.providers.mcp.session import McpSession, ServerToolList
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
        self._connection = ServerConnection(name, spec, self._update_tools, options or ConnectionOptions())

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def has_tool(self, name: str) -> bool:
        return name in self._server_tools

    def describe_execution(self, name: str) -> object:
        return self._connection.spec, self._server_version

    def get_instructions(self) -> str:
        return self._connection.instructions

    def status(self) -> ServerStatus:
        return self._connection.status

    def last_connected_at(self) -> float:
        return self._connection.connected_at

    def is_reconnecting(self) -> bool:
        return self._connection.is_first_reconnect

    async def warmup(self) -> None:
        """Starts the server. Raises ProviderError if it does not start."""
        try:
            await self._connection.start()
        except ServerUnreachable as error:
            raise ProviderError(str(error)) from None

    async def restart(self) -> None:
        """Stops the server and starts it again. Running calls fail. Raises ProviderError if it does not start."""
        try:
            await self._connection.restart()
        except ServerUnreachable as error:
            raise ProviderError(f"MCP server {self.namespace} did not start: {error}") from None

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        tool = self._server_tools.get(name)
        if tool is None:
            return _failure("unknown_tool", f'the server no longer offers "{name}"', executed=False)
        is_retry = was_sent = False
        while True:
            try:
                async with self._connection.borrow_session() as session:
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
        previous, self._server_tools = self._server_tools, tool_list.tools
        previous_version, self._server_version = self._server_version, self._connection.status.server
        self._tools = [self._describe_tool(server_tool.tool) for server_tool in tool_list.tools.values()]
        if (
            list(previous) != list(tool_list.tools)
            or previous_version != self._server_version  # Results that an older version returned are not used again.
            or any(
                previous[name].tool.to_dict() != server_tool.tool.to_dict()
                or previous[name].tool.mcp_fields != server_tool.tool.mcp_fields
                for name, server_tool in tool_list.tools.items()
            )
        ):
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

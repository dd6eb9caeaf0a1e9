"""An MCP server as a provider of tools: lists what it offers, runs calls on it, and says how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import HEADER_MISMATCH, INVALID_PARAMS, METHOD_NOT_FOUND

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind, ProviderError
from toolspace.providers.mcp.connection import ConnectionOptions, ServerConnection
from toolspace.providers.mcp.conversion import ServerTool
from toolspace.providers.mcp.errors import ServerUnreachable, describe_error, is_connection_lost, may_be_unknown_session
from toolspace.providers.mcp.session import McpSession, ServerToolList
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.status import ServerStatus

_LISTED_ANEW = frozenset((INVALID_PARAMS, METHOD_NOT_FOUND, HEADER_MISMATCH))
"""What a server says to a call of a tool that is another one now, or gone."""


class McpProvider(ToolProvider):
    """One MCP server.

    `McpProvider("memory", ServerSpec(command="npx", args=("-y", "@modelcontextprotocol/server-memory")))`
    """

    kind = "mcp"

    def __init__(self, name: str, spec: ServerSpec, hooks: ConnectionOptions | None = None) -> None:
        super().__init__()
        self.namespace = name
        self._tools: Mapping[str, ServerTool] = {}
        self._listed: Sequence[Tool] = ()
        self._connection = ServerConnection(name, spec, self._take, hooks or ConnectionOptions())

    def list_tools(self) -> Sequence[Tool]:
        return self._listed

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def get_instructions(self) -> str:
        return self._connection.instructions

    def status(self) -> ServerStatus:
        return self._connection.status

    async def warmup(self) -> None:
        try:
            await self._connection.start()
        except ServerUnreachable as error:
            raise ProviderError(str(error)) from None

    async def restart(self) -> None:
        """Stops the server and starts it again. Calls under way fail. Raises where it does not start."""
        try:
            await self._connection.restart()
        except ServerUnreachable as error:
            raise ProviderError(f"MCP server {self.namespace} did not start: {error}") from None

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        tool = self._tools.get(name)
        if tool is None:
            return _failure("unknown_tool", f'the server no longer offers "{name}"', executed=False)
        again = sent = False
        while True:
            try:
                async with self._connection.borrow_session() as session:
                    return await self._call(session, tool, parameters, context)
            except _Again as why:
                sent = sent or why.sent
                if again:
                    return _unreachable(str(why), sent=sent)
                tool = self._tools.get(name, tool)
            except ServerUnreachable as error:
                return _unreachable(str(error), sent=sent or error.sent)
            except ProviderError as error:  # Nobody is logged in.
                return _failure("transport_error", str(error), executed=False)
            except MCPError as error:
                if error.code in _LISTED_ANEW:
                    self._connection.refresh_tools()
                result = _failure("execution_error", error.message or f"MCP error {error.code}")
                result.extras["code"] = error.code
                return result
            again = True

    async def _call(
        self, session: McpSession, tool: ServerTool, parameters: dict[str, Any], context: ToolContext
    ) -> ToolResult:
        try:
            return await session.call_tool(tool, parameters, context)
        except (asyncio.CancelledError, GeneratorExit):
            # Timed out, most likely. The server was told, if it listens; whether it still lives is to be seen.
            with suppress(RuntimeError):  # The event loop has ended.
                self._connection.start_probe(session)
            raise
        except MCPError as error:
            if is_connection_lost(error):
                raise await self._lost(session, tool, error) from None
            if self._connection.spec.kind == "http" and may_be_unknown_session(error):
                # It refused before it looked at the call, unless the tool itself speaks of sessions.
                if not await self._connection.check_alive(session):
                    raise _Again("the server forgets its sessions at once", sent=False) from None
            elif error.code == HEADER_MISMATCH and session.is_stateless:
                self._take(await session.list_tools())
                raise _Again(error.message, sent=False) from None
            raise

    async def _lost(self, session: McpSession, tool: ServerTool, error: MCPError) -> Exception:
        """What to make of a call whose answer will not come."""
        one_request = isinstance(error, ServerUnreachable)
        sent = error.sent if isinstance(error, ServerUnreachable) else True
        reason = describe_error(error) if one_request else "the server went away during the call"
        # Once more where that cannot do harm: nothing was sent, or twice is the same as once.
        harmless = tool.is_repeatable or not sent
        if not one_request:
            self._connection.report_lost(session, reason)
        elif harmless:
            await self._connection.check_alive(session)
        else:
            self._connection.start_probe(session)  # Others have calls under way on it.
        return _Again(reason, sent=sent) if harmless else ServerUnreachable(reason, sent=sent)

    def _take(self, listing: ServerToolList) -> None:
        before, self._tools = self._tools, listing.tools
        self._listed = [one.tool for one in listing.tools.values()]
        if list(before) != list(listing.tools) or any(
            before[name].tool.to_dict() != one.tool.to_dict() for name, one in listing.tools.items()
        ):
            self.notify_changed()


class _Again(Exception):
    """The call may succeed, and does no harm, if it is made once more. The text says why it failed."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


def _unreachable(reason: str, *, sent: bool) -> ToolResult:
    hint = "; it may have run all the same" if sent else ""
    return _failure("transport_error", f"{reason}{hint}", executed=sent)


def _failure(kind: ErrorKind, message: str, *, executed: bool = True) -> ToolResult:
    return ToolResult(False, error=message, error_kind=kind, executed=executed)

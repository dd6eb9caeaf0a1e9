"""Reads what comes in several shapes: MCP servers as every client writes them, tools with older names.

Turns each into the one shape of `model`; the settings themselves are listed in `settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec

from toolspace.config.document import shown
from toolspace.config.kinds import duration
from toolspace.config.model import McpServer, ToolDefinition, Transport
from toolspace.config.reading import Kind, Record, Reported, Value, attempt
from toolspace.core.names import did_you_mean, is_local_name
from toolspace.core.tool import ExecutionType

TRANSPORT_ALIASES: Mapping[str, Transport] = {
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "remote": "http",
    "local": "stdio",
    "ws": "websocket",
}

# A function is code, which no file can declare.
EXECUTION_TYPES: tuple[ExecutionType, ...] = tuple(kind for kind in get_args(ExecutionType) if kind != "function")
OLDER_TYPES: Mapping[str, ExecutionType] = {
    "request": "gateway",
    "ai-agent": "agent",
    "image-generator": "image",
    "waiting": "wait",
}
BASIC_MODES: Mapping[str, ExecutionType] = {
    "no-execution": "external",
    "pass-through": "internal",
    "static": "static",
}
_INVISIBLE: frozenset[ExecutionType] = frozenset(("internal", "static", "compute", "prebuilt"))
_NEEDED: Mapping[ExecutionType, str] = {"gateway": "url", "static": "output", "compute": "expression"}


class ServerKind(Kind[McpServer]):
    """An MCP server's entry."""

    def __init__(self, record: Record[McpServer]) -> None:
        super().__init__("mapping", "a mapping", self._server, single=False)
        self.record = record

    def _server(self, value: Value) -> McpServer:
        entry = dict(value.mapping())
        disabled = isinstance(entry.get("disabled"), bool) and "enabled" not in entry
        if disabled:
            entry["enabled"] = not entry.pop("disabled")
        server = self.record.read(Value(entry, value.session, value.at, value.name))
        if disabled:
            value.session.origins[*value.name, "enabled"] = (*value.at, "disabled")
        if isinstance(given := server.extra.get("timeout"), str):
            timeout = attempt(duration, value.child("timeout", given, name="requestTimeoutMs"))
            server = msgspec.structs.replace(server, request_timeout=server.request_timeout or timeout)
        elif given is not None:
            value.session.warn(
                (*value.at, "timeout"),
                "has no effect, as programs disagree on its unit; write requestTimeoutMs, or a string such "
                'as "30s" here',
            )
        return self._with_transport(value, server)

    def _with_transport(self, value: Value, server: McpServer) -> McpServer:
        transport = server.transport
        if transport is None:
            if server.command is not None:
                transport = "stdio"
            elif server.url is not None:
                transport = "websocket" if server.url.startswith(("ws://", "wss://")) else "http"
        needed = "command" if transport == "stdio" else "url"
        if transport is None:
            value.session.warn(value.at, 'has neither "command" nor "url", so it cannot start')
        elif getattr(server, needed) is None and server.enabled:
            value.note(f'"{needed}" is missing, which the transport {transport} needs')
            raise Reported
        return msgspec.structs.replace(server, transport=transport)


class DefinitionKind(Kind[ToolDefinition]):
    """A tool declared in configuration. Its execution type gets its present name."""

    def __init__(self, record: Record[ToolDefinition]) -> None:
        super().__init__("mapping", "a mapping", self._definition, single=False)
        self.record = record

    def _definition(self, value: Value) -> ToolDefinition:
        name = str(value.name[-1])
        if not is_local_name(name):
            value.note(f"{shown(name)} cannot name a tool; use 1 to 64 of the characters A-Z a-z 0-9 _ -")
            raise Reported
        entry = dict(value.mapping())
        written = entry.get("executionType")
        execution_type = self._execution_type(value, entry)
        entry["executionType"] = execution_type
        if entry.get("visible") is None:
            entry["visible"] = execution_type not in _INVISIBLE
        tool = self.record.read(Value(entry, value.session, value.at, value.name))
        needed = _NEEDED.get(execution_type)
        if needed is not None and needed not in tool.execution:
            value.child("execution", None).note(f'"{needed}" is missing, which the execution type {written} needs')
            raise Reported
        pauses = written == "basic" and execution_type == "external" and tool.timeout is None and not tool.is_async
        return msgspec.structs.replace(tool, pauses_run=pauses)

    def _execution_type(self, value: Value, entry: Mapping[str, Any]) -> ExecutionType:
        written = entry.get("executionType")
        execution = entry.get("execution")
        details = cast("dict[str, Any]", execution if isinstance(execution, dict) else {})
        if written is None:
            if "url" in details:
                return "gateway"
            value.note(f'"executionType" is missing; expected one of {", ".join(EXECUTION_TYPES)}')
            raise Reported
        inner = value.child("executionType", written)
        if written == "basic":
            mode = details.get("mode", "no-execution")
            if not isinstance(mode, str) or mode not in BASIC_MODES:
                value.child("execution", details).child("mode", mode).wrong(f"one of {', '.join(BASIC_MODES)}")
                raise Reported
            return BASIC_MODES[mode]
        if isinstance(written, str) and written in OLDER_TYPES:
            return OLDER_TYPES[written]
        if written not in EXECUTION_TYPES:
            hint = did_you_mean(written, EXECUTION_TYPES) if isinstance(written, str) else ""
            inner.wrong(f"one of {', '.join(EXECUTION_TYPES)}", hint)
            raise Reported
        return written

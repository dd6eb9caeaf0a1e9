"""Reads what comes in several shapes: MCP servers as every client writes them, tools with older names.

Turns each into the one shape of `model`; the settings themselves are listed in `settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec

from toolspace.config import value_types
from toolspace.config.document import format_value
from toolspace.config.model import McpServerSettings, ToolDefinition, Transport
from toolspace.config.reader import AlreadyReported, SectionType, Value, ValueType, read_value
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
_HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
_REQUEST: Mapping[str, ValueType[Any]] = {
    "url": value_types.string,
    "method": value_types.choice(*_HTTP_METHODS),
    "headers": value_types.string_map,
    "query": value_types.mapping,
    "body": value_types.any_value,
}
_BY_OTHERS: frozenset[ExecutionType] = frozenset(("external", "space"))
_EXECUTION: Mapping[ExecutionType, Mapping[str, ValueType[Any]]] = {
    "gateway": _REQUEST,
    "external": _REQUEST,
    "space": _REQUEST,
    "internal": {},
    "static": {"output": value_types.any_value},
    "prebuilt": {"action": value_types.string},
    "compute": {"expression": value_types.string},
    "wait": {"duration": value_types.duration},
}
"""What `execution` may say, by who executes. The types that are not here take anything."""
_NEEDED: Mapping[ExecutionType, str] = {
    "gateway": "url",
    "static": "output",
    "compute": "expression",
    "prebuilt": "action",
}
_OF_BASIC = "mode"


class McpServerType(ValueType[McpServerSettings]):
    """An MCP server's entry."""

    def __init__(self, record: SectionType[McpServerSettings]) -> None:
        super().__init__("mapping", "a mapping", self._server, fits_variable=False)
        self.record = record

    def _server(self, value: Value) -> McpServerSettings:
        entry = dict(value.mapping())
        disabled = isinstance(entry.get("disabled"), bool) and "enabled" not in entry
        if disabled:
            entry["enabled"] = not entry.pop("disabled")
        server = self.record.read(Value(entry, value.context, value.path, value.key))
        if disabled:
            value.context.origins[*value.key, "enabled"] = (*value.path, "disabled")
        if isinstance(given := server.extra.get("timeout"), str):
            timeout = read_value(value_types.duration, value.child("timeout", given, name="requestTimeoutMs"))
            server = msgspec.structs.replace(server, request_timeout=server.request_timeout or timeout)
        elif given is not None:
            value.context.warn(
                (*value.path, "timeout"),
                "has no effect, as programs disagree on its unit; write requestTimeoutMs, or a string such "
                'as "30s" here',
            )
        return self._with_transport(value, server)

    def _with_transport(self, value: Value, server: McpServerSettings) -> McpServerSettings:
        transport = server.transport
        if transport is None:
            if server.command is not None:
                transport = "stdio"
            elif server.url is not None:
                transport = "websocket" if server.url.startswith(("ws://", "wss://")) else "http"
        needed = "command" if transport == "stdio" else "url"
        if transport is None:
            value.context.warn(value.path, 'has neither "command" nor "url", so it cannot start')
        elif getattr(server, needed) is None and server.enabled:
            value.report(f'"{needed}" is missing, which the transport {transport} needs')
            raise AlreadyReported
        return msgspec.structs.replace(server, transport=transport)


class ToolDefinitionType(ValueType[ToolDefinition]):
    """A tool declared in configuration. Its execution type gets its present name."""

    def __init__(self, record: SectionType[ToolDefinition]) -> None:
        super().__init__("mapping", "a mapping", self._definition, fits_variable=False)
        self.record = record

    def _definition(self, value: Value) -> ToolDefinition:
        name = str(value.key[-1])
        if not is_local_name(name):
            value.report(f"{format_value(name)} cannot name a tool; use 1 to 64 of the characters A-Z a-z 0-9 _ -")
            raise AlreadyReported
        entry = dict(value.mapping())
        written = entry.get("executionType")
        execution_type = self._execution_type(value, entry)
        entry["executionType"] = execution_type
        if entry.get("visible") is None:
            entry["visible"] = execution_type not in _INVISIBLE
        elif execution_type == "prebuilt" and entry["visible"] is not False:
            value.context.warn((*value.path, "visible"), "has no effect: what a prebuilt tool does is shown to nobody")
        tool = self.record.read(Value(entry, value.context, value.path, value.key))
        given = value.child("execution", tool.execution)
        needed = _NEEDED.get(execution_type)
        if needed is not None and needed not in tool.execution:
            given.report(f'"{needed}" is missing, which the execution type {written} needs')
            raise AlreadyReported
        execution = self._execution(given, execution_type)
        if execution_type == "wait" and not _says_how_long(tool):
            given.report('"duration" is missing, and the inputSchema has no "duration" either; give one of them')
            raise AlreadyReported
        pauses = written == "basic" and execution_type == "external" and tool.timeout is None and not tool.is_async
        return msgspec.structs.replace(tool, execution=execution, pauses_run=pauses)

    def _execution(self, value: Value, execution_type: ExecutionType) -> Mapping[str, Any]:
        """How it is executed, each key checked: nothing there is secret but what it holds."""
        known = _EXECUTION.get(execution_type)
        if known is None:
            return value.mapping()
        found: dict[str, Any] = {}
        sound = True
        for key, inner in value.items():
            if key == _OF_BASIC:
                found[key] = inner.data
            elif key not in known:
                there = f"; the keys here are {', '.join(known)}" if known else f"; {execution_type} tools have none"
                inner.report(f"unknown key{did_you_mean(key, known) or there}")
                sound = False
            elif inner.data is None and key != "output":
                continue  # Nothing said.
            else:
                try:
                    read = read_value(known[key], inner, secret=True)
                except AlreadyReported:
                    sound = False
                else:
                    # A duration stays as it was written: the tool's definition shows it.
                    found[key] = inner.data if known[key] is value_types.duration else read
        if not sound:
            raise AlreadyReported
        return found

    def _execution_type(self, value: Value, entry: Mapping[str, Any]) -> ExecutionType:
        execution = entry.get("execution")
        details = cast("dict[str, Any]", execution if isinstance(execution, dict) else {})
        found = self._written_type(value, entry.get("executionType"), details)
        if found not in _BY_OTHERS or details.get("url") is None:
            return found
        # Who has an address is asked there, and nobody else has to answer.
        if str(details["url"]).lower().startswith(("http://", "https://")):
            return "gateway"
        value.context.warn(
            (*value.path, "execution", "url"), "has no effect, as it does not begin with https:// or http://"
        )
        return found

    def _written_type(self, value: Value, written: Any, details: Mapping[str, Any]) -> ExecutionType:
        if written is None:
            if "url" in details:
                return "gateway"
            value.report(f'"executionType" is missing; expected one of {", ".join(EXECUTION_TYPES)}')
            raise AlreadyReported
        inner = value.child("executionType", written)
        if written == "basic":
            mode = details.get("mode", "no-execution")
            if not isinstance(mode, str) or mode not in BASIC_MODES:
                value.child("execution", details).child("mode", mode).report_invalid(f"one of {', '.join(BASIC_MODES)}")
                raise AlreadyReported
            return BASIC_MODES[mode]
        if isinstance(written, str) and written in OLDER_TYPES:
            return OLDER_TYPES[written]
        if written not in EXECUTION_TYPES:
            hint = did_you_mean(written, EXECUTION_TYPES) if isinstance(written, str) else ""
            inner.report_invalid(f"one of {', '.join(EXECUTION_TYPES)}", hint)
            raise AlreadyReported
        return written


def _says_how_long(tool: ToolDefinition) -> bool:
    schema = tool.input_schema
    return "duration" in tool.execution or schema is None or "duration" in (schema.get("properties") or {})

"""Reads what comes in several shapes: MCP servers as every client writes them, tools with older names.

Turns each into the one shape of `model`; the settings themselves are listed in `settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec

from toolspace.config import kinds
from toolspace.config.document import shown
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
_HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
_REQUEST: Mapping[str, Kind[Any]] = {
    "url": kinds.text,
    "method": kinds.choice(*_HTTP_METHODS),
    "headers": kinds.word_map,
    "query": kinds.mapping,
    "body": kinds.anything,
}
_BY_OTHERS: frozenset[ExecutionType] = frozenset(("external", "space"))
_EXECUTION: Mapping[ExecutionType, Mapping[str, Kind[Any]]] = {
    "gateway": _REQUEST,
    "external": _REQUEST,
    "space": _REQUEST,
    "internal": {},
    "static": {"output": kinds.anything},
    "prebuilt": {"action": kinds.text},
    "compute": {"expression": kinds.text},
    "wait": {"duration": kinds.duration},
}
"""What `execution` may say, by who executes. The types that are not here take anything."""
_NEEDED: Mapping[ExecutionType, str] = {
    "gateway": "url",
    "static": "output",
    "compute": "expression",
    "prebuilt": "action",
}
_OF_BASIC = "mode"


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
            timeout = attempt(kinds.duration, value.child("timeout", given, name="requestTimeoutMs"))
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
        elif execution_type == "prebuilt" and entry["visible"] is not False:
            value.session.warn((*value.at, "visible"), "has no effect: what a prebuilt tool does is shown to nobody")
        tool = self.record.read(Value(entry, value.session, value.at, value.name))
        given = value.child("execution", tool.execution)
        needed = _NEEDED.get(execution_type)
        if needed is not None and needed not in tool.execution:
            given.note(f'"{needed}" is missing, which the execution type {written} needs')
            raise Reported
        execution = self._execution(given, execution_type)
        if execution_type == "wait" and not _says_how_long(tool):
            given.note('"duration" is missing, and the inputSchema has no "duration" either; give one of them')
            raise Reported
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
                inner.note(f"unknown key{did_you_mean(key, known) or there}")
                sound = False
            elif inner.data is None and key != "output":
                continue  # Nothing said.
            else:
                try:
                    read = attempt(known[key], inner, secret=True)
                except Reported:
                    sound = False
                else:
                    # A duration stays as it was written: the tool's definition shows it.
                    found[key] = inner.data if known[key] is kinds.duration else read
        if not sound:
            raise Reported
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
        value.session.warn(
            (*value.at, "execution", "url"), "has no effect, as it does not begin with https:// or http://"
        )
        return found

    def _written_type(self, value: Value, written: Any, details: Mapping[str, Any]) -> ExecutionType:
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


def _says_how_long(tool: ToolDefinition) -> bool:
    schema = tool.input_schema
    return "duration" in tool.execution or schema is None or "duration" in (schema.get("properties") or {})

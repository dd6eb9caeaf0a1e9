"""Converts tools to MCP tool definitions, encodes each of them once, and returns them in pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from toolspace.core import json_text
from toolspace.core.tool import Tool
from toolspace.core.tool_formats import export_tools
from toolspace.core.validation import InvalidArguments, SchemaValidator

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

"""Tools as MCP lists them: each definition is made and encoded once, and given out in pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from toolspace.core import json_text
from toolspace.core.export import export_tools
from toolspace.core.tool import Tool
from toolspace.core.validation import InvalidArguments, SchemaValidator

PAGE_TOOLS = 1_000
PAGE_BYTES = 900_000
"""Clients refuse a server-sent event above a mebibyte, and a page may have to travel as one."""
_MIRROR = b'"x-mcp-header"'
_STORED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "In place of a result that is too large: where to read it.",
    "properties": {"tool_output": {"type": "object"}},
    "required": ["tool_output"],
}
_STORED_SAMPLE = {"tool_output": {"handle": "session-x/0", "reason": "size_limit_exceeded", "preview": ""}}


class InvalidCursor(Exception):
    """The client sent a cursor that none of our pages ended with."""


class EncodedTool(NamedTuple):
    """One tool on the wire."""

    encoded: bytes
    has_header_arguments: bool
    """Whether arguments of it may be repeated in HTTP headers, which then have to be compared."""

    @property
    def wire(self) -> dict[str, Any]:
        """As data; read back from the text, so that it is JSON for certain."""
        return json_text.decode(self.encoded)


class ToolPage(NamedTuple):
    definitions: Sequence[EncodedTool]
    next_cursor: str | None


class ToolDefinitions:
    """The definitions of tools in one era. `clear` when the catalogue changed."""

    def __init__(self, *, modern: bool) -> None:
        self._modern = modern
        self._known: dict[Tool, EncodedTool] = {}

    def clear(self) -> None:
        self._known = {}

    def get(self, tool: Tool) -> EncodedTool:
        known = self._known.get(tool)
        if known is None:
            known = self._known[tool] = _define(tool, modern=self._modern)
        return known

    def page(self, tools: Sequence[Tool], cursor: str | None) -> ToolPage:
        """The page after a cursor. By name: whatever comes and goes between pages, none is skipped or told twice."""
        after = None if cursor is None else _name_of(cursor)
        ordered = sorted((tool for tool in tools if after is None or tool.name > after), key=lambda tool: tool.name)
        shown: list[EncodedTool] = []
        room = PAGE_BYTES
        for tool in ordered[:PAGE_TOOLS]:
            definition = self.get(tool)
            room -= len(definition.encoded)
            if room < 0 and shown:
                break
            shown.append(definition)
        more = len(shown) < len(ordered)
        return ToolPage(shown, _cursor_after(ordered[len(shown) - 1].name) if more else None)


def _define(tool: Tool, *, modern: bool) -> EncodedTool:
    (wire,) = export_tools((tool,), "mcp")
    wire["inputSchema"] = _argument_schema(wire["inputSchema"])
    output = wire.pop("outputSchema", None)
    if output is not None and (modern or output.get("type") == "object"):
        relaxed = output if tool.has_small_results else _or_stored(output)
        if relaxed is not None:
            wire["outputSchema"] = relaxed
    encoded = json_text.encode_bytes(wire)
    return EncodedTool(encoded, _MIRROR in encoded)


def _argument_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as every client can read it: one that is oddly shaped must not spoil the list of all others."""
    shaped = {**schema, "type": "object"}
    properties: Any = schema.get("properties")
    if isinstance(properties, Mapping):
        given = cast("Mapping[str, Any]", properties)
        shaped["properties"] = {
            str(name): value if isinstance(value, Mapping | bool) else {} for name, value in given.items()
        }
    else:
        shaped.pop("properties", None)
    required: Any = schema.get("required")
    if not (isinstance(required, list) and all(isinstance(one, str) for one in cast("list[Any]", required))):
        shaped.pop("required", None)
    if not isinstance(schema.get("$schema"), str):
        shaped.pop("$schema", None)
    return shaped


def _or_stored(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A schema that also allows the handle of a stored result; None where it cannot be widened.

    Clients hold results against the schema, and any result may turn out too large.
    """
    try:
        SchemaValidator(schema, tool="").from_mapping(dict(_STORED_SAMPLE))
        return schema
    except InvalidArguments:
        pass
    except Exception:  # No schema at all: better promise nothing.
        return None
    if b'"#"' in (text := json_text.encode_bytes(schema)) or text.count(b'"#/') > text.count(b'"#/$defs/'):
        return None  # It refers to its own root, which would be another one.
    own = {key: value for key, value in schema.items() if key not in ("$defs", "$schema")}
    widened: dict[str, Any] = {"anyOf": [own, _STORED_SCHEMA]}
    if own.get("type") == "object":
        widened["type"] = "object"
    return {**widened, "$defs": schema["$defs"]} if "$defs" in schema else widened


def _cursor_after(name: str) -> str:
    return base64.urlsafe_b64encode(f"after:{name}".encode()).decode()


def _name_of(cursor: str) -> str:
    try:
        kind, _, name = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        kind = name = ""
    if kind != "after" or not name:
        raise InvalidCursor(f"unknown cursor {cursor[:80]!r}; leave it out to begin anew")
    return name

"""Reads what MCP servers send, as plain JSON data: tool definitions and results of calls. Sends nothing.

A server may send anything: what cannot be read is left out with a reason, or kept as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from toolspace.core.result import (
    AudioPart,
    Content,
    ImagePart,
    JsonPart,
    ResourcePart,
    TextPart,
    ToolResult,
    join_parts,
)
from toolspace.core.tool import Annotations, Tool, ToolCategory

_HINTS = {
    "read_only": "readOnlyHint",
    "destructive": "destructiveHint",
    "idempotent": "idempotentHint",
    "open_world": "openWorldHint",
}
_SERVER_INFO = "io.modelcontextprotocol/serverInfo"
"""With every answer of the stateless era; the server's status has it."""
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


class UnusableTool(Exception):
    """A tool that a server lists and that cannot be offered. The text says why."""


class ServerTool(msgspec.Struct, frozen=True):
    """A tool as a server lists it, and what its calls need."""

    tool: Tool
    headers: Mapping[tuple[str, ...], str]
    """Arguments that the stateless era wants repeated in HTTP headers: path → name."""

    @property
    def is_repeatable(self) -> bool:
        """Whether running it twice does no more than once."""
        annotations = self.tool.annotations
        return bool(annotations.read_only or annotations.idempotent)


def parse_tool(wire: object, *, stateless: bool) -> ServerTool:
    """One entry of `tools/list`. Raises `Unusable`."""
    from mcp.shared.inbound import find_invalid_x_mcp_header, x_mcp_header_map

    entry = _mapping(wire)
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise UnusableTool("has no name")
    schema = _mapping(entry.get("inputSchema")) or _NO_ARGUMENTS
    if _mapping(entry.get("execution")).get("taskSupport") == "required":
        raise UnusableTool("needs MCP tasks, which are not supported yet")
    headers: Mapping[tuple[str, ...], str] = {}
    if stateless and b"x-mcp-header" in msgspec.json.encode(schema):
        if (fault := find_invalid_x_mcp_header(schema)) is not None:
            raise UnusableTool(f"asks for headers in a way that is not allowed: {fault}")
        headers = x_mcp_header_map(schema)
    hints = _mapping(entry.get("annotations"))
    output = entry.get("outputSchema")
    tool = Tool(
        name,
        _first_text(entry.get("description"), entry.get("title"), hints.get("title")),
        schema,
        output_schema=cast("dict[str, Any]", output) if isinstance(output, dict) else None,
        category=ToolCategory.MCP,
        visible=False,
        annotations=Annotations(**{ours: _flag(hints.get(theirs)) for ours, theirs in _HINTS.items()}),
    )
    return ServerTool(tool, headers)


def parse_result(wire: Mapping[str, Any]) -> ToolResult:
    """The answer to `tools/call`. `isError` is a failure, with whatever the server gave as its reason."""
    content = wire.get("content")
    items = cast("list[object]", content) if isinstance(content, list) else []
    failed = wire.get("isError") is True
    meta = {key: value for key, value in _mapping(wire.get("_meta")).items() if key != _SERVER_INFO}
    extras: dict[str, Any] = {"_meta": meta} if meta else {}
    if len(items) == 1 and not failed and "structuredContent" not in wire:
        item = items[0]
        if isinstance(item, dict) and cast("dict[str, Any]", item).get("type") == "text":
            text = cast("dict[str, Any]", item).get("text")
            if isinstance(text, str):  # By far the commonest answer.
                return ToolResult(True, text, extras=extras)
    parts = tuple(_part(item) for item in items)
    if failed:
        reason = "\n".join(part.placeholder for part in parts).strip() or "the tool failed and did not say why"
        if "structuredContent" in wire:
            extras["structuredContent"] = wire["structuredContent"]
        return ToolResult(False, error=reason, error_kind="execution_error", parts=parts, extras=extras)
    if wire.get("structuredContent") is not None:
        return ToolResult(True, wire["structuredContent"], parts=parts, extras=extras)
    if all(isinstance(part, TextPart) for part in parts):
        return ToolResult(True, "\n".join(part.placeholder for part in parts), extras=extras)
    return ToolResult(True, join_parts(parts), parts=parts, extras=extras)


def _part(item: object) -> Content:
    entry = _mapping(item)
    match entry.get("type"):
        case "text" if isinstance(text := entry.get("text"), str):
            return TextPart(text=text)
        case "image" if isinstance(data := entry.get("data"), str):
            return ImagePart(data=data, mime_type=_first_text(entry.get("mimeType")) or "image/png")
        case "audio" if isinstance(data := entry.get("data"), str):
            return AudioPart(data=data, mime_type=_first_text(entry.get("mimeType")) or "audio/wav")
        case "resource" if isinstance((inner := _mapping(entry.get("resource"))).get("uri"), str):
            return _resource(inner)
        case "resource_link" if isinstance(entry.get("uri"), str):
            return _resource(entry)
        case _:
            return JsonPart(value=item)  # A kind that is newer than this: kept as it came.


def _resource(entry: Mapping[str, Any]) -> ResourcePart:
    def text(key: str) -> str | None:
        return value if isinstance(value := entry.get(key), str) else None

    return ResourcePart(
        uri=entry["uri"], name=text("name"), mime_type=text("mimeType"), text=text("text"), blob=text("blob")
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _first_text(*values: object) -> str:
    return next((value for value in values if isinstance(value, str) and value), "")


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None

"""Converts what MCP servers send, as decoded JSON, to Toolspace's types: tool definitions, call results, instructions.

A server may send anything. A tool that cannot be used raises `UnusableTool`; unknown content is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.result import (
    AudioPart,
    Content,
    ImagePart,
    JsonPart,
    ResourcePart,
    TextPart,
    ToolResult,
    join_error,
    join_parts,
)
from toolspace.core.schema_size import SchemaTooLarge, measure_schema
from toolspace.core.tool import Annotations, Tool, ToolCategory

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_HINTS = {
    "read_only": "readOnlyHint",
    "destructive": "destructiveHint",
    "idempotent": "idempotentHint",
    "open_world": "openWorldHint",
}
_SERVER_INFO = "io.modelcontextprotocol/serverInfo"
"""Part of every result of the stateless era; the server's status shows it."""
_DEFINITION_KEYS = frozenset(("name", "description", "inputSchema", "outputSchema"))
"""The fields of a tool that Toolspace reads itself. The others are passed on to MCP clients as they are."""
MAX_FIELDS_BYTES = 256 * 1024
"""The other fields of a tool are left out if they are larger together: lists of tools are kept and sent often."""
_PART_KEYS = {
    "text": frozenset(("type", "text")),
    "image": frozenset(("type", "data", "mimeType")),
    "audio": frozenset(("type", "data", "mimeType")),
    "resource": frozenset(("type", "resource")),
    "resource_link": frozenset(("type", "uri", "name", "mimeType")),
}
_RESOURCE_KEYS = frozenset(("uri", "mimeType", "text", "blob"))
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
MAX_INSTRUCTIONS_BYTES = 8_000
"""The rest of a server's instructions is cut off."""
MAX_PARTS = 1_000
"""Further parts of a result are left out: an empty part costs a server little and this process much."""


class UnusableTool(Exception):
    """A listed tool that cannot be offered. The message says why."""


class ServerTool(msgspec.Struct, frozen=True):
    """A tool of a server, and what its calls need."""

    tool: Tool
    headers: Mapping[tuple[str, ...], str]
    """Arguments that the stateless era repeats in HTTP headers: path of the argument → name of the header."""

    @property
    def is_repeatable(self) -> bool:
        """Whether a second execution does no harm."""
        annotations = self.tool.annotations
        return bool(annotations.read_only or annotations.idempotent)


def parse_tool(entry: object, *, stateless: bool) -> ServerTool:
    """Parses one entry of `tools/list`. Raises `UnusableTool`."""
    from mcp.shared.inbound import find_invalid_x_mcp_header, x_mcp_header_map

    fields = _as_mapping(entry)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise UnusableTool("has no name")
    schema = _as_mapping(fields.get("inputSchema")) or _NO_ARGUMENTS
    if _as_mapping(fields.get("execution")).get("taskSupport") == "required":
        raise UnusableTool("needs MCP tasks, which are not supported yet")
    output_schema = fields.get("outputSchema")
    try:
        measure_schema(schema)
        measure_schema(_as_mapping(output_schema))
    except SchemaTooLarge as error:
        raise UnusableTool(str(error)) from None
    headers: Mapping[tuple[str, ...], str] = {}
    if stateless and b"x-mcp-header" in msgspec.json.encode(schema):
        if (problem := find_invalid_x_mcp_header(schema)) is not None:
            raise UnusableTool(f"asks for headers in a way that is not allowed: {problem}")
        headers = x_mcp_header_map(schema)
    hints = _as_mapping(fields.get("annotations"))
    tool = Tool(
        name,
        _first_text(fields.get("description"), fields.get("title"), hints.get("title")),
        schema,
        output_schema=cast("dict[str, Any]", output_schema) if isinstance(output_schema, dict) else None,
        category=ToolCategory.MCP,
        visible=False,
        annotations=Annotations(**{name: _as_bool(hints.get(hint)) for name, hint in _HINTS.items()}),
        mcp_fields=_get_tool_fields(fields),
    )
    return ServerTool(tool, headers)


def parse_result(wire: Mapping[str, Any]) -> ToolResult:
    """Parses the result of `tools/call`. `isError` is a failure, with the server's content as the reason."""
    content = wire.get("content")
    items = cast("list[object]", content) if isinstance(content, list) else []
    is_error = wire.get("isError") is True
    meta = _get_meta(wire)
    extras: dict[str, Any] = {"_meta": meta} if meta else {}
    if len(items) == 1 and not is_error and "structuredContent" not in wire:
        item = items[0]
        if isinstance(item, dict) and cast("dict[str, Any]", item).get("type") == "text":
            text = cast("dict[str, Any]", item).get("text")
            if (
                isinstance(text, str) and text and len(cast("dict[str, Any]", item)) == 2
            ):  # By far the most common result.
                return ToolResult(True, text, extras=extras)
    parts = tuple(_parse_part(item) for item in items[:MAX_PARTS])
    if len(items) > MAX_PARTS:
        parts += (
            TextPart(text=f"({len(items) - MAX_PARTS:,} more parts left out: a result has at most {MAX_PARTS:,})"),
        )
    if is_error:
        reason = join_error(parts) or "the tool failed without a reason"
        if "structuredContent" in wire:
            extras["structuredContent"] = wire["structuredContent"]
        return ToolResult(False, error=reason, error_kind="execution_error", parts=parts, extras=extras)
    if (structured_content := wire.get("structuredContent")) is not None:
        result = ToolResult(True, structured_content, parts=parts, extras=extras)
        if not parts or not isinstance(structured_content, dict):
            result.structured_content = structured_content
        return result
    return ToolResult(True, join_parts(parts), parts=parts, extras=extras)


def parse_resource_contents(wire: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of `resources/read`, with its `_meta`. Contents that no client could read are left out."""
    contents = wire.get("contents")
    result: dict[str, Any] = {
        "contents": [
            {**_select_fields(item, _RESOURCE_KEYS), **{key: item[key] for key in _RESOURCE_KEYS if key in item}}
            for item in map(_as_mapping, cast("list[object]", contents) if isinstance(contents, list) else ())
            if isinstance(item.get("uri"), str) and isinstance(item.get("text", item.get("blob")), str)
        ]
    }
    if meta := _get_meta(wire):
        result["_meta"] = meta
    return result


def _get_meta(wire: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _as_mapping(wire.get("_meta")).items() if key != _SERVER_INFO}


def limit_instructions(instructions: str) -> str:
    """Returns a server's instructions, limited. They are untrusted: whoever builds a prompt puts them into a fence."""
    data = json_text.valid_text(instructions.strip()[:MAX_INSTRUCTIONS_BYTES]).encode()
    text = data[:MAX_INSTRUCTIONS_BYTES].decode("utf-8", "ignore")
    is_cut = len(data) > MAX_INSTRUCTIONS_BYTES or len(instructions.strip()) > MAX_INSTRUCTIONS_BYTES
    return f"{text}\n(The rest is left out: it has more than {MAX_INSTRUCTIONS_BYTES:,} bytes.)" if is_cut else text


def _parse_part(item: object) -> Content:
    wire = _as_mapping(item)
    match wire.get("type"):
        case "text" if isinstance(text := wire.get("text"), str):
            return TextPart(text=text, fields=_get_part_fields(wire))
        case "image" if isinstance(data := wire.get("data"), str):
            mime_type = _first_text(wire.get("mimeType")) or "image/png"
            return ImagePart(data=data, mime_type=mime_type, fields=_get_part_fields(wire))
        case "audio" if isinstance(data := wire.get("data"), str):
            mime_type = _first_text(wire.get("mimeType")) or "audio/wav"
            return AudioPart(data=data, mime_type=mime_type, fields=_get_part_fields(wire))
        case "resource" if isinstance((resource := _as_mapping(wire.get("resource"))).get("uri"), str):
            fields = _get_part_fields(wire)
            if inner_fields := _select_fields(resource, _RESOURCE_KEYS):
                fields = {**({} if fields is msgspec.UNSET else fields), "resource": inner_fields}
            return _parse_resource(resource, fields)
        case "resource_link" if isinstance(wire.get("uri"), str):
            return _parse_resource(wire, _get_part_fields(wire))
        case _:
            return JsonPart(value=item)  # A newer kind of content: kept as it is.


def _parse_resource(wire: Mapping[str, Any], fields: Mapping[str, Any] | msgspec.UnsetType) -> ResourcePart:
    def text(key: str) -> str | None:
        return value if isinstance(value := wire.get(key), str) else None

    return ResourcePart(
        uri=wire["uri"],
        name=text("name"),
        mime_type=text("mimeType"),
        text=text("text"),
        blob=text("blob"),
        fields=fields,
    )


def _get_part_fields(wire: Mapping[str, Any]) -> Mapping[str, Any] | msgspec.UnsetType:
    return _select_fields(wire, _PART_KEYS[wire["type"]]) or msgspec.UNSET


def _get_tool_fields(wire: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = _select_fields(wire, _DEFINITION_KEYS)
    try:
        return fields if len(msgspec.json.encode(fields)) <= MAX_FIELDS_BYTES else {}
    except (RecursionError, msgspec.MsgspecError, TypeError, ValueError):
        return {}


def _select_fields(wire: Mapping[str, Any], own_keys: frozenset[str]) -> dict[str, Any]:
    """Returns the other fields of a tool or of content, without those that MCP clients could not read.

    One invalid field would make a client refuse the whole list or result.
    """
    return {key: value for key, value in wire.items() if key not in own_keys and _is_field_valid(key, value)}


def _is_field_valid(key: str, value: object) -> bool:
    if (validator := _field_validators().get(key)) is None:
        return True
    try:
        validator.validate_python(value, by_name=False)
        return True
    except ValueError:
        return False


@cache
def _field_validators() -> Mapping[str, TypeAdapter[Any]]:
    # Imported when needed: a server whose definitions have no such fields does not pay for the validators.
    import mcp_types as types
    from pydantic import TypeAdapter

    return {
        "title": TypeAdapter(str),
        "description": TypeAdapter(str),
        "name": TypeAdapter(str),
        "size": TypeAdapter(int),
        "icons": TypeAdapter(list[types.Icon]),
        "execution": TypeAdapter(types.ToolExecution),
        "annotations": TypeAdapter(types.ToolAnnotations | types.Annotations),
        "_meta": TypeAdapter(dict[str, Any]),
    }


def _as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _first_text(*values: object) -> str:
    return next((value for value in values if isinstance(value, str) and value), "")


def _as_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None

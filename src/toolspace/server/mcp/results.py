"""Results of calls as MCP gives them to clients: content for models, structure for programs. Pure translation."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.result import AudioPart, Content, ImagePart, JsonPart, ResourcePart, TextPart, ToolResult

OUTPUTS = "toolspace://outputs/"
_log = logging.getLogger("toolspace.mcp")


def answer(result: ToolResult, *, modern: bool, output_schema: bool = False) -> dict[str, Any]:
    """A result as JSON data."""
    return json_text.plain(_answer(result, modern=modern, output_schema=output_schema))


def encoded_answer(result: ToolResult, *, modern: bool, output_schema: bool = False) -> bytes:
    """The same as JSON text, without the closing brace: the caller has more to say."""
    return json_text.encode_bytes(_answer(result, modern=modern, output_schema=output_schema))[:-1]


def text_of(result: ToolResult) -> str:
    """What the model reads. A fault of ours is logged, and not told."""
    if result.error_kind == "internal_error":
        _log.error("tool %s: %s", result.tool, result.error)
        return "(tool failed: internal error)"
    return result.text


def _answer(result: ToolResult, *, modern: bool, output_schema: bool) -> dict[str, Any]:
    if not result.ok:
        return {"content": [{"type": "text", "text": text_of(result)}], "isError": True}
    if not result.parts and not result.extras:
        content = [{"type": "text", "text": result.text}]
    else:
        content = _content(result)
    answer: dict[str, Any] = {"content": content, "isError": False}
    value = result.result
    if isinstance(value, dict) or (modern and output_schema and (value is not None or not result.parts)):
        # The text is the value's JSON already, unless the tool said it in parts of its own.
        answer["structuredContent"] = value if result.parts or isinstance(value, str) else msgspec.Raw(result.text)
    return answer


def _content(result: ToolResult) -> list[dict[str, Any]]:
    content = [_part(part) for part in result.parts] or [{"type": "text", "text": result.text}]
    if result.extras.get("stored") and (handle := result.extras.get("handle")):
        content.append(link(handle, result))
    return content


def link(handle: str, result: ToolResult) -> dict[str, Any]:
    """Where a result that was too large can be read."""
    value: Any = result.result
    facts = value.get("tool_output", {})
    made: dict[str, Any] = {
        "type": "resource_link",
        "uri": OUTPUTS + handle,
        "name": handle.rpartition("/")[2],
        "title": f"Output of {result.tool}",
        "description": "The whole result, which was too large to be given here.",
    }
    if isinstance(facts.get("bytes"), int):
        made["size"] = facts["bytes"]
    return made


def _part(part: Content) -> dict[str, Any]:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case JsonPart(value=value):
            return {"type": "text", "text": json_text.encode(value)}
        case ImagePart(data=data, mime_type=mime_type):
            return {"type": "image", "data": data, "mimeType": mime_type}
        case AudioPart(data=data, mime_type=mime_type):
            return {"type": "audio", "data": data, "mimeType": mime_type}
        case ResourcePart():
            return _resource(part)


def _resource(part: ResourcePart) -> dict[str, Any]:
    known: dict[str, Any] = {"uri": part.uri}
    if part.mime_type is not None:
        known["mimeType"] = part.mime_type
    if part.text is not None:
        return {"type": "resource", "resource": {**known, "text": part.text}}
    if part.blob is not None:
        return {"type": "resource", "resource": {**known, "blob": part.blob}}
    return {"type": "resource_link", "name": part.name or part.uri.rpartition("/")[2] or part.uri, **known}

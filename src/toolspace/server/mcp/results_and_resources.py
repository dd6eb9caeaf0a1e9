"""Converts call results to MCP: content for models, structured content for programs, stored outputs as resources.

Used by `request_handlers`, `fast_path` and `tool_service`. It stores no output itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from toolspace.core import json_text
from toolspace.core.extension_points import OutputStore, StoredOutput
from toolspace.core.result import (
    PENDING_CALL_KEY,
    AudioPart,
    Content,
    ImagePart,
    JsonPart,
    ResourcePart,
    TextPart,
    ToolResult,
)
from toolspace.core.tool_context import ToolContext

OUTPUT_URI_PREFIX = "toolspace://outputs/"
RESOURCE_TEMPLATE = {
    "uriTemplate": OUTPUT_URI_PREFIX + "{session}/{id}{?offset}",
    "name": "stored-output",
    "title": "Stored output",
    "description": "A result that was too large to be returned whole; offset is the first character to read.",
}
_PAGE_CHARACTERS = 256 * 1024
_LINE_CHARACTERS = 1 << 20
"""A store returns longer lines in pieces of this size."""
_MAX_READERS, _MAX_OUTPUTS_PER_READER = 1_000, 200
_log = logging.getLogger("toolspace.mcp")


def build_call_result(result: ToolResult, *, modern: bool, has_output_schema: bool) -> dict[str, Any]:
    """Returns a result in MCP's format. `json_text` encodes it; it may hold JSON that is encoded already."""
    if not result.ok:
        return {"content": [{"type": "text", "text": _get_error_text(result)}], "isError": True}
    if has_output_schema and PENDING_CALL_KEY in result.extras:
        # Clients refuse a success whose value does not match the schema, and there is no value yet.
        return {"content": [{"type": "text", "text": result.text}], "isError": True}
    if not result.parts and not result.extras:
        content = [{"type": "text", "text": result.text}]
    else:
        content = _build_content(result)
    wire: dict[str, Any] = {"content": content, "isError": False}
    value = result.result
    if isinstance(value, dict) or (modern and has_output_schema and (value is not None or not result.parts)):
        # The text is already the JSON of the value, unless the tool returned parts.
        wire["structuredContent"] = value if result.parts or isinstance(value, str) else msgspec.Raw(result.text)
    return wire


def _get_error_text(result: ToolResult) -> str:
    """An internal error is logged, and its details are not sent."""
    if result.error_kind == "internal_error":
        _log.error("tool %s: %s", result.tool, result.error)
        return "(tool failed: internal error)"
    return result.text


def _build_content(result: ToolResult) -> list[dict[str, Any]]:
    content = [_build_part(part) for part in result.parts] or [{"type": "text", "text": result.text}]
    if result.extras.get("stored") and (handle := result.extras.get("handle")):
        content.append(_build_output_link(handle, result))
    return content


def _build_output_link(handle: str, result: ToolResult) -> dict[str, Any]:
    """Links to a stored output."""
    value: Any = result.result
    description = "The whole result, which was too large to be returned here."
    link = {"type": "resource_link", **_describe_output(handle, result.tool, description)}
    size = value.get("tool_output", {}).get("bytes")
    if isinstance(size, int):
        link["size"] = size
    return link


def _build_part(part: Content) -> dict[str, Any]:
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
            return _build_resource(part)


def _build_resource(part: ResourcePart) -> dict[str, Any]:
    fields: dict[str, Any] = {"uri": part.uri}
    if part.mime_type is not None:
        fields["mimeType"] = part.mime_type
    if part.text is not None:
        return {"type": "resource", "resource": {**fields, "text": part.text}}
    if part.blob is not None:
        return {"type": "resource", "resource": {**fields, "blob": part.blob}}
    return {"type": "resource_link", "name": part.name or part.uri.rpartition("/")[2] or part.uri, **fields}


class ResourceNotFound(Exception):
    """The caller can read no such resource. The reason is not told, so that nobody learns what others have."""


class StoredOutputs:
    """Stored outputs as MCP resources: lists those of a caller, and reads them in pages."""

    def __init__(self, store: OutputStore, session: str) -> None:
        self._store = store
        self._session = session
        self._handles: OrderedDict[str, OrderedDict[str, str]] = OrderedDict()
        """Handles by reader, the newest last."""

    def add(self, handle: str, context: ToolContext | None) -> bool:
        """Adds a handle to the list of its reader. Returns whether it is the reader's first."""
        reader = self._reader(context)
        is_first = reader not in self._handles
        handles = self._handles.setdefault(reader, OrderedDict())
        self._handles.move_to_end(reader)
        handles[handle] = handle
        while len(handles) > _MAX_OUTPUTS_PER_READER:
            handles.popitem(last=False)
        while len(self._handles) > _MAX_READERS:
            self._handles.popitem(last=False)
        return is_first

    async def list_resources(self, context: ToolContext | None) -> list[dict[str, Any]]:
        handles = list(self._handles.get(self._reader(context), ()))
        outputs = [await self._find(handle, context) for handle in handles]
        return [_build_resource_entry(output) for output in outputs if output is not None]

    async def read_resource(self, uri: str, context: ToolContext | None) -> dict[str, Any]:
        """Returns one page of an output as resource contents. Raises `ResourceNotFound`."""
        handle, offset = _parse_uri(uri)
        output = await self._find(handle, context)
        if output is None:
            raise ResourceNotFound(f"no resource {uri[:200]!r} can be read here; it may have expired")
        text, has_more = await self._read_page(output, offset)
        is_whole = offset == 0 and not has_more
        contents: dict[str, Any] = {
            "uri": uri,
            "mimeType": "application/json" if output.is_json and is_whole else "text/plain",
            "text": text,
        }
        if has_more:
            next_uri = OUTPUT_URI_PREFIX + handle + "?" + urlencode({"offset": offset + len(text)})
            contents["_meta"] = {"toolspace/next": next_uri, "toolspace/bytes": output.bytes}
        return contents

    async def _find(self, handle: str, context: ToolContext | None) -> StoredOutput | None:
        session, owner = self._identity(context)
        return await self._store.find(handle, session=session, owner=owner)

    async def _read_page(self, output: StoredOutput, offset: int) -> tuple[str, bool]:
        """Returns the characters from an offset on, and whether there are more."""
        page: list[str] = []
        skip, free = offset, _PAGE_CHARACTERS
        async with aclosing(_read_text(self._store, output)) as pieces:
            async for piece in pieces:
                if skip >= len(piece):
                    skip -= len(piece)
                    continue
                rest = piece[skip:]
                skip = 0
                page.append(rest[:free])
                if len(rest) > free:
                    return "".join(page), True
                free -= len(rest)
        return "".join(page), False

    def _identity(self, context: ToolContext | None) -> tuple[str, str | None]:
        if context is None:
            return self._session, None
        return context.session_id or self._session, context.user_id

    def _reader(self, context: ToolContext | None) -> str:
        session, owner = self._identity(context)
        return f"user:{owner}" if owner is not None else f"session:{session}"


async def _read_text(store: OutputStore, output: StoredOutput) -> AsyncGenerator[str, None]:
    """Yields the stored text, from the lines that the store returns."""
    size = 0
    async for lines in store.lines(output):
        for line in lines:
            size += len(line.encode("utf-8", "surrogatepass"))
            # A piece of a longer line has no line break. The last line has one only if the stored size includes it.
            has_line_break = len(line) != _LINE_CHARACTERS and size < output.bytes
            size += has_line_break
            yield line + "\n" if has_line_break else line


def _parse_uri(uri: str) -> tuple[str, int]:
    """Returns handle and offset. The store does not find an invalid handle."""
    if not uri.startswith(OUTPUT_URI_PREFIX):
        raise ResourceNotFound(f"no resource {uri[:200]!r} here; stored outputs are {OUTPUT_URI_PREFIX}<handle>")
    handle, _, query = uri.removeprefix(OUTPUT_URI_PREFIX).partition("?")
    offset = dict(parse_qsl(query, max_num_fields=4)).get("offset", "0") if len(query) < 200 else ""
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 16):
        raise ResourceNotFound(f"no resource {uri[:200]!r} here; offset is a number of characters")
    return handle, int(offset)


def _build_resource_entry(output: StoredOutput) -> dict[str, Any]:
    return {
        **_describe_output(output.handle, output.tool, f"{output.lines} lines, {output.tokens} tokens"),
        "mimeType": "application/json" if output.is_json else "text/plain",
        "size": output.bytes,
    }


def _describe_output(handle: str, tool: str, description: str) -> dict[str, Any]:
    name = handle.rpartition("/")[2]
    return {"uri": OUTPUT_URI_PREFIX + handle, "name": name, "title": f"Output of {tool}", "description": description}

"""Converts call results to MCP: content for models, structured content for programs, stored outputs as resources.

Used by `request_handlers`, `fast_path` and `tool_service`. It stores no output itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast
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
    join_error,
)
from toolspace.core.tool_context import ToolContext

OUTPUT_URI_PREFIX = "toolspace://outputs/"
RESOURCE_TEMPLATE = {
    "uriTemplate": OUTPUT_URI_PREFIX + "{session}/{id}{?offset}",
    "name": "stored-output",
    "title": "Stored output",
    "description": "A result that was too large for a model: all of it, or the page from the character `offset` on.",
}
MAX_STRUCTURED_BYTES = 900_000
"""A stored output up to this size is also sent as structured content, if its tool has an output schema.

Clients refuse a server-sent event above 1 MiB.
"""
MAX_RESOURCE_BYTES = 8 * 1024 * 1024
"""A larger resource is not sent in one answer."""
_STORED_RESULT_NOTE = {
    "type": "text",
    "text": "The call succeeded; do not repeat it. Its structured result is too large to be sent, and is stored:",
}
_PAGE_CHARACTERS = 256 * 1024
_LINE_CHARACTERS = 1 << 20
"""A store returns longer lines in pieces of this size."""
_MAX_READERS, _MAX_OUTPUTS_PER_READER = 1_000, 200
_log = logging.getLogger("toolspace.mcp")


def build_call_result(result: ToolResult, *, modern: bool, has_output_schema: bool) -> dict[str, Any]:
    """Returns a result in MCP's format. `json_text` encodes it; it may hold JSON that is encoded already.

    What an MCP server behind sent is returned as it was.
    """
    extras, structured_content = result.extras, result.structured_content
    wire: dict[str, Any]
    if not result.ok:
        wire = _build_failure(result)
    elif has_output_schema and PENDING_CALL_KEY in extras:
        # Clients refuse a success whose value does not match the schema, and there is no value yet.
        wire = {"content": _build_content(result), "isError": True}
    elif has_output_schema and extras.get("stored") and _is_unreadable(result, modern=modern):
        # The same: the value is too large to be sent.
        wire = {"content": [_STORED_RESULT_NOTE, *_build_content(result)], "isError": True}
    else:
        content = [{"type": "text", "text": result.text}] if not result.parts and not extras else _build_content(result)
        wire = {"content": content, "isError": False}
        value = result.result
        has_structured = structured_content is not msgspec.UNSET and (modern or isinstance(structured_content, dict))
        if has_structured and (has_output_schema or not extras.get("stored")):
            wire["structuredContent"] = structured_content
            if not result.parts and not extras.get("stored"):
                wire["content"] = []
        elif isinstance(value, dict) or (modern and has_output_schema and not result.parts):
            # The text is already the JSON of the value, unless the tool returned parts.
            wire["structuredContent"] = value if result.parts or isinstance(value, str) else msgspec.Raw(result.text)
        elif value == "" and not result.parts and result.kind == "mcp":
            wire["content"] = []  # A server that returns an empty text returns a part.
    if extras and (meta := extras.get("_meta")):
        wire["_meta"] = meta
    return wire


def _build_failure(result: ToolResult) -> dict[str, Any]:
    """Returns the content of a server behind, unless something on the way has changed the reason."""
    if not result.parts or result.error != join_error(result.parts):
        return {"content": [{"type": "text", "text": _get_error_text(result)}], "isError": True}
    wire: dict[str, Any] = {"content": [_build_part(part) for part in result.parts], "isError": True}
    if (structured_content := result.extras.get("structuredContent")) is not None:
        wire["structuredContent"] = structured_content
    return wire


def _is_unreadable(result: ToolResult, *, modern: bool) -> bool:
    """Whether the value of a stored output cannot be sent as structured content, which a client expects."""
    value: Any = result.structured_content
    if value is msgspec.UNSET:
        return True
    if not modern and not isinstance(value, dict):
        return False  # Earlier eras have output schemas of objects only.
    return len(json_text.encode_bytes(cast("object", value))) > MAX_STRUCTURED_BYTES


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
    fields: Mapping[str, Any] = {} if part.fields is msgspec.UNSET else part.fields
    match part:
        case TextPart(text=text):
            return {**fields, "type": "text", "text": text}
        case JsonPart(value=value):
            return {**fields, "type": "text", "text": json_text.encode(value)}
        case ImagePart(data=data, mime_type=mime_type):
            return {**fields, "type": "image", "data": data, "mimeType": mime_type}
        case AudioPart(data=data, mime_type=mime_type):
            return {**fields, "type": "audio", "data": data, "mimeType": mime_type}
        case ResourcePart():
            return _build_resource(part, fields)


def _build_resource(part: ResourcePart, fields: Mapping[str, Any]) -> dict[str, Any]:
    wire: dict[str, Any] = {"uri": part.uri}
    if part.mime_type is not None:
        wire["mimeType"] = part.mime_type
    if part.text is None and part.blob is None:
        name = part.name or part.uri.rpartition("/")[2] or part.uri
        return {**fields, "type": "resource_link", "name": name, **wire}
    if part.text is not None:
        wire["text"] = part.text
    if part.blob is not None:
        wire["blob"] = part.blob
    return {**fields, "type": "resource", "resource": {**fields.get("resource", {}), **wire}}


class ResourceNotFound(Exception):
    """The caller can read no such resource. The reason is not told, so that nobody learns what others have."""


class ResourceTooLarge(Exception):
    """The resource does not fit into one answer. The message says how to read it."""


class StoredOutputs:
    """Stored outputs as MCP resources: lists those of a caller, and reads them."""

    def __init__(self, store: OutputStore, session: str) -> None:
        self._store = store
        self._session = session
        self._handles: OrderedDict[str, OrderedDict[str, str]] = OrderedDict()
        """Handles by reader, the newest last."""

    def add(self, handle: str, context: ToolContext | None) -> bool:
        """Adds a handle to the list of its reader. Returns whether it is the reader's first."""
        reader = self.get_reader(context)
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
        handles = list(self._handles.get(self.get_reader(context), ()))
        outputs = [await self._find(handle, context) for handle in handles]
        return [_build_resource_entry(output) for output in outputs if output is not None]

    async def read_resource(self, uri: str, context: ToolContext | None) -> dict[str, Any]:
        """Returns an output as resource contents: all of it, or the page at the offset that the URI names.

        Raises `ResourceNotFound`, and `ResourceTooLarge` if all of it is too large for one answer.
        """
        handle, offset = _parse_uri(uri)
        output = await self._find(handle, context)
        if output is None:
            raise ResourceNotFound(f"no resource {uri[:200]!r} can be read here; it may have expired")
        if offset is None and output.bytes > MAX_RESOURCE_BYTES:
            raise ResourceTooLarge(
                f"the output has {output.bytes:,} bytes, and one answer at most {MAX_RESOURCE_BYTES:,}; read it in "
                f"pages with {OUTPUT_URI_PREFIX}{handle}?offset=0, or a part of it with the tool agent__read_output"
            )
        free = MAX_RESOURCE_BYTES if offset is None else _PAGE_CHARACTERS
        text, has_more = await self._read_page(output, offset or 0, free)
        contents: dict[str, Any] = {
            "uri": uri,
            "mimeType": "application/json" if output.is_json and not offset and not has_more else "text/plain",
            "text": text,
        }
        if has_more:
            next_uri = OUTPUT_URI_PREFIX + handle + "?" + urlencode({"offset": (offset or 0) + len(text)})
            contents["_meta"] = {"toolspace/next": next_uri, "toolspace/bytes": output.bytes}
        return contents

    async def _find(self, handle: str, context: ToolContext | None) -> StoredOutput | None:
        session, owner = self._identity(context)
        return await self._store.find(handle, session=session, owner=owner)

    async def _read_page(self, output: StoredOutput, offset: int, free: int) -> tuple[str, bool]:
        """Returns at most `free` characters from an offset on, and whether there are more."""
        page: list[str] = []
        skip = offset
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

    def get_reader(self, context: ToolContext | None) -> str:
        """Returns whose outputs a caller can list: the principal's, or the session's of an anonymous caller."""
        session, owner = self._identity(context)
        return f"user:{owner}" if owner is not None else f"session:{session}"

    def _identity(self, context: ToolContext | None) -> tuple[str, str | None]:
        if context is None:
            return self._session, None
        return context.session_id or self._session, context.user_id


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


def _parse_uri(uri: str) -> tuple[str, int | None]:
    """Returns handle and offset; None: no offset. The store does not find an invalid handle."""
    if not uri.startswith(OUTPUT_URI_PREFIX):
        raise ResourceNotFound(f"no resource {uri[:200]!r} here; stored outputs are {OUTPUT_URI_PREFIX}<handle>")
    handle, _, query = uri.removeprefix(OUTPUT_URI_PREFIX).partition("?")
    if not query:
        return handle, None
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

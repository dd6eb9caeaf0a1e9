"""Results of calls as MCP gives them to clients: content for models, structure for programs. Pure translation."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import OutputStore, StoredOutput
from toolspace.core.result import AudioPart, Content, ImagePart, JsonPart, ResourcePart, TextPart, ToolResult

OUTPUT_URI_PREFIX = "toolspace://outputs/"
_log = logging.getLogger("toolspace.mcp")


def build_call_result(result: ToolResult, *, modern: bool, output_schema: bool = False) -> dict[str, Any]:
    """A result as JSON data."""
    return json_text.to_json_data(_answer(result, modern=modern, output_schema=output_schema))


def encode_call_result(result: ToolResult, *, modern: bool, output_schema: bool = False) -> bytes:
    """The same as JSON text, without the closing brace: the caller has more to say."""
    return json_text.encode_bytes(_answer(result, modern=modern, output_schema=output_schema))[:-1]


def get_result_text(result: ToolResult) -> str:
    """What the model reads. A fault of ours is logged, and not told."""
    if result.error_kind == "internal_error":
        _log.error("tool %s: %s", result.tool, result.error)
        return "(tool failed: internal error)"
    return result.text


def _answer(result: ToolResult, *, modern: bool, output_schema: bool) -> dict[str, Any]:
    if not result.ok:
        return {"content": [{"type": "text", "text": get_result_text(result)}], "isError": True}
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
        content.append(build_resource_link(handle, result))
    return content


def build_resource_link(handle: str, result: ToolResult) -> dict[str, Any]:
    """Where a result that was too large can be read."""
    value: Any = result.result
    facts = value.get("tool_output", {})
    made: dict[str, Any] = {
        "type": "resource_link",
        "uri": OUTPUT_URI_PREFIX + handle,
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


# MERGED from resources: Stored outputs as MCP resources: which there are for a caller, and their text in pages. St…

RESOURCE_TEMPLATE = {
    "uriTemplate": OUTPUT_URI_PREFIX + "{session}/{id}{?offset}",
    "name": "stored-output",
    "title": "Stored output",
    "description": "A result that was too large to be given whole; offset is the first character to read.",
}
_PAGE = 256 * 1024
"""Characters of one answer."""
_PIECE = 1 << 20
"""A store gives longer lines in pieces of this size."""
_MOST_READERS, _MOST_EACH = 1_000, 200


class ResourceNotFound(Exception):
    """Nothing that this caller may read; whatever the reason, so that nobody learns what others have."""


class StoredOutputs:
    """What callers stored through this server, newest last."""

    def __init__(self, store: OutputStore, session: str) -> None:
        self._store = store
        self._session = session
        self._seen: OrderedDict[str, OrderedDict[str, str]] = OrderedDict()

    def remember(self, handle: str, context: ToolContext | None) -> bool:
        """Keeps a handle for `list`. Whether it is the first of this caller."""
        reader = self._reader(context)
        first = reader not in self._seen
        seen = self._seen.setdefault(reader, OrderedDict())
        self._seen.move_to_end(reader)
        seen[handle] = handle
        while len(seen) > _MOST_EACH:
            seen.popitem(last=False)
        while len(self._seen) > _MOST_READERS:
            self._seen.popitem(last=False)
        return first

    async def list_resources(self, context: ToolContext | None) -> list[dict[str, Any]]:
        handles = list(self._seen.get(self._reader(context), ()))
        found = [await self._find(handle, context) for handle in handles]
        return [_described(output) for output in found if output is not None]

    async def read_resource(self, uri: str, context: ToolContext | None) -> dict[str, Any]:
        """One page of an output, as the contents of a resource. Raises `NoSuchResource`."""
        handle, offset = _parse(uri)
        output = await self._find(handle, context)
        if output is None:
            raise ResourceNotFound(f"no resource {uri[:200]!r} can be read here; it may have expired")
        text, more = await self._page(output, offset)
        whole = offset == 0 and not more
        contents: dict[str, Any] = {
            "uri": uri,
            "mimeType": "application/json" if output.is_json and whole else "text/plain",
            "text": text,
        }
        if more:
            following = OUTPUT_URI_PREFIX + handle + "?" + urlencode({"offset": offset + len(text)})
            contents["_meta"] = {"toolspace/next": following, "toolspace/bytes": output.bytes}
        return contents

    async def _find(self, handle: str, context: ToolContext | None) -> StoredOutput | None:
        session, owner = self._identity(context)
        return await self._store.find(handle, session=session, owner=owner)

    async def _page(self, output: StoredOutput, offset: int) -> tuple[str, bool]:
        """The characters from an offset on, and whether there are more."""
        pieces: list[str] = []
        skip, room = offset, _PAGE
        async with aclosing(_pieces(self._store, output)) as text:
            async for piece in text:
                if skip >= len(piece):
                    skip -= len(piece)
                    continue
                rest = piece[skip:]
                skip = 0
                pieces.append(rest[:room])
                if len(rest) > room:
                    return "".join(pieces), True
                room -= len(rest)
        return "".join(pieces), False

    def _identity(self, context: ToolContext | None) -> tuple[str, str | None]:
        if context is None:
            return self._session, None
        return context.session_id or self._session, context.user_id

    def _reader(self, context: ToolContext | None) -> str:
        session, owner = self._identity(context)
        return f"user:{owner}" if owner is not None else f"session:{session}"


async def _pieces(store: OutputStore, output: StoredOutput) -> AsyncGenerator[str, None]:
    """The text as it was stored, from the lines that the store gives."""
    seen = 0
    async for lines in store.lines(output):
        for line in lines:
            seen += len(line.encode("utf-8", "surrogatepass"))
            # A piece of an endless line has no end of its own; the last line has one only if there is room for it.
            ended = len(line) != _PIECE and seen < output.bytes
            seen += ended
            yield line + "\n" if ended else line


def _parse(uri: str) -> tuple[str, int]:
    """Handle and offset. A model may send anything; what is no handle, the store does not find."""
    if not uri.startswith(OUTPUT_URI_PREFIX):
        raise ResourceNotFound(f"no resource {uri[:200]!r} here; stored outputs are {OUTPUT_URI_PREFIX}<handle>")
    handle, _, query = uri.removeprefix(OUTPUT_URI_PREFIX).partition("?")
    offset = dict(parse_qsl(query, max_num_fields=4)).get("offset", "0") if len(query) < 200 else ""
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 16):
        raise ResourceNotFound(f"no resource {uri[:200]!r} here; offset is a number of characters")
    return handle, int(offset)


def _described(output: StoredOutput) -> dict[str, Any]:
    return {
        "uri": OUTPUT_URI_PREFIX + output.handle,
        "name": output.handle.rpartition("/")[2],
        "title": f"Output of {output.tool}",
        "description": f"{output.lines} lines, {output.tokens} tokens",
        "mimeType": "application/json" if output.is_json else "text/plain",
        "size": output.bytes,
    }

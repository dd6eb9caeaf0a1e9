"""Stored outputs as MCP resources: which there are for a caller, and their text in pages. Stores nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qsl, urlencode

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import OutputStore, StoredOutput
from toolspace.server.mcp.results import OUTPUTS

TEMPLATE = {
    "uriTemplate": OUTPUTS + "{session}/{id}{?offset}",
    "name": "stored-output",
    "title": "Stored output",
    "description": "A result that was too large to be given whole; offset is the first character to read.",
}
_PAGE = 256 * 1024
"""Characters of one answer."""
_PIECE = 1 << 20
"""A store gives longer lines in pieces of this size."""
_MOST_READERS, _MOST_EACH = 1_000, 200


class NoSuchResource(Exception):
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

    async def list(self, context: ToolContext | None) -> list[dict[str, Any]]:
        handles = list(self._seen.get(self._reader(context), ()))
        found = [await self._find(handle, context) for handle in handles]
        return [_described(output) for output in found if output is not None]

    async def read(self, uri: str, context: ToolContext | None) -> dict[str, Any]:
        """One page of an output, as the contents of a resource. Raises `NoSuchResource`."""
        handle, offset = _parse(uri)
        output = await self._find(handle, context)
        if output is None:
            raise NoSuchResource(f"no resource {uri[:200]!r} can be read here; it may have expired")
        text, more = await self._page(output, offset)
        whole = offset == 0 and not more
        contents: dict[str, Any] = {
            "uri": uri,
            "mimeType": "application/json" if output.is_json and whole else "text/plain",
            "text": text,
        }
        if more:
            following = OUTPUTS + handle + "?" + urlencode({"offset": offset + len(text)})
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
    if not uri.startswith(OUTPUTS):
        raise NoSuchResource(f"no resource {uri[:200]!r} here; stored outputs are {OUTPUTS}<handle>")
    handle, _, query = uri.removeprefix(OUTPUTS).partition("?")
    offset = dict(parse_qsl(query, max_num_fields=4)).get("offset", "0") if len(query) < 200 else ""
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 16):
        raise NoSuchResource(f"no resource {uri[:200]!r} here; offset is a number of characters")
    return handle, int(offset)


def _described(output: StoredOutput) -> dict[str, Any]:
    return {
        "uri": OUTPUTS + output.handle,
        "name": output.handle.rpartition("/")[2],
        "title": f"Output of {output.tool}",
        "description": f"{output.lines} lines, {output.tokens} tokens",
        "mimeType": "application/json" if output.is_json else "text/plain",
        "size": output.bytes,
    }

"""Answers that come piece by piece: JSON lines, JSON sequences, server-sent events. Bytes in, values out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from toolspace.core import json_text
from toolspace.errors import ToolLimitError

Values = AsyncGenerator[Any, None]

_LONGEST = 16 << 20
_RECORD_SEPARATOR = b"\x1e"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_END = "[DONE]"
"""What model APIs send last. It says that there is nothing more, and is nothing itself."""


def stream_of(media_type: str) -> Callable[[AsyncIterator[bytes]], Values] | None:
    """What reads a stream of this type; None where the type is no stream."""
    return _READERS.get(media_type)


async def json_lines(pieces: AsyncIterator[bytes]) -> Values:
    """Each line as its JSON value; one that is no JSON as its text."""
    async for line in _split(pieces, _newlines):
        if line := line.strip():
            yield _json_or_text(line)


async def json_sequence(pieces: AsyncIterator[bytes]) -> Values:
    """Each record of a JSON text sequence (RFC 7464)."""
    async for record in _split(pieces, _records):
        if record := record.strip():
            yield _json_or_text(record)


async def events(pieces: AsyncIterator[bytes]) -> Values:
    """The data of each event: an object or a list where it is one, else its text. With its name, where it has one."""
    name = ""
    data: list[str] = []
    size = 0
    first = True
    async for line in _split(pieces, _any_line_ends):
        if first:
            line, first = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:  # The end of the answer, and not an empty line.
            break
        text = line.rstrip(b"\r\n").decode("utf-8", "replace")
        if not text:
            if data:
                whole = "\n".join(data)
                if whole == _END:
                    return
                yield _event(name, whole)
            name, data, size = "", [], 0
            continue
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            size += len(value)
            if size > _LONGEST:
                raise _too_long()
            data.append(value)
        elif field == "event":
            name = value
    # What has no empty line behind it is not complete, and the standard drops it.


def _event(name: str, data: str) -> Any:
    value: Any = data
    # Only these: a stream of text may have a `5` or a `true` in it, which is text all the same.
    if data[:1] in ("{", "["):
        value = _json_or_text(data.encode())
    return value if name in ("", "message") else {"event": name, "data": value}


def _json_or_text(line: bytes) -> Any:
    try:
        return json_text.decode(line)
    except ValueError:
        return line.decode("utf-8", "replace")


async def _split(pieces: AsyncIterator[bytes], cut: Callable[[bytes], list[bytes]]) -> AsyncGenerator[bytes, None]:
    """The records between separators. One that never ends is refused before it fills the memory."""
    begun: list[bytes] = []
    size = 0
    async for piece in pieces:
        begun.append(piece)
        size += len(piece)
        if len(cut(piece)) > 1:  # Only then: joining a long record anew for each of its pieces would take for ever.
            *whole, rest = cut(b"".join(begun))
            for record in whole:
                yield record
            begun, size = [rest], len(rest)
        if size > _LONGEST:
            raise _too_long()
    for record in cut(b"".join(begun)):
        yield record


def _newlines(data: bytes) -> list[bytes]:
    return data.split(b"\n")


def _records(data: bytes) -> list[bytes]:
    return data.split(_RECORD_SEPARATOR)


def _any_line_ends(data: bytes) -> list[bytes]:
    lines = data.splitlines(keepends=True)
    # A carriage return at the end may be the first half of a line end.
    return lines if lines and not lines[-1].endswith(b"\n") else [*lines, b""]


def _too_long() -> ToolLimitError:
    return ToolLimitError(f"a single record of the answer is longer than {_LONGEST >> 20} MiB", executed=True)


_READERS: dict[str, Callable[[AsyncIterator[bytes]], Values]] = {
    "application/x-ndjson": json_lines,
    "application/ndjson": json_lines,
    "application/jsonl": json_lines,
    "application/x-jsonl": json_lines,
    "application/jsonlines": json_lines,
    "application/x-jsonlines": json_lines,
    "application/json-lines": json_lines,
    "application/json-seq": json_sequence,
    "text/event-stream": events,
}

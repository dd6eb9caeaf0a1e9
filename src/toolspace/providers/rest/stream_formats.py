"""Parses bodies that arrive piece by piece: JSON lines, JSON text sequences, server-sent events.

`response` uses it. Bytes in, JSON values out; it reads no connection.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from toolspace.core import json_text
from toolspace.core.sse import SseDecoder, SseSizeError
from toolspace.errors import ToolLimitError

Values = AsyncGenerator[Any, None]

_MAX_RECORD_BYTES = 16 << 20
_RECORD_SEPARATOR = b"\x1e"
_END_OF_STREAM = b"[DONE]"
"""The last event of model APIs. It is no value."""


def find_stream_reader(media_type: str) -> Callable[[AsyncIterator[bytes]], Values] | None:
    """The function that reads a stream of this media type; None if the type is no stream."""
    return _READERS.get(media_type)


async def read_json_lines(pieces: AsyncIterator[bytes]) -> Values:
    """Each non-empty line as its JSON value, or as text if it is no JSON."""
    async for line in _split(pieces, _split_lines):
        if line := line.strip():
            yield _json_or_text(line)


async def read_json_sequence(pieces: AsyncIterator[bytes]) -> Values:
    """Each record of a JSON text sequence (RFC 7464)."""
    async for record in _split(pieces, _split_records):
        if record := record.strip():
            yield _json_or_text(record)


async def read_events(pieces: AsyncIterator[bytes]) -> Values:
    """The data of each event, parsed if it is a JSON object or list. A named event is `{event, data}`."""
    decoder = SseDecoder(_MAX_RECORD_BYTES)
    async for piece in pieces:
        try:
            events = decoder.feed(piece)
        except SseSizeError:
            raise _too_long_error() from None
        for event in events:
            if event.data == _END_OF_STREAM:
                return
            if event.data is not None:
                yield _event_value(event.event, event.data)
    # An event without an empty line after it is incomplete; the standard drops it.


def _event_value(name: str, data: bytes) -> Any:
    # Only objects and lists: in a stream of text, `5` and `true` are text too.
    value: Any = _json_or_text(data) if data[:1] in (b"{", b"[") else data.decode("utf-8", "replace")
    return value if name == "message" else {"event": name, "data": value}


def _json_or_text(record: bytes) -> Any:
    try:
        return json_text.decode(record)
    except ValueError:
        return record.decode("utf-8", "replace")


async def _split(pieces: AsyncIterator[bytes], split: Callable[[bytes], list[bytes]]) -> AsyncGenerator[bytes, None]:
    """The records between separators. Raises `ToolLimitError` if a record does not end within the limit."""
    unfinished_pieces: list[bytes] = []
    size = 0
    async for piece in pieces:
        unfinished_pieces.append(piece)
        size += len(piece)
        # Joined only when a record ends: joining a long record for each of its pieces takes quadratic time.
        if len(split(piece)) > 1:
            *records, rest = split(b"".join(unfinished_pieces))
            for record in records:
                yield record
            unfinished_pieces, size = [rest], len(rest)
        if size > _MAX_RECORD_BYTES:
            raise _too_long_error()
    for record in split(b"".join(unfinished_pieces)):
        yield record


def _split_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")


def _split_records(data: bytes) -> list[bytes]:
    return data.split(_RECORD_SEPARATOR)


def _too_long_error() -> ToolLimitError:
    return ToolLimitError(
        f"one record of the streamed response is longer than {_MAX_RECORD_BYTES >> 20} MiB", executed=True
    )


_READERS: dict[str, Callable[[AsyncIterator[bytes]], Values]] = {
    "application/x-ndjson": read_json_lines,
    "application/ndjson": read_json_lines,
    "application/jsonl": read_json_lines,
    "application/x-jsonl": read_json_lines,
    "application/jsonlines": read_json_lines,
    "application/x-jsonlines": read_json_lines,
    "application/json-lines": read_json_lines,
    "application/json-seq": read_json_sequence,
    "text/event-stream": read_events,
}

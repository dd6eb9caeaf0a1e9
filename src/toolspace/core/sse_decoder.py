"""Decodes server-sent events (`text/event-stream`) from bytes as they arrive.

The Python client, the model adapters, REST tools and the MCP client use it. It opens no connection and does not parse
the data of an event.
"""

from __future__ import annotations

import msgspec

MAX_EVENT_BYTES = 16 << 20
MAX_DATA_LINES = 100_000
"""The maximum number of data lines of one event. Lines may be empty, and each is an object in memory."""
_BOM = b"\xef\xbb\xbf"
_MAX_RETRY_DIGITS = 8
_LF = 10


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """One event of a stream."""

    data: bytes | None
    """The data lines, joined by LF. None for a block that has an id but no data: it only moves the position."""
    event: str = "message"
    id: str | None = None
    """The id in this block; None if the block has none."""


class SseSizeError(ValueError):
    """An event of the stream is larger than the decoder accepts."""


class SseDecoder:
    """Turns the chunks of one stream into events. Chunks may be split anywhere.

    Lines end with LF, CRLF or CR. A byte order mark at the start, comments and unknown fields are skipped.
    """

    __slots__ = ("_after_cr", "_data", "_event", "_id", "_is_started", "_max_bytes", "_partial_line", "_size", "retry")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.retry: float | None = None
        """How many seconds the server asks clients to wait before they reconnect."""
        self._max_bytes = max_event_bytes
        self._partial_line: list[bytes] = []
        """Pieces of a line that has not ended. Joined once, so a line that arrives byte by byte stays linear."""
        self._data: list[bytes] = []
        self._event = ""
        self._id: str | None = None
        self._size = 0
        """Bytes of the data lines and of the partial line of the current event."""
        self._after_cr = False
        self._is_started = False

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Returns the events that end in this chunk. Raises `SseSizeError` for an event that is too large."""
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk[0] == _LF:
                chunk = chunk[1:]
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in chunk:
            self._add_partial(chunk)
            return []
        if self._partial_line:
            self._size -= sum(map(len, self._partial_line))
            self._partial_line.append(chunk)
            chunk = b"".join(self._partial_line)
            self._partial_line.clear()
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if not self._is_started:
            self._is_started = True
            lines[0] = lines[0].removeprefix(_BOM)
        events: list[SseEvent] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._add_data(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line:
                self._read_field(line)
            else:
                self._end_event(events)
        self._add_partial(rest)
        return events

    def finish(self) -> list[SseEvent]:
        """Returns the last event of a stream that ended without an empty line, which some servers forget."""
        return self.feed(b"\n\n")

    def _read_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._add_data(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit() and len(value) <= _MAX_RETRY_DIGITS:
            self.retry = int(value) / 1000

    def _end_event(self, events: list[SseEvent]) -> None:
        data, self._size = self._data, 0
        if data:
            text = data[0] if len(data) == 1 else b"\n".join(data)
            events.append(SseEvent(text, self._event or "message", self._id))
            data.clear()
        elif self._id is not None:
            events.append(SseEvent(None, self._event or "message", self._id))
        self._event, self._id = "", None

    def _add_data(self, value: bytes) -> None:
        self._grow(len(value))
        if len(self._data) >= MAX_DATA_LINES:
            raise SseSizeError(f"an event of the stream has more than {MAX_DATA_LINES:,} data lines")
        self._data.append(value)

    def _add_partial(self, piece: bytes) -> None:
        if piece:
            self._grow(len(piece))
            self._partial_line.append(piece)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._max_bytes:
            raise SseSizeError(f"an event of the stream has more than {self._max_bytes:,} bytes")

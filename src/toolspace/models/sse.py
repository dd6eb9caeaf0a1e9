"""Reads server-sent events from bytes as they come, split anywhere. Knows nothing of what their data means."""

from __future__ import annotations

MAX_EVENT = 16 << 20
"""Bytes of one event. No answer of a model is so long; whatever is, would only fill the memory."""


class EventReader:
    """Turns the chunks of one stream into the data of its events.

    Lines end with LF, CRLF or CR; comments, which keep connections alive, and fields other than `data` are skipped.
    """

    __slots__ = ("_after_cr", "_data", "_held", "_limit", "_size", "_started")

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._limit = limit
        self._held: list[bytes] = []
        """Pieces of a line that has not ended. Joined once: a line that comes byte by byte must not cost its square."""
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._started = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that end in this chunk. Raises `ValueError` for an event that is too long."""
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk[0] == 10:
                chunk = chunk[1:]
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in chunk:
            self._hold(chunk)
            return []
        if self._held:
            self._held.append(chunk)
            chunk = b"".join(self._held)
            self._held.clear()
            self._size = sum(map(len, self._data))
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if not self._started:
            self._started = True
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        events: list[bytes] = []
        for line in lines:
            if not line:
                self._end(events)
            elif line.startswith(b"data:"):
                self._add(line)
        if rest:
            self._hold(rest)
        return events

    def finish(self) -> list[bytes]:
        """What is left when the stream has ended: some servers forget the empty line after the last event."""
        return self.feed(b"\n\n")

    def _add(self, line: bytes) -> None:
        value = line[6:] if line.startswith(b"data: ") else line[5:]
        self._grow(len(value))
        self._data.append(value)

    def _end(self, events: list[bytes]) -> None:
        if self._data:
            events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
            self._data.clear()
            self._size = 0

    def _hold(self, piece: bytes) -> None:
        if piece:
            self._grow(len(piece))
            self._held.append(piece)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._limit:
            raise ValueError(f"an event is longer than {self._limit:,} bytes")

"""What the output stores share: handles, who may read an output, and splitting bytes into lines."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator

from toolspace.core.interfaces import StoredOutput

LINE_LIMIT = 1 << 20
"""Characters; a longer line is split into pieces."""
BLOCK = 256 * 1024
"""Bytes of one read or write."""

_READABLE = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HANDLE = re.compile(r"(session-[A-Za-z0-9_-]{1,64})/([0-9a-f]{16})", re.ASCII)


def folder_of(session: str) -> str:
    """The first half of a session's handles: readable if the session is a plain name, otherwise a hash of it."""
    if _READABLE.fullmatch(session) and session != "session-":
        return session if session.startswith("session-") else f"session-{session}"
    import hashlib  # Here: few sessions need it.

    return "session-" + hashlib.sha256(session.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def new_handle(session: str) -> str:
    return f"{folder_of(session)}/{os.urandom(8).hex()}"


def parse_handle(handle: str) -> tuple[str, str] | None:
    """Folder and id of a handle. None for any other text: a model may send anything."""
    match = _HANDLE.fullmatch(handle)
    return (match[1], match[2]) if match else None


def may_read(output: StoredOutput, *, session: str, owner: str | None) -> bool:
    """A user may read its outputs from any session; without users, only the same session may.

    Compares the sessions, not their folders: two sessions may share one.
    """
    return output.owner == owner and (owner is not None or output.session == session)


def count_lines(newlines: int, last_character: str) -> int:
    """A last line without a newline counts too."""
    return newlines + (last_character not in ("", "\n"))


def encode(text: str) -> bytes:
    """UTF-8 of any text. Lone surrogates, which UTF-8 cannot encode, become escapes."""
    return text.encode("utf-8", "backslashreplace")


def decode_start(data: bytes) -> str:
    """Decodes bytes that may end in the middle of a character, without that character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


class LineSplitter:
    """Splits blocks of bytes into lines, with no more than one line in memory."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, block: bytes) -> list[str]:
        """The lines that this block completes; an empty block means the end."""
        lines = (self._rest + self._decoder.decode(block, final=not block)).split("\n")
        self._rest = lines.pop()
        if not block and self._rest:
            lines.append(self._rest)
            self._rest = ""
        if max(map(len, lines), default=0) > LINE_LIMIT:
            lines = [piece for line in lines for piece in _pieces(line)]
        while len(self._rest) > LINE_LIMIT:
            lines.append(self._rest[:LINE_LIMIT])
            self._rest = self._rest[LINE_LIMIT:]
        return lines


def _pieces(line: str) -> Iterator[str]:
    yield line[:LINE_LIMIT]
    for start in range(LINE_LIMIT, len(line), LINE_LIMIT):
        yield line[start : start + LINE_LIMIT]

"""What all output stores share: how handles are made and read, who may read, and how bytes become lines."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator

from toolspace.core.interfaces import StoredOutput

LINE_LIMIT = 1 << 20
"""A longer line comes in pieces of so many characters."""
BLOCK = 256 * 1024
"""How much is read or written at once."""

_READABLE = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HANDLE = re.compile(r"(session-[A-Za-z0-9_-]{1,64})/([0-9a-f]{16})", re.ASCII)


def folder_of(session: str) -> str:
    """The first half of a session's handles. A session can be any text; a plain one stays readable."""
    if _READABLE.fullmatch(session) and session != "session-":
        return session if session.startswith("session-") else f"session-{session}"
    import hashlib  # Only an odd session pays for it; most names are kept as they are.

    return "session-" + hashlib.sha256(session.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def new_handle(session: str) -> str:
    return f"{folder_of(session)}/{os.urandom(8).hex()}"


def parse_handle(handle: str) -> tuple[str, str] | None:
    """Folder and id of a handle. A model may send anything: what is not exactly a handle is None."""
    match = _HANDLE.fullmatch(handle)
    return (match[1], match[2]) if match else None


def may_read(output: StoredOutput, *, session: str, owner: str | None) -> bool:
    """The same user reads from any session; without users, only the same session does.

    The session is compared in full, not by its folder: two sessions may share one.
    """
    return output.owner == owner and (owner is not None or output.session == session)


def count_lines(newlines: int, last: str) -> int:
    """A last line that does not end counts too."""
    return newlines + (last not in ("", "\n"))


def encode(text: str) -> bytes:
    """UTF-8 of any text. Lone surrogates, which UTF-8 cannot carry, are written as their escapes."""
    return text.encode("utf-8", "backslashreplace")


def decode_start(data: bytes) -> str:
    """The text of bytes that may end in the middle of a character, without that character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


class LineSplitter:
    """Turns blocks of bytes into lines, with no more than one line in memory."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, block: bytes) -> list[str]:
        """The lines that this block completes; an empty block is the end."""
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

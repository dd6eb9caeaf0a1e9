"""Turns the bytes of files into text and back: encodings, windows of lines, and what is too large. Opens nothing."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from toolspace.errors import ToolExecutionError, ToolLimitError, ToolValidationError

MAX_TEXT_BYTES = 10 * 1024 * 1024
"""How many bytes of a file, or characters of it as text, are taken into memory at most."""
_PIECE = 256 * 1024
_HEAD = 8192
# Text encodings by name, but of host names, of source code and of nothing; none of them can be read in pieces.
_NO_FILE_ENCODINGS = frozenset(("idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape"))


class LineWindow(NamedTuple):
    """Some lines of a text, and how many there are in all."""

    content: str
    total_lines: int


def check_encoding(encoding: str) -> str:
    """The encoding's proper name; raises unless Python reads files in it."""
    try:
        "".encode(encoding)
        name = codecs.lookup(encoding).name
    except (LookupError, ValueError):
        name = "undefined"
    if name in _NO_FILE_ENCODINGS:
        raise ToolValidationError(
            f'encoding: {encoding[:40]!r} is not a text encoding; use "utf-8", another such as "latin-1", or "base64"'
        )
    return name


def read_lines(
    file: BinaryIO, path: str, encoding: str, *, first: int, count: int | None, check: Callable[[], None]
) -> LineWindow:
    """The lines from `first` (0 is the first one) on, with their ends as they are, without loading the rest."""
    end = None if count is None else first + count
    kept: list[str] = []
    size = line = 0
    text = ""
    for text in _decoded(file, path, encoding, check):
        ends = text.count("\n")
        start = _after_lines(text, first - line, ends)
        stop = len(text) if end is None else _after_lines(text, end - line, ends)
        if start < stop:
            kept.append(text[start:stop])
            size += stop - start
            if size > MAX_TEXT_BYTES:
                raise too_large_error(path, "the lines asked for are too many or too long, so lower limit")
        line += ends
    unfinished = bool(text) and not text.endswith("\n")
    return LineWindow("".join(kept), line + unfinished)


def read_all(file: BinaryIO, path: str, size: int) -> bytes:
    """The whole file, if it is not too large."""
    data = file.read(MAX_TEXT_BYTES + 1) if size <= MAX_TEXT_BYTES else b""
    if size > MAX_TEXT_BYTES or len(data) > MAX_TEXT_BYTES:
        raise too_large_error(path, f"it has {max(size, len(data)):,} bytes")
    return data


def decode_text(data: bytes, path: str) -> str:
    """UTF-8 text as it is, byte order mark and line ends included; raises for a binary file."""
    if b"\0" in data[:_HEAD]:
        raise _binary(path, "it holds null bytes", "utf-8")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _binary(path, f"byte {error.start} is 0x{data[error.start]:02x}", "utf-8") from None


def encode_text(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        bad = error.object[error.start]
        raise ToolValidationError(
            f'content: character {error.start}, {bad!a}, does not exist in {encoding}; use "utf-8"'
            if encoding != "utf-8"
            else f"content: character {error.start}, {bad!a}, is half of a surrogate pair; leave it out"
        ) from None


def looks_binary(head: bytes) -> bool:
    """Whether the first block of a file says that it is no text."""
    return b"\0" in head[:_HEAD]


def too_large_error(path: str, why: str) -> ToolLimitError:
    return ToolLimitError(f"{path!r} was not read: {why}; at most {MAX_TEXT_BYTES:,} bytes are read at once")


def _decoded(file: BinaryIO, path: str, encoding: str, check: Callable[[], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    at = 0
    while True:
        check()
        piece = file.read(_PIECE)
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeError as error:
            where = f"near byte {at + getattr(error, 'start', 0)}: {getattr(error, 'reason', error)}"
            raise _binary(path, where, encoding) from None
        if at == 0 and "\0" in text[:_HEAD]:
            raise _binary(path, "it holds null characters", encoding)
        if text:
            yield text
        if not piece:
            return
        at += len(piece)


def _after_lines(text: str, count: int, ends: int) -> int:
    """Where `count` of the `ends` line ends in the text are behind; its end where it has fewer."""
    if count > ends:
        return len(text)
    at = 0
    for _ in range(count):
        at = text.index("\n", at) + 1
    return at


def _binary(path: str, why: str, encoding: str) -> ToolExecutionError:
    return ToolExecutionError(
        f'{path!r} is not {encoding} text ({why}); read it with its own encoding, or with encoding "base64"'
    )

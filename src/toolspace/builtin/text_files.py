"""Decodes and encodes the content of files: encodings, ranges of lines, size limits. Opens no files."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from toolspace.core.charsets import find_codec
from toolspace.errors import ToolExecutionError, ToolLimitError, ToolValidationError

MAX_TEXT_BYTES = 10 * 1024 * 1024
"""The maximum size of a file in memory, in bytes or in characters of its text."""
_READ_BYTES = 256 * 1024
_HEAD_BYTES = 8192


class LineWindow(NamedTuple):
    """Some lines of a text, and the number of all its lines."""

    content: str
    total_lines: int


def check_encoding(encoding: str) -> str:
    """The name of Python's codec. Raises `ToolValidationError` if there is none for text."""
    codec = find_codec(encoding)
    if codec is None:
        raise ToolValidationError(
            f'encoding: {encoding[:40]!r} is not a text encoding; use "utf-8", another such as "latin-1", or "base64"'
        )
    return codec


def read_lines(
    file: BinaryIO, path: str, encoding: str, *, first: int, count: int | None, check: Callable[[], None]
) -> LineWindow:
    """`count` lines from line `first` (counted from 0) on, with their line ends. Does not load the other lines.

    `check` is called between reads and may raise to stop.
    """
    end = None if count is None else first + count
    pieces: list[str] = []
    size = line_count = 0
    text = ""
    for text in _decode_pieces(file, path, encoding, check):
        line_ends = text.count("\n")
        start = _skip_lines(text, first - line_count, line_ends)
        stop = len(text) if end is None else _skip_lines(text, end - line_count, line_ends)
        if start < stop:
            pieces.append(text[start:stop])
            size += stop - start
            if size > MAX_TEXT_BYTES:
                raise too_large_error(path, "the requested lines are too many or too long, so lower limit")
        line_count += line_ends
    has_unfinished_line = bool(text) and not text.endswith("\n")
    return LineWindow("".join(pieces), line_count + has_unfinished_line)


def read_all(file: BinaryIO, path: str, size: int) -> bytes:
    """The whole file. Raises `ToolLimitError` if it is too large."""
    data = file.read(MAX_TEXT_BYTES + 1) if size <= MAX_TEXT_BYTES else b""
    if size > MAX_TEXT_BYTES or len(data) > MAX_TEXT_BYTES:
        raise too_large_error(path, f"it has {max(size, len(data)):,} bytes")
    return data


def decode_text(data: bytes, path: str) -> str:
    """Decodes UTF-8, and keeps byte order mark and line ends. Raises `ToolExecutionError` for a binary file."""
    if is_binary(data):
        raise _not_text_error(path, "it contains null bytes", "utf-8")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_text_error(path, f"byte {error.start} is 0x{data[error.start]:02x}", "utf-8") from None


def encode_text(text: str, encoding: str) -> bytes:
    """Encodes the argument `content`. Raises `ToolValidationError` that names the first invalid character."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise ToolValidationError(
            f'content: character {error.start}, {character!a}, does not exist in {encoding}; use "utf-8"'
            if encoding != "utf-8"
            else f"content: character {error.start}, {character!a}, is half of a surrogate pair; leave it out"
        ) from None


def is_binary(head: bytes) -> bool:
    """Whether the beginning of a file shows that it is not text."""
    return b"\0" in head[:_HEAD_BYTES]


def too_large_error(path: str, reason: str) -> ToolLimitError:
    return ToolLimitError(f"{path!r} was not read: {reason}; at most {MAX_TEXT_BYTES:,} bytes are read at once")


def _decode_pieces(file: BinaryIO, path: str, encoding: str, check: Callable[[], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    position = 0
    while True:
        check()
        piece = file.read(_READ_BYTES)
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeError as error:
            reason = f"near byte {position + getattr(error, 'start', 0)}: {getattr(error, 'reason', error)}"
            raise _not_text_error(path, reason, encoding) from None
        if position == 0 and "\0" in text[:_HEAD_BYTES]:
            raise _not_text_error(path, "it contains null characters", encoding)
        if text:
            yield text
        if not piece:
            return
        position += len(piece)


def _skip_lines(text: str, count: int, line_ends: int) -> int:
    """The position after `count` lines; the end of the text if it has fewer than that."""
    if count > line_ends:
        return len(text)
    position = 0
    for _ in range(count):
        position = text.index("\n", position) + 1
    return position


def _not_text_error(path: str, reason: str, encoding: str) -> ToolExecutionError:
    return ToolExecutionError(
        f'{path!r} is not {encoding} text ({reason}); read it with its own encoding, or with encoding "base64"'
    )

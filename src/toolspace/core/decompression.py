"""`Decompressor`: decompresses the body of an HTTP response in pieces of a limited size. Reads nothing itself.

The HTTP tools and the OAuth client use it. The other HTTP clients rely on their libraries, which limit the pieces too.
"""

from __future__ import annotations

import zlib

SUPPORTED_ENCODINGS = ("gzip", "deflate")
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_RAW_DEFLATE_WINDOW = -zlib.MAX_WBITS
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_GZIP_MEMBERS = 1_000
"""Members may be empty, so that a small body has many. Each costs a decompressor."""


def normalize_encoding(header: str) -> str:
    """The content encoding that a `Content-Encoding` header names; empty if the body is not encoded."""
    encoding = header.strip().lower().removeprefix("x-")
    return "" if encoding == "identity" else encoding


class Decompressor:
    """Decompresses `gzip` or `deflate` up to a size: a small body may decompress to any size."""

    __slots__ = ("_encoding", "_is_finished", "_members", "_rest", "_stream", "is_cut")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream = zlib.decompressobj(_GZIP_WINDOW) if encoding == "gzip" else None
        self._is_finished = False
        self._members = 1
        self._rest: bytes = b""
        self.is_cut = False
        """Whether the data has too many gzip members. The rest is not decompressed."""

    def decompress(self, data: bytes, max_size: int) -> bytes:
        """Decompresses the next bytes to at most `max_size` bytes. Raises `zlib.error` if they are invalid.

        What does not fit is decompressed by the next call.
        """
        output = bytearray()
        data = self._rest + data
        while data and max_size > len(output) and not self._is_finished:
            if self._stream is None:
                # Some servers send raw deflate data, although the standard requires a zlib header.
                self._stream = zlib.decompressobj(zlib.MAX_WBITS if data[0] & 0xF == 8 else _RAW_DEFLATE_WINDOW)
            output += self._stream.decompress(data, max_size - len(output))
            if not self._stream.eof:
                data = self._stream.unconsumed_tail
                continue
            data = self._stream.unused_data
            if self._encoding == "gzip" and data.startswith(_GZIP_MAGIC):
                self._stream = zlib.decompressobj(_GZIP_WINDOW)  # A gzip file may have several members.
                self._members += 1
                self.is_cut = self._is_finished = self._members > _MAX_GZIP_MEMBERS
            elif self._encoding == "gzip" and _GZIP_MAGIC.startswith(data):
                data = b""  # The next member may follow. The stream keeps its first byte in `unused_data`.
            else:
                self._is_finished = True
        self._rest = b"" if self._is_finished else data
        return bytes(output)

    @property
    def has_rest(self) -> bool:
        """Whether there are bytes that did not fit."""
        return bool(self._rest)

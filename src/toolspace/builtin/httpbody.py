"""Turns the bytes of an HTTP answer into what a model can read, within bounds. Fetches nothing."""

from __future__ import annotations

import codecs
import re
import zlib

_GZIP = 16 + zlib.MAX_WBITS
_RAW_DEFLATE = -zlib.MAX_WBITS
_GZIP_START = b"\x1f\x8b"

# Decoders that take quadratic time or read escapes: no page is written so, but an attacker's may say it is.
_REFUSED_CHARSETS = frozenset(("idna", "punycode", "raw_unicode_escape", "undefined", "unicode_escape"))
_BOMS = (("utf-8-sig", codecs.BOM_UTF8), ("utf-16", codecs.BOM_UTF16_LE), ("utf-16", codecs.BOM_UTF16_BE))
_TEXT_TYPE = re.compile(
    r"text/.*|application/(json|xml|javascript|ecmascript|x-www-form-urlencoded|x-ndjson|graphql|yaml|x-yaml|toml)"
    r"|.*\+(json|xml|yaml)"
)
_CHARSET = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9._:+-]{1,40})""", re.IGNORECASE)
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?([A-Za-z0-9._:+-]{1,40})""", re.IGNORECASE)


class Unpacker:
    """Undoes gzip and deflate within a bound: a small answer may unpack to any size."""

    __slots__ = ("_encoding", "_finished", "_stream")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream = zlib.decompressobj(_GZIP) if encoding == "gzip" else None
        self._finished = False

    @staticmethod
    def of(content_encoding: str) -> Unpacker | None:
        """The one for a `Content-Encoding`; None where the body is to be taken as it is."""
        encoding = content_encoding.strip().lower().removeprefix("x-")
        return Unpacker(encoding) if encoding in ("gzip", "deflate") else None

    def unpack(self, packed: bytes, room: int) -> bytes:
        """What the next bytes stand for, at most `room` of it. Raises `zlib.error` where they are broken."""
        unpacked = bytearray()
        while packed and room > len(unpacked) and not self._finished:
            if self._stream is None:
                # Some servers send bare deflate data where the standard asks for a zlib header.
                self._stream = zlib.decompressobj(zlib.MAX_WBITS if packed[0] & 0xF == 8 else _RAW_DEFLATE)
            unpacked += self._stream.decompress(packed, room - len(unpacked))
            if not self._stream.eof:
                packed = self._stream.unconsumed_tail
                continue
            packed = self._stream.unused_data
            if self._encoding == "gzip" and packed.startswith(_GZIP_START):
                self._stream = zlib.decompressobj(_GZIP)  # A gzip file may be several, one after the other.
            else:
                self._finished = bool(packed) or self._encoding != "gzip"
        return bytes(unpacked)


def as_text(body: bytes, content_type: str, *, cut: bool = False) -> str | None:
    """The text of a body; None where it is binary. `cut`: its end is missing, maybe inside a character."""
    for charset, mark in _BOMS:
        if body.startswith(mark):
            return _decode(body, charset, cut)
    media_type = content_type.partition(";")[0].strip().lower()
    declared = _CHARSET.search(content_type)
    if declared is None and "html" in media_type:
        meta = _META_CHARSET.search(body, 0, 2048)
        charset = meta[1].decode() if meta else None
    else:
        charset = declared[1] if declared else None
    if charset is not None and _usable(charset):
        return _decode(body, charset, cut)
    try:
        if b"\x00" not in body:
            return _decode(body, "utf-8", cut, errors="strict")
    except UnicodeDecodeError:
        pass
    if _TEXT_TYPE.fullmatch(media_type):
        # Text that does not say its charset and is not UTF-8 is most often in the old one of the West.
        return _decode(body, "cp1252" if b"\x00" not in body else "utf-8", cut)
    return None


def _usable(charset: str) -> bool:
    try:
        b"x".decode(charset, "replace")  # Not empty: that would not even look the charset up.
        return codecs.lookup(charset).name.replace("-", "_") not in _REFUSED_CHARSETS
    except (LookupError, ValueError):
        return False


def _decode(body: bytes, charset: str, cut: bool, errors: str = "replace") -> str:
    return codecs.getincrementaldecoder(charset)(errors).decode(body, final=not cut)

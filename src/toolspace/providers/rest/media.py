"""What the bytes of an answer are, by their content type: JSON, text and its charset, images, or just bytes."""

from __future__ import annotations

import codecs
import re
from functools import lru_cache
from typing import Literal, NamedTuple

MediaKind = Literal["json", "text", "image", "audio", "binary", "unknown"]

_CHARSET = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9._:+-]{1,40})""", re.IGNORECASE)
# Decoders that take quadratic time or read escapes: no answer is written so, but an attacker's may say it is.
_REFUSED_CHARSETS = frozenset(("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"))
_TEXT_TYPES = re.compile(
    r"text/.*|.*[/+](xml|yaml|x-yaml)"
    r"|application/(javascript|ecmascript|x-www-form-urlencoded|graphql|toml|sql|x-sh)"
)


class MediaType(NamedTuple):
    """A content type, read."""

    type: str
    """`application/json`; empty where the server gave none."""
    kind: MediaKind
    charset: str | None
    """A charset that Python knows; None where none is given."""


@lru_cache(256)
def parse_content_type(header: str) -> MediaType:
    """What a `Content-Type` header says."""
    media_type = header.partition(";")[0].strip().lower()
    declared = _CHARSET.search(header)
    return MediaType(
        media_type, _kind(media_type), declared[1] if declared and _is_usable_charset(declared[1]) else None
    )


def decode_text(body: bytes, media: MediaType) -> str | None:
    """The text of a body; None where it is binary."""
    if media.kind in ("image", "audio"):  # Some frameworks give every answer a charset.
        return None
    if media.charset is not None:
        return _decode_with_charset(body, media)
    if media.kind == "binary":
        return None
    try:
        if media.kind != "unknown" or b"\0" not in body:
            return body.decode("utf-8-sig")
    except UnicodeDecodeError:
        # Text that does not say its charset and is not UTF-8 is most often in the old one of the West.
        if media.kind != "unknown":
            return body.decode("cp1252", "replace")
    return None


def _decode_with_charset(body: bytes, media: MediaType) -> str | None:
    charset = media.charset or "utf-8"
    if media.kind in ("json", "text"):
        return body.decode(charset, "replace")
    try:
        text = body.decode(charset)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def text_decoder(media: MediaType) -> codecs.IncrementalDecoder:
    """What decodes a text that comes in pieces."""
    return codecs.getincrementaldecoder(media.charset or "utf-8-sig")("replace")


def _kind(media_type: str) -> MediaKind:
    if media_type.endswith(("/json", "+json")):
        return "json"
    if _TEXT_TYPES.fullmatch(media_type):  # Before images: `image/svg+xml` is one that a model can read.
        return "text"
    if media_type.startswith("image/"):
        return "image"
    if media_type.startswith("audio/"):
        return "audio"
    return "unknown" if media_type in ("", "application/octet-stream") else "binary"


def _is_usable_charset(charset: str) -> bool:
    try:
        b"x".decode(charset, "replace")  # Not empty: that would not even look the charset up.
        return codecs.lookup(charset).name not in _REFUSED_CHARSETS
    except (LookupError, ValueError):
        return False

"""Rules for HTTP messages that every HTTP client shares: methods, names, headers, charsets, URLs in errors.

The REST and OpenAPI providers and the built-in network tools use it. It sends nothing and does not import aiohttp.
"""

from __future__ import annotations

import codecs
import math
import re
import time
from base64 import b64encode
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yarl import URL

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing."""
IDEMPOTENT_METHODS = frozenset((*SAFE_METHODS, "PUT", "DELETE"))
"""Methods that have the same effect when they are sent twice."""
REDIRECT_STATUSES = frozenset((301, 302, 303, 307, 308))

FRAMING_HEADERS = frozenset(
    ("connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
"""Headers that decide where a message ends. A caller who sets one could smuggle a second request into the first."""
CLIENT_HEADERS = FRAMING_HEADERS | {"host", "proxy-authorization", "proxy-connection"}
"""Headers that only the HTTP client sets: the framing, and the server that a request is for."""

CHARSET_PARAMETER = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9._:+-]{1,40})""", re.IGNORECASE)
"""The charset of a `Content-Type` header is its first group."""

# Decoders that take quadratic time or interpret escapes. Real text does not use them; an attacker may declare them.
_REFUSED_CODECS = frozenset(("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"))
_METHOD = re.compile(r"[A-Z]{1,20}")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_HEADER_NAME = 200
_USER_INFO = re.compile(r"^([^/]*//)[^/]*@")
_MAX_URL_TEXT = 200


def is_method(text: str) -> bool:
    """Whether a client may send it as a method. CONNECT and TRACE are refused."""
    return _METHOD.fullmatch(text) is not None and text not in ("CONNECT", "TRACE")


def is_token(text: str) -> bool:
    """Whether it can name a header, a cookie or an authentication scheme (RFC 9110, `token`)."""
    return _TOKEN.fullmatch(text) is not None


def is_header_name(text: str) -> bool:
    """Whether it is a header name of reasonable length."""
    return len(text) <= _MAX_HEADER_NAME and is_token(text)


def basic_authorization(credentials: str) -> str:
    """The `Authorization` header of `user:password`."""
    return f"Basic {b64encode(credentials.encode()).decode()}"


def join_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name. Values of a repeated header are joined by ", "; invalid bytes are replaced."""
    joined_headers: dict[str, str] = {}
    for name, value in headers:
        name, value = name.lower(), value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        joined_headers[name] = f"{joined_headers[name]}, {value}" if name in joined_headers else value
    return joined_headers


def parse_retry_after(text: str | None) -> float | None:
    """The seconds that a `Retry-After` header asks to wait: a number, or a date. None if it is neither."""
    text = (text or "").strip()
    try:
        seconds = float(text[:20])
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def display_url(url: URL | str) -> str:
    """A URL for messages, without user, query and fragment: they may hold secrets. Unparsed text is quoted."""
    text = _USER_INFO.sub(r"\1", re.split("[?#]", str(url), maxsplit=1)[0])
    text = repr(text) if isinstance(url, str) else text
    return text if len(text) <= _MAX_URL_TEXT else f"{text[:_MAX_URL_TEXT]}…"


def find_codec(charset: str) -> str | None:
    """The name of Python's codec for a charset. None if there is none for text, or it is unsafe to use."""
    try:
        b"x".decode(charset, "replace")  # Not empty: Python does not look up the codec to decode nothing.
        name = codecs.lookup(charset).name
    except (LookupError, ValueError):
        return None
    return None if name in _REFUSED_CODECS else name

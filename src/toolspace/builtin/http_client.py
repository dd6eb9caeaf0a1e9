"""Sends one HTTP request, redirects included, to addresses that the guard admits. Knows nothing of tools.

Names are looked up here, once per hop, and the connection gets the very addresses that were checked: a name
that answers otherwise a moment later wins nothing. Nothing outlives a request; cancelling it closes its
connection.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import socket
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from toolspace.builtin.allowed_hosts import HostGuard
from toolspace.core.addresses import Address, canonical_host, is_same_origin, parse_address
from toolspace.core.http_errors import CONNECT_SECONDS, HTTP_FAILURES, describe_http_failure
from toolspace.errors import ToolExecutionError, ToolPermissionError, ToolTransportError, ToolValidationError

# MERGED from httpbody: Turns the bytes of an HTTP answer into what a model can read, within bounds. Fetches nothing.

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


class Decompressor:
    """Undoes gzip and deflate within a bound: a small answer may unpack to any size."""

    __slots__ = ("_encoding", "_finished", "_stream")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream = zlib.decompressobj(_GZIP) if encoding == "gzip" else None
        self._finished = False

    @staticmethod
    def for_encoding(content_encoding: str) -> Decompressor | None:
        """The one for a `Content-Encoding`; None where the body is to be taken as it is."""
        encoding = content_encoding.strip().lower().removeprefix("x-")
        return Decompressor(encoding) if encoding in ("gzip", "deflate") else None

    def decompress(self, packed: bytes, room: int) -> bytes:
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


def decode_body(body: bytes, content_type: str, *, cut: bool = False) -> str | None:
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


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Looks up the addresses of a host name. May raise `OSError`."""

MAX_REDIRECTS = 10
MAX_BODY_BYTES = 10_000_000

_DEFAULT_HEADERS = {"accept-encoding": "gzip, deflate", "user-agent": "toolspace"}
_METHOD = re.compile(r"[A-Z]{1,20}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]*")
_USER_INFO = re.compile(r"//[^/]*@")
_FORBIDDEN_URL = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")

# Set by the client: the caller could otherwise aim at another virtual host, or end the request early and
# start one that nobody checked.
_OWN_HEADERS = frozenset(
    (
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# All that another origin gets to see: keys come in more headers than Authorization and Cookie.
_TRAVELLING_HEADERS = frozenset(("accept", "accept-encoding", "accept-language", "content-type", "range", "user-agent"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedRequest:
    method: str
    url: URL
    headers: Mapping[str, str]
    body: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedResponse:
    status: int
    headers: Mapping[str, str]
    """Lower-case names; what came several times is joined by ", "."""
    body: bytes
    truncated: bool
    url: URL
    """Where the answer came from, after redirects."""


async def resolve_with_system(host: str, port: int) -> Sequence[str]:
    """The addresses that this machine's resolver knows, the preferred ones first."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class GuardedHttpClient:
    """Sends requests to public hosts and to those that `allowed_hosts` names. Holds nothing open."""

    def __init__(
        self,
        allowed_hosts: Sequence[str] | None = None,
        *,
        resolve: Resolve = resolve_with_system,
        max_redirects: int = MAX_REDIRECTS,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._guard = HostGuard(allowed_hosts)
        self._resolve = resolve
        self._max_redirects = max_redirects
        self._max_body_bytes = max_body_bytes

    async def send(
        self,
        method: str,
        url: str | URL,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> GuardedResponse:
        """The answer to one request, whatever its status; a redirect, too, where none is to be followed."""
        first = parse_url(url)
        request = GuardedRequest(method=check_method(method), url=first, headers=check_headers(headers), body=body)
        addresses = await self._admit(request.url)
        for _ in range(self._max_redirects):
            response = await self._send_once(request, addresses)
            target = _redirect_of(response)
            if target is None:
                return response
            try:
                addresses = await self._admit(target)
            except ToolPermissionError as error:
                reason = str(error).removeprefix(error.prefix)
                message = f"{error.prefix}{display_url(response.url)} redirects to {display_url(target)}: {reason}"
                # The first host may have acted on what it got.
                harmless = request.method in ("GET", "HEAD", "OPTIONS")
                raise ToolPermissionError(message, executed=not harmless) from None
            request = _redirected(request, target, response.status)
        response = await self._send_once(request, addresses)
        if self._max_redirects and _redirect_of(response) is not None:
            raise ToolExecutionError(f"{display_url(first)} redirects more than {self._max_redirects} times")
        return response

    async def _admit(self, url: URL) -> list[Address]:
        host, port = canonical_host(url.raw_host or ""), url.port or 80
        if not isinstance(host, str):
            return self._guard.filter_addresses(host, port, [host])
        self._guard.check_name(host, port)
        try:
            found = await self._resolve(host, port)
        except OSError as error:
            reason = error.strerror or error
            raise ToolTransportError(f"cannot find the address of {host}: {reason}") from None
        addresses = self._guard.filter_addresses(host, port, [parse_address(text) for text in dict.fromkeys(found)])
        if not addresses:
            raise ToolTransportError(f"cannot find the address of {host}: it has none")
        return addresses

    async def _send_once(self, request: GuardedRequest, addresses: Sequence[Address]) -> GuardedResponse:
        # A session per request costs 20 µs and leaves nothing open; aiohttp shares one TLS context.
        connector = aiohttp.TCPConnector(resolver=_Pinned(addresses), use_dns_cache=False, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            # No total: how long a call may take is for its caller to say.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,  # Unpacked here, where the bound is.
            trust_env=False,  # A proxy would connect to where it likes.
            max_line_size=32_768,
            max_field_size=32_768,
        ) as session:
            try:
                async with session.request(
                    request.method,
                    request.url,
                    headers={**_DEFAULT_HEADERS, **request.headers},
                    data=request.body,
                    allow_redirects=False,
                ) as response:
                    body, truncated = await _read(response, self._max_body_bytes)
                    return GuardedResponse(
                        status=response.status,
                        headers=_join(response),
                        body=body,
                        truncated=truncated,
                        url=request.url,
                    )
            # `from None`: aiohttp's errors carry the whole URL, and a key may be in its query.
            except HTTP_FAILURES as error:
                raise ToolTransportError(describe_http_failure(error, request.url)) from None
            except zlib.error:
                raise ToolTransportError(f"{display_url(request.url)} answered with a broken compressed body") from None


class _Pinned(AbstractResolver):
    """Answers with addresses that were checked, so that connecting looks nothing up again."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None: ...


def parse_url(text: str | URL) -> URL:
    """A URL that can be fetched, its host in the one spelling that the guard checks."""
    try:
        if isinstance(text, str):
            if _FORBIDDEN_URL.search(text.strip(" ")):
                raise ValueError("it has a space, a backslash or a control character; percent-encode it")
            text = URL(text.strip(" "))
        if text.scheme not in ("http", "https"):
            raise ValueError("it must start with http:// or https://")
        if not text.raw_host or not text.host:  # The second one raises where the first is broken punycode.
            raise ValueError("it names no host")
        if text.port == 0:
            raise ValueError("there is no port 0")
        if text.raw_user is not None or text.raw_password is not None:
            raise ValueError("it holds a user name or password; send an Authorization header instead")
        return text.with_host(str(canonical_host(text.raw_host))).with_fragment(None)
    except ValueError as error:
        raise ToolValidationError(f"url: {display_url(text)} cannot be fetched: {error}") from None


def check_method(method: str) -> str:
    method = method.strip().upper()
    if not _METHOD.fullmatch(method) or method in ("CONNECT", "TRACE"):
        raise ToolValidationError(f"method: {method[:40]!r} cannot be sent; use GET, HEAD, POST, PUT, PATCH or DELETE")
    return method


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers under lower-case names. The messages leave the values out: they may be secrets."""
    checked: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not _HEADER_NAME.fullmatch(name):
            raise ToolValidationError(f"headers: {name[:80]!r} is not a header name")
        if not _HEADER_VALUE.fullmatch(value):
            raise ToolValidationError(f"headers.{name}: a value has no line breaks or control characters")
        if name.lower() in _OWN_HEADERS:
            raise ToolValidationError(f"headers.{name}: this header is set by the client; leave it out")
        checked[name.lower()] = value
    return checked


def display_url(url: URL | str) -> str:
    """A URL for messages, without the parts that may hold secrets."""
    text = _USER_INFO.sub("//", re.split("[?#]", str(url), maxsplit=1)[0])
    text = text if isinstance(url, URL) else repr(text)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _redirect_of(response: GuardedResponse) -> URL | None:
    location = response.headers.get("location")
    if response.status not in (301, 302, 303, 307, 308) or not location:
        return None
    try:
        return parse_url(response.url.join(URL(location)))
    except ToolValidationError as error:
        reason = str(error).removeprefix(f"{error.prefix}url: ")
    except ValueError as error:
        reason = f"{display_url(location)} is not a URL: {error}"
    raise ToolExecutionError(f"{display_url(response.url)} redirects, but {reason}")


def _redirected(request: GuardedRequest, target: URL, status: int) -> GuardedRequest:
    headers = dict(request.headers)
    if not is_same_origin(request.url, target):
        headers = {name: value for name, value in headers.items() if name in _TRAVELLING_HEADERS}
    keeps_method = status in (307, 308) or (status != 303 and request.method != "POST")
    if keeps_method or request.method == "HEAD":
        return replace(request, url=target, headers=headers)
    headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
    return GuardedRequest(method="GET", url=target, headers=headers)


async def _read(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """The unpacked body up to the limit, and whether there was more. What is left stays unread."""
    unpacker = Decompressor.for_encoding(response.headers.get("content-encoding", ""))
    body = bytearray()
    received = 0
    async for piece in response.content.iter_any():
        # Counted too: packed data can go on forever and unpack to nothing.
        received += len(piece)
        body += piece if unpacker is None else unpacker.decompress(piece, limit + 1 - len(body))
        if len(body) > limit or received > limit:
            return bytes(body[:limit]), True
    return bytes(body), False


def _join(response: aiohttp.ClientResponse) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in response.headers.items():
        value = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        name = name.lower()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers

"""The HTTP client of the network tools: sends one request to permitted hosts (`allowedHosts`) and follows redirects.

Host names are resolved here, once per request and redirect, and the connection uses exactly the addresses that were
checked. So a name that resolves differently a moment later gains nothing. Nothing stays open after a request;
cancelling it closes its connection. `network` and `web_search` use it. It knows nothing of tools.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import socket
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_network

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from toolspace.core.decompression import SUPPORTED_ENCODINGS, Decompressor, normalize_encoding
from toolspace.core.http_client_errors import CONNECT_SECONDS, HTTP_FAILURES, describe_http_failure
from toolspace.core.http_messages import (
    CHARSET_PARAMETER,
    CLIENT_HEADERS,
    REDIRECT_STATUSES,
    SAFE_METHODS,
    display_url,
    find_codec,
    is_header_name,
    is_method,
    join_headers,
)
from toolspace.core.network_addresses import (
    Address,
    Host,
    Network,
    canonical_host,
    is_same_origin,
    parse_address,
    special_kind,
)
from toolspace.errors import (
    ConfigError,
    ToolExecutionError,
    ToolPermissionError,
    ToolTransportError,
    ToolValidationError,
)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host name to addresses. May raise `OSError`."""

MAX_REDIRECTS = 10
MAX_BODY_BYTES = 10_000_000

_METADATA_HOSTS = frozenset((
    "instance-data", "instance-data.ec2.internal", "metadata", "metadata.goog", "metadata.google.internal",
    "metadata.tencentyun.com",
))  # fmt: skip
_DEFAULT_HEADERS = {"accept-encoding": "gzip, deflate", "user-agent": "toolspace"}
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]*")
_INVALID_URL_CHARACTER = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
_CROSS_ORIGIN_HEADERS = frozenset(
    ("accept", "accept-encoding", "accept-language", "content-type", "range", "user-agent")
)
"""Headers that another origin may receive after a redirect. Services put secrets into any other header."""
_BYTE_ORDER_MARKS = (("utf-8-sig", codecs.BOM_UTF8), ("utf-16", codecs.BOM_UTF16_LE), ("utf-16", codecs.BOM_UTF16_BE))
_TEXT_TYPE = re.compile(
    r"text/.*|application/(json|xml|javascript|ecmascript|x-www-form-urlencoded|x-ndjson|graphql|yaml|x-yaml|toml)"
    r"|.*\+(json|xml|yaml)"
)
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?([A-Za-z0-9._:+-]{1,40})""", re.IGNORECASE)


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
    """Lower-case names; values of a repeated header are joined by ", "."""
    body: bytes
    truncated: bool
    url: URL
    """The URL after redirects."""


class AllowedHosts:
    """Which hosts and addresses may be reached: the public ones, and the entries of `allowedHosts`.

    An entry is `host`, `host:port`, `*.domain`, an address, a network, or `*` for all. The URL of a request may come
    from a model that read a hostile page. So addresses are compared by value, not by spelling.
    """

    def __init__(self, entries: Sequence[str] | None = None) -> None:
        self._names: set[tuple[str, int | None]] = set()
        self._suffixes: list[tuple[str, int | None]] = []
        self._networks: list[tuple[Network, int | None]] = []
        for entry in entries or ():
            try:
                self._add(entry.strip())
            except ValueError as error:
                raise ConfigError(
                    f"allowedHosts: {entry!r} is not a host, host:port, *.domain, address or network: {error}"
                ) from None

    def check_name(self, host: Host, port: int) -> None:
        """Raises for the host name of a metadata service, before it is resolved."""
        if host in _METADATA_HOSTS and not self._allows_name(host, port):
            raise ToolPermissionError(f"{host} is a metadata service; add the host to allowedHosts to allow it")

    def filter_addresses(self, host: Host, port: int, addresses: Sequence[Address]) -> list[Address]:
        """The addresses of a host that may be reached. Raises `ToolPermissionError` if none of them may."""
        if self._allows_name(host, port):
            return list(addresses)
        permitted_addresses = [
            address for address in addresses if special_kind(address) is None or self._allows_address(address, port)
        ]
        if not permitted_addresses and addresses:
            address, kind = addresses[0], special_kind(addresses[0])
            if isinstance(host, str):
                text = f"{host} resolves to the {kind} address {address}; add the host"
            else:
                text = f"{address} is a {kind} address; add it"
            raise ToolPermissionError(f"{text} to allowedHosts to allow it")
        return permitted_addresses

    def _allows_name(self, host: Host, port: int) -> bool:
        """Whether an entry names this host. Then it may be reached at any address."""
        if not isinstance(host, str):
            return False
        if (host, None) in self._names or (host, port) in self._names:
            return True
        return any(host.endswith(suffix) and entry_port in (None, port) for suffix, entry_port in self._suffixes)

    def _allows_address(self, address: Address, port: int) -> bool:
        """Whether an entry names this address, or a network that contains it."""
        return any(address in network and entry_port in (None, port) for network, entry_port in self._networks)

    def _add(self, entry: str) -> None:
        if "//" in entry:
            raise ValueError("write the host, not a URL")
        host, port = _split_port(entry)
        if host == "*":
            self._suffixes.append(("", port))
            self._networks += [(IPv4Network("0.0.0.0/0"), port), (IPv6Network("::/0"), port)]
        elif "/" in host:
            self._networks.append((ip_network(host, strict=False), port))
        elif host.startswith("*."):
            domain = canonical_host(host[2:])
            if not isinstance(domain, str):
                raise ValueError("for several addresses write a network such as 10.0.0.0/8")
            self._suffixes.append((f".{domain}", port))
        else:
            name_or_address = canonical_host(host)
            if isinstance(name_or_address, str):
                self._names.add((name_or_address, port))
            else:
                self._networks.append((ip_network(name_or_address), port))


def _split_port(entry: str) -> tuple[str, int | None]:
    if entry.startswith("["):
        host, bracket, rest = entry[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("the bracket is not closed")
        port = rest[1:] if rest else None
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    else:
        host, port = entry, None
    if port is None:
        return host, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{port!r} is not a port")
    return host, int(port)


async def resolve_with_system(host: str, port: int) -> Sequence[str]:
    """Resolves a host name with the resolver of the machine, preferred addresses first."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


class GuardedHttpClient:
    """Sends requests to public hosts and to those that `allowed_hosts` names. Keeps no connection open."""

    def __init__(
        self,
        allowed_hosts: Sequence[str] | None = None,
        *,
        resolve: Resolve = resolve_with_system,
        max_redirects: int = MAX_REDIRECTS,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._allowed_hosts = AllowedHosts(allowed_hosts)
        self._resolve = resolve
        self._max_redirects = max_redirects
        self._max_body_bytes = max_body_bytes

    async def send(
        self, method: str, url: str | URL, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> GuardedResponse:
        """Returns the response, whatever its status. With `max_redirects=0` a redirect is returned too.

        Raises `ToolValidationError` for an invalid request, `ToolPermissionError` for a host that is not allowed, and
        `ToolTransportError` if there is no response.
        """
        first_url = parse_url(url)
        request = GuardedRequest(method=check_method(method), url=first_url, headers=check_headers(headers), body=body)
        addresses = await self._find_addresses(request.url)
        for _ in range(self._max_redirects):
            response = await self._send_once(request, addresses)
            target = _redirect_target(response)
            if target is None:
                return response
            try:
                addresses = await self._find_addresses(target)
            except ToolPermissionError as error:
                reason = str(error).removeprefix(error.prefix)
                message = f"{error.prefix}{display_url(response.url)} redirects to {display_url(target)}: {reason}"
                # The first host may have acted on the request.
                raise ToolPermissionError(message, executed=request.method not in SAFE_METHODS) from None
            request = _redirect_request(request, target, response.status)
        response = await self._send_once(request, addresses)
        if self._max_redirects and _redirect_target(response) is not None:
            raise ToolExecutionError(f"{display_url(first_url)} redirects more than {self._max_redirects} times")
        return response

    async def _find_addresses(self, url: URL) -> list[Address]:
        """The permitted addresses of a URL's host."""
        host, port = canonical_host(url.raw_host or ""), url.port or 80
        if not isinstance(host, str):
            return self._allowed_hosts.filter_addresses(host, port, [host])
        self._allowed_hosts.check_name(host, port)
        try:
            texts = await self._resolve(host, port)
        except OSError as error:
            reason = error.strerror or error
            raise ToolTransportError(f"cannot find the address of {host}: {reason}") from None
        addresses = self._allowed_hosts.filter_addresses(
            host, port, [parse_address(text) for text in dict.fromkeys(texts)]
        )
        if not addresses:
            raise ToolTransportError(f"cannot find the address of {host}: it has none")
        return addresses

    async def _send_once(self, request: GuardedRequest, addresses: Sequence[Address]) -> GuardedResponse:
        # A session per request takes 20 µs and leaves nothing open; aiohttp shares the TLS context.
        connector = aiohttp.TCPConnector(resolver=_FixedResolver(addresses), use_dns_cache=False, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            # No total timeout: the deadline of the call applies.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,  # `_read_body` decompresses within the limit.
            trust_env=False,  # A proxy would choose the addresses itself.
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
                    body, truncated = await _read_body(response, self._max_body_bytes)
                    return GuardedResponse(
                        status=response.status,
                        headers=join_headers(response.headers.items()),
                        body=body,
                        truncated=truncated,
                        url=request.url,
                    )
            # `from None`: errors of aiohttp contain the whole URL, and its query may hold a secret.
            except HTTP_FAILURES as error:
                raise ToolTransportError(describe_http_failure(error, request.url)) from None
            except zlib.error:
                raise ToolTransportError(
                    f"the compressed body of {display_url(request.url)} cannot be decompressed"
                ) from None


class _FixedResolver(AbstractResolver):
    """Returns addresses that were already checked, so that connecting resolves nothing again."""

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


def parse_url(url: str | URL) -> URL:
    """Parses an http URL and normalizes its host for the checks. Raises `ToolValidationError`."""
    try:
        if isinstance(url, str):
            if _INVALID_URL_CHARACTER.search(url.strip(" ")):
                raise ValueError("it contains a space, a backslash or a control character; percent-encode it")
            url = URL(url.strip(" "))
        if url.scheme not in ("http", "https"):
            raise ValueError("it must start with http:// or https://")
        if not url.raw_host or not url.host:  # `host` raises if `raw_host` is invalid punycode.
            raise ValueError("it has no host")
        if url.port == 0:
            raise ValueError("there is no port 0")
        if url.raw_user is not None or url.raw_password is not None:
            raise ValueError("it contains a user name or password; send an Authorization header instead")
        return url.with_host(str(canonical_host(url.raw_host))).with_fragment(None)
    except ValueError as error:
        raise ToolValidationError(f"url: {display_url(url)} cannot be fetched: {error}") from None


def check_method(method: str) -> str:
    """The method in capitals. Raises `ToolValidationError`."""
    method = method.strip().upper()
    if not is_method(method):
        raise ToolValidationError(f"method: {method[:40]!r} cannot be sent; use GET, HEAD, POST, PUT, PATCH or DELETE")
    return method


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers by lower-case name. Raises `ToolValidationError` without the value, which may be a secret."""
    checked_headers: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not is_header_name(name):
            raise ToolValidationError(f"headers: {name[:80]!r} is not a header name")
        if not _HEADER_VALUE.fullmatch(value):
            raise ToolValidationError(f"headers.{name}: the value contains a line break or control character")
        if name.lower() in CLIENT_HEADERS:
            raise ToolValidationError(f"headers.{name}: this header is set by the client; leave it out")
        checked_headers[name.lower()] = value
    return checked_headers


def _redirect_target(response: GuardedResponse) -> URL | None:
    """The URL that a response redirects to, if it does. Raises `ToolExecutionError` if that URL is invalid."""
    location = response.headers.get("location")
    if response.status not in REDIRECT_STATUSES or not location:
        return None
    try:
        return parse_url(response.url.join(URL(location)))
    except ToolValidationError as error:
        reason = str(error).removeprefix(f"{error.prefix}url: ")
    except ValueError as error:
        reason = f"{display_url(location)} is not a URL: {error}"
    raise ToolExecutionError(f"{display_url(response.url)} redirects, but {reason}")


def _redirect_request(request: GuardedRequest, target: URL, status: int) -> GuardedRequest:
    headers = dict(request.headers)
    if not is_same_origin(request.url, target):
        headers = {name: value for name, value in headers.items() if name in _CROSS_ORIGIN_HEADERS}
    keeps_method = status in (307, 308) or (status != 303 and request.method != "POST")
    if keeps_method or request.method == "HEAD":
        return replace(request, url=target, headers=headers)
    headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
    return GuardedRequest(method="GET", url=target, headers=headers)


async def _read_body(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """The decompressed body up to the limit, and whether it was truncated. The rest stays unread."""
    encoding = normalize_encoding(response.headers.get("content-encoding", ""))
    decompressor = Decompressor(encoding) if encoding in SUPPORTED_ENCODINGS else None
    body = bytearray()
    received_bytes = 0
    async for piece in response.content.iter_any():
        # Compressed bytes count too: they can go on forever and decompress to nothing.
        received_bytes += len(piece)
        body += piece if decompressor is None else decompressor.decompress(piece, limit + 1 - len(body))
        if len(body) > limit or received_bytes > limit or (decompressor is not None and decompressor.is_cut):
            return bytes(body[:limit]), True
    return bytes(body), False


def decode_body(body: bytes, content_type: str, *, truncated: bool = False) -> str | None:
    """The text of a body; None if it is binary. A truncated body may end inside a character."""
    for charset, mark in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return _decode(body, charset, truncated)
    media_type = content_type.partition(";")[0].strip().lower()
    match = CHARSET_PARAMETER.search(content_type)
    charset = match[1] if match else None
    if match is None and "html" in media_type:
        meta = _META_CHARSET.search(body, 0, 2048)
        charset = meta[1].decode() if meta else None
    if charset is not None and find_codec(charset):
        return _decode(body, charset, truncated)
    try:
        if b"\x00" not in body:
            return _decode(body, "utf-8", truncated, errors="strict")
    except UnicodeDecodeError:
        pass
    if _TEXT_TYPE.fullmatch(media_type):
        # Text without a charset that is not UTF-8 is most often Windows-1252.
        return _decode(body, "cp1252" if b"\x00" not in body else "utf-8", truncated)
    return None


def _decode(body: bytes, charset: str, truncated: bool, errors: str = "replace") -> str:
    return codecs.getincrementaldecoder(charset)(errors).decode(body, final=not truncated)

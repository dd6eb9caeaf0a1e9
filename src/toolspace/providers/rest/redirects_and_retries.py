"""Sends requests over the connections of one event loop, follows redirects and retries. Only `client` uses it.

A host that the configuration names may have any address: the operator chose it. A redirect from a public server must
not lead to a non-public address, so it uses a second session whose resolver returns only public addresses.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Mapping

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from toolspace.core.http_client_errors import CONNECT_SECONDS, HTTP_FAILURES
from toolspace.core.http_messages import (
    IDEMPOTENT_METHODS,
    REDIRECT_STATUSES,
    SAFE_METHODS,
    display_url,
    join_headers,
    parse_retry_after,
)
from toolspace.core.network_addresses import canonical_host, is_same_origin, parse_address
from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ToolContext
from toolspace.core.trace_context import TraceContext
from toolspace.errors import ToolExecutionError, ToolPermissionError
from toolspace.providers.rest.client import ClassifyAddress, HttpLimits, HttpRequest, HttpResponse
from toolspace.providers.rest.response import read_result, read_up_to, transport_error

_RETRY_STATUSES = frozenset((429, 503))
_FIRST_RETRY_WAIT = 0.5
_MAX_DISCARDED_BYTES = 1 << 16
_CROSS_ORIGIN_HEADERS = frozenset(("accept", "accept-language", "range", "user-agent"))
"""Headers that another origin may receive after a redirect. Services put secrets into any other header."""


class RestTransport:
    """The connections of one event loop. `aclose` closes them."""

    def __init__(self, classify_address: ClassifyAddress) -> None:
        self._classify_address = classify_address
        self._session = _open_session(None)
        self._public_session: aiohttp.ClientSession | None = None

    async def send(self, request: HttpRequest, context: ToolContext, limits: HttpLimits) -> ToolResult:
        """Sends a request and reads the result; see `HttpClient.send`."""
        max_attempts = limits.max_attempts if request.method in IDEMPOTENT_METHODS else 1
        attempt = 1
        if context.trace is not None:
            request = _add_trace(request, context.trace)
        while True:
            response = await self._open_response(request, limits)
            try:
                wait = 0.0
                retries = response.status in _RETRY_STATUSES and attempt < max_attempts
                if retries:
                    wait = retry_delay(response.headers.get("Retry-After"), attempt)
                    retries = wait <= limits.max_retry_wait and wait < context.remaining_seconds
                if not retries:
                    result = await read_result(response, context, limits)
                    if attempt > 1:
                        result.extras["attempts"] = attempt
                    return result
                # Reading the body lets the pool reuse the connection.
                await read_up_to(response, _MAX_DISCARDED_BYTES)
            finally:
                response.close()  # Closes the connection, unless the body was read and the pool has it back.
            context.report_progress(attempt, max_attempts, f"HTTP {response.status}; trying again in {wait:.1f} s")
            await asyncio.sleep(wait)
            attempt += 1

    async def fetch(self, request: HttpRequest, limits: HttpLimits) -> HttpResponse:
        """Sends a request and reads the whole body; see `HttpClient.fetch`."""
        response = await self._open_response(request, limits)
        try:
            body, is_complete = await read_up_to(response, limits.max_text_bytes)
        finally:
            response.close()
        if not is_complete:
            raise ToolExecutionError(
                f"the response of {display_url(request.url)} has more than {limits.max_text_bytes:,} bytes"
            )
        return HttpResponse(status=response.status, headers=join_headers(response.headers.items()), body=body)

    async def is_public(self, host: str) -> bool:
        """Whether a host has only public addresses. True if it cannot be resolved: then redirects are checked."""
        try:
            name_or_address = canonical_host(host)
            if not isinstance(name_or_address, str):
                return self._classify_address(name_or_address) is None
            entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return all(self._classify_address(parse_address(str(entry[4][0]))) is None for entry in entries)
        except (OSError, ValueError):
            return True

    async def aclose(self) -> None:
        await self._session.close()
        if self._public_session is not None:
            await self._public_session.close()

    def detach(self) -> None:
        """Drops the connections of an event loop that no longer runs, without waiting for them to close."""
        for session in (self._session, self._public_session):
            if session is not None:
                session.detach()

    async def _open_response(self, request: HttpRequest, limits: HttpLimits) -> aiohttp.ClientResponse:
        """The response after redirects, its body unread. The caller closes it."""
        session = (
            self._get_public_session(request.url, "a document on the web") if request.public_only else self._session
        )
        for _ in range(limits.max_redirects + 1):
            response = await _send(session, request)
            location = response.headers.get("Location") if response.status in REDIRECT_STATUSES else None
            if location is None or request.method not in SAFE_METHODS:
                return response
            response.close()
            next_request = redirect_request(request, location)
            if next_request.url.raw_host != request.url.raw_host and (
                session is not self._session or await self.is_public(request.url.raw_host or "")
            ):
                session = self._get_public_session(next_request.url, display_url(request.url))
            request = next_request
        raise ToolExecutionError(
            f"a request was redirected more than {limits.max_redirects} times, last to {display_url(request.url)}"
        )

    def _get_public_session(self, url: URL, origin: str) -> aiohttp.ClientSession:
        """The session that reaches only public addresses. `origin` names in errors what led to the URL."""
        host = url.raw_host or ""
        try:
            name_or_address = canonical_host(host)
        except ValueError as error:
            raise ToolExecutionError(f"{origin} leads to an invalid host: {error}", executed=False) from None
        if not isinstance(name_or_address, str) and (kind := self._classify_address(name_or_address)) is not None:
            raise _not_public_error(host, kind)
        if self._public_session is None:
            self._public_session = _open_session(_PublicResolver(self._classify_address))
        return self._public_session


class _PublicResolver(AbstractResolver):
    """Resolves host names and returns only public addresses."""

    def __init__(self, classify_address: ClassifyAddress) -> None:
        self._classify_address = classify_address
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        entries = await self._inner.resolve(host, port, family)
        kinds = [self._classify_address(parse_address(entry["host"])) for entry in entries]
        public_entries = [entry for entry, kind in zip(entries, kinds, strict=True) if kind is None]
        if not public_entries:
            raise _not_public_error(host, next((kind for kind in kinds if kind), "unknown"))
        return public_entries

    async def close(self) -> None:
        await self._inner.close()


def _add_trace(request: HttpRequest, trace_context: TraceContext) -> HttpRequest:
    """Adds the headers of a trace, except those that the tool sets itself."""
    items = request.headers.items() if isinstance(request.headers, Mapping) else request.headers
    own_names = {name.lower() for name, _ in items}
    fields = trace_context.to_fields().items()
    headers = [*items, *((name, value) for name, value in fields if name not in own_names)]
    return msgspec.structs.replace(request, headers=headers)


def retry_delay(retry_after: str | None, attempt: int) -> float:
    """Seconds until the next attempt: as `Retry-After` says, otherwise exponential backoff with jitter."""
    seconds = parse_retry_after(retry_after)
    return seconds if seconds is not None else _FIRST_RETRY_WAIT * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)


def redirect_request(request: HttpRequest, location: str) -> HttpRequest:
    """The request that follows a redirect of a safe request.

    Another origin receives neither the body nor headers that may hold secrets. Raises `ToolExecutionError` if the
    location is no http URL, and `ToolPermissionError` if it leads from https to http.
    """
    source = request.url
    try:
        target = source.join(URL(location)).with_fragment(None).with_user(None)
        if target.scheme not in ("http", "https") or not target.raw_host or target.port == 0:
            raise ValueError
    except ValueError:
        raise ToolExecutionError(f"{display_url(source)} redirects to a location that is no http URL") from None
    if source.scheme == "https" and target.scheme == "http":
        raise ToolPermissionError(
            f"{display_url(source)} redirects to {display_url(target)}, from https to http", executed=False
        )
    if is_same_origin(source, target):
        return msgspec.structs.replace(request, url=target)
    items = request.headers.items() if isinstance(request.headers, Mapping) else request.headers
    headers = [(name, value) for name, value in items if name.lower() in _CROSS_ORIGIN_HEADERS]
    return msgspec.structs.replace(request, url=target, headers=headers, body=None)


def _open_session(resolver: AbstractResolver | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # No connection limit: queues limit concurrency. Checked addresses are resolved each time.
        connector=aiohttp.TCPConnector(limit=0, resolver=resolver, use_dns_cache=resolver is None, ttl_dns_cache=60),
        cookie_jar=aiohttp.DummyCookieJar(),  # Calls of different users share the session.
        # No total timeout: the deadline of the call applies.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        trust_env=False,
        headers={"User-Agent": "toolspace"},
        max_line_size=32_768,
        max_field_size=32_768,
    )


async def _send(session: aiohttp.ClientSession, request: HttpRequest) -> aiohttp.ClientResponse:
    try:
        return await session.request(
            request.method, request.url, headers=request.headers, data=request.body, allow_redirects=False
        )
    # `from None`: errors of aiohttp contain the whole URL, and its query may hold a secret.
    except HTTP_FAILURES as error:
        raise transport_error(error, request.url) from None


def _not_public_error(host: str, kind: str) -> ToolPermissionError:
    return ToolPermissionError(
        f"a public server leads to {host}, which is a {kind} address; configure that URL itself to allow it",
        executed=False,
    )

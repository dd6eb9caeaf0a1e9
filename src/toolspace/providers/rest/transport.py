"""Sends requests over the connections of one event loop: redirects, second tries, and what cancelling closes.

The host that the configuration names may be anywhere: the operator chose it. A redirect from a public server must
not lead to an address that is not public: it goes over connections of its own, whose addresses are checked.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from toolspace.core.addresses import Address, canonical_host, parse_address, special_kind
from toolspace.core.context import ToolContext
from toolspace.core.http_errors import CONNECT_SECONDS, HTTP_FAILURES
from toolspace.core.result import ToolResult
from toolspace.errors import ToolExecutionError, ToolPermissionError
from toolspace.providers.rest.client import HttpLimits, HttpRequest, HttpResponse
from toolspace.providers.rest.redirects import REDIRECT_STATUSES, display_url, redirect_request
from toolspace.providers.rest.response import join_headers, read_result, read_up_to, transport_error

# MERGED from retry: How long to wait before a request is sent again. Waits for nothing itself.

RETRY_STATUSES = frozenset((429, 503))
"""The statuses that mean: not now."""

_FIRST_WAIT = 0.5


def retry_delay(retry_after: str | None, attempt: int) -> float:
    """What the server asks for, in seconds or as a date; else longer each time, and not the same for everyone."""
    asked = _asked(retry_after.strip()) if retry_after else None
    return _FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.5, 1.0) if asked is None else asked


def _asked(text: str) -> float | None:
    if text.isascii() and text.isdigit():
        return float(text[:10])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


ClassifyAddress = Callable[[Address], str | None]
"""Why an address is not public, or None."""

_SMALL_BODY = 1 << 16


class RestTransport:
    """The connections of one loop. Opened by the first request; `aclose` ends them."""

    def __init__(self, classify_address: ClassifyAddress = special_kind) -> None:
        self._classify_address = classify_address
        self._open = _session(None)
        self._guarded: aiohttp.ClientSession | None = None

    async def send(self, request: HttpRequest, context: ToolContext, limits: HttpLimits) -> ToolResult:
        attempt = 1
        while True:
            response = await self._ask(request, limits)
            try:
                wait = 0.0
                again = response.status in RETRY_STATUSES and request.is_idempotent and attempt < limits.max_attempts
                if again:
                    wait = retry_delay(response.headers.get("Retry-After"), attempt)
                    again = wait <= limits.max_retry_wait and wait < context.remaining_seconds
                if not again:
                    result = await read_result(response, context, limits)
                    if attempt > 1:
                        result.extras["attempts"] = attempt
                    return result
                # Read, so that its connection can be used again.
                await read_up_to(response, _SMALL_BODY)
            finally:
                # Closes the connection, unless all was read and it is in the pool again.
                response.close()
            context.report_progress(
                attempt, limits.max_attempts, f"HTTP {response.status}; trying again in {wait:.1f} s"
            )
            await asyncio.sleep(wait)
            attempt += 1

    async def fetch(self, request: HttpRequest, limits: HttpLimits) -> HttpResponse:
        response = await self._ask(request, limits)
        try:
            body, complete = await read_up_to(response, limits.max_text_bytes)
        finally:
            response.close()
        if not complete:
            raise ToolExecutionError(
                f"{display_url(request.url)} answers with more than {limits.max_text_bytes:,} bytes"
            )
        return HttpResponse(status=response.status, headers=join_headers(response), body=body)

    async def aclose(self) -> None:
        await self._open.close()
        if self._guarded is not None:
            await self._guarded.close()

    def abandon(self) -> None:
        """Lets go of connections whose loop does not run: nothing could wait for their end."""
        for session in (self._open, self._guarded):
            if session is not None:
                session.detach()

    async def _ask(self, request: HttpRequest, limits: HttpLimits) -> aiohttp.ClientResponse:
        """The answer to a request, after redirects. Its body is still to be read, and it to be closed."""
        session = self._guard(request.url, "a document on the web") if request.public_only else self._open
        for _ in range(limits.max_redirects + 1):
            response = await _send(session, request)
            location = response.headers.get("Location") if response.status in REDIRECT_STATUSES else None
            if location is None or not request.is_safe:
                return response
            response.close()
            following = redirect_request(request, location)
            if following.url.raw_host != request.url.raw_host:
                session = await self._session_for(request, following, session)
            request = following
        raise ToolExecutionError(
            f"a request was redirected more than {limits.max_redirects} times, to {display_url(request.url)}"
        )

    async def _session_for(
        self, request: HttpRequest, following: HttpRequest, session: aiohttp.ClientSession
    ) -> aiohttp.ClientSession:
        """The connections that a redirect to another host goes over."""
        if session is self._open and not await self.is_public(request.url.raw_host or ""):
            return session
        return self._guard(following.url, display_url(request.url))

    def _guard(self, url: URL, guide: str) -> aiohttp.ClientSession:
        """The connections to a host that `guide` names, which all lead to public addresses."""
        host = url.raw_host or ""
        try:
            named = canonical_host(host)
        except ValueError as error:
            raise ToolExecutionError(f"{guide} leads to no host: {error}", executed=False) from None
        if not isinstance(named, str) and (kind := self._classify_address(named)) is not None:
            raise _refusal(host, kind)
        if self._guarded is None:
            self._guarded = _session(_PublicOnly(self._classify_address))
        return self._guarded

    async def is_public(self, host: str) -> bool:
        """Whether a host is on the web, and not the operator's own."""
        try:
            named = canonical_host(host)
            if not isinstance(named, str):
                return self._classify_address(named) is None
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return all(self._classify_address(parse_address(str(entry[4][0]))) is None for entry in found)
        except (OSError, ValueError):
            return True  # Nobody knows; so what it leads to is checked.


class _PublicOnly(AbstractResolver):
    """Looks names up, and gives none but public addresses out."""

    def __init__(self, special: ClassifyAddress) -> None:
        self._special = special
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        kinds = [self._special(parse_address(entry["host"])) for entry in found]
        admitted = [entry for entry, kind in zip(found, kinds, strict=True) if kind is None]
        if not admitted:
            raise _refusal(host, next((kind for kind in kinds if kind), "unknown"))
        return admitted

    async def close(self) -> None:
        await self._inner.close()


def _session(resolver: AbstractResolver | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # How many requests are under way at once is for queues to say; checked addresses are looked up each time.
        connector=aiohttp.TCPConnector(limit=0, resolver=resolver, use_dns_cache=resolver is None, ttl_dns_cache=60),
        cookie_jar=aiohttp.DummyCookieJar(),  # Its users are different people.
        # No total: how long a call may take is for its caller to say.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        trust_env=False,
        headers={"User-Agent": "toolspace"},
        max_line_size=32_768,
        max_field_size=32_768,
    )


async def _send(session: aiohttp.ClientSession, request: HttpRequest) -> aiohttp.ClientResponse:
    body: Any = request.body
    try:
        return await session.request(
            request.method,
            request.url,
            headers=request.headers,
            data=body() if callable(body) else body,
            allow_redirects=False,
        )
    # `from None`: the errors of aiohttp carry the whole URL, and a key may be in its query.
    except HTTP_FAILURES as error:
        raise transport_error(error, request.url) from None


def _refusal(host: str, kind: str) -> ToolPermissionError:
    return ToolPermissionError(
        f"a public server leads to {host}, which is a {kind} address; configure that URL itself to allow it",
        executed=False,
    )

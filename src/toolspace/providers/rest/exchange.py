"""Sends requests over the connections of one event loop: redirects, second tries, and what cancelling closes.

The host that the configuration names may be anywhere: the operator chose it. A redirect from a public server must
not lead to an address that is not public: it goes over connections of its own, whose addresses are checked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from toolspace.core.addresses import Address, canonical_host, parse_address, special_kind
from toolspace.core.context import ToolContext
from toolspace.core.http_errors import CONNECT_SECONDS, FAULTS
from toolspace.core.result import ToolResult
from toolspace.errors import ToolExecutionError, ToolPermissionError
from toolspace.providers.rest.answer import headers_of, read_answer, read_some
from toolspace.providers.rest.client import Response
from toolspace.providers.rest.faults import fault_of
from toolspace.providers.rest.limits import Limits
from toolspace.providers.rest.redirects import REDIRECTS, redirected, shown
from toolspace.providers.rest.request import Request
from toolspace.providers.rest.retry import RETRIED, seconds_to_wait

Special = Callable[[Address], str | None]
"""Why an address is not public, or None."""

_SMALL_BODY = 1 << 16


class Exchange:
    """The connections of one loop. Opened by the first request; `aclose` ends them."""

    def __init__(self, special: Special = special_kind) -> None:
        self._special = special
        self._open = _session(None)
        self._guarded: aiohttp.ClientSession | None = None

    async def send(self, request: Request, context: ToolContext, limits: Limits) -> ToolResult:
        attempt = 1
        while True:
            response = await self._ask(request, limits)
            try:
                wait = 0.0
                again = response.status in RETRIED and request.idempotent and attempt < limits.attempts
                if again:
                    wait = seconds_to_wait(response.headers.get("Retry-After"), attempt)
                    again = wait <= limits.longest_wait and wait < context.remaining_seconds
                if not again:
                    result = await read_answer(response, context, limits)
                    if attempt > 1:
                        result.extras["attempts"] = attempt
                    return result
                # Read, so that its connection can be used again.
                await read_some(response, _SMALL_BODY)
            finally:
                # Closes the connection, unless all was read and it is in the pool again.
                response.close()
            context.report_progress(attempt, limits.attempts, f"HTTP {response.status}; trying again in {wait:.1f} s")
            await asyncio.sleep(wait)
            attempt += 1

    async def fetch(self, request: Request, limits: Limits) -> Response:
        response = await self._ask(request, limits)
        try:
            body, complete = await read_some(response, limits.memory)
        finally:
            response.close()
        if not complete:
            raise ToolExecutionError(f"{shown(request.url)} answers with more than {limits.memory:,} bytes")
        return Response(status=response.status, headers=headers_of(response), body=body)

    async def aclose(self) -> None:
        await self._open.close()
        if self._guarded is not None:
            await self._guarded.close()

    def abandon(self) -> None:
        """Lets go of connections whose loop does not run: nothing could wait for their end."""
        for session in (self._open, self._guarded):
            if session is not None:
                session.detach()

    async def _ask(self, request: Request, limits: Limits) -> aiohttp.ClientResponse:
        """The answer to a request, after redirects. Its body is still to be read, and it to be closed."""
        session = self._guard(request.url, "a document on the web") if request.public else self._open
        for _ in range(limits.redirects + 1):
            response = await _send(session, request)
            location = response.headers.get("Location") if response.status in REDIRECTS else None
            if location is None or not request.safe:
                return response
            response.close()
            following = redirected(request, location)
            if following.url.raw_host != request.url.raw_host:
                session = await self._session_for(request, following, session)
            request = following
        raise ToolExecutionError(
            f"a request was redirected more than {limits.redirects} times, to {shown(request.url)}"
        )

    async def _session_for(
        self, request: Request, following: Request, session: aiohttp.ClientSession
    ) -> aiohttp.ClientSession:
        """The connections that a redirect to another host goes over."""
        if session is self._open and not await self.is_public(request.url.raw_host or ""):
            return session
        return self._guard(following.url, shown(request.url))

    def _guard(self, url: URL, guide: str) -> aiohttp.ClientSession:
        """The connections to a host that `guide` names, which all lead to public addresses."""
        host = url.raw_host or ""
        try:
            named = canonical_host(host)
        except ValueError as error:
            raise ToolExecutionError(f"{guide} leads to no host: {error}", executed=False) from None
        if not isinstance(named, str) and (kind := self._special(named)) is not None:
            raise _refusal(host, kind)
        if self._guarded is None:
            self._guarded = _session(_PublicOnly(self._special))
        return self._guarded

    async def is_public(self, host: str) -> bool:
        """Whether a host is on the web, and not the operator's own."""
        try:
            named = canonical_host(host)
            if not isinstance(named, str):
                return self._special(named) is None
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return all(self._special(parse_address(str(entry[4][0]))) is None for entry in found)
        except (OSError, ValueError):
            return True  # Nobody knows; so what it leads to is checked.


class _PublicOnly(AbstractResolver):
    """Looks names up, and gives none but public addresses out."""

    def __init__(self, special: Special) -> None:
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


async def _send(session: aiohttp.ClientSession, request: Request) -> aiohttp.ClientResponse:
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
    except FAULTS as error:
        raise fault_of(error, request.url) from None


def _refusal(host: str, kind: str) -> ToolPermissionError:
    return ToolPermissionError(
        f"a public server leads to {host}, which is a {kind} address; configure that URL itself to allow it",
        executed=False,
    )

"""One HTTP request as data, ready to send. Knows nothing of templates, tools or connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from yarl import URL

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult

if TYPE_CHECKING:
    from aiohttp.payload import Payload

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing, so that their redirects may be followed."""
IDEMPOTENT_METHODS = frozenset((*SAFE_METHODS, "PUT", "DELETE"))
"""Methods that do no more when they are sent twice, so that they may be sent again."""

HttpHeaders = Mapping[str, str] | Sequence[tuple[str, str]]
HttpBody = bytes | Callable[[], "Payload"] | None
"""Bytes, or what makes the payload anew for each time the request is sent."""


class HttpRequest(msgspec.Struct, frozen=True):
    """What goes over the wire. Its text shows no header, query or body: keys may be in them."""

    method: str
    """In capitals."""
    url: URL
    """Encoded, without user, password and fragment. `URL(text, encoded=True)` costs nothing to make."""
    headers: HttpHeaders = ()
    body: HttpBody = None
    is_idempotent: bool = False
    """Whether it may be sent again after 429 and 503."""
    is_safe: bool = False
    """Whether it changes nothing, so that a redirect may be followed."""
    public_only: bool = False
    """Whether it may reach public addresses only: not the operator has chosen the host, but somebody on the web."""

    def __repr__(self) -> str:
        return f"Request({self.method} {self.url.with_query(None)})"


BuildRequest = Callable[[dict[str, Any]], HttpRequest]
"""Makes the request of one call from its arguments. Compiled once per tool; raises `ToolValidationError`."""


# MERGED from limits: How much one request may take, whatever the server does.

_MIB = 1 << 20


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes of an answer, unpacked; times are seconds."""

    max_text_bytes: int = 64 * _MIB
    """What may be held in memory of an answer that is text or JSON."""
    max_binary_bytes: int = 16 * _MIB
    """What may be held of an image, of sound, of any other file."""
    max_stored_bytes: int = 4096 * _MIB
    """What may go to the output store as it comes."""
    max_attempts: int = 3
    """How often an idempotent request is sent while the answer is 429 or 503."""
    max_retry_wait: float = 30.0
    """How long `Retry-After` may ask to wait."""
    max_redirects: int = 5


DEFAULT_LIMITS = HttpLimits()


# MERGED from client: The HTTP client that all REST tools and OpenAPI services of a toolspace share. Knows nothing …

if TYPE_CHECKING:
    from toolspace.providers.rest.transport import ClassifyAddress, RestTransport


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, read into memory: for documents and tokens, not for tools."""

    status: int
    headers: dict[str, str]
    """Lower-case names; what came several times is joined by ", "."""
    body: bytes


class HttpClient:
    """One pool of connections for each event loop. Whoever makes it closes it."""

    def __init__(self, *, classify_address: ClassifyAddress | None = None) -> None:
        """`special` says of an address why it is not public; redirects from public servers do not lead there."""
        self._classify_address = classify_address
        self._loop: asyncio.AbstractEventLoop | None = None
        self._current: RestTransport | None = None
        self._exchanges: dict[asyncio.AbstractEventLoop, RestTransport] = {}

    async def send(
        self, request: HttpRequest, context: ToolContext, *, limits: HttpLimits = DEFAULT_LIMITS
    ) -> ToolResult:
        """The answer as a tool's result: redirects followed, 429 and 503 tried again, streams passed on as they come.

        A status other than 2xx is a failed result with `extras {status, headers, body}`. Raises `ToolTransportError`
        where there was no answer.
        """
        return await self._here().send(request, context, limits)

    async def fetch(self, request: HttpRequest, *, max_bytes: int) -> HttpResponse:
        """The whole answer, whatever its status, for a provider's own needs. Raises `ToolTransportError`."""
        return await self._here().fetch(request, HttpLimits(max_text_bytes=max_bytes))

    async def is_public(self, host: str) -> bool:
        """Whether a host is on the web, and not the operator's own."""
        return await self._here().is_public(host)

    async def aclose(self) -> None:
        """Closes every connection. A request after it opens new ones."""
        exchanges, self._exchanges = self._exchanges, {}
        self._loop = self._current = None
        here = asyncio.get_running_loop()
        for loop, exchange in exchanges.items():
            if loop is here or loop.is_closed():
                await exchange.aclose()
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(exchange.aclose(), loop)
                await asyncio.wrap_future(closing)
            else:
                exchange.abandon()

    def _here(self) -> RestTransport:
        loop = asyncio.get_running_loop()
        if loop is self._loop and self._current is not None:
            return self._current
        exchange = self._exchanges.get(loop)
        if exchange is None:
            from toolspace.providers.rest.transport import (
                RestTransport,  # Here: aiohttp costs what listing need not pay.
            )

            exchange = RestTransport() if self._classify_address is None else RestTransport(self._classify_address)
            self._exchanges[loop] = exchange
        self._loop, self._current = loop, exchange
        return exchange

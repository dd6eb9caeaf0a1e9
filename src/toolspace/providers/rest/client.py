"""The HTTP client that all REST tools and OpenAPI services of a toolspace share, and the requests that it sends.

Knows nothing of templates or tools. The first request imports aiohttp and opens the connection pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from yarl import URL

from toolspace.core.network_addresses import Address, special_kind
from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ToolContext

if TYPE_CHECKING:
    from toolspace.providers.rest.redirects_and_retries import RestTransport

_MIB = 1 << 20

HttpHeaders = Mapping[str, str] | Sequence[tuple[str, str]]
ClassifyAddress = Callable[[Address], str | None]
"""Returns why an address is not public (`private`, `loopback`, …), or None if it is public."""


class HttpRequest(msgspec.Struct, frozen=True):
    """One request, ready to send. Its `repr` omits headers, query and body: they may hold secrets."""

    method: str
    """In capitals."""
    url: URL
    """Encoded, without user, password and fragment."""
    headers: HttpHeaders = ()
    body: bytes | None = None
    public_only: bool = False
    """Whether it may reach only public addresses, because the host comes from a document on the web."""

    def __repr__(self) -> str:
        return f"HttpRequest({self.method} {self.url.with_query(None)})"


BuildRequest = Callable[[dict[str, Any]], HttpRequest]
"""Builds the request of one call from its arguments. Compiled once per tool; raises `ToolValidationError`."""


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A complete response in memory."""

    status: int
    headers: dict[str, str]
    """Lower-case names; values of a repeated header are joined by ", "."""
    body: bytes


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one request. Sizes are bytes of the decompressed body; times are seconds."""

    max_text_bytes: int = 64 * _MIB
    """Text or JSON in memory."""
    max_binary_bytes: int = 16 * _MIB
    """An image, audio or any other file."""
    max_stored_bytes: int = 4096 * _MIB
    """Text that goes to the output store as it arrives."""
    max_attempts: int = 3
    """How often an idempotent request is sent while the status is 429 or 503."""
    max_retry_wait: float = 30.0
    """The longest wait that `Retry-After` may ask for."""
    max_redirects: int = 5


DEFAULT_LIMITS = HttpLimits()


class HttpClient:
    """Keeps one connection pool per event loop. The owner calls `aclose`."""

    def __init__(self, *, classify_address: ClassifyAddress = special_kind) -> None:
        self._classify_address = classify_address
        self._transports: dict[asyncio.AbstractEventLoop, RestTransport] = {}

    async def send(
        self, request: HttpRequest, context: ToolContext, *, limits: HttpLimits = DEFAULT_LIMITS
    ) -> ToolResult:
        """Sends a request and returns the response as a tool result. Streamed values become partial results.

        Follows redirects of safe methods and retries 429 and 503 for idempotent ones. A status outside 2xx is a failed
        result with `extras {status, headers, body}`. Raises `ToolTransportError` if there is no response.
        """
        return await self._transport().send(request, context, limits)

    async def fetch(self, request: HttpRequest, *, max_bytes: int) -> HttpResponse:
        """Returns the complete response, whatever its status. Raises `ToolTransportError` if there is none."""
        return await self._transport().fetch(request, HttpLimits(max_text_bytes=max_bytes))

    async def is_public(self, host: str) -> bool:
        """Whether a host has only public addresses, or cannot be resolved."""
        return await self._transport().is_public(host)

    async def aclose(self) -> None:
        """Closes every connection. A later request opens new ones."""
        transports, self._transports = self._transports, {}
        running_loop = asyncio.get_running_loop()
        for loop, transport in transports.items():
            if loop is running_loop or loop.is_closed():
                await transport.aclose()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(transport.aclose(), loop))
            else:
                transport.detach()

    def _transport(self) -> RestTransport:
        """The transport of the running event loop."""
        loop = asyncio.get_running_loop()
        transport = self._transports.get(loop)
        if transport is None:
            # Imported here: aiohttp is slow to import, and listing tools does not need it.
            from toolspace.providers.rest.redirects_and_retries import RestTransport

            transport = self._transports[loop] = RestTransport(self._classify_address)
        return transport

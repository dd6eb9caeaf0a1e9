"""The HTTP client that all REST tools and OpenAPI services of a toolspace share. Knows nothing of templates.

The library behind it is imported, and a pool of connections opened, by the first request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.providers.rest.limits import DEFAULT_LIMITS, Limits
from toolspace.providers.rest.request import Request

if TYPE_CHECKING:
    from toolspace.providers.rest.exchange import Exchange, Special

__all__ = ["DEFAULT_LIMITS", "HttpClient", "Limits", "Response"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, read into memory: for documents and tokens, not for tools."""

    status: int
    headers: dict[str, str]
    """Lower-case names; what came several times is joined by ", "."""
    body: bytes


class HttpClient:
    """One pool of connections for each event loop. Whoever makes it closes it."""

    def __init__(self, *, special: Special | None = None) -> None:
        """`special` says of an address why it is not public; redirects from public servers do not lead there."""
        self._special = special
        self._loop: asyncio.AbstractEventLoop | None = None
        self._current: Exchange | None = None
        self._exchanges: dict[asyncio.AbstractEventLoop, Exchange] = {}

    async def send(self, request: Request, context: ToolContext, *, limits: Limits = DEFAULT_LIMITS) -> ToolResult:
        """The answer as a tool's result: redirects followed, 429 and 503 tried again, streams passed on as they come.

        A status other than 2xx is a failed result with `extras {status, headers, body}`. Raises `ToolTransportError`
        where there was no answer.
        """
        return await self._here().send(request, context, limits)

    async def fetch(self, request: Request, *, max_bytes: int) -> Response:
        """The whole answer, whatever its status, for a provider's own needs. Raises `ToolTransportError`."""
        return await self._here().fetch(request, Limits(memory=max_bytes))

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

    def _here(self) -> Exchange:
        loop = asyncio.get_running_loop()
        if loop is self._loop and self._current is not None:
            return self._current
        exchange = self._exchanges.get(loop)
        if exchange is None:
            from toolspace.providers.rest.exchange import Exchange  # Here: aiohttp costs what listing need not pay.

            exchange = Exchange() if self._special is None else Exchange(self._special)
            self._exchanges[loop] = exchange
        self._loop, self._current = loop, exchange
        return exchange

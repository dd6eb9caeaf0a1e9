"""The HTTP connections to model providers, which all models of a toolspace share. Knows nothing of the requests.

The first request imports aiohttp and opens connections.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

_LARGE_BODY = 1 << 20
"""A larger body is passed as a file: aiohttp writes files in pieces, so that the event loop stays responsive."""
_KEEP_ALIVE_SECONDS = 60.0
"""An agent's step with its tools often takes longer than aiohttp's default of 15 s."""
_MAX_TIMEOUTS = 100


class ModelHttpClient:
    """One connection pool for each event loop. The creator closes it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}
        self._proxies: dict[str, str | None] = {}

    async def post(self, url: URL, headers: Mapping[str, str], body: bytes, timeout: float) -> aiohttp.ClientResponse:
        """Returns the response with an unread body; the caller closes it. Raises `core.http_errors.HTTP_FAILURES`.

        Does not follow redirects: the key would be sent along.
        """
        data: Any = body if len(body) < _LARGE_BODY else io.BytesIO(body)
        host = url.raw_host or ""
        proxy = self._proxies[host] if host in self._proxies else self._find_proxy(host, url)
        limits = self._timeouts.get(timeout) or self._create_timeout(timeout)
        session = self._get_session()
        return await session.post(url, headers=headers, data=data, timeout=limits, proxy=proxy, allow_redirects=False)

    async def aclose(self) -> None:
        """Closes every connection. A later request opens new ones."""
        sessions, self._sessions = self._sessions, {}
        self._loop = self._session = None
        current_loop = asyncio.get_running_loop()
        for loop, session in sessions.items():
            if loop is current_loop or loop.is_closed():
                await session.close()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop))
            else:
                session.detach()  # Nobody can wait for connections whose event loop does not run.

    def _get_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop is self._loop and self._session is not None:
            return self._session
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = _open_session()
        self._loop, self._session = loop, session
        return session

    def _create_timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        import aiohttp

        from toolspace.core.http_errors import CONNECT_SECONDS

        if len(self._timeouts) > _MAX_TIMEOUTS:
            self._timeouts.clear()
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(CONNECT_SECONDS, seconds))
        self._timeouts[seconds] = timeout
        return timeout

    def _find_proxy(self, host: str, url: URL) -> str | None:
        """The proxy that the environment names for a host. Cached: aiohttp would look it up for each request."""
        from urllib.request import getproxies_environment, proxy_bypass

        proxies = getproxies_environment()
        proxy = proxies.get(url.scheme) or proxies.get("all")
        if proxy is not None and proxy_bypass(f"{host}:{url.port}"):
            proxy = None
        self._proxies[host] = proxy if proxy is not None and proxy.startswith("http") else None
        return self._proxies[host]


def _open_session() -> aiohttp.ClientSession:
    import aiohttp

    return aiohttp.ClientSession(
        # No limit here: the agents' scheduler limits how many requests run at once.
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        # Compression gains nothing for events of a few bytes, and delays them.
        headers={"User-Agent": "toolspace", "Accept-Encoding": "identity"},
        max_line_size=32_768,
        max_field_size=32_768,
    )

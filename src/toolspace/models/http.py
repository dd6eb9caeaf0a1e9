"""The connections to model providers, shared by all models of a toolspace. Knows nothing of what is sent.

The library behind it is imported, and connections opened, by the first request.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

_LARGE = 1 << 20
"""Bytes above which a body is handed over as a file: aiohttp writes those in pieces, and the loop goes on meanwhile."""
_KEPT_SECONDS = 60.0
"""How long an idle connection is kept: a step of an agent, with its tools, is often longer than the usual 15 s."""


class ModelHttpClient:
    """One pool of connections for each event loop. Whoever makes it closes it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}
        self._proxies: dict[str, str | None] = {}

    async def post(self, url: URL, headers: Mapping[str, str], body: bytes, timeout: float) -> aiohttp.ClientResponse:
        """The answer, its body still to be read and it to be closed. Raises one of `core.httpfaults.FAULTS`.

        Redirects are not followed: the key would go along.
        """
        data: Any = body if len(body) < _LARGE else io.BytesIO(body)
        host = url.raw_host or ""
        proxy = self._proxies[host] if host in self._proxies else self._find_proxy(host, url)
        limit = self._timeouts.get(timeout) or self._make_timeout(timeout)
        session = self._here()
        return await session.post(url, headers=headers, data=data, timeout=limit, proxy=proxy, allow_redirects=False)

    async def aclose(self) -> None:
        """Closes every connection. A request after it opens new ones."""
        sessions, self._sessions = self._sessions, {}
        self._loop = self._session = None
        here = asyncio.get_running_loop()
        for loop, session in sessions.items():
            if loop is here or loop.is_closed():
                await session.close()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop))
            else:
                session.detach()  # Nothing could wait for the end of connections whose loop does not run.

    def _here(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop is self._loop and self._session is not None:
            return self._session
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = _open()
        self._loop, self._session = loop, session
        return session

    def _make_timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        import aiohttp

        from toolspace.core.http_errors import CONNECT_SECONDS

        if len(self._timeouts) > 100:
            self._timeouts.clear()
        made = aiohttp.ClientTimeout(total=seconds, sock_connect=min(CONNECT_SECONDS, seconds))
        self._timeouts[seconds] = made
        return made

    def _find_proxy(self, host: str, url: URL) -> str | None:
        """The proxy that the environment names for a host, looked up once: aiohttp would do so for each request."""
        from urllib.request import getproxies_environment, proxy_bypass

        proxies = getproxies_environment()
        found = proxies.get(url.scheme) or proxies.get("all")
        if found is not None and proxy_bypass(f"{host}:{url.port}"):
            found = None
        self._proxies[host] = found if found is not None and found.startswith("http") else None
        return self._proxies[host]


def _open() -> aiohttp.ClientSession:
    import aiohttp

    return aiohttp.ClientSession(
        # How many agents think at once is for others to say.
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=_KEPT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        # Events of a few bytes gain nothing from being packed, and would come later.
        headers={"User-Agent": "toolspace", "Accept-Encoding": "identity"},
        max_line_size=32_768,
        max_field_size=32_768,
    )

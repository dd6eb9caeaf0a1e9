"""HTTP for models: the connections to providers, bodies of requests and responses, and retries.

Used by all adapters, `images` and `embeddings`. Knows no provider's API. The first request imports aiohttp and opens
connections.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.defaults import MODEL_RETRIES
from toolspace.core.language_model import (
    Model,
    ModelListener,
    ModelRequest,
    ModelStreamPart,
    ModelTurn,
    ResponseRestarted,
)
from toolspace.errors import ModelError
from toolspace.models.errors import build_error, connection_error, response_error

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

_LARGE_BODY = 1 << 20
"""A larger body is passed as a file: aiohttp writes files in pieces, so that the event loop stays responsive."""
_KEEP_ALIVE_SECONDS = 60.0
"""An agent's step with its tools often takes longer than aiohttp's default of 15 s."""
_MAX_ERROR_BODY = 1 << 16
_MAX_TOTAL_SECONDS = 900.0
"""After this time no new attempt starts."""
_MAX_WAIT_SECONDS = 60.0
"""The longest wait between two attempts. If the provider asks for more, the request fails at once."""
_FIRST_WAIT_SECONDS = 0.5

_log = logging.getLogger("toolspace.models")
_encoder = msgspec.json.Encoder()


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The URL and the headers of a model's API, and the names that its errors show. Its `repr` shows no key."""

    name: str
    """`provider:model`."""
    url: str = ""
    headers: Mapping[str, str] = {}
    credential_name: str = ""
    """The variable or setting to check if the key is refused: `OPENAI_API_KEY`, `model.apiKey`."""

    @property
    def url_without_query(self) -> str:
        return self.url.partition("?")[0]

    def parse_url(self) -> URL:
        """Raises `ModelError`."""
        from yarl import URL

        try:
            url = URL(self.url)
        except ValueError as error:
            raise ModelError("not_found", f"{self.name}: its address is no URL: {error}; check base_url") from None
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise ModelError("not_found", f"{self.name}: its address must begin with http:// or https://")
        return url

    def __repr__(self) -> str:
        return f"ModelEndpoint(url={self.url_without_query!r})"


class ModelHttpClient:
    """One connection pool for each event loop. The creator closes it."""

    def __init__(self) -> None:
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._proxies: dict[str, str | None] = {}

    async def post(self, endpoint: ModelEndpoint, body: bytes, timeout: float) -> aiohttp.ClientResponse:
        """Returns the response with an unread body; the caller closes it. Raises `core.http_errors.HTTP_FAILURES`.

        Does not follow redirects: the key would be sent along.
        """
        import aiohttp

        from toolspace.core.http_client_errors import CONNECT_SECONDS

        url = endpoint.parse_url()
        host = url.raw_host or ""
        return await self._get_session().post(
            url,
            headers={**endpoint.headers, "Content-Type": "application/json"},
            data=body if len(body) < _LARGE_BODY else io.BytesIO(body),
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout)),
            proxy=self._proxies[host] if host in self._proxies else self._find_proxy(host, url),
            allow_redirects=False,
        )

    async def fetch(self, endpoint: ModelEndpoint, body: bytes, *, timeout: float, max_bytes: int) -> bytes:
        """Posts a request and returns the whole body of the response. Raises `ModelError`."""
        from toolspace.core.http_client_errors import HTTP_FAILURES

        has_started = False
        try:
            response = await self.post(endpoint, body, timeout)
            try:
                if response.status != 200:
                    raise await read_error(endpoint, response)
                has_started = True
                content = await read_body(response, max_bytes + 1)
            finally:
                response.close()
        except HTTP_FAILURES as failure:
            raise connection_error(endpoint, failure, timeout=timeout, has_started=has_started) from None
        if len(content) > max_bytes:
            raise ModelError("invalid", f"{endpoint.name}: its answer has more than {max_bytes:,} bytes")
        return content

    async def aclose(self) -> None:
        """Closes every connection. A later request opens new ones."""
        sessions, self._sessions = self._sessions, {}
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
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = _open_session()
        return session

    def _find_proxy(self, host: str, url: URL) -> str | None:
        """The proxy that the environment names for a host. Cached: aiohttp would look it up for each request."""
        from urllib.request import getproxies_environment, proxy_bypass

        proxies = getproxies_environment()
        proxy = proxies.get(url.scheme) or proxies.get("all")
        is_usable = proxy is not None and proxy.startswith("http") and not proxy_bypass(f"{host}:{url.port}")
        self._proxies[host] = proxy if is_usable else None
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


def encode_body(body: dict[str, Any]) -> bytes:
    """A request body as JSON. Replaces characters that UTF-8 cannot encode: texts of tools and people may have them."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        return _encoder.encode(_replace_invalid_text(body))


def _replace_invalid_text(value: Any) -> Any:
    if isinstance(value, str):
        return json_text.valid_text(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {json_text.valid_text(key): _replace_invalid_text(inner) for key, inner in fields.items()}
    if isinstance(value, list | tuple):
        return [_replace_invalid_text(inner) for inner in cast("list[Any]", value)]
    return value


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, up to the limit."""
    body = bytearray()
    while len(body) < limit and (chunk := await response.content.readany()):
        body += chunk
    return bytes(body[:limit])


async def read_error(endpoint: ModelEndpoint, response: aiohttp.ClientResponse) -> ModelError:
    """The error for a response with a status other than 200, whose body is unread."""
    body = await read_body(response, _MAX_ERROR_BODY)
    if 300 <= response.status < 400:
        message = f"{endpoint.url_without_query} redirects elsewhere; set base_url to the URL of the API"
        return build_error(endpoint, "not_found", message, status=response.status)
    return response_error(endpoint, response.status, response.headers, body)


# Retries


async def retry_transient(
    send: Callable[[], Awaitable[T]],
    *,
    retries: int,
    max_seconds: float = _MAX_TOTAL_SECONDS,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    before_retry: Callable[[], None] | None = None,
) -> T:
    """Sends a request, and again with growing delays as long as it fails for a temporary reason."""
    deadline = time.monotonic() + max_seconds
    attempt = 0
    while True:
        attempt += 1
        try:
            return await send()
        except ModelError as error:
            delay = _retry_delay(error, attempt)
            max_delay = min(_MAX_WAIT_SECONDS, deadline - time.monotonic())
            if not error.is_transient or attempt > retries or delay > max_delay:
                if attempt > 1:
                    error.add_note(f"asked {attempt} times")
                raise
            _log.warning("%s; retrying in %.1f s", error, delay)
        if before_retry is not None:
            before_retry()
        await sleep(delay)


def _retry_delay(error: ModelError, attempt: int) -> float:
    """The delay that the provider asks for; else one that grows with each attempt and has random jitter."""
    if error.retry_after is None:
        return min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0)
    # A little longer than asked for: clients that got the same delay must not return all at once.
    return error.retry_after + random.uniform(0.0, min(0.25, error.retry_after / 10))


class RetryingModel(Model):
    """Repeats requests to a model with growing delays, as long as the failures are temporary."""

    def __init__(
        self,
        model: Model,
        *,
        retries: int = MODEL_RETRIES,
        max_seconds: float = _MAX_TOTAL_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model
        self.name = model.name
        self.context_window = model.context_window
        self._retries = retries
        self._max_seconds = max_seconds
        self._sleep = sleep

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        listener = _RestartableListener(listen) if listen is not None else None
        return await retry_transient(
            lambda: self.model.respond(request, listener),
            retries=self._retries,
            max_seconds=self._max_seconds,
            sleep=self._sleep,
            before_retry=listener.restart if listener is not None else None,
        )

    async def aclose(self) -> None:
        await self.model.aclose()


class _RestartableListener:
    """Tells the listener to discard a partial response before it is requested again."""

    __slots__ = ("_has_parts", "_listen")

    def __init__(self, listen: ModelListener) -> None:
        self._listen = listen
        self._has_parts = False

    def __call__(self, part: ModelStreamPart) -> None:
        self._has_parts = True
        self._listen(part)

    def restart(self) -> None:
        if self._has_parts:
            self._has_parts = False
            self._listen(ResponseRestarted())

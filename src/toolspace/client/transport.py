"""Sends requests to a gateway over one HTTP session, with credentials, retries and errors. Knows no routes."""

from __future__ import annotations

import asyncio
import inspect
import io
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, cast
from urllib.parse import quote, urlencode

import aiohttp
import yarl

from toolspace.client.errors import (
    ApiError,
    GatewayUnreachable,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    UnexpectedResponse,
    error_class,
)
from toolspace.core import json_text

Token = str | Callable[[], str | Awaitable[str]]
"""A JWT, or a function that returns one. The function is called again when the gateway rejects the token."""
LocateGateway = Callable[[], Awaitable[tuple[str, str] | None]]
"""Finds a gateway again: returns its URL and a secret key, or None if there is none now."""

CONNECT_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 45.0
"""A stream is closed if no byte arrives for so long: three intervals of the default heartbeat."""
_MAX_RETRY_AFTER: Final = 30.0
_LARGE_BODY: Final = 512 * 1024
_REPEATABLE_METHODS: Final = frozenset(("GET", "PUT", "PATCH", "DELETE"))
"""Methods with the same effect when they are sent twice."""


class GatewayCredentials:
    """A secret key or a tool key, or a public key with a token; or none, for public routes."""

    def __init__(self, *, secret_key: str | None = None, public_key: str | None = None, token: Token | None = None):
        if secret_key is not None and (public_key is not None or token is not None):
            raise ValueError("give either secret_key, or public_key with token; not both")
        if (public_key is None) != (token is None):
            raise ValueError("public_key and token go together: the token names the entity that sends the requests")
        self._key_headers: dict[str, str] = {}
        if secret_key is not None:
            self._key_headers["x-secret-key"] = secret_key
        if public_key is not None:
            self._key_headers["x-public-key"] = public_key
        self._token = token
        self._current_token: str | None = None

    @property
    def can_renew(self) -> bool:
        """Whether a new token can be requested."""
        return callable(self._token)

    async def headers(self, *, renew: bool = False) -> dict[str, str]:
        """Returns the headers to send. `renew`: the gateway has rejected the last token."""
        if self._token is None:
            return self._key_headers
        if self._current_token is None or renew:
            token = self._token() if callable(self._token) else self._token
            self._current_token = await token if inspect.isawaitable(token) else token
        return {**self._key_headers, "authorization": f"Bearer {self._current_token}"}


class Transport:
    """One HTTP session with a gateway. Opened by its first request, closed by `aclose`."""

    def __init__(
        self,
        url: str,
        credentials: GatewayCredentials,
        *,
        timeout: float = 60.0,
        attempts: int = 5,
        locate: LocateGateway | None = None,
    ) -> None:
        """`locate` finds the gateway after it could not be reached or has rejected the key: it may have restarted."""
        parsed = yarl.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"{url!r} is not the URL of a gateway, such as http://127.0.0.1:8787")
        self.url = url.rstrip("/")
        self._credentials = credentials
        self._locate = locate
        self._timeout = timeout
        self._attempts = max(1, attempts)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def aclose(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        idempotency_key: str | None = None,
        is_repeatable: bool = False,
        timeout: float | None = None,
        no_timeout: bool = False,
    ) -> Any:
        """Sends a request and returns the JSON of the response; None for an empty one. Raises `ApiError`.

        A request is retried after a lost connection, 429 and 503 if that is safe: by its method, by an
        `idempotency_key`, or because the caller says so (`is_repeatable`). `no_timeout`: the response may take as long
        as a tool takes.
        """
        data = None if body is None else json_text.encode_bytes(body)
        headers = {"accept": "application/json", **_current_trace_headers()}
        if data is not None:
            headers["content-type"] = "application/json"
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        total = timeout if timeout is not None or no_timeout else self._timeout
        timeouts = aiohttp.ClientTimeout(total=total, sock_connect=CONNECT_SECONDS)
        is_repeatable = is_repeatable or method in _REPEATABLE_METHODS or idempotency_key is not None
        attempts = self._attempts
        delays = retry_delays(first=0.1, longest=5.0)
        has_renewed = renew = was_lost = False
        while True:
            attempts -= 1
            try:
                credentials = await self._credentials.headers(renew=renew)
                renew = False
                status, content = await self._send(method, path, query, {**headers, **credentials}, data, timeouts)
            except Unauthorized:
                if has_renewed or not self.can_renew:
                    raise
                has_renewed = renew = True
                await self.relocate()
            except (Unavailable, TooManyRequests) as error:
                if not is_repeatable or attempts <= 0:
                    raise
                await asyncio.sleep(retry_delay(error, next(delays)))
            except GatewayUnreachable as error:
                if not (is_repeatable or not error.was_sent) or attempts <= 0:
                    raise
                was_lost = was_lost or error.was_sent
                await asyncio.sleep(next(delays))
                await self.relocate()
            except ApiError as error:
                if error.status == 404 and method == "DELETE" and was_lost:
                    return None  # The first attempt deleted it, and only its response was lost.
                raise
            else:
                return _decode(status, content)

    async def open_stream(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        last_event_id: str | None = None,
        renew: bool = False,
    ) -> aiohttp.ClientResponse:
        """Opens an event stream. The caller closes the response."""
        headers = {"accept": "text/event-stream", **await self._credentials.headers(renew=renew)}
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        timeouts = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            response = await self._open().request(
                "GET", self._target(path, query), headers=headers, timeout=timeouts, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.url, error, timeouts) from error
        try:
            if response.status != 200:
                raise _api_error(response, await response.read())
            if response.content_type != "text/event-stream":
                raise UnexpectedResponse(f"{self.url}{path} responded with {response.content_type}, not with events")
        except BaseException as error:
            response.close()
            if isinstance(error, aiohttp.ClientError | TimeoutError | OSError):
                raise _unreachable(self.url, error, timeouts) from error
            raise
        return response

    @property
    def can_renew(self) -> bool:
        """Whether a new key or token can be found when the old one is rejected."""
        return self._credentials.can_renew or self._locate is not None

    async def relocate(self) -> None:
        """Finds the gateway again, if this is possible."""
        address = await self._locate() if self._locate is not None else None
        if address is not None:
            self.url, secret_key = address
            self._credentials = GatewayCredentials(secret_key=secret_key)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        headers: dict[str, str],
        data: bytes | None,
        timeouts: aiohttp.ClientTimeout,
    ) -> tuple[int, bytes]:
        try:
            # No redirects: they would send the key to another server. A large body is sent in pieces, so that it does
            # not block the event loop, and only after the gateway has accepted the headers.
            is_large = data is not None and len(data) > _LARGE_BODY
            async with self._open().request(
                method,
                self._target(path, query),
                headers=headers,
                data=io.BytesIO(data) if data is not None and is_large else data,
                expect100=is_large,
                timeout=timeouts,
                allow_redirects=False,
            ) as response:
                body = await response.read()
                if response.status >= 300:
                    raise _api_error(response, body)
                return response.status, body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.url, error, timeouts) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("the client is closed; use it inside its `async with`")
        if self._session is None:
            # Each stream has a connection of its own, so their number is not limited here; the gateway limits it.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _target(self, path: str, query: Mapping[str, Any] | None) -> yarl.URL:
        pairs = {name: _format_query(value) for name, value in (query or {}).items() if value is not None}
        text = f"{self.url}{path}?{urlencode(pairs)}" if pairs else f"{self.url}{path}"
        return yarl.URL(text, encoded=True)  # Not normalized, so that an id such as "." stays a segment of the path.


def quote_segment(text: str) -> str:
    """Returns any text as one segment of a path."""
    return quote(text, safe="").replace(".", "%2E") if text.strip(".") == "" else quote(text, safe="")


def api_path(*segments: str) -> str:
    """Returns the path of a resource: `/api/spaces/spc_1`."""
    return f"/api/{'/'.join(map(quote_segment, segments))}"


def retry_delays(*, first: float, longest: float) -> Iterator[float]:
    """Yields how many seconds to wait before each retry: doubled each time, with jitter."""
    base = first
    while True:
        yield base * random.uniform(0.5, 1.0)
        base = min(longest, base * 2)


def retry_delay(error: ApiError, delay: float) -> float:
    """Returns the delay, or the longer one that the gateway asks for."""
    return min(_MAX_RETRY_AFTER, max(delay, error.retry_after or 0.0))


def _format_query(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list | tuple) else str(value)


def _decode(status: int, content: bytes) -> Any:
    if not content:
        return None
    try:
        return json_text.decode(content)
    except ValueError as error:
        raise UnexpectedResponse(f"the response ({status}) is not JSON: {error}") from None


def _api_error(response: aiohttp.ClientResponse, body: bytes) -> ApiError:
    problem: dict[str, Any] = {}
    if response.content_type.endswith("json"):
        with suppress(ValueError):  # Without a valid document, only the status is known.
            problem = json_text.parse_arguments(body)
    title = str(problem.get("title") or response.reason or "error")
    detail = str(problem.get("detail") or "")
    retry_after = response.headers.get("retry-after", "")
    return error_class(response.status)(
        response.status,
        title,
        detail,
        problem=problem,
        retry_after=float(retry_after) if retry_after.isdecimal() and len(retry_after) < 10 else None,
    )


def _current_trace_headers() -> dict[str, str]:
    """Returns the headers of the current OpenTelemetry context; none if the program does not use OpenTelemetry."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        inject(headers)
    return headers


def _unreachable(url: str, error: Exception, timeouts: aiohttp.ClientTimeout) -> GatewayUnreachable:
    reason = str(error)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        reason = f"it accepted no connection within {timeouts.sock_connect:g} s"
    elif isinstance(error, TimeoutError) and (seconds := timeouts.total or timeouts.sock_read) is not None:
        reason = f"it did not respond within {seconds:g} s"
    was_sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return GatewayUnreachable(
        f"the gateway at {url} cannot be reached: {reason or type(error).__name__}", was_sent=was_sent
    )

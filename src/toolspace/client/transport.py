"""Requests to a gateway over one shared session: credentials, retries, errors. Knows no routes."""

from __future__ import annotations

import asyncio
import inspect
import io
import random
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
"""A JWT, or what gives one: it is asked again when the gateway takes the last one no more."""

CONNECT_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 45.0
"""After how long without a byte a stream is taken for dead: three heartbeats."""
_MOST_RETRY_AFTER: Final = 30.0
_LARGE: Final = 512 * 1024
_SAFE: Final = frozenset(("GET", "PUT", "PATCH", "DELETE"))
"""Methods that mean the same when they are sent twice."""


class GatewayCredentials:
    """Who asks: a secret key or a tool key, or a public key with a token; or nobody, for what is open to all."""

    def __init__(self, *, secret_key: str | None = None, public_key: str | None = None, token: Token | None = None):
        if secret_key is not None and (public_key is not None or token is not None):
            raise ValueError("give either secret_key, or public_key with token; not both")
        if (public_key is None) != (token is None):
            raise ValueError("public_key and token go together: the token says which entity asks")
        self._fixed: dict[str, str] = {}
        if secret_key is not None:
            self._fixed["x-secret-key"] = secret_key
        if public_key is not None:
            self._fixed["x-public-key"] = public_key
        self._token = token
        self._current: str | None = None

    @property
    def can_renew(self) -> bool:
        return callable(self._token)

    async def headers(self, *, renew: bool = False) -> dict[str, str]:
        """What to send. `renew`: the last token was not taken."""
        if self._token is None:
            return self._fixed
        if self._current is None or renew:
            given = self._token() if callable(self._token) else self._token
            self._current = await given if inspect.isawaitable(given) else given
        return {**self._fixed, "authorization": f"Bearer {self._current}"}


class Transport:
    """One session with a gateway. Opened when it is first used, closed by `aclose`."""

    def __init__(self, url: str, credentials: GatewayCredentials, *, timeout: float = 60.0, attempts: int = 5) -> None:
        parsed = yarl.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"{url!r} is not the address of a gateway; one looks like http://127.0.0.1:8787")
        self.url = url.rstrip("/")
        self._credentials = credentials
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
        """Asks, and gives the JSON that was answered; None where nothing was.

        What may be sent twice is sent again when the connection is lost and when the gateway says that it cannot now:
        whatever only reads or sets, what has a `key` (its `Idempotency-Key`), and what changes nothing the second time
        (`again`). `patient`: the answer may take as long as a tool takes.
        """
        data = None if body is None else json_text.encode_bytes(body)
        headers = {"accept": "application/json"}
        if data is not None:
            headers["content-type"] = "application/json"
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        limit = timeout if timeout is not None or no_timeout else self._timeout
        limits = aiohttp.ClientTimeout(total=limit, sock_connect=CONNECT_SECONDS)
        repeatable = method in _SAFE or idempotency_key is not None or is_repeatable
        left = self._attempts
        waits = retry_delays(first=0.1, most=5.0)
        renewed = renew = was_lost = False
        while True:
            left -= 1
            try:
                own = await self._credentials.headers(renew=renew)
                renew = False
                status, answer = await self._exchange(method, path, query, {**headers, **own}, data, limits)
            except Unauthorized:
                if renewed or not self._credentials.can_renew:
                    raise
                renewed = renew = True
            except (Unavailable, TooManyRequests) as error:
                if not repeatable or left <= 0:
                    raise
                await asyncio.sleep(retry_delay(error, next(waits)))
            except GatewayUnreachable as error:
                if not (repeatable or not error.was_sent) or left <= 0:
                    raise
                was_lost = was_lost or error.was_sent
                await asyncio.sleep(next(waits))
            except ApiError as error:
                if error.status == 404 and method == "DELETE" and was_lost:
                    return None  # The first time did it, and only the answer was lost.
                raise
            else:
                return _decoded(status, answer)

    async def open_stream(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        last_event_id: str | None = None,
        renew: bool = False,
    ) -> aiohttp.ClientResponse:
        """Begins to read a stream of events. Whoever gets the answer closes it."""
        headers = {"accept": "text/event-stream", **await self._credentials.headers(renew=renew)}
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            response = await self._open().request(
                "GET", self._target(path, query), headers=headers, timeout=limits, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.url, error) from error
        try:
            if response.status != 200:
                raise _refusal(response, await response.read())
            if response.content_type != "text/event-stream":
                raise UnexpectedResponse(f"{self.url}{path} answered with {response.content_type}, not with events")
        except BaseException as error:
            response.close()
            if isinstance(error, aiohttp.ClientError | TimeoutError | OSError):
                raise _unreachable(self.url, error) from error
            raise
        return response

    @property
    def can_renew(self) -> bool:
        """Whether new credentials can be had when the old ones are not taken any more."""
        return self._credentials.can_renew

    async def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        headers: dict[str, str],
        data: bytes | None,
        limits: aiohttp.ClientTimeout,
    ) -> tuple[int, bytes]:
        try:
            # No redirects: they would take the key elsewhere. What is large is sent once the gateway says that it takes
            # it, and in pieces, so that others have their turn.
            large = data is not None and len(data) > _LARGE
            async with self._open().request(
                method,
                self._target(path, query),
                headers=headers,
                data=io.BytesIO(data) if data is not None and large else data,
                expect100=large,
                timeout=limits,
                allow_redirects=False,
            ) as response:
                body = await response.read()
                if response.status >= 300:
                    raise _refusal(response, body)
                return response.status, body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(self.url, error) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("the client is closed; use it inside its `async with`")
        if self._session is None:
            # Streams hold a connection each, so there is no limit to them here; the gateway has its own.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _target(self, path: str, query: Mapping[str, Any] | None) -> yarl.URL:
        pairs = {name: _in_query(value) for name, value in (query or {}).items() if value is not None}
        text = f"{self.url}{path}?{urlencode(pairs)}" if pairs else f"{self.url}{path}"
        return yarl.URL(text, encoded=True)  # As it is: an id that is a dot must stay one.


def quote_segment(text: str) -> str:
    """A part of a path, whatever is in it."""
    return quote(text, safe="").replace(".", "%2E") if text.strip(".") == "" else quote(text, safe="")


def retry_delays(*, first: float, most: float) -> Iterator[float]:
    """How long to wait before each next try: longer and longer, and not in step with others."""
    base = first
    while True:
        yield base * random.uniform(0.5, 1.0)
        base = min(most, base * 2)


def retry_delay(error: ApiError, own: float) -> float:
    """How long to wait where the gateway may have said so itself."""
    return min(_MOST_RETRY_AFTER, max(own, error.retry_after or 0.0))


def _in_query(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list | tuple) else str(value)


def _decoded(status: int, answer: bytes) -> Any:
    if not answer:
        return None
    try:
        return json_text.decode(answer)
    except ValueError as error:
        raise UnexpectedResponse(f"the answer ({status}) is not JSON: {error}") from None


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> ApiError:
    problem: dict[str, Any] = {}
    if response.content_type.endswith("json"):
        with suppress(ValueError):  # Then the status has to do.
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


def _unreachable(url: str, error: Exception) -> GatewayUnreachable:
    said = "it did not answer in time" if isinstance(error, TimeoutError) and not str(error) else str(error)
    was_sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return GatewayUnreachable(
        f"the gateway at {url} cannot be reached: {said or type(error).__name__}", was_sent=was_sent
    )

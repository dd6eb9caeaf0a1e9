"""The HTTP connections to model providers, which all models of a toolspace share. Knows nothing of the requests.

The first request imports aiohttp and opens connections.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec

from toolspace.core.defaults import MODEL_RETRIES
from toolspace.core.model import Model, ModelListener, ModelRequest, ModelStreamPart, ModelTurn, ResponseRestarted
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ModelError, ModelErrorKind

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


# MERGED from retry: Repeats model requests that failed for a temporary reason: a busy provider or a lost connection.

MAX_TOTAL_SECONDS = 900.0
"""After this time no new attempt starts."""
MAX_WAIT_SECONDS = 60.0
"""The longest wait between two attempts. If the provider asks for more, the request fails at once."""
_FIRST_WAIT_SECONDS = 0.5

_log = logging.getLogger("toolspace.models")


class RetryingModel(Model):
    """Repeats requests to a model with growing delays, as long as the failures are temporary."""

    def __init__(
        self,
        model: Model,
        *,
        retries: int = MODEL_RETRIES,
        max_seconds: float = MAX_TOTAL_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model
        self.name = model.name
        self.context_window = model.context_window
        self._retries = retries
        self._max_seconds = max_seconds
        self._sleep = sleep

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        start = time.monotonic()
        attempt = 0
        listener = _RestartableListener(listen) if listen is not None else None
        while True:
            attempt += 1
            try:
                return await self.model.respond(request, listener)
            except ModelError as error:
                delay = retry_delay(error, attempt)
                remaining = self._max_seconds - (time.monotonic() - start)
                if not error.is_transient or attempt > self._retries or delay > min(MAX_WAIT_SECONDS, remaining):
                    if attempt > 1:
                        error.add_note(f"asked {attempt} times")
                    raise
                _log.warning("%s; retrying in %.1f s", error, delay)
            if listener is not None:
                listener.restart()
            await self._sleep(delay)

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


def retry_delay(error: ModelError, attempt: int) -> float:
    """The delay that the provider asks for; else one that grows with each attempt and has random jitter."""
    backoff = min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0)
    if error.retry_after is None:
        return backoff
    # A little longer than asked for: clients that got the same delay must not return all at once.
    return error.retry_after + random.uniform(0.0, min(0.25, error.retry_after / 10))


# MERGED from errors: Turns a provider's error response, an error in a stream or a lost connection into a `ModelError`.

if TYPE_CHECKING:
    from yarl import URL

_MAX_MESSAGE = 600
"""Characters of a provider's message that a `ModelError` shows."""
_MAX_SCANNED = 1 << 16
_TOO_LONG = re.compile(
    r"context[ _]length|context[ _]window|maximum context|prompt is too long|too many (?:input )?tokens"
    r"|input (?:is )?too long|exceeds? the (?:maximum|max|available|model'?s?)\b.{0,40}(?:tokens|context)"
    r"|input token count.{0,40}exceeds|reduce the length of the (?:messages|prompt|input)|request_too_large",
    re.IGNORECASE,
)
_UNPAID = re.compile(
    r"insufficient_quota|credit balance|billing|exceeded your current quota|insufficient balance", re.I
)
_BAD_KEY = re.compile(r"api[ _]key (?:not valid|not found|expired)|API_KEY_INVALID|invalid api key", re.IGNORECASE)
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s")

_KINDS_BY_TYPE: Mapping[str, ModelErrorKind] = {
    "overloaded_error": "overloaded",
    "overloaded": "overloaded",
    "server_is_overloaded": "overloaded",
    "slow_down": "overloaded",
    "unavailable": "overloaded",
    "rate_limit_error": "rate_limited",
    "rate_limit_exceeded": "rate_limited",
    "resource_exhausted": "rate_limited",
    "api_error": "unavailable",
    "server_error": "unavailable",
    "timeout_error": "unavailable",
    "internal": "unavailable",
    "deadline_exceeded": "unavailable",
    "authentication_error": "not_permitted",
    "permission_error": "not_permitted",
    "billing_error": "not_permitted",
    "permission_denied": "not_permitted",
    "unauthenticated": "not_permitted",
    "insufficient_quota": "not_permitted",
    "not_found_error": "not_found",
    "model_not_found": "not_found",
    "not_found": "not_found",
    "request_too_large": "too_long",
    "context_length_exceeded": "too_long",
    "invalid_request_error": "invalid",
    "invalid_prompt": "invalid",
    "invalid_argument": "invalid",
}
_SUMMARIES: Mapping[ModelErrorKind, str] = {
    "no_key": "no key is set",
    "not_permitted": "the provider does not accept the key",
    "not_found": "there is no such model, or no model API at its address",
    "invalid": "the provider refuses the request",
    "too_long": "the conversation does not fit the model's context window; lower consciousness.maxTokens",
    "rate_limited": "too many requests or tokens in too short a time",
    "overloaded": "the provider is busy",
    "unavailable": "the provider cannot answer now",
    "broken": "the response is invalid",
}


class ProviderErrorDetails(msgspec.Struct, frozen=True):
    """The content of a provider's error, from any of the forms that providers use."""

    message: str = ""
    type: str = ""
    """Its type, code or status, in lower case."""
    status: int | None = None
    retry_after: float | None = None


def error_from_response(
    name: str, status: int, headers: Mapping[str, str], body: bytes, *, credential_name: str
) -> ModelError:
    """The error for a response with a status other than 200.

    `credential_name` is the setting or variable that a refused key comes from.
    """
    details = parse_error_body(body)
    if details.message == "":
        text = body[:_MAX_SCANNED].decode("utf-8", "replace").strip()
        details = msgspec.structs.replace(details, message=text)
    delay = parse_retry_after(headers)
    kind = _find_kind(status, details)
    error = build_error(name, kind, details.message, status=status, credential_name=credential_name)
    error.retry_after = details.retry_after if delay is None else delay
    return error


def error_from_event(name: str, error: object, *, credential_name: str) -> ModelError:
    """The error for an error event in the middle of a stream."""
    details = _parse_error(error)
    kind = _find_kind(details.status, details)
    kind = "unavailable" if kind == "broken" else kind
    result = build_error(name, kind, details.message, status=details.status, credential_name=credential_name)
    result.retry_after = details.retry_after
    return result


def error_from_connection(name: str, failure: Exception, url: URL, *, timeout: float, has_started: bool) -> ModelError:
    """The error for a request without a response, or with a partial one (`has_started`)."""
    import aiohttp

    from toolspace.core.http_errors import describe_http_failure

    if isinstance(failure, TimeoutError) and not isinstance(failure, aiohttp.ConnectionTimeoutError):
        return ModelError("unavailable", f"{name}: no answer within {timeout:g} s; raise model.timeout")
    if isinstance(failure, aiohttp.InvalidURL):
        return ModelError("not_found", f"{name}: its address is no URL; check base_url")
    return ModelError("broken" if has_started else "unavailable", f"{name}: {describe_http_failure(failure, url)}")


def build_error(
    name: str, kind: ModelErrorKind, message: str, *, status: int | None = None, credential_name: str = ""
) -> ModelError:
    """An error of a kind, with the provider's message."""
    summary = _SUMMARIES[kind]
    if kind == "not_permitted" and credential_name:
        summary = f"{summary}; check {credential_name}"
    text = f"{name}: {summary}" + (f" (HTTP {status})" if status is not None else "")
    # Masked before it is cut: some servers repeat the request, and half of a key would not be recognized.
    message = str(mask_secrets(message[:_MAX_SCANNED])).strip()
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]}…"
    return ModelError(kind, f"{text}: {message}" if message else text, status=status)


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that the headers of a response ask to wait: from a number, milliseconds, or a date."""
    milliseconds = headers.get("retry-after-ms") or ""
    if milliseconds.isascii() and milliseconds.isdigit():
        return float(milliseconds[:12]) / 1000
    text = (headers.get("retry-after") or "").strip()
    if not text:
        return None
    try:
        seconds = float(text[:20])
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def parse_error_body(body: bytes) -> ProviderErrorDetails:
    """The error in a body, which is JSON in one of several forms, or anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ProviderErrorDetails()
    if isinstance(value, list) and value:  # Google's answer to requests for streams.
        value = cast("list[Any]", value)[0]
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        return _parse_error(fields.get("error") or fields)
    return ProviderErrorDetails()


def _parse_error(error: object) -> ProviderErrorDetails:
    if isinstance(error, str):
        return ProviderErrorDetails(error)
    if not isinstance(error, Mapping):
        return ProviderErrorDetails()
    fields = cast("Mapping[str, Any]", error)
    message = next((fields[key] for key in ("message", "detail", "error", "msg") if fields.get(key)), "")
    code, error_type, status = fields.get("code"), fields.get("type"), fields.get("status")
    words = [word.lower() for word in (code, status, error_type) if isinstance(word, str) and word]
    # OpenRouter and others put the message of the provider behind them into `metadata.raw`.
    metadata = fields.get("metadata")
    raw = cast("Mapping[str, Any]", metadata).get("raw") if isinstance(metadata, Mapping) else None
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
    param = fields.get("param")
    if isinstance(param, str) and param and param not in text:
        text = f"{text} ({param})"
    return ProviderErrorDetails(
        message=f"{text} {raw}" if isinstance(raw, str) else text,
        type=next((word for word in words if word in _KINDS_BY_TYPE), words[0] if words else ""),
        status=next((number for number in (code, status) if type(number) is int and 300 <= number < 600), None),
        retry_after=_parse_retry_delay(fields.get("details")),
    )


def _parse_retry_delay(details: object) -> float | None:
    """Google sends the delay in the body: `{"retryDelay": "34s"}`."""
    for detail in cast("list[Any]", details) if isinstance(details, list) else []:
        delay = cast("Mapping[str, Any]", detail).get("retryDelay") if isinstance(detail, Mapping) else None
        match = _SECONDS.fullmatch(delay) if isinstance(delay, str) else None
        if match is not None:
            return float(match[1])
    return None


def _find_kind(status: int | None, details: ProviderErrorDetails) -> ModelErrorKind:
    message, kind = details.message, _KINDS_BY_TYPE.get(details.type)
    if status == 413 or kind == "too_long" or (status in (None, 400, 422, 500) and _TOO_LONG.search(message)):
        return "too_long"
    is_unpaid = status in (400, 403, 429) and _UNPAID.search(message)
    if status == 402 or details.type == "insufficient_quota" or is_unpaid:
        # Google's limits per minute are quotas too, and temporary.
        return "rate_limited" if details.type == "resource_exhausted" else "not_permitted"
    if status in (401, 403) or (status == 400 and _BAD_KEY.search(message)):
        return "not_permitted"
    if status == 404 or (status is not None and 300 <= status < 400):
        return "not_found"
    if status == 429:
        return "rate_limited"
    if status in (503, 529):
        return "overloaded"
    if status in (408, 409, 425) or (status is not None and status >= 500):
        return "overloaded" if kind == "overloaded" else "unavailable"
    if status is not None:
        return "invalid"
    return kind or "broken"

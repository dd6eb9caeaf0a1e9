"""What a provider's refusal, a lost connection or an error in a stream means, as a `ModelError`. Sends nothing."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ModelError, ModelErrorKind

if TYPE_CHECKING:
    from yarl import URL

_LONGEST = 600
"""Characters of a provider's message that are passed on."""
_LOOKED_AT = 1 << 16
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

_BY_TYPE: Mapping[str, ModelErrorKind] = {
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
_WAYS: Mapping[ModelErrorKind, str] = {
    "no_key": "no key is set",
    "not_permitted": "the provider does not accept the key",
    "not_found": "there is no such model, or no model API at its address",
    "invalid": "the provider refuses the request",
    "too_long": "the conversation does not fit the model's context window; lower consciousness.maxTokens",
    "rate_limited": "too many requests or tokens in too short a time",
    "overloaded": "the provider is busy",
    "unavailable": "the provider cannot answer now",
    "broken": "the answer makes no sense",
}


class ProviderErrorDetails(msgspec.Struct, frozen=True):
    """What a provider's error says, in whichever form it came."""

    message: str = ""
    kind: str = ""
    """Its type, code or status, in lower case."""
    status: int | None = None
    retry_after: float | None = None


def error_from_response(name: str, status: int, headers: Mapping[str, str], body: bytes, *, check: str) -> ModelError:
    """The error for an answer with a status other than 200. `check` names what to look at where a key is refused."""
    said = parse_error_body(body)
    if said.message == "":
        said = msgspec.structs.replace(said, message=body[:_LOOKED_AT].decode("utf-8", "replace").strip())
    kind = _kind(status, said)
    wait = parse_retry_after(headers)
    error = build_error(name, kind, said.message, status=status, check=check)
    error.retry_after = said.retry_after if wait is None else wait
    return error


def error_from_event(name: str, error: object, *, check: str) -> ModelError:
    """The error for an error event in the middle of a stream."""
    said = _read(error)
    kind = _kind(said.status, said)
    made = build_error(name, "unavailable" if kind == "broken" else kind, said.message, status=said.status, check=check)
    made.retry_after = said.retry_after
    return made


def error_from_connection(name: str, fault: Exception, url: URL, *, timeout: float, begun: bool) -> ModelError:
    """The error for a request that got no answer, or only a part of one."""
    import aiohttp

    from toolspace.core.http_errors import describe_http_failure

    if isinstance(fault, TimeoutError) and not isinstance(fault, aiohttp.ConnectionTimeoutError):
        return ModelError("unavailable", f"{name}: no answer within {timeout:g} s; raise model.timeout")
    if isinstance(fault, aiohttp.InvalidURL):
        return ModelError("not_found", f"{name}: its address is no URL; check base_url")
    return ModelError("broken" if begun else "unavailable", f"{name}: {describe_http_failure(fault, url)}")


def build_error(
    name: str, kind: ModelErrorKind, message: str, *, status: int | None = None, check: str = ""
) -> ModelError:
    """An error of a kind, with what the provider said of it."""
    way = _WAYS[kind]
    if kind == "not_permitted" and check:
        way = f"{way}; check {check}"
    text = f"{name}: {way}" + (f" (HTTP {status})" if status is not None else "")
    # Cut behind that: some servers say back what they were sent, and half a key is a part of a key.
    message = str(mask_secrets(message[:_LOOKED_AT])).strip()
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}…"
    return ModelError(kind, f"{text}: {message}" if message else text, status=status)


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that an answer's headers ask to wait: a number, milliseconds, or a date."""
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
    """The error of a body, which is JSON in one of several forms, or anything."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ProviderErrorDetails()
    if isinstance(value, list) and value:  # As Google answers requests for streams.
        value = cast("list[Any]", value)[0]
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        inner = fields.get("error")
        return _read(inner if inner else fields)
    return ProviderErrorDetails()


def _read(error: object) -> ProviderErrorDetails:
    if isinstance(error, str):
        return ProviderErrorDetails(error)
    if not isinstance(error, Mapping):
        return ProviderErrorDetails()
    fields = cast("Mapping[str, Any]", error)
    message = next((fields[key] for key in ("message", "detail", "error", "msg") if fields.get(key)), "")
    code, named, status = fields.get("code"), fields.get("type"), fields.get("status")
    words = [word.lower() for word in (code, status, named) if isinstance(word, str) and word]
    kind = next((word for word in words if word in _BY_TYPE), words[0] if words else "")
    # OpenRouter and others wrap what the provider behind them said.
    metadata = fields.get("metadata")
    raw = cast("Mapping[str, Any]", metadata).get("raw") if isinstance(metadata, Mapping) else None
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
    param = fields.get("param")
    if isinstance(param, str) and param and param not in text:
        text = f"{text} ({param})"
    return ProviderErrorDetails(
        message=f"{text} {raw}" if isinstance(raw, str) else text,
        kind=kind,
        status=next((one for one in (code, status) if type(one) is int and 300 <= one < 600), None),
        retry_after=_delay(fields.get("details")),
    )


def _delay(details: object) -> float | None:
    """Google says in the body how long to wait: `{"retryDelay": "34s"}`."""
    for one in cast("list[Any]", details) if isinstance(details, list) else []:
        delay = cast("Mapping[str, Any]", one).get("retryDelay") if isinstance(one, Mapping) else None
        found = _SECONDS.fullmatch(delay) if isinstance(delay, str) else None
        if found is not None:
            return float(found[1])
    return None


def _kind(status: int | None, said: ProviderErrorDetails) -> ModelErrorKind:
    message, named = said.message, _BY_TYPE.get(said.kind)
    if status == 413 or named == "too_long" or (status in (None, 400, 422, 500) and _TOO_LONG.search(message)):
        return "too_long"
    if status == 402 or said.kind == "insufficient_quota" or (status in (400, 403, 429) and _UNPAID.search(message)):
        # Google's limits by the minute are quotas too, and pass.
        return "rate_limited" if said.kind == "resource_exhausted" else "not_permitted"
    if status in (401, 403) or (status == 400 and _BAD_KEY.search(message)):
        return "not_permitted"
    if status == 404 or (status is not None and 300 <= status < 400):
        return "not_found"
    if status == 429:
        return "rate_limited"
    if status in (503, 529):
        return "overloaded"
    if status in (408, 409, 425) or (status is not None and status >= 500):
        return "overloaded" if named == "overloaded" else "unavailable"
    if status is not None:
        return "invalid"
    return named or "broken"

"""Turns a provider's error response, an error in a stream or a lost connection into a `ModelError`.

Used by the model adapters. Sends nothing.
"""

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

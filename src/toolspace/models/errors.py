"""Turns a provider's error response, an error in a stream or a lost connection into a `ModelError`.

Used by `http` and the adapters. Sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from toolspace.core.http_messages import parse_retry_after
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ModelError, ModelErrorKind

if TYPE_CHECKING:
    from toolspace.models.http import ModelEndpoint

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
    r"insufficient_quota|credit balance|billing|exceeded your current quota|insufficient balance", re.IGNORECASE
)
_BAD_KEY = re.compile(r"api[ _]key (?:not valid|not found|expired)|API_KEY_INVALID|invalid api key", re.IGNORECASE)
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s")

_TYPES_BY_KIND: Mapping[ModelErrorKind, str] = {
    "overloaded": "overloaded_error overloaded server_is_overloaded slow_down unavailable",
    "rate_limited": "rate_limit_error rate_limit_exceeded resource_exhausted",
    "unavailable": "api_error server_error timeout_error internal deadline_exceeded",
    "not_permitted": "authentication_error permission_error billing_error permission_denied unauthenticated "
    "insufficient_quota",
    "not_found": "not_found_error model_not_found not_found",
    "too_long": "request_too_large context_length_exceeded",
    "invalid": "invalid_request_error invalid_prompt invalid_argument",
}
_KINDS_BY_TYPE: Mapping[str, ModelErrorKind] = {
    name: kind for kind, names in _TYPES_BY_KIND.items() for name in names.split()
}
_KINDS_BY_STATUS: Mapping[int, ModelErrorKind] = {
    **dict.fromkeys((401, 403), "not_permitted"),
    404: "not_found",
    429: "rate_limited",
    **dict.fromkeys((503, 529), "overloaded"),
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


def build_error(
    endpoint: ModelEndpoint,
    kind: ModelErrorKind,
    message: str,
    *,
    status: int | None = None,
    retry_after: float | None = None,
) -> ModelError:
    """An error of a kind, with the provider's message."""
    text = f"{endpoint.name}: {_SUMMARIES[kind]}"
    if kind == "not_permitted" and endpoint.credential_name:
        text = f"{text}; check {endpoint.credential_name}"
    if status is not None:
        text = f"{text} (HTTP {status})"
    # Masked before it is cut: some servers repeat the request, and half of a key would not be recognized.
    message = str(mask_secrets(message[:_MAX_SCANNED])).strip()
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]}…"
    return ModelError(kind, f"{text}: {message}" if message else text, status=status, retry_after=retry_after)


def response_error(endpoint: ModelEndpoint, status: int, headers: Mapping[str, str], body: bytes) -> ModelError:
    """The error for a response with a status other than 200."""
    details = _parse_error_body(body)
    message = details.message or body[:_MAX_SCANNED].decode("utf-8", "replace").strip()
    delay = _parse_retry_after(headers)
    return build_error(
        endpoint,
        _find_kind(status, message, details.type),
        message,
        status=status,
        retry_after=details.retry_after if delay is None else delay,
    )


def event_error(endpoint: ModelEndpoint, error: object) -> ModelError:
    """The error for an error event in the middle of a stream."""
    details = _parse_error(error)
    kind = _find_kind(details.status, details.message, details.type)
    return build_error(endpoint, kind, details.message, status=details.status, retry_after=details.retry_after)


def connection_error(endpoint: ModelEndpoint, failure: Exception, *, timeout: float, has_started: bool) -> ModelError:
    """The error for a request without a response, or with a partial one (`has_started`)."""
    import aiohttp

    from toolspace.core.http_client_errors import describe_http_failure

    if isinstance(failure, TimeoutError) and not isinstance(failure, aiohttp.ConnectionTimeoutError):
        return ModelError("unavailable", f"{endpoint.name}: no answer within {timeout:g} s; raise model.timeout")
    if isinstance(failure, aiohttp.InvalidURL):
        return ModelError("not_found", f"{endpoint.name}: its address is no URL; check base_url")
    description = describe_http_failure(failure, endpoint.parse_url())
    return ModelError("broken" if has_started else "unavailable", f"{endpoint.name}: {description}")


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that the headers of a response ask to wait: from a number, milliseconds, or a date."""
    milliseconds = headers.get("retry-after-ms") or ""
    if milliseconds.isascii() and milliseconds.isdigit():
        return float(milliseconds[:12]) / 1000
    return parse_retry_after(headers.get("retry-after"))


class _ErrorDetails(msgspec.Struct, frozen=True):
    """The content of a provider's error, from any of the forms that providers use."""

    message: str = ""
    type: str = ""
    """Its type, code or status, in lower case."""
    status: int | None = None
    retry_after: float | None = None


def _parse_error_body(body: bytes) -> _ErrorDetails:
    """The error in a body, which is JSON in one of several forms, or anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _ErrorDetails()
    if isinstance(value, list) and value:  # Google's answer to requests for streams.
        value = cast("list[Any]", value)[0]
    if not isinstance(value, Mapping):
        return _ErrorDetails()
    fields = cast("Mapping[str, Any]", value)
    return _parse_error(fields.get("error") or fields)


def _parse_error(error: object) -> _ErrorDetails:
    if not isinstance(error, Mapping):
        return _ErrorDetails(error if isinstance(error, str) else "")
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
    return _ErrorDetails(
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


def _find_kind(status: int | None, message: str, error_type: str) -> ModelErrorKind:
    kind = _KINDS_BY_TYPE.get(error_type)
    if status == 413 or kind == "too_long" or (status in (None, 400, 422, 500) and _TOO_LONG.search(message)):
        return "too_long"
    is_unpaid = status in (400, 403, 429) and _UNPAID.search(message)
    if status == 402 or error_type == "insufficient_quota" or is_unpaid:
        # Google's limits per minute are quotas too, and temporary.
        return "rate_limited" if error_type == "resource_exhausted" else "not_permitted"
    if status is None:
        return kind or "unavailable"
    if status == 400 and _BAD_KEY.search(message):
        return "not_permitted"
    if status in _KINDS_BY_STATUS:
        return _KINDS_BY_STATUS[status]
    if status in (408, 409, 425) or status >= 500:
        return "overloaded" if kind == "overloaded" else "unavailable"
    return "not_found" if 300 <= status < 400 else "invalid"

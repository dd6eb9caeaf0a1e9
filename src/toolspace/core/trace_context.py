"""The trace context of a caller (W3C Trace Context and Baggage): `traceparent`, `tracestate` and `baggage`.

The interfaces read it from requests; providers pass it on with theirs. It travels in the `ToolContext` of a call, so
that no call sees another's. It knows nothing of OpenTelemetry; `integrations.opentelemetry` puts its own span there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_TRACESTATE_CHARACTERS = 512
MAX_BAGGAGE_CHARACTERS = 8_192
TRACE_KEYS = ("traceparent", "tracestate", "baggage")
"""The names of the HTTP headers, and of the keys in the `_meta` of MCP requests."""
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[\x21-\x7e]*)?"
)
_VERSION_0_CHARACTERS = 55
_PRINTABLE = re.compile(r"[\x20-\x7e]+")


class TraceContext(NamedTuple):
    """A valid trace context: what it has can be sent as it is."""

    traceparent: str | None = None
    tracestate: str | None = None
    baggage: str | None = None

    def to_fields(self) -> dict[str, str]:
        """Returns the headers, or the keys of `_meta`."""
        return {key: value for key, value in zip(TRACE_KEYS, self, strict=True) if value is not None}


def parse_trace_context(fields: Mapping[str, Any]) -> TraceContext | None:
    """Reads a trace context from headers with lower-case names, or from `_meta`. Ignores malformed values.

    Returns None if there is none. A `tracestate` counts only together with a valid `traceparent`.
    """
    traceparent = _match(_TRACEPARENT, fields.get("traceparent"), 2 * _VERSION_0_CHARACTERS)
    if traceparent is not None and traceparent.startswith("00") and len(traceparent) != _VERSION_0_CHARACTERS:
        traceparent = None
    tracestate = None
    if traceparent is not None:
        tracestate = _match(_PRINTABLE, fields.get("tracestate"), MAX_TRACESTATE_CHARACTERS)
    baggage = _match(_PRINTABLE, fields.get("baggage"), MAX_BAGGAGE_CHARACTERS)
    if traceparent is None and baggage is None:
        return None
    return TraceContext(traceparent, tracestate, baggage)


def read_trace_headers(headers: Mapping[bytes, bytes]) -> TraceContext | None:
    """Reads a trace context from the headers of an ASGI request. Costs two lookups if there is none."""
    if b"traceparent" not in headers and b"baggage" not in headers:
        return None
    return parse_trace_context(
        {key: headers[name].decode("latin-1") for key in TRACE_KEYS if (name := key.encode()) in headers}
    )


def _match(pattern: re.Pattern[str], value: object, max_characters: int) -> str | None:
    if not isinstance(value, str) or len(value) > max_characters:
        return None
    value = value.strip(" \t")
    return value if pattern.fullmatch(value) else None

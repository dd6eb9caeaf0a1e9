"""Which configured values a service must not be able to bring into a log or an error, by sending them back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from toolspace.core.secret_masking import is_secret_name, remember_secrets
from toolspace.providers.rest.template import holes

_KEY_NAME = re.compile(r"key|auth|token|secret|appid|signature|^sig$", re.IGNORECASE)


def remember_request_secrets(url: str, headers: Mapping[str, str], query: Mapping[str, Any] | None = None) -> None:
    """Remembers the keys in a configured request, which are named in more ways than other settings: `X-Key`, `appid`.

    Texts with holes are left out: arguments fill them.
    """
    remember_secrets(_secrets(url, {**headers, **(query or {})}))


def _secrets(url: str, named: Mapping[str, Any]) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        if parts.password:
            yield unquote(parts.password)
        pairs = parse_qsl(parts.query)
    except ValueError:
        pairs = []
    for name, value in (*named.items(), *pairs):
        if isinstance(value, str) and (is_secret_name(name) or _KEY_NAME.search(name)) and not any(holes(value)):
            yield value
            yield value.rpartition(" ")[2]  # Without `Bearer`.

"""Finds the values in a configuration that no log may show. Hides nothing itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from toolspace.core.secret_masking import is_secret_name

_VARIABLE = re.compile(r"(?<!\$)\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)")


def _holds_secret(variable: str) -> bool:
    """People name variables more briefly than fields: `STRIPE_KEY`, `GITHUB_PAT`."""
    return is_secret_name(variable) or variable.upper().endswith(("_KEY", "_PAT", "_AUTH", "_TOKEN"))


def secrets_in(data: object, environ: Mapping[str, str], *, secret: bool = False) -> Iterator[str]:
    """What stands under a key such as `apiKey`, and what a variable that is named like a secret fills in anywhere.

    `data` is the document as it was written. Of a text with variables only what they hold is a secret: `Bearer` in
    `Bearer ${KEY}` is none.
    """
    if isinstance(data, str):
        names = _VARIABLE.findall(data)
        if secret and not names:
            yield data
        yield from (environ[name] for name in names if name in environ and (secret or _holds_secret(name)))
    elif isinstance(data, list):
        for item in cast("list[object]", data):
            yield from secrets_in(item, environ, secret=secret)
    elif isinstance(data, Mapping):
        # Not handed down: below a key `password` of a JSON Schema stands what a password looks like.
        for key, value in cast("Mapping[str, Any]", data).items():
            yield from secrets_in(value, environ, secret=is_secret_name(key))

"""Masks secrets in logs and messages: by the name of their field, by their form, and by registered values."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from toolspace.core.secret_values import MASK, reference_secrets

_SECRET_NAME = re.compile(
    r"pass$|passw(or)?d|passphrase|pwd$|secret|(?<!progress)token$|api[-_]?key|access[-_]?key|private[-_]?key|authorization"
    r"|credential|cookie",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"\b(Bearer|Basic|BEARER|BASIC)\s+[A-Za-z0-9._~+/=-]{6,}"
    r"|\b(bearer|basic)\s+(?=[a-z]*[^a-z\s])[A-Za-z0-9._~+/=-]{6,}"  # Not "a basic question".
)
_KEY_LIKE = re.compile(
    r"\b(?:(?:sk|pk|rk|glpat|xox[abeprs])[-_]|gh[opsur]_|github_pat_|AKIA|AIza)[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*"
)
_IN_URL = re.compile(
    r"(://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|([?&](?:api[-_]?key|key|sig|signature|secret|password|[a-z_]*token)=)[^&\s\"'#]+",
    re.IGNORECASE,
)
_MIN_SECRET = 6
_MAX_DEPTH = 50
_MAX_VALUES = 20_000
"""Deeper levels and further values are cut: nobody reads them in a log, and data may be cyclic."""
_MAX_TEXT = 10_000
"""Characters of one text inside data."""
_ELLIPSIS = "…"

_secrets: list[str] = []


def register_secrets(values: Iterable[str]) -> None:
    """Masks these values from now on, in the whole process. Used for the values of configured secrets."""
    # Longest first: a secret that contains another one must be masked as a whole.
    _secrets[:] = sorted({*_secrets, *(value for value in values if len(value) >= _MIN_SECRET)}, key=len, reverse=True)


def is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name[-200:]) is not None  # A longer text is no name, and may have megabytes.


def mask_secrets(value: Any) -> Any:
    """Returns the value with every recognised secret replaced."""
    return _Masking().mask(value, 0)


class _Masking:
    """Masks one value, up to a number of parts."""

    __slots__ = ("_remaining",)

    def __init__(self) -> None:
        self._remaining = _MAX_VALUES

    def mask(self, value: Any, depth: int) -> Any:
        self._remaining -= 1
        if isinstance(value, str):
            if self._remaining <= 0:
                return _ELLIPSIS
            # A long text inside data is cut after masking, so that no half of a secret remains.
            is_long = depth > 0 and len(value) > _MAX_TEXT
            return _mask_text(value[: 2 * _MAX_TEXT])[:_MAX_TEXT] + _ELLIPSIS if is_long else _mask_text(value)
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return value
        if depth > _MAX_DEPTH or self._remaining <= 0:
            return _ELLIPSIS
        if isinstance(value, Mapping):
            return dict(self._items(cast("Mapping[str, Any]", value), depth))
        return list(self._members(cast("list[Any]", value), depth))

    def _items(self, value: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
        for key, item in value.items():
            if self._remaining <= 0:
                yield _ELLIPSIS, _ELLIPSIS
                return
            is_secret = _has_content(item) and is_secret_name(str(key))
            yield key, MASK if is_secret else self.mask(item, depth + 1)

    def _members(self, value: Iterable[Any], depth: int) -> Iterator[Any]:
        for item in value:
            if self._remaining <= 0:
                yield _ELLIPSIS
                return
            yield self.mask(item, depth + 1)


def _has_content(value: object) -> bool:
    """Whether there is anything to mask. Numbers, lists and objects under a secret name are secrets too."""
    return not isinstance(value, bool) and value is not None and value != ""


def _mask_text(text: str) -> str:
    # Longest first over both lists: a secret that contains another one must be masked as a whole.
    for secret in heapq.merge(_secrets, reference_secrets.texts, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, MASK)
    text = reference_secrets.mask(text)
    text = _BEARER.sub(lambda match: f"{match[1] or match[2]} {MASK}", text)
    text = _IN_URL.sub(lambda match: f"{match[1] or match[2]}{MASK}", text)
    return _KEY_LIKE.sub(MASK, text)

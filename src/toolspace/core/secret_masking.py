"""Keeps secrets out of logs: by the name of the field that holds them, and by their value where it is known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

MASK = "[hidden]"
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
_DEPTH = 50
_MOST = 20_000
"""Levels, and values in all, beyond which nothing is shown: no one reads them in a log, and they may have no end."""
_LONG = 10_000
"""Characters of one text inside data."""
_CUT = "…"

_secrets: list[str] = []


def register_secrets(values: Iterable[str]) -> None:
    """Values that must never be shown, from now on and in this whole process: those that configuration names."""
    # Longest first: a secret that begins with another one must go as a whole.
    _secrets[:] = sorted({*_secrets, *(value for value in values if len(value) >= _MIN_SECRET)}, key=len, reverse=True)


def is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name[-200:]) is not None  # Whatever is longer is no name, and may be megabytes.


def mask_secrets(value: Any) -> Any:
    """The value with every secret that can be recognised replaced."""
    return _Masking().of(value, 0)


class _Masking:
    """One value on its way to a log, of which only so much is looked at."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _MOST

    def of(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, str):
            if self._left <= 0:
                return _CUT
            # Inside data, megabytes are cut. Not where they are looked at: that could leave half a secret.
            long = depth > 0 and len(value) > _LONG
            return _mask_text(value[: 2 * _LONG])[:_LONG] + _CUT if long else _mask_text(value)
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return value
        if depth > _DEPTH or self._left <= 0:
            return _CUT
        if isinstance(value, Mapping):
            return dict(self._items(cast("Mapping[str, Any]", value), depth))
        return list(self._members(cast("list[Any]", value), depth))

    def _items(self, value: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
        for key, item in value.items():
            if self._left <= 0:
                yield _CUT, _CUT
                return
            hide = _holds_something(item) and is_secret_name(str(key))
            yield key, MASK if hide else self.of(item, depth + 1)

    def _members(self, value: Iterable[Any], depth: int) -> Iterator[Any]:
        for item in value:
            if self._left <= 0:
                yield _CUT
                return
            yield self.of(item, depth + 1)


def _holds_something(value: object) -> bool:
    """Whether there is anything to hide: numbers, lists and objects under a secret name are secrets too."""
    return not isinstance(value, bool) and value is not None and value != ""


def _mask_text(text: str) -> str:
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    text = _BEARER.sub(lambda match: f"{match[1] or match[2]} {MASK}", text)
    text = _IN_URL.sub(lambda match: f"{match[1] or match[2]}{MASK}", text)
    return _KEY_LIKE.sub(MASK, text)

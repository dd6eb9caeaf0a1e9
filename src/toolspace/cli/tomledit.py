"""Sets or removes one table in a TOML text and leaves every other character as it is. Knows no editor.

TOML can say one thing in many ways. What is changed here is the usual one, a table under a header of its own; where the
result would not say what was meant, the text is left to the user.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from toolspace.config.parsing import HIDING

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def set_table(text: str, path: tuple[str, ...], values: Mapping[str, str | list[str]]) -> str:
    """The text with these values in a table, which is made at the end where it is missing. Its other keys stay."""
    newline = "\r\n" if "\r\n" in text else "\n"
    statements = list(_statements(text))
    if not any(one.table == path and one.key is None for one in statements):
        lines = [f"[{'.'.join(map(_key, path))}]", *(f"{_key(key)} = {_value(value)}" for key, value in values.items())]
        before = text if not text or text.endswith("\n") else text + newline
        return before + (newline if before.strip() else "") + newline.join(lines) + newline
    for key, value in values.items():
        written = f"{_key(key)} = {_value(value)}"
        statements = list(_statements(text))
        old = next((one for one in statements if one.table == path and one.key == (key,)), None)
        if old is not None:
            text = text[: old.start] + written + text[old.end :]
            continue
        header = next(one for one in statements if one.table == path and one.key is None)
        line_end = text.find("\n", header.end)
        at = len(text) if line_end < 0 else line_end + 1
        lead = "" if line_end >= 0 else newline
        text = text[:at] + lead + written + newline + text[at:]
    return text


def remove_table(text: str, path: tuple[str, ...]) -> str:
    """The text without a table, and without those inside it. Comments above the next table stay with that."""
    kept, at = "", 0
    for start, end in _spans(text, path):
        kept += text[at:start]
        at = end
    rest = text[at:]
    if kept.endswith(("\n\n", "\n\r\n")) and (not rest.strip() or rest.startswith(("\n", "\r\n"))):
        kept = kept[: -2 if kept.endswith("\r\n") else -1]  # The empty line that parted it from the one before.
    return kept + rest


def _spans(text: str, path: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """From each of its headers to the end of the last line that belongs to it."""
    span: tuple[int, int] | None = None
    for one in _statements(text):
        inside = one.table[: len(path)] == path
        if span is not None and not inside:
            yield span
            span = None
        if inside:
            line_end = text.find("\n", one.end)
            end = len(text) if line_end < 0 else line_end + 1
            span = (span[0] if span is not None else one.start, end)
    if span is not None:
        yield span


class _Statement(NamedTuple):
    """A header, or one `key = value`."""

    start: int
    end: int
    table: tuple[str, ...]
    key: tuple[str, ...] | None
    """None for a header."""


def _statements(text: str) -> Iterator[_Statement]:
    """The statements of a text that is known to be right."""
    table: tuple[str, ...] = ()
    for start, end in _pieces(text):
        # As the parser reads them: lone carriage returns are no line ends to it.
        piece = text[start:end].replace("\r\n", "\n")
        keys = _path(tomllib.loads(piece), header=piece.startswith("["))
        if piece.startswith("["):
            # Of an array of tables, `[[x]]`, none is ever ours.
            table = ("",) if piece.startswith("[[") else keys
            yield _Statement(start, end, table, None)
        else:
            yield _Statement(start, end, table, keys)


def _path(data: dict[str, Any], *, header: bool) -> tuple[str, ...]:
    """The keys that a statement names. Of `a.b = {c = 1}` that is `a` or more: enough to tell plain keys."""
    key, inner = next(iter(data.items()))
    keys = (key,)
    while header and isinstance(inner, dict) and inner:
        key, inner = next(iter(inner.items()))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        keys += (str(key),)  # pyright: ignore[reportUnknownArgumentType]
    return keys


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Where each statement begins and ends, without the comments and spaces around it."""
    at, depth, start, end = 0, 0, -1, -1
    while at < len(text):
        hidden = HIDING.match(text, at)
        if hidden is not None:
            if not hidden[0].startswith("#"):
                start, end = (start if start >= 0 else at), hidden.end()
            at = hidden.end()
            continue
        sign = text[at]
        at += 1
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(sign, 0)
        if sign == "\n" and depth == 0:
            if start >= 0:
                yield start, end
            start = -1
        elif not sign.isspace():
            start, end = (start if start >= 0 else at - 1), at
    if start >= 0:
        yield start, end


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # A JSON string is a TOML string, but for DEL, and for what lies beyond 0xFFFF.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

"""Reads TOML, keeping the line of every value that has one of its own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, cast

from toolspace.config.document import MAX_DEPTH, KeyPath, Parsed, TextFault

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
# What can hide a bracket, a comment or the end of a line: strings, longest openings first, and comments.
HIDING = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)


def parse_toml(text: str) -> Parsed:
    """The values of a TOML text. Raises `TextFault`; a key given twice is one."""
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _PLACE.search(message)
        line, column = (int(place[1]), int(place[2])) if place and place[1] else (text.count("\n") + 1, None)
        raise TextFault(_PLACE.sub("", message), line, column) from None
    except ValueError as error:  # An integer of thousands of digits.
        raise TextFault(str(error), 1) from None
    except RecursionError:
        raise TextFault("nested too deeply", 1) from None
    return Parsed(_plain(data, 0), _lines(text), {})


def _plain(value: object, depth: int) -> Any:
    """The value as JSON data: TOML alone of the three formats has dates and times."""
    if depth > MAX_DEPTH:
        raise TextFault(f"nested deeper than {MAX_DEPTH} levels", 1)
    if isinstance(value, dict):
        return {key: _plain(inner, depth + 1) for key, inner in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_plain(inner, depth + 1) for inner in cast("list[object]", value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _lines(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for line, statement in _statements(text):
        keys = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _header(keys, counts)
            for end in range(1, len(table) + 1):
                lines.setdefault(table[:end], line)
        else:
            _mark(keys, table, line, lines)
    return lines


def _header(keys: dict[str, Any], counts: dict[KeyPath, int]) -> KeyPath:
    """The table that a header opens; `counts` knows the last one of each array of tables."""
    table: KeyPath = ()
    inner: Any = keys
    while inner:
        key = str(next(iter(inner)))
        inner = inner[key]
        table += (key,)
        if isinstance(inner, list):  # `[[table]]`: one more of its kind.
            counts[table] = counts.get(table, -1) + 1
            return (*table, counts[table])
        if table in counts:  # A table inside the last one of an array.
            table += (counts[table],)
    return table


def _mark(value: object, path: KeyPath, line: int, lines: dict[KeyPath, int]) -> None:
    """One statement stands in one place: everything in it has that line."""
    pairs: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        pairs = list(cast("dict[str | int, object]", value).items())
    elif isinstance(value, list):
        pairs = list(enumerate(cast("list[object]", value)))
    for key, inner in pairs:
        lines.setdefault((*path, key), line)
        _mark(inner, (*path, key), line, lines)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each header and each `key = value` with the line it begins in. The text is known to be right."""
    start, line, depth, at, newlines = 0, 1, 0, 0, 0
    while at < len(text):
        hidden = HIDING.match(text, at)
        if hidden is not None:
            newlines += hidden[0].count("\n")
            at = hidden.end()
            continue
        sign = text[at]
        at += 1
        if sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "\n":
            newlines += 1
            if depth == 0:
                yield from _statement(line, text[start:at])
                start, line, newlines = at, line + newlines, 0
    yield from _statement(line, text[start:])


def _statement(line: int, text: str) -> Iterator[tuple[int, str]]:
    stripped = text.strip()
    if stripped and not stripped.startswith("#"):
        yield line, text

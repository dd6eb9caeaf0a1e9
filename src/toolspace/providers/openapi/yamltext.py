"""Reads YAML as JSON data, from a stranger's document. Knows nothing of OpenAPI.

Built from parser events, because the library's constructor follows nested aliases and merges without end, and takes
`no`, `12:30` and `2020-01-01` for something else than the text that OpenAPI's YAML 1.2 makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import yaml

MAX_DEPTH = 150
MAX_VALUES = 5_000_000
"""Values with all aliases followed: a few lines of them can mean billions."""

_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_LONGEST_NUMBER = 400
_yaml: Any = yaml  # The stubs leave `parse` untyped.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; a part that is an alias is the very object of its anchor. Raises `ValueError`."""
    try:
        return _Reader(text).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"{error.problem or error.context or 'not valid YAML'}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None


class _Reader:
    def __init__(self, text: str) -> None:
        self._events: Iterator[Any] = iter(_yaml.parse(text, Loader=_LOADER))
        self._anchors: dict[str, tuple[Any, int]] = {}
        """The value behind each anchor, and how many values it is with its own aliases followed."""
        self._count = 0

    def document(self) -> Any:
        next(self._events)  # The start of the stream.
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        return self._value(next(self._events), 0)

    def _value(self, event: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels{_line(event)}")
        before = self._count
        self._add(1, event)
        anchor: str | None = event.anchor
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            return self._alias(str(anchor), event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(inner := next(self._events), yaml.SequenceEndEvent):
                value.append(self._value(inner, depth + 1))
        else:
            value = self._mapping(depth)
        if anchor is not None:
            self._anchors[anchor] = (value, self._count - before)
        return value

    def _mapping(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        merged: list[Any] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            # Keys are text in JSON: a response's `200`, which YAML reads as a number, is "200".
            key: Any = event.value if isinstance(event, yaml.ScalarEvent) else self._value(event, depth + 1)
            if not isinstance(key, str):
                raise ValueError(f"a key must be plain text{_line(event)}")
            item = self._value(next(self._events), depth + 1)
            if key == "<<" and getattr(event, "implicit", (False,))[0]:  # Not where it is quoted.
                merged += cast("list[Any]", item) if isinstance(item, list) else [item]
            else:
                value[key] = item
        for other in merged:
            if isinstance(other, dict):
                for key, item in cast("dict[str, Any]", other).items():
                    value.setdefault(key, item)
        return value

    def _alias(self, anchor: str, event: Any) -> Any:
        if anchor not in self._anchors:
            raise ValueError(f"the alias *{anchor} has no anchor before it, or stands inside it{_line(event)}")
        value, size = self._anchors[anchor]
        self._add(size, event)
        return value

    def _add(self, count: int, event: Any) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values with its aliases followed{_line(event)}")


def _scalar(event: Any) -> Any:
    text: str = event.value
    # A tag that is written out wins; quotes make text of everything.
    if not event.implicit[0]:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] in "+-.0123456789" and len(text) < _LONGEST_NUMBER:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _PREFIXED.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            number = float(text)
            return number if abs(number) != float("inf") else text
    return text


def _line(event: Any) -> str:
    mark = event.start_mark
    return f" in line {mark.line + 1}" if mark else ""

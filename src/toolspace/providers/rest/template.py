"""Texts and data with `${parameters.x}` in them, taken apart once and filled in on every call. Sends nothing.

`${parameters.a.b}` goes down into objects, `${parameters.a[0]}` into lists, `${parameters}` is all of them, and
`${parameters.a:-text}` says what to use where the argument is absent. Null counts as absent, except in JSON data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from toolspace.core import json_text

_HOLE = re.compile(r"\$\{\s*parameters\b([^{}]*)\}")
_STEP = re.compile(r"\.([^.\[\]\s]+)|\[(\d{1,9})\]")


class _Absent:
    """What a hole gives where the argument was not given."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class Placeholder(NamedTuple):
    """A place that an argument fills: the way to it, and what stands there where it is absent."""

    path: tuple[str | int, ...]
    default: str | None = None

    @property
    def name(self) -> str:
        """`a.b[0]`: how messages write it."""
        text = ""
        for step in self.path:
            text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else step)
        return text or "parameters"

    def get_value(self, parameters: Mapping[str, Any]) -> Any:
        """The argument, or `ABSENT`. Null is given, not absent: data keeps it."""
        value: Any = parameters
        for step in self.path:
            if isinstance(value, Mapping):
                value = cast("Mapping[str, Any]", value).get(str(step), ABSENT)
            elif isinstance(value, list) and _is_index(step):
                items = cast("list[Any]", value)
                value = items[int(step)] if int(step) < len(items) else ABSENT
            else:
                value = ABSENT
            if value is ABSENT:
                return ABSENT if self.default is None else self.default
        return value


TemplateParts = tuple[str | Placeholder, ...]
Escape = Callable[[str], str]


def parse_template(text: str) -> TemplateParts:
    """The literal pieces of a text and the holes between them. Raises `ValueError` where a hole makes no sense."""
    pieces: list[str | Placeholder] = []
    at = 0
    for found in _HOLE.finditer(text):
        if found.start() > at:
            pieces.append(text[at : found.start()])
        pieces.append(_hole(found))
        at = found.end()
    if at < len(text):
        pieces.append(text[at:])
    return tuple(pieces)


def iter_placeholders(template: object) -> Iterator[Placeholder]:
    """Every hole of a text or of data, in order."""
    if isinstance(template, str):
        yield from (piece for piece in parse_template(template) if isinstance(piece, Placeholder))
    elif isinstance(template, Mapping):
        for value in cast("Mapping[str, object]", template).values():
            yield from iter_placeholders(value)
    elif isinstance(template, list | tuple):
        for value in cast("Sequence[object]", template):
            yield from iter_placeholders(value)


def argument_text(value: object) -> str:
    """An argument inside a text: as it is, or as compact JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None or value is ABSENT else json_text.encode(value)


Fill = Callable[[Mapping[str, Any]], Any]
"""The value of a template for some arguments, or `ABSENT`."""


def compile_data(template: object) -> Fill:
    """Data with texts in it. A hole that is the whole of a text keeps its type; what is absent is left out."""
    if isinstance(template, str):
        return compile_value(parse_template(template))
    if not any(iter_placeholders(template)):
        return lambda parameters: template
    if isinstance(template, Mapping):
        members = [(key, compile_data(value)) for key, value in cast("Mapping[str, object]", template).items()]

        def fill_mapping(parameters: Mapping[str, Any]) -> Any:
            return {key: value for key, fill in members if (value := fill(parameters)) is not ABSENT}

        return fill_mapping
    items = [compile_data(value) for value in cast("Sequence[object]", template)]

    def fill_list(parameters: Mapping[str, Any]) -> Any:
        return [value for fill in items if (value := fill(parameters)) is not ABSENT]

    return fill_list


def compile_value(pieces: TemplateParts) -> Fill:
    """A text, or the argument itself where the text is nothing but a hole."""
    return pieces[0].get_value if len(pieces) == 1 and isinstance(pieces[0], Placeholder) else compile_text(pieces)


def compile_text(pieces: TemplateParts, escape: Escape | None = None) -> Fill:
    """A text with its holes filled in, each escaped. `ABSENT` where it has holes and none of them is given."""
    if not any(isinstance(piece, Placeholder) for piece in pieces):
        text = "".join(cast("tuple[str, ...]", pieces))
        return lambda parameters: text

    def fill(parameters: Mapping[str, Any]) -> Any:
        parts: list[str] = []
        given = False
        for piece in pieces:
            if isinstance(piece, str):
                parts.append(piece)
                continue
            value = piece.get_value(parameters)
            if value is not ABSENT and value is not None:
                given = True
                text = argument_text(value)
                parts.append(text if escape is None else escape(text))
        return "".join(parts) if given else ABSENT

    return fill


def _hole(found: re.Match[str]) -> Placeholder:
    way, has_default, default = found[1].partition(":-")
    way = way.strip()
    path: list[str | int] = []
    at = 0
    while at < len(way):
        step = _STEP.match(way, at)
        if step is None:
            raise ValueError(f"{found[0]} names no parameter; write ${{parameters.name}}, …name.inner}} or …name[0]}}")
        path.append(step[1] if step[1] is not None else int(step[2]))
        at = step.end()
    if path and isinstance(path[0], int):
        raise ValueError(f"{found[0]}: parameters have names; write ${{parameters.name}}")
    return Placeholder(tuple(path), default if has_default else None)


def _is_index(step: str | int) -> bool:
    return isinstance(step, int) or (step.isascii() and step.isdigit() and len(step) < 10)

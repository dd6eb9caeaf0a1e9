"""Templates with `${parameters.x}`: parsed once, filled with the arguments of every call. Sends nothing.

`${parameters.a.b}` is a member of an object, `${parameters.a[0]}` an item of a list, `${parameters}` all arguments.
`${parameters.a:-text}` has a default for a missing argument. Null counts as missing, except in JSON data.
`request_builder` and `url_template` use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from toolspace.core import json_text

_PLACEHOLDER = re.compile(r"\$\{\s*parameters\b([^{}]*)\}")
_STEP = re.compile(r"\.([^.\[\]\s]+)|\[(\d{1,9})\]")


class _Absent:
    """The value of a placeholder whose argument is missing."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class Placeholder(NamedTuple):
    """One `${parameters…}`: the path to the argument, and its default."""

    path: tuple[str | int, ...]
    default: str | None = None

    @property
    def name(self) -> str:
        """`a.b[0]`, for messages."""
        text = ""
        for step in self.path:
            text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else step)
        return text or "parameters"

    def get_value(self, parameters: Mapping[str, Any]) -> Any:
        """The argument, its default, or `ABSENT`. Null is a value here."""
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
Fill = Callable[[Mapping[str, Any]], Any]
"""Returns the value of a template for some arguments, or `ABSENT`."""


def parse_template(text: str) -> TemplateParts:
    """Splits a text into literal parts and placeholders. Raises `ValueError` for an invalid placeholder."""
    parts: list[str | Placeholder] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        if match.start() > position:
            parts.append(text[position : match.start()])
        parts.append(_parse_placeholder(match))
        position = match.end()
    if position < len(text):
        parts.append(text[position:])
    return tuple(parts)


def iter_placeholders(template: object) -> Iterator[tuple[Placeholder, bool]]:
    """Every placeholder of a text or of data, and whether it is the whole of its text."""
    if isinstance(template, str):
        parts = parse_template(template)
        yield from ((part, len(parts) == 1) for part in parts if isinstance(part, Placeholder))
    elif isinstance(template, Mapping):
        for value in cast("Mapping[str, object]", template).values():
            yield from iter_placeholders(value)
    elif isinstance(template, list | tuple):
        for value in cast("Sequence[object]", template):
            yield from iter_placeholders(value)


def argument_text(value: object) -> str:
    """An argument inside a text: a string unchanged, anything else as compact JSON, null as nothing."""
    if isinstance(value, str):
        return value
    return "" if value is None or value is ABSENT else json_text.encode(value)


def compile_data(template: object) -> Fill:
    """Compiles data that contains templates. A text that is one placeholder keeps the argument's type.

    Members and items whose value is `ABSENT` are left out.
    """
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


def compile_value(parts: TemplateParts) -> Fill:
    """Compiles a text; a single placeholder gives the argument itself."""
    return parts[0].get_value if len(parts) == 1 and isinstance(parts[0], Placeholder) else compile_text(parts)


def compile_text(parts: TemplateParts, escape: Escape | None = None) -> Fill:
    """Compiles a text; every argument is escaped. The value is `ABSENT` if all its placeholders are."""
    if not any(isinstance(part, Placeholder) for part in parts):
        text = "".join(cast("tuple[str, ...]", parts))
        return lambda parameters: text

    def fill(parameters: Mapping[str, Any]) -> Any:
        texts: list[str] = []
        has_argument = False
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            value = part.get_value(parameters)
            if value is not ABSENT and value is not None:
                has_argument = True
                text = argument_text(value)
                texts.append(text if escape is None else escape(text))
        return "".join(texts) if has_argument else ABSENT

    return fill


def _parse_placeholder(match: re.Match[str]) -> Placeholder:
    steps, has_default, default = match[1].partition(":-")
    steps = steps.strip()
    path: list[str | int] = []
    position = 0
    while position < len(steps):
        step = _STEP.match(steps, position)
        if step is None:
            raise ValueError(f"{match[0]} names no parameter; write ${{parameters.name}}, …name.inner}} or …name[0]}}")
        path.append(step[1] if step[1] is not None else int(step[2]))
        position = step.end()
    if path and isinstance(path[0], int):
        raise ValueError(f"{match[0]}: parameters have names; write ${{parameters.name}}")
    return Placeholder(tuple(path), default if has_default else None)


def _is_index(step: str | int) -> bool:
    return isinstance(step, int) or (step.isascii() and step.isdigit() and len(step) < 10)

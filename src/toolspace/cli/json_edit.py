"""Sets or removes one value in a JSON text and leaves every other character as it is: comments, order, indentation.

Reads the text with the parser of the configuration first; what follows can rely on it being right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from toolspace.config.parsing import parse_json

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCALAR = re.compile(r"[^\s,\]}/]+")
_INSIDE = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/|[\[\]{}]', re.DOTALL)
_INDENT = re.compile(r"^([ \t]+)\S", re.MULTILINE)


def set_value(text: str, path: tuple[str, ...], value: Any) -> str:
    """The text with a value at a key path, whose objects are made where they are missing.

    Raises `TextFault` where the text is no JSON, and `TypeError` where something on the path is no object.
    """
    bom, text = _without_bom(text)
    if not text.strip():
        text = "{}\n"
    if parse_json(text).data is None:  # Comments, and nothing else.
        text = text.rstrip() + "\n{}\n"
    return bom + _set(text, _object_at(text, _skip(text, 0)), path, value)


def remove_value(text: str, path: tuple[str, ...]) -> str:
    """The text without the value at a key path; as it is where there is none."""
    bom, text = _without_bom(text)
    parse_json(text)
    found = _find(text, path)
    return bom + (text if found is None else _removed(text, *found))


class _Member(NamedTuple):
    """One `"key": value` of an object, and where it stands."""

    key: str
    start: int
    value: int
    end: int
    comma: int | None
    """Where the comma after it is."""


class _Object(NamedTuple):
    start: int
    """Of its opening brace."""
    end: int
    """Of its closing brace."""
    members: list[_Member]

    def member(self, key: str) -> _Member | None:
        return next((one for one in self.members if one.key == key), None)


def _without_bom(text: str) -> tuple[str, str]:
    return ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)


def _skip(text: str, at: int) -> int:
    """Past spaces and comments."""
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at


def _object_at(text: str, at: int) -> _Object:
    if text[at : at + 1] != "{":
        raise TypeError("not an object")
    start, at, members = at, _skip(text, at + 1), list[_Member]()
    while text[at] != "}":
        key = _STRING.match(text, at)
        assert key is not None
        value = _skip(text, _skip(text, key.end()) + 1)
        end = _end(text, value)
        after = _skip(text, end)
        comma = after if text[after] == "," else None
        members.append(_Member(json.loads(key[0]), at, value, end, comma))
        at = after if comma is None else _skip(text, comma + 1)
    return _Object(start, at, members)


def _end(text: str, at: int) -> int:
    """Where the value that begins here ends."""
    if text[at] == '"':
        match = _STRING.match(text, at)
    elif text[at] not in "[{":
        match = _SCALAR.match(text, at)
    else:
        match, depth = None, 0
        for match in _INSIDE.finditer(text, at):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
            if depth == 0:
                break
    assert match is not None
    return match.end()


def _find(text: str, path: tuple[str, ...]) -> tuple[_Object, _Member] | None:
    at = _skip(text, 0)
    found: tuple[_Object, _Member] | None = None
    for key in path:
        if text[at : at + 1] != "{":
            return None
        around = _object_at(text, at)
        member = around.member(key)
        if member is None:
            return None
        found, at = (around, member), member.value
    return found


def _set(text: str, around: _Object, path: tuple[str, ...], value: Any) -> str:
    key, *rest = path
    member = around.member(key)
    if member is None:
        for inner in reversed(rest):
            value = {inner: value}
        return _added(text, around, key, value)
    if not rest:
        written = _written(text, value, _margin(text, member.start), inline=not _has_break(text, around))
        return text[: member.value] + written + text[member.end :]
    if text[member.value] != "{":
        raise TypeError(f"{key} is not an object")
    return _set(text, _object_at(text, member.value), tuple(rest), value)


def _added(text: str, around: _Object, key: str, value: Any) -> str:
    inline = "\n" not in text.strip() if not around.members else not _has_break(text, around)
    inline = inline and text.strip() != "{}"
    newline = "\r\n" if "\r\n" in text else "\n"
    outer = _margin(text, around.start)
    margin = _margin(text, around.members[0].start) if around.members and not inline else outer + _unit(text)
    member = f"{json.dumps(key, ensure_ascii=False)}: {_written(text, value, margin, inline=inline)}"
    if not around.members:
        # What is in an empty object can only be space and comments, which stay before the new member.
        inside = text[around.start + 1 : around.end].rstrip()
        body = member if inline and not inside else f"{inside}{newline}{margin}{member}{newline}{outer}"
        return text[: around.start + 1] + body + text[around.end :]
    last = around.members[-1]
    after = last.end if last.comma is None else last.comma + 1
    tail = text[after : around.end].rstrip()
    glue = " " if inline and "//" not in tail else f"{newline}{margin}"
    close = text[after + len(tail) : around.end]
    if "//" in tail and "\n" not in close:
        close = newline + outer
    comma = "," if last.comma is not None and not inline else ""  # Whoever ends lists with a comma does so here too.
    opening = "" if last.comma is not None else ","
    return text[:after] + opening + tail + glue + member + comma + close + text[around.end :]


def _removed(text: str, around: _Object, member: _Member) -> str:
    start, end = member.start, member.end if member.comma is None else member.comma + 1
    line_start = text.rfind("\n", 0, start) + 1
    if not text[line_start:start].strip():
        start = line_start
        rest = re.compile(r"[ \t]*\r?\n").match(text, end)
        # Its whole lines go. Where something follows on its last line, that stays.
        end = rest.end() if rest is not None else end
    elif member.comma is not None:
        end = _spaces(text, end)
    index = around.members.index(member)
    if member.comma is None and index > 0:
        # The last one leaves, so the comma of the one before it would trail.
        comma = around.members[index - 1].comma
        assert comma is not None
        return text[:comma] + text[comma + 1 : start].rstrip(" \t") + text[end:]
    return text[:start] + text[end:]


def _spaces(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _written(text: str, value: Any, margin: str, *, inline: bool) -> str:
    if inline:
        return json.dumps(value, ensure_ascii=False)
    newline = "\r\n" if "\r\n" in text else "\n"
    return newline.join(_lines(value, margin, _unit(text)))


def _lines(value: Any, margin: str, unit: str) -> Iterator[str]:
    """JSON as people write it: objects over lines, lists of words on one."""
    if not isinstance(value, dict) or not value:
        yield json.dumps(value, ensure_ascii=False)
        return
    lines = ["{"]
    items = list(cast("dict[str, Any]", value).items())
    for index, (key, inner) in enumerate(items):
        head, *rest = _lines(inner, margin + unit, unit)
        written = [f"{margin}{unit}{json.dumps(key, ensure_ascii=False)}: {head}", *rest]
        written[-1] += "," if index < len(items) - 1 else ""
        lines += written
    yield from (*lines, margin + "}")


def _margin(text: str, at: int) -> str:
    """The indentation of the line that a place is in."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """What this file indents by."""
    found = _INDENT.search(text)
    return found[1] if found is not None else "  "


def _has_break(text: str, around: _Object) -> bool:
    """Whether its members stand on lines of their own."""
    return bool(around.members) and "\n" in text[around.start : around.members[0].start]

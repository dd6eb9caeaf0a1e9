"""Sets or removes one value of a JSON text, and leaves every other character as it is: comments, order, indentation.

`editor_files` uses it for settings files. The text is parsed as configuration first, so the functions that look for
positions can rely on valid JSON with comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from toolspace.config.file_formats import parse_json

if TYPE_CHECKING:
    from tomlkit.container import Container
    from tomlkit.items import Table

_SPACE_AND_COMMENTS = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCALAR = re.compile(r"[^\s,\]}/]+")
_STRING_COMMENT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/|[\[\]{}]', re.DOTALL)
_INDENT = re.compile(r"^([ \t]+)\S", re.MULTILINE)


def set_value(text: str, path: tuple[str, ...], value: Any) -> str:
    """Returns the text with a value at a key path. Missing objects on the path are created.

    Raises `TextSyntaxError` if the text is not JSON, and `TypeError` if a value on the path is not an object.
    """
    bom, text = _split_bom(text)
    if not text.strip():
        text = "{}\n"
    if parse_json(text).data is None:  # The text has only comments.
        text = text.rstrip() + "\n{}\n"
    return bom + _set(text, _parse_object(text, _skip(text, 0)), path, value)


def remove_value(text: str, path: tuple[str, ...]) -> str:
    """Returns the text without the value at a key path; unchanged if there is none."""
    bom, text = _split_bom(text)
    parse_json(text)
    place = _find(text, path)
    return bom + (text if place is None else _remove(text, *place))


class _Member(NamedTuple):
    """The positions of one `"key": value` of an object."""

    key: str
    start: int
    value: int
    end: int
    comma: int | None
    """The position of the comma after it."""


class _Object(NamedTuple):
    start: int
    """The position of the opening brace."""
    end: int
    """The position of the closing brace."""
    members: list[_Member]

    def member(self, key: str) -> _Member | None:
        return next((member for member in self.members if member.key == key), None)


def _split_bom(text: str) -> tuple[str, str]:
    return ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)


def _skip(text: str, position: int) -> int:
    """Returns the position after spaces and comments."""
    match = _SPACE_AND_COMMENTS.match(text, position)
    return match.end() if match is not None else position


def _parse_object(text: str, position: int) -> _Object:
    if text[position : position + 1] != "{":
        raise TypeError("not an object")
    start, position, members = position, _skip(text, position + 1), list[_Member]()
    while text[position] != "}":
        key = _STRING.match(text, position)
        assert key is not None
        value = _skip(text, _skip(text, key.end()) + 1)
        end = _value_end(text, value)
        after = _skip(text, end)
        comma = after if text[after] == "," else None
        members.append(_Member(json.loads(key[0]), position, value, end, comma))
        position = after if comma is None else _skip(text, comma + 1)
    return _Object(start, position, members)


def _value_end(text: str, position: int) -> int:
    """Returns the end of the value that begins at a position."""
    if text[position] == '"':
        match = _STRING.match(text, position)
    elif text[position] not in "[{":
        match = _SCALAR.match(text, position)
    else:
        match, depth = None, 0
        for match in _STRING_COMMENT_OR_BRACKET.finditer(text, position):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
            if depth == 0:
                break
    assert match is not None
    return match.end()


def _find(text: str, path: tuple[str, ...]) -> tuple[_Object, _Member] | None:
    position = _skip(text, 0)
    place: tuple[_Object, _Member] | None = None
    for key in path:
        if text[position : position + 1] != "{":
            return None
        parent = _parse_object(text, position)
        member = parent.member(key)
        if member is None:
            return None
        place, position = (parent, member), member.value
    return place


def _set(text: str, parent: _Object, path: tuple[str, ...], value: Any) -> str:
    key, *rest = path
    member = parent.member(key)
    if member is None:
        for inner in reversed(rest):
            value = {inner: value}
        return _add(text, parent, key, value)
    if not rest:
        value_text = _format(text, value, _indentation(text, member.start), inline=not _is_multiline(text, parent))
        return text[: member.value] + value_text + text[member.end :]
    if text[member.value] != "{":
        raise TypeError(f"{key} is not an object")
    return _set(text, _parse_object(text, member.value), tuple(rest), value)


def _add(text: str, parent: _Object, key: str, value: Any) -> str:
    inline = "\n" not in text.strip() if not parent.members else not _is_multiline(text, parent)
    inline = inline and text.strip() != "{}"
    newline = "\r\n" if "\r\n" in text else "\n"
    outer = _indentation(text, parent.start)
    margin = (
        _indentation(text, parent.members[0].start) if parent.members and not inline else outer + _indent_unit(text)
    )
    member = f"{json.dumps(key, ensure_ascii=False)}: {_format(text, value, margin, inline=inline)}"
    if not parent.members:
        # An empty object has only spaces and comments; they stay in front of the new member.
        inside = text[parent.start + 1 : parent.end].rstrip()
        body = member if inline and not inside else f"{inside}{newline}{margin}{member}{newline}{outer}"
        return text[: parent.start + 1] + body + text[parent.end :]
    last = parent.members[-1]
    after = last.end if last.comma is None else last.comma + 1
    tail = text[after : parent.end].rstrip()
    glue = " " if inline and "//" not in tail else f"{newline}{margin}"
    close = text[after + len(tail) : parent.end]
    if "//" in tail and "\n" not in close:
        close = newline + outer
    comma = "," if last.comma is not None and not inline else ""  # Keep the style of trailing commas.
    opening = "" if last.comma is not None else ","
    return text[:after] + opening + tail + glue + member + comma + close + text[parent.end :]


def _remove(text: str, parent: _Object, member: _Member) -> str:
    start, end = member.start, member.end if member.comma is None else member.comma + 1
    line_start = text.rfind("\n", 0, start) + 1
    if not text[line_start:start].strip():
        start = line_start
        rest = re.compile(r"[ \t]*\r?\n").match(text, end)
        # Remove its whole lines, but keep what follows on its last line.
        end = rest.end() if rest is not None else end
    elif member.comma is not None:
        end = _skip_spaces(text, end)
    index = parent.members.index(member)
    if member.comma is None and index > 0:
        # The last member is removed, so the comma of the member before it goes too.
        comma = parent.members[index - 1].comma
        assert comma is not None
        return text[:comma] + text[comma + 1 : start].rstrip(" \t") + text[end:]
    return text[:start] + text[end:]


def _skip_spaces(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t"):
        position += 1
    return position


def _format(text: str, value: Any, margin: str, *, inline: bool) -> str:
    if inline:
        return json.dumps(value, ensure_ascii=False)
    newline = "\r\n" if "\r\n" in text else "\n"
    return newline.join(_format_lines(value, margin, _indent_unit(text)))


def _format_lines(value: Any, margin: str, unit: str) -> Iterator[str]:
    """Yields the lines of indented JSON, with lists on one line."""
    if not isinstance(value, dict) or not value:
        yield json.dumps(value, ensure_ascii=False)
        return
    lines = ["{"]
    items = list(cast("dict[str, Any]", value).items())
    for index, (key, inner) in enumerate(items):
        head, *rest = _format_lines(inner, margin + unit, unit)
        member_lines = [f"{margin}{unit}{json.dumps(key, ensure_ascii=False)}: {head}", *rest]
        member_lines[-1] += "," if index < len(items) - 1 else ""
        lines += member_lines
    yield from (*lines, margin + "}")


def _indentation(text: str, position: int) -> str:
    """Returns the indentation of the line of a position."""
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _indent_unit(text: str) -> str:
    """Returns one level of indentation of this text."""
    match = _INDENT.search(text)
    return match[1] if match is not None else "  "


def _is_multiline(text: str, parent: _Object) -> bool:
    """Whether the members are on lines of their own."""
    return bool(parent.members) and "\n" in text[parent.start : parent.members[0].start]


# MERGED from toml_edit: Sets or removes one table of a TOML text, and leaves every other line as it is. Used for the s

_BLANK_LINES_AT_END = re.compile(r"(\r?\n)(?:\r?\n)+\Z")


def set_table(text: str, path: tuple[str, str], values: Mapping[str, str | list[str]]) -> str:
    """Returns the text with these values in a table. A missing table is added at the end; its other keys stay."""
    import tomlkit

    newline = "\r\n" if "\r\n" in text else "\n"
    document = tomlkit.parse(text)
    tables = [table for table, _, _ in _find_tables(document, path)]
    if not tables:
        outer, name = path
        section = tomlkit.dumps({outer: {name: dict(values)}}).replace("\n", newline)
        before = text if not text or text.endswith("\n") else text + newline
        return before + (newline if before.strip() else "") + section
    for key, value in values.items():
        tables[0][key] = item = tomlkit.item(value)
        item.trivia.trail = newline
    return tomlkit.dumps(document)


def remove_table(text: str, path: tuple[str, str]) -> str:
    """Returns the text without a table and the tables inside it."""
    import tomlkit
    from tomlkit.items import Whitespace

    document = tomlkit.parse(text)
    tables = list(_find_tables(document, path))
    for table, container, index in tables:
        container.body[index] = (None, Whitespace(_trailing_comments(table)))
    after = tomlkit.dumps(document)
    return _BLANK_LINES_AT_END.sub(r"\1", after) if tables else after


def _find_tables(document: Container, path: tuple[str, str]) -> Iterator[tuple[Table, Container, int]]:
    """Yields each part of a table, with its container and index: a table can be written in several places."""
    from tomlkit.items import Table

    outer, name = path
    for key, section in document.body:
        if key is not None and key.key == outer and isinstance(section, Table):
            for index, (inner_key, item) in enumerate(section.value.body):
                if inner_key is not None and inner_key.key == name and isinstance(item, Table):
                    yield item, section.value, index


def _trailing_comments(table: Table) -> str:
    """Returns the blank lines and comments at the end of a table, or of the last table inside it."""
    from tomlkit.items import Comment, Table, Whitespace

    trailing: list[str] = []
    for key, item in reversed(table.value.body):
        if isinstance(item, Table):
            trailing.append(_trailing_comments(item))
            break
        if key is not None or not isinstance(item, Comment | Whitespace):
            break
        trailing.append(item.as_string())
    return "".join(reversed(trailing))

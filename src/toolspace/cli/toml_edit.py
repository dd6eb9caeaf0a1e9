"""Sets or removes one table of a TOML text, and leaves every other line as it is. Used for the settings of editors.

Only tables with a header of their own (`[servers.name]`) are changed; a text that writes the table in another way is
returned unchanged. Comments below a removed table stay, because they belong to the table that follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import tomlkit
from tomlkit.container import Container
from tomlkit.items import Comment, Table, Whitespace

_BLANK_LINES_AT_END = re.compile(r"(\r?\n)(?:\r?\n)+\Z")


def set_table(text: str, path: tuple[str, str], values: Mapping[str, str | list[str]]) -> str:
    """Returns the text with these values in a table. A missing table is added at the end; its other keys stay."""
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
    document = tomlkit.parse(text)
    tables = list(_find_tables(document, path))
    for table, container, index in tables:
        container.body[index] = (None, Whitespace(_trailing_comments(table)))
    after = tomlkit.dumps(document)
    return _BLANK_LINES_AT_END.sub(r"\1", after) if tables else after


def _find_tables(document: Container, path: tuple[str, str]) -> Iterator[tuple[Table, Container, int]]:
    """Yields each part of a table, with its container and index: a table can be written in several places."""
    outer, name = path
    for key, section in document.body:
        if key is not None and key.key == outer and isinstance(section, Table):
            for index, (inner_key, item) in enumerate(section.value.body):
                if inner_key is not None and inner_key.key == name and isinstance(item, Table):
                    yield item, section.value, index


def _trailing_comments(table: Table) -> str:
    """Returns the blank lines and comments at the end of a table, or of the last table inside it."""
    trailing: list[str] = []
    for key, item in reversed(table.value.body):
        if isinstance(item, Table):
            trailing.append(_trailing_comments(item))
            break
        if key is not None or not isinstance(item, Comment | Whitespace):
            break
        trailing.append(item.as_string())
    return "".join(reversed(trailing))

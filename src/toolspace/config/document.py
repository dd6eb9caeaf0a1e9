"""A configuration file as data: its values, their lines, and what is wrong with it. Knows no settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from toolspace.errors import ConfigError

KeyPath = tuple[str | int, ...]

MAX_DEPTH = 100
"""Deeper nesting is a mistake or an attack, and would end in a recursion error."""

_PLAIN_KEY = re.compile(r"[\w$*-]+")


class TextFault(Exception):
    """The text is not what its format allows, and where."""

    def __init__(self, message: str, line: int, column: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class Parsed(NamedTuple):
    """What a text says."""

    data: Any
    lines: dict[KeyPath, int]
    """The line of every value: for a mapping, the line of its key."""
    texts: dict[KeyPath, str]
    """How a number was written, where that can differ from how it prints: `1.10`."""


class Document(NamedTuple):
    """A file that was read. `name` is what messages call it."""

    name: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]
    texts: Mapping[KeyPath, str]

    def line(self, path: KeyPath) -> int | None:
        """The line of a value, or of the nearest thing around it that has one."""
        for end in range(len(path), 0, -1):
            if (line := self.lines.get(path[:end])) is not None:
                return line
        return None

    def place(self, path: KeyPath) -> str:
        """`toolspace.yaml:12`, for messages."""
        line = self.line(path)
        return self.name if line is None else f"{self.name}:{line}"


EMPTY = Document("", {}, {}, {})


class Problem(NamedTuple):
    """One thing that is wrong in a document, or in a variable that stands in for one of its values."""

    at: KeyPath
    message: str
    variable: str | None = None


def dotted(path: KeyPath) -> str:
    """`mcpServers.github.args[0]`: a key path as people write it."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
            continue
        written = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        text += f".{written}" if text else written
    return text


def shown(value: object) -> str:
    """A value in a message: short, on one line, and harmless to a terminal."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def config_error(document: Document, problems: Iterable[Problem]) -> ConfigError:
    """Every problem of a document as one error, a line each, from the top of the file to its end."""
    ordered = sorted(problems, key=lambda problem: (problem.variable or "", document.line(problem.at) or 0))
    return ConfigError("\n".join(dict.fromkeys(_line(document, problem) for problem in ordered)))


def _line(document: Document, problem: Problem) -> str:
    if problem.variable is not None:
        return f"{problem.variable} (environment): {problem.message}"
    key = dotted(problem.at)
    return f"{document.place(problem.at)}: {f'{key}: ' if key else ''}{problem.message}"

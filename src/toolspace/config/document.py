"""A configuration file as data: its values, their lines, and its problems. Knows no settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from toolspace.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""

MAX_DEPTH = 100
"""Deeper nesting is a mistake or an attack, and would end in a recursion error."""

_PLAIN_KEY = re.compile(r"[\w$*-]+")


class TextSyntaxError(Exception):
    """The text breaks the rules of its format. Has the place."""

    def __init__(self, message: str, line: int, column: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class ParsedText(NamedTuple):
    """The values of a text."""

    data: Any
    lines: dict[KeyPath, int]
    """The line of every value: for a value in a mapping, the line of its key."""
    texts: dict[KeyPath, str]
    """How each number was written, which can differ from how it prints: `1.10`."""


class ConfigDocument(NamedTuple):
    """A parsed file. Messages use its `name`."""

    name: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]
    texts: Mapping[KeyPath, str]

    def find_line(self, path: KeyPath) -> int | None:
        """The line of a value, or of the nearest value around it that has one."""
        for end in range(len(path), 0, -1):
            if (line := self.lines.get(path[:end])) is not None:
                return line
        return None

    def format_location(self, path: KeyPath) -> str:
        """`toolspace.yaml:12`, for messages."""
        line = self.find_line(path)
        return self.name if line is None else f"{self.name}:{line}"


EMPTY = ConfigDocument("", {}, {}, {})


class ConfigProblem(NamedTuple):
    """One problem of a document, or of an environment variable that overrides one of its values."""

    path: KeyPath
    message: str
    variable: str | None = None


def format_key_path(path: KeyPath) -> str:
    """`mcpServers.github.args[0]`: a key path as people write it."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
            continue
        word = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        text += f".{word}" if text else word
    return text


def format_value(value: object) -> str:
    """A value in a message: short, on one line, and without terminal control characters."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def config_error(document: ConfigDocument, problems: Iterable[ConfigProblem]) -> ConfigError:
    """All problems of a document as one error, with a line for each, in the order of the file."""
    sorted_problems = sorted(
        problems, key=lambda problem: (problem.variable or "", document.find_line(problem.path) or 0)
    )
    return ConfigError("\n".join(dict.fromkeys(_format_problem(document, problem) for problem in sorted_problems)))


def _format_problem(document: ConfigDocument, problem: ConfigProblem) -> str:
    if problem.variable is not None:
        return f"{problem.variable} (environment): {problem.message}"
    key = format_key_path(problem.path)
    return f"{document.format_location(problem.path)}: {f'{key}: ' if key else ''}{problem.message}"

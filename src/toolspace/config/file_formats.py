"""A configuration file as data: its values with their lines, and its problems. Parses JSON, TOML and YAML.

Used by the other modules of `config`, and by the CLI commands that edit the files of editors. Knows no settings.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

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


class JsonMember(NamedTuple):
    """The positions of one `"key": value` of a JSON object."""

    key: str
    start: int
    value: int
    end: int
    comma: int | None
    """The position of the comma after it."""


class JsonObject(NamedTuple):
    """The positions of a JSON object: of its braces and of its members."""

    start: int
    end: int
    members: list[JsonMember]

    def find(self, key: str) -> JsonMember | None:
        return next((member for member in self.members if member.key == key), None)


class ParsedText(NamedTuple):
    """The values of a text."""

    data: Any
    lines: dict[KeyPath, int]
    """The line of every value: for a value in a mapping, the line of its key."""
    texts: dict[KeyPath, str]
    """How each number was written, which can differ from how it prints: `1.10`."""
    objects: Mapping[KeyPath, JsonObject] = {}
    """Of JSON only: the place of every object, for programs that edit the text."""


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


# Parsing

MAX_BYTES = 10_000_000

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
# Strings and comments: their brackets, comment signs and line ends do not count. Longer opening quotes come first.
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)


def read_document(path: Path) -> ConfigDocument:
    """Reads and parses a file. Raises `ConfigError` with the place of the problem."""
    name = display_name(path)
    try:
        if not path.is_dir() and path.exists() and not path.is_file():
            raise ConfigError(f"{name}: is no regular file")  # Reading a pipe would block the start.
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes, which no configuration needs")
    return parse_document(content, name)


def parse_document(content: bytes, name: str) -> ConfigDocument:
    """Parses the content of a file. The ending of its name decides the format."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    parse = _PARSERS.get(Path(name).suffix.lower())
    if parse is None:
        raise ConfigError(f"{name}: the name must end in .yaml, .yml, .json or .toml, which says its format")
    try:
        data, lines, texts, _ = parse(text)
    except TextSyntaxError as error:
        column = f":{error.column}" if error.column is not None else ""
        raise ConfigError(f"{name}:{error.line}{column}: {error}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: expected a mapping of settings, got {format_value(data)}")
    return ConfigDocument(name, cast("dict[str, object]", data), lines, texts)


def display_name(path: Path) -> str:
    """The name of a file in messages: relative if it is below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)


def _parse_yaml(text: str) -> ParsedText:
    from toolspace.core.yaml_text import YamlSyntaxError, parse_yaml  # Imports PyYAML, which takes 30 ms.

    try:
        return ParsedText(*parse_yaml(text))
    except YamlSyntaxError as error:
        raise TextSyntaxError(str(error), error.line, error.column) from None


# JSON


def parse_json(text: str) -> ParsedText:
    """Parses JSON with comments and trailing commas. Raises `TextSyntaxError`, also for a key that occurs twice."""
    return _JsonParser(text).parse()


class _JsonParser:
    """One pass over one text. The standard decoder reads the scalars; the rest is parsed here, to know the lines."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[KeyPath, int] = {}
        self.texts: dict[KeyPath, str] = {}
        self.objects: dict[KeyPath, JsonObject] = {}
        self.line_breaks = [match.start() for match in re.finditer("\n", text)]
        self.decoder = json.JSONDecoder(parse_constant=self._refuse_constant)

    def parse(self) -> ParsedText:
        if self._peek() == "":
            return ParsedText(None, {}, {})
        value = self._parse_value(())
        if self._peek() != "":
            self._fail("expected the end of the file")
        return ParsedText(value, self.lines, self.texts, self.objects)

    def _parse_value(self, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            self._fail(f"nested deeper than {MAX_DEPTH} levels")
        match self._peek():
            case "{":
                return self._parse_object(path)
            case "[":
                return self._parse_array(path)
            case _:
                return self._parse_scalar(path)

    def _parse_object(self, path: KeyPath) -> dict[str, Any]:
        object_start = self.position
        self.position += 1
        values: dict[str, Any] = {}
        members: list[JsonMember] = []
        while (character := self._peek()) != "}":
            if character != '"':
                self._fail('expected a key in double quotes or "}"')
            start = self.position
            line = self._find_line(start)
            key: str = self._parse_scalar(())
            inner_path = (*path, key)
            if key in values:
                self._fail(f"the key {json.dumps(key)} is given twice, first in line {self.lines[inner_path]}", start)
            self.lines[inner_path] = line
            if self._peek() != ":":
                self._fail('expected ":"')
            self.position += 1
            self._peek()
            value_start = self.position
            values[key] = self._parse_value(inner_path)
            members.append(JsonMember(key, start, value_start, self.position, self._skip_comma("}")))
        self.objects[path] = JsonObject(object_start, self.position, members)
        self.position += 1
        return values

    def _parse_array(self, path: KeyPath) -> list[Any]:
        self.position += 1
        values: list[Any] = []
        while self._peek() != "]":
            inner_path = (*path, len(values))
            self.lines[inner_path] = self._find_line(self.position)
            values.append(self._parse_value(inner_path))
            self._skip_comma("]")
        self.position += 1
        return values

    def _parse_scalar(self, path: KeyPath) -> Any:
        start = self.position
        try:
            value, self.position = self.decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self._fail(error.msg[:1].lower() + error.msg[1:], max(error.pos, start))
        except ValueError as error:  # An integer of thousands of digits.
            self._fail(str(error))
        if isinstance(value, str):
            if _SURROGATE.search(value):
                self._fail("a string holds half of a surrogate pair", start)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self.texts[path] = self.text[start : self.position]
        return value

    def _skip_comma(self, end: str) -> int | None:
        """Skips a comma and returns its position. Before the end it is optional."""
        character = self._peek()
        if character == ",":
            self.position += 1
            return self.position - 1
        if character != end:
            self._fail(f'expected "," or "{end}"')
        return None

    def _peek(self) -> str:
        match = _SPACE.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return self.text[self.position : self.position + 1]

    def _find_line(self, position: int) -> int:
        return bisect_right(self.line_breaks, position - 1) + 1

    def _refuse_constant(self, name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def _fail(self, message: str, position: int | None = None) -> NoReturn:
        position = self.position if position is None else position
        line = self._find_line(position)
        line_start = self.line_breaks[line - 2] + 1 if line > 1 else 0
        raise TextSyntaxError(message, line, position - line_start + 1)


# TOML


def parse_toml(text: str) -> ParsedText:
    """Parses TOML. Raises `TextSyntaxError`, also for a key that occurs twice."""
    import tomllib

    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _TOML_PLACE.search(message)
        line, column = (int(place[1]), int(place[2])) if place and place[1] else (text.count("\n") + 1, None)
        raise TextSyntaxError(_TOML_PLACE.sub("", message), line, column) from None
    except ValueError as error:  # An integer of thousands of digits.
        raise TextSyntaxError(str(error), 1) from None
    except RecursionError:
        raise TextSyntaxError("nested too deeply", 1) from None
    return ParsedText(_to_plain_data(data, 0), _find_toml_lines(text, tomllib.loads), {})


def _to_plain_data(value: object, depth: int) -> Any:
    """The value as JSON data: of the three formats, only TOML has dates and times."""
    if depth > MAX_DEPTH:
        raise TextSyntaxError(f"nested deeper than {MAX_DEPTH} levels", 1)
    if isinstance(value, dict):
        return {key: _to_plain_data(inner, depth + 1) for key, inner in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_to_plain_data(inner, depth + 1) for inner in cast("list[object]", value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _find_toml_lines(text: str, parse: Callable[[str], dict[str, Any]]) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    last_indices: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for line, statement in _split_statements(text):
        keys = parse(statement)
        if statement.lstrip().startswith("["):
            table = _find_table(keys, last_indices)
            for end in range(1, len(table) + 1):
                lines.setdefault(table[:end], line)
        else:
            _set_line(keys, table, line, lines)
    return lines


def _find_table(keys: dict[str, Any], last_indices: dict[KeyPath, int]) -> KeyPath:
    """The table that a header opens. `last_indices` has the last index of each array of tables."""
    table: KeyPath = ()
    inner: Any = keys
    while inner:
        key = str(next(iter(inner)))
        inner = inner[key]
        table += (key,)
        if isinstance(inner, list):  # `[[table]]` appends to an array of tables.
            last_indices[table] = last_indices.get(table, -1) + 1
            return (*table, last_indices[table])
        if table in last_indices:  # A table inside the last element of an array.
            table += (last_indices[table],)
    return table


def _set_line(value: object, path: KeyPath, line: int, lines: dict[KeyPath, int]) -> None:
    """Sets the line of every value in one statement to the line of the statement."""
    pairs: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        pairs = list(cast("dict[str | int, object]", value).items())
    elif isinstance(value, list):
        pairs = list(enumerate(cast("list[object]", value)))
    for key, inner in pairs:
        lines.setdefault((*path, key), line)
        _set_line(inner, (*path, key), line, lines)


def _split_statements(text: str) -> Iterator[tuple[int, str]]:
    """Each header and each `key = value` of a valid text, with its first line."""
    start, line, depth, position, newlines = 0, 1, 0, 0, 0
    while position < len(text):
        hidden = _STRING_OR_COMMENT.match(text, position)
        if hidden is not None:
            newlines += hidden[0].count("\n")
            position = hidden.end()
            continue
        character = text[position]
        position += 1
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "\n":
            newlines += 1
            if depth == 0:
                if _is_statement(text[start:position]):
                    yield line, text[start:position]
                start, line, newlines = position, line + newlines, 0
    if _is_statement(text[start:]):
        yield line, text[start:]


def _is_statement(text: str) -> bool:
    content = text.strip()
    return bool(content) and not content.startswith("#")


_PARSERS: Mapping[str, Callable[[str], ParsedText]] = {
    ".json": parse_json,
    ".jsonc": parse_json,
    ".toml": parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}

"""Reads a configuration file of any format into a document. Knows no settings."""

from __future__ import annotations

import json
import os
import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from toolspace.config.document import MAX_DEPTH, ConfigDocument, KeyPath, ParsedText, TextSyntaxError, format_value
from toolspace.errors import ConfigError

# MERGED from tomltext: Reads TOML, keeping the line of every value that has one of its own.

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
# What can hide a bracket, a comment or the end of a line: strings, longest openings first, and comments.
HIDING = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)


def parse_toml(text: str) -> ParsedText:
    """The values of a TOML text. Raises `TextFault`; a key given twice is one."""
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _PLACE.search(message)
        line, column = (int(place[1]), int(place[2])) if place and place[1] else (text.count("\n") + 1, None)
        raise TextSyntaxError(_PLACE.sub("", message), line, column) from None
    except ValueError as error:  # An integer of thousands of digits.
        raise TextSyntaxError(str(error), 1) from None
    except RecursionError:
        raise TextSyntaxError("nested too deeply", 1) from None
    return ParsedText(_plain(data, 0), _lines(text), {})


def _plain(value: object, depth: int) -> Any:
    """The value as JSON data: TOML alone of the three formats has dates and times."""
    if depth > MAX_DEPTH:
        raise TextSyntaxError(f"nested deeper than {MAX_DEPTH} levels", 1)
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


# MERGED from jsontext: Reads JSON, with the comments and trailing commas that editors allow, keeping the line of e…

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse_json(text: str) -> ParsedText:
    """The values of a JSON text. Raises `TextFault`; a key given twice is one."""
    return _Scanner(text).document()


class _Scanner:
    """One pass over one text. The standard decoder reads the scalars; the rest is ours, to know the lines."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.texts: dict[KeyPath, str] = {}
        self.breaks = [match.start() for match in re.finditer("\n", text)]
        self.decoder = json.JSONDecoder(parse_constant=self._refuse_constant)

    def document(self) -> ParsedText:
        if self._peek() == "":
            return ParsedText(None, {}, {})
        value = self._value(())
        if self._peek() != "":
            self._fail("expected the end of the file")
        return ParsedText(value, self.lines, self.texts)

    def _value(self, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            self._fail(f"nested deeper than {MAX_DEPTH} levels")
        match self._peek():
            case "{":
                return self._object(path)
            case "[":
                return self._array(path)
            case _:
                return self._scalar(path)

    def _object(self, path: KeyPath) -> dict[str, Any]:
        self.at += 1
        values: dict[str, Any] = {}
        while (sign := self._peek()) != "}":
            if sign != '"':
                self._fail('expected a key in double quotes or "}"')
            line = self._line(self.at)
            start = self.at
            key: str = self._scalar(())
            here = (*path, key)
            if key in values:
                self._fail(f"the key {json.dumps(key)} is given twice, first in line {self.lines[here]}", start)
            self.lines[here] = line
            self._expect(":")
            values[key] = self._value(here)
            self._separator("}")
        self.at += 1
        return values

    def _array(self, path: KeyPath) -> list[Any]:
        self.at += 1
        values: list[Any] = []
        while self._peek() != "]":
            here = (*path, len(values))
            self.lines[here] = self._line(self.at)
            values.append(self._value(here))
            self._separator("]")
        self.at += 1
        return values

    def _scalar(self, path: KeyPath) -> Any:
        start = self.at
        try:
            value, self.at = self.decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self._fail(error.msg[:1].lower() + error.msg[1:], max(error.pos, start))
        except ValueError as error:  # An integer of thousands of digits.
            self._fail(str(error))
        if isinstance(value, str):
            if _SURROGATE.search(value):
                self._fail("a string holds half of a surrogate pair", start)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self.texts[path] = self.text[start : self.at]
        return value

    def _separator(self, end: str) -> None:
        """Past a comma; none is needed before the end, and one there is fine."""
        sign = self._peek()
        if sign == ",":
            self.at += 1
        elif sign != end:
            self._fail(f'expected "," or "{end}"')

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            self._fail(f'expected "{sign}"')
        self.at += 1

    def _peek(self) -> str:
        match = _SPACE.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return self.text[self.at : self.at + 1]

    def _line(self, at: int) -> int:
        return bisect_right(self.breaks, at - 1) + 1

    def _refuse_constant(self, name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        line = self._line(at)
        start = self.breaks[line - 2] + 1 if line > 1 else 0
        raise TextSyntaxError(message, line, at - start + 1)


MAX_BYTES = 10_000_000


def read_document(path: Path) -> ConfigDocument:
    """The document in a file. Raises `ConfigError` with the place of the fault."""
    name = display_name(path)
    try:
        if not path.is_dir() and path.exists() and not path.is_file():
            raise ConfigError(f"{name}: is no regular file")  # A pipe would keep the start waiting.
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
    """The document in the content of a file; the end of its name says the format."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    try:
        data, lines, texts = _parser(name)(text)
    except TextSyntaxError as fault:
        column = f":{fault.column}" if fault.column is not None else ""
        raise ConfigError(f"{name}:{fault.line}{column}: {fault}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: expected a mapping of settings, got {format_value(data)}")
    return ConfigDocument(name, cast("dict[str, object]", data), lines, texts)


def display_name(path: Path) -> str:
    """What messages call a file: relative where it lies below the working folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)


def _parse_yaml(text: str) -> ParsedText:
    from toolspace.core.yaml_text import YamlSyntaxError, parse_yaml

    try:
        return ParsedText(*parse_yaml(text))
    except YamlSyntaxError as error:
        raise TextSyntaxError(str(error), error.line, error.column) from None


def _parser(name: str) -> Callable[[str], ParsedText]:
    # Here: a run loads the parser of the one format it meets; YAML's takes 30 ms.
    suffix = Path(name).suffix.lower()
    if suffix in (".json", ".jsonc"):
        return parse_json
    if suffix == ".toml":
        return parse_toml
    if suffix in (".yaml", ".yml"):
        return _parse_yaml
    raise ConfigError(f"{name}: the name must end in .yaml, .yml, .json or .toml, which says its format")

"""Reads JSON, with the comments and trailing commas that editors allow, keeping the line of every value."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import Any, NoReturn

from toolspace.config.document import MAX_DEPTH, KeyPath, Parsed, TextFault

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse_json(text: str) -> Parsed:
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

    def document(self) -> Parsed:
        if self._peek() == "":
            return Parsed(None, {}, {})
        value = self._value(())
        if self._peek() != "":
            self._fail("expected the end of the file")
        return Parsed(value, self.lines, self.texts)

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
        raise TextFault(message, line, at - start + 1)

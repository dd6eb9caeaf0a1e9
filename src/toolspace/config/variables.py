"""Fills `${VAR}` and `${VAR:-default}` into the strings of a document. Reads no environment by itself.

`$${` stands for a literal `${`. `${parameters.x}` belongs to REST tools and stays. Keys are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from toolspace.config.document import ConfigDocument, ConfigProblem, KeyPath
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import is_secret_name

_START = re.compile(r"\$?\$\{")
_NAME = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)")
_PARAMETER = re.compile(r"\$\{\s*parameters\b[^{}]*\}")
_INPUT = re.compile(r"\$\{input:[^{}]*\}")
_FALSE = ("false", "no", "off", "0")
MAX_LENGTH = 1_000_000
"""How long an expanded string may be: variables can be large."""
MAX_NESTING = 20
"""How deeply defaults may nest."""


class ExpandedDocument(NamedTuple):
    data: dict[str, Any]
    unexpanded: dict[KeyPath, str]
    """What stood where something was filled in: messages show that, since a variable may hold a secret."""
    problems: list[ConfigProblem]


class _Fault(Exception):
    """A reference that cannot be filled in."""


def expand(document: ConfigDocument, environ: Mapping[str, str]) -> ExpandedDocument:
    """The data of a document with its variables filled in. What cannot be, is a problem of its own."""
    walk = _Walk(environ)
    data = cast("dict[str, Any]", walk.value(document.data, (), required=True))
    return ExpandedDocument(data, walk.written, walk.problems)


def expand_text(text: str, environ: Mapping[str, str]) -> str:
    """One string with its variables filled in. Raises `ValueError` where one cannot be."""
    try:
        return _expand(text, environ)
    except _Fault as fault:
        raise ValueError(str(fault)) from None


class _Walk:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.written: dict[KeyPath, str] = {}
        self.problems: list[ConfigProblem] = []

    def value(self, value: object, path: KeyPath, *, required: bool) -> object:
        if isinstance(value, str):
            return self._text(value, path, required=required) if "${" in value else value
        if isinstance(value, dict):
            mapping = cast("dict[str, object]", value)
            if required and "enabled" in mapping:
                # Something switched off need not have its keys at hand.
                required = not _is_off(self.value(mapping["enabled"], (*path, "enabled"), required=True))
            if mapping.get("disabled") is True:  # How some editors write it.
                required = False
            return {key: self.value(inner, (*path, key), required=required) for key, inner in mapping.items()}
        if isinstance(value, list):
            items = cast("list[object]", value)
            return [self.value(inner, (*path, index), required=required) for index, inner in enumerate(items)]
        return value

    def _text(self, text: str, path: KeyPath, *, required: bool) -> str:
        try:
            expanded = _expand(text, self.environ)
        except _Fault as fault:
            if required:
                self.problems.append(ConfigProblem(path, str(fault)))
            return text
        if expanded != text:
            self.written[path] = text
        return expanded


def _expand(text: str, environ: Mapping[str, str], depth: int = 0) -> str:
    if depth > MAX_NESTING:
        raise _Fault(f"defaults nested deeper than {MAX_NESTING} levels")
    parts: list[str] = []
    at = 0
    while (start := _START.search(text, at)) is not None:
        parts.append(text[at : start.start()])
        if start[0] == "$${":
            parts.append("${")
            at = start.end()
        elif (parameter := _PARAMETER.match(text, start.start())) is not None:
            parts.append(parameter[0])
            at = parameter.end()
        else:
            value, at = _reference(text, start.start(), environ, depth)
            parts.append(value)
    parts.append(text[at:])
    whole = "".join(parts)
    if len(whole) > MAX_LENGTH:
        raise _Fault(f"longer than {MAX_LENGTH:,} characters once its variables are filled in")
    return whole


def _reference(text: str, start: int, environ: Mapping[str, str], depth: int) -> tuple[str, int]:
    """The value of the reference that begins at `start`, and where it ends."""
    if (asked := _INPUT.match(text, start)) is not None:
        raise _Fault(f"{asked[0]} asks an editor's user; name a variable instead: ${{NAME}}")
    name = _NAME.match(text, start + 2)
    end = _end(text, start) if name is not None else -1
    if name is None or end < 0:
        raise _no_variable(text, start)
    rest = text[name.end() : end]
    value = environ.get(name[1])
    if rest.startswith(":-"):
        return (value, end + 1) if value else (_expand(rest[2:], environ, depth + 1), end + 1)
    if rest:
        raise _no_variable(text, start)
    if value is None:
        hint = did_you_mean(name[1], environ) or f"; set it, or give a default: ${{{name[1]}:-value}}"
        raise _Fault(f"the variable {name[1]} is not set{hint}")
    return value, end + 1


def _end(text: str, start: int) -> int:
    """Where the brace closes that opens at `start`; references nest in defaults."""
    depth = 0
    at = start
    while at < len(text):
        if text.startswith("$${", at):
            at += 3
        elif text.startswith("${", at):
            depth += 1
            at += 2
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
            at += 1
        else:
            at += 1
    return -1


def _no_variable(text: str, start: int) -> _Fault:
    piece = text[start : start + 30].split("\n", maxsplit=1)[0]
    end = piece.find("}")
    written = ascii(piece[: end + 1] if end >= 0 else piece)[1:-1]
    return _Fault(f'"{written}" is not a variable; write ${{NAME}} or ${{NAME:-default}}, or $${{ for a literal ${{')


def _is_off(value: object) -> bool:
    return value is False or (isinstance(value, str) and value.strip().lower() in _FALSE)


# MERGED from secrets: Finds the values in a configuration that no log may show. Hides nothing itself.

_VARIABLE = re.compile(r"(?<!\$)\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)")


def _holds_secret(variable: str) -> bool:
    """People name variables more briefly than fields: `STRIPE_KEY`, `GITHUB_PAT`."""
    return is_secret_name(variable) or variable.upper().endswith(("_KEY", "_PAT", "_AUTH", "_TOKEN"))


def find_secrets(data: object, environ: Mapping[str, str], *, secret: bool = False) -> Iterator[str]:
    """What stands under a key such as `apiKey`, and what a variable that is named like a secret fills in anywhere.

    `data` is the document as it was written. Of a text with variables only what they hold is a secret: `Bearer` in
    `Bearer ${KEY}` is none.
    """
    if isinstance(data, str):
        names = _VARIABLE.findall(data)
        if secret and not names:
            yield data
        yield from (environ[name] for name in names if name in environ and (secret or _holds_secret(name)))
    elif isinstance(data, list):
        for item in cast("list[object]", data):
            yield from find_secrets(item, environ, secret=secret)
    elif isinstance(data, Mapping):
        # Not handed down: below a key `password` of a JSON Schema stands what a password looks like.
        for key, value in cast("Mapping[str, Any]", data).items():
            yield from find_secrets(value, environ, secret=is_secret_name(key))

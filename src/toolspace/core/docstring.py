"""Reads the description and the argument lines of a docstring: Google, NumPy and Sphinx styles.

By hand because a thousand tools are read at start: the libraries for it take longer than all the rest.
"""

from __future__ import annotations

import re
from inspect import cleandoc
from typing import NamedTuple

_GOOGLE = re.compile(
    r"^(Args|Arguments|Parameters|Params|Keyword Arg(?:ument)?s|Other Parameters"
    r"|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?)"
    r":\s*$",
    re.MULTILINE,
)
_NUMPY = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,}\s*$", re.MULTILINE)
_SPHINX = re.compile(r"^:(\w+)(?:\s+([^:\n]*?))?:[ \t]*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_GOOGLE_ITEM = re.compile(
    r"^(\*{0,2}\w+(?:, ?\*{0,2}\w+)*)\s*(?:\([^\n]*?\))?\s*:[ \t]*(.*(?:\n(?:[ \t]+.*|[ \t]*(?=\n)))*)", re.MULTILINE
)
_NUMPY_ITEM = re.compile(
    r"^(\*{0,2}\w+(?:, ?\*{0,2}\w+)*)(?:\s*:[^\n]*)?\n((?:[ \t]+.*(?:\n|$)|[ \t]*\n)+)", re.MULTILINE
)
_ARGUMENTS = frozenset(
    ("args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters")
)


class Docstring(NamedTuple):
    description: str
    arguments: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    """What the function does, and what each argument means."""
    if not text:
        return Docstring("", {})
    text = cleandoc(text).strip()
    if "\n" not in text:
        return Docstring(text, {})
    if found := _sections(_GOOGLE, text):
        return _read(text, found, _GOOGLE_ITEM)
    if found := _sections(_NUMPY, text):
        return _read(text, found, _NUMPY_ITEM)
    if ":param" in text or ":arg" in text:
        return _read_sphinx(text)
    return Docstring(text, {})


def _sections(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return list(pattern.finditer(text))


def _read(text: str, headings: list[re.Match[str]], item: re.Pattern[str]) -> Docstring:
    arguments: dict[str, str] = {}
    for index, heading in enumerate(headings):
        if heading[1].casefold() not in _ARGUMENTS:
            continue
        end = headings[index + 1].start() if index + 1 < len(headings) else len(text)
        body = cleandoc("\n" + text[heading.end() : end])
        for match in item.finditer(body):
            arguments.update((name.strip(" *"), _join(match[2])) for name in match[1].split(","))
    return Docstring(text[: headings[0].start()].strip(), arguments)


def _read_sphinx(text: str) -> Docstring:
    arguments: dict[str, str] = {}
    first = len(text)
    for match in _SPHINX.finditer(text):
        first = min(first, match.start())
        if match[1] in ("param", "parameter", "arg", "argument") and match[2]:
            arguments[match[2].split()[-1].lstrip("*")] = _join(match[3])
    return Docstring(text[:first].strip(), arguments)


def _join(lines: str) -> str:
    return " ".join(lines.split())

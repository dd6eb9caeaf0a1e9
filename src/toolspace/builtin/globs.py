"""Matches relative paths against globs such as `*.ts`, `src/**/*.py` and `*.{js,jsx}`. Never takes one for a regex."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache

from toolspace.errors import ToolValidationError

_ALTERNATIVES = 64
_LONGEST = 1000


class Glob:
    """A compiled glob. Without a `/` it is held against the name, at any depth; with one, against the whole path."""

    def __init__(self, pattern: str, parameter: str) -> None:
        if not pattern or len(pattern) > _LONGEST or "\0" in pattern:
            raise ToolValidationError(
                f"{parameter}: expected a glob such as *.py of at most {_LONGEST} characters, got {pattern[:60]!r}"
            )
        plain = pattern.removeprefix("./")
        self.has_folders = "/" in plain.rstrip("/")
        self._options = [PathPattern(option) for option in _expand(plain, parameter)]

    def matches(self, path: str) -> bool:
        parts = path.split("/") if self.has_folders else [path.rpartition("/")[2]]
        return any(option.matches(parts) for option in self._options)

    def can_match_below(self, folder: str) -> bool:
        """Whether a path below the folder could match; what cannot need not be looked into."""
        return not self.has_folders or any(option.can_match_below(folder.split("/")) for option in self._options)


class PathPattern:
    """One glob without braces, as its steps between slashes.

    All positions in the glob are followed at once, step by step, so no glob takes more than the product of both
    lengths; backtracking over `**` would let a short hostile glob run for years.
    """

    def __init__(self, pattern: str) -> None:
        steps = [step for step in pattern.split("/") if step not in ("", ".")]
        if steps and steps[-1] == "**":
            steps.append("*")  # `a/**` is what lies inside `a`, not `a` itself.
        self._steps = [None if step == "**" else _compile(step) for step in steps]

    def matches(self, parts: Iterable[str]) -> bool:
        return len(self._steps) in self._after(parts)

    def can_match_below(self, parts: Iterable[str]) -> bool:
        return any(position < len(self._steps) for position in self._after(parts))

    def _after(self, parts: Iterable[str]) -> set[int]:
        at = self._spread({0})
        for part in parts:
            at = self._spread(self._advance(at, part))
            if not at:
                break
        return at

    def _advance(self, at: set[int], part: str) -> set[int]:
        following: set[int] = set()
        for position in at:
            if position == len(self._steps):
                continue
            step = self._steps[position]
            if step is None:
                following.add(position)
            elif step.match(part):
                following.add(position + 1)
        return following

    def _spread(self, at: set[int]) -> set[int]:
        """`**` also matches no folder at all."""
        for position in sorted(at):
            while position < len(self._steps) and self._steps[position] is None:
                position += 1
                at.add(position)
        return at


@lru_cache(maxsize=1024)
def _compile(step: str) -> re.Pattern[str]:
    # The standard translation is free of exponential backtracking (atomic groups, since Python 3.11).
    return re.compile(fnmatch.translate(_standard(step)))


def _standard(step: str) -> str:
    """The step in fnmatch's dialect, which knows neither `\\*` nor `[^a]`."""
    out: list[str] = []
    at = 0
    while at < len(step):
        here = step[at]
        if here == "\\" and at + 1 < len(step):
            at += 1
            out.append(f"[{step[at]}]" if step[at] in "*?[" else step[at])
        elif here == "[" and step.startswith("[^", at) and "]" in step[at + 3 :]:
            out.append("[!")
            at += 1
        else:
            out.append(here)
        at += 1
    return "".join(out)


def _expand(pattern: str, parameter: str) -> list[str]:
    """`a.{b,c}` as `a.b` and `a.c`. A brace without its partner, or without a comma, is an ordinary character."""
    options = [pattern]
    done: list[str] = []
    while options:
        option = options.pop()
        split = _first_braces(option)
        if split is None:
            done.append(option)
        else:
            head, choices, tail = split
            options.extend(head + choice + tail for choice in choices)
        if len(options) + len(done) > _ALTERNATIVES:
            raise ToolValidationError(
                f"{parameter}: {pattern[:60]!r} stands for more than {_ALTERNATIVES} globs; use fewer braces"
            )
    return done


def _first_braces(pattern: str) -> tuple[str, list[str], str] | None:
    for start in (index for index, character in enumerate(pattern) if character == "{"):
        depth, choices, begin = 0, list[str](), start + 1
        for index in range(start, len(pattern)):
            character = pattern[index]
            if character == "{":
                depth += 1
            elif character == "," and depth == 1:
                choices.append(pattern[begin:index])
                begin = index + 1
            elif character == "}":
                depth -= 1
                if depth == 0:
                    if choices:
                        choices.append(pattern[begin:index])
                        return pattern[:start], choices, pattern[index + 1 :]
                    break
    return None

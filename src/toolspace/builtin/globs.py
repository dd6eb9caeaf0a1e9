"""Matches relative paths against globs such as `*.ts`, `src/**/*.py` and `*.{js,jsx}`. Reads no files.

The file tools use it for `pattern` and `glob`; `grep` uses it for `.gitignore` rules too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache

from toolspace.errors import ToolValidationError

_MAX_ALTERNATIVES = 64
_MAX_GLOB_LENGTH = 1000


class Glob:
    """A compiled glob. Without a `/` it matches names at any depth; with one it matches whole paths."""

    def __init__(self, pattern: str, parameter: str) -> None:
        """Raises `ToolValidationError` that names the parameter."""
        if not pattern or len(pattern) > _MAX_GLOB_LENGTH or "\0" in pattern:
            raise ToolValidationError(
                f"{parameter}: expected a glob such as *.py of at most {_MAX_GLOB_LENGTH} characters, "
                f"got {pattern[:60]!r}"
            )
        relative = pattern.removeprefix("./")
        self.has_folders = "/" in relative.rstrip("/")
        self._alternatives = [PathPattern(text) for text in _expand_braces(relative, parameter)]

    def matches(self, path: str) -> bool:
        parts = path.split("/") if self.has_folders else [path.rpartition("/")[2]]
        return any(alternative.matches(parts) for alternative in self._alternatives)

    def can_match_below(self, folder: str) -> bool:
        """Whether a path below the folder could match. If not, the folder need not be visited."""
        parts = folder.split("/")
        return not self.has_folders or any(alternative.can_match_below(parts) for alternative in self._alternatives)


class PathPattern:
    """One glob without braces, as steps between slashes.

    All positions in the glob are followed at the same time, so matching takes at most the product of both lengths.
    Backtracking over `**` would take exponential time for a short hostile glob.
    """

    def __init__(self, pattern: str) -> None:
        steps = [step for step in pattern.split("/") if step not in ("", ".")]
        if steps and steps[-1] == "**":
            steps.append("*")  # `a/**` matches what is inside `a`, not `a` itself.
        self._steps = [None if step == "**" else _compile_step(step) for step in steps]

    def matches(self, parts: Iterable[str]) -> bool:
        return len(self._steps) in self._positions_after(parts)

    def can_match_below(self, parts: Iterable[str]) -> bool:
        """Whether a path that continues with more parts could match."""
        return any(position < len(self._steps) for position in self._positions_after(parts))

    def _positions_after(self, parts: Iterable[str]) -> set[int]:
        positions = self._skip_wildcards({0})
        for part in parts:
            positions = self._skip_wildcards(self._advance(positions, part))
            if not positions:
                break
        return positions

    def _advance(self, positions: set[int], part: str) -> set[int]:
        next_positions: set[int] = set()
        for position in positions:
            if position == len(self._steps):
                continue
            step = self._steps[position]
            if step is None:
                next_positions.add(position)
            elif step.match(part):
                next_positions.add(position + 1)
        return next_positions

    def _skip_wildcards(self, positions: set[int]) -> set[int]:
        """Adds the positions after `**`, which also matches no folder at all."""
        for position in sorted(positions):
            while position < len(self._steps) and self._steps[position] is None:
                position += 1
                positions.add(position)
        return positions


@lru_cache(maxsize=1024)
def _compile_step(step: str) -> re.Pattern[str]:
    # The standard translation has no exponential backtracking (atomic groups, since Python 3.11).
    return re.compile(fnmatch.translate(_to_fnmatch(step)))


def _to_fnmatch(step: str) -> str:
    """The step in the syntax of `fnmatch`, which supports neither `\\*` nor `[^a]`."""
    out: list[str] = []
    position = 0
    while position < len(step):
        character = step[position]
        if character == "\\" and position + 1 < len(step):
            position += 1
            out.append(f"[{step[position]}]" if step[position] in "*?[" else step[position])
        elif character == "[" and step.startswith("[^", position) and "]" in step[position + 3 :]:
            out.append("[!")
            position += 1
        else:
            out.append(character)
        position += 1
    return "".join(out)


def _expand_braces(pattern: str, parameter: str) -> list[str]:
    """`a.{b,c}` as `a.b` and `a.c`. A brace that is not closed, or has no comma, is an ordinary character."""
    pending_globs = [pattern]
    globs: list[str] = []
    while pending_globs:
        text = pending_globs.pop()
        braces = _split_first_braces(text)
        if braces is None:
            globs.append(text)
        else:
            head, choices, tail = braces
            pending_globs.extend(head + choice + tail for choice in choices)
        if len(pending_globs) + len(globs) > _MAX_ALTERNATIVES:
            raise ToolValidationError(
                f"{parameter}: {pattern[:60]!r} stands for more than {_MAX_ALTERNATIVES} globs; use fewer braces"
            )
    return globs


def _split_first_braces(pattern: str) -> tuple[str, list[str], str] | None:
    for start in (index for index, character in enumerate(pattern) if character == "{"):
        depth, choices, choice_start = 0, list[str](), start + 1
        for index in range(start, len(pattern)):
            character = pattern[index]
            if character == "{":
                depth += 1
            elif character == "," and depth == 1:
                choices.append(pattern[choice_start:index])
                choice_start = index + 1
            elif character == "}":
                depth -= 1
                if depth == 0:
                    if choices:
                        choices.append(pattern[choice_start:index])
                        return pattern[:start], choices, pattern[index + 1 :]
                    break
    return None

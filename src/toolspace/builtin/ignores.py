"""Knows which files a repository ignores: `.gitignore` files, as git reads them. Reads no other files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from toolspace.builtin.globs import Segments
from toolspace.builtin.paths import open_file

_LARGEST = 256 * 1024
NAME = ".gitignore"


class Rule(NamedTuple):
    """One line of a `.gitignore`."""

    pattern: Segments
    negated: bool
    folders_only: bool
    anchored: bool
    """Held against the path from the file's own folder, not against the name."""


class IgnoreFile(NamedTuple):
    """The rules of one `.gitignore`, for what lies below its folder."""

    folder: str
    """An absolute path without a slash at its end."""
    rules: tuple[Rule, ...]

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Whether it ignores an absolute path; None where it says nothing. The last rule that fits decides."""
        parts = path[len(self.folder) + 1 :].split("/")
        for rule in reversed(self.rules):
            if rule.folders_only and not is_folder:
                continue
            if rule.pattern.matches(parts if rule.anchored else parts[-1:]):
                return not rule.negated
        return None


def is_ignored(path: str, files: Sequence[IgnoreFile], *, is_folder: bool) -> bool:
    """Whether the files, given from the outermost to the innermost, ignore an absolute path."""
    for file in reversed(files):
        verdict = file.verdict(path, is_folder=is_folder)
        if verdict is not None:
            return verdict
    return False


def read_ignore_file(folder: int, path: str) -> IgnoreFile | None:
    """The `.gitignore` of an open folder, if it has one."""
    file = open_file(folder, NAME)
    if file is None:
        return None
    with file:
        text = file.read(_LARGEST).decode("utf-8", "replace")
    return IgnoreFile(path.rstrip("/"), parse(text))


def parse(text: str) -> tuple[Rule, ...]:
    rules = (_rule(line) for line in text.removeprefix("\ufeff").split("\n"))
    return tuple(rule for rule in rules if rule is not None)


def _rule(line: str) -> Rule | None:
    line = _without_trailing_spaces(line.removesuffix("\r"))
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    if negated:
        line = line[1:]
    folders_only = line.endswith("/")
    line = line.rstrip("/")
    if not line:
        return None
    return Rule(Segments(line), negated, folders_only, anchored="/" in line)


def _without_trailing_spaces(line: str) -> str:
    bare = line.rstrip(" ")
    escaped = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if len(bare) < len(line) and escaped % 2 else bare

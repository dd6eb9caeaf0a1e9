"""The tool that searches files. Leaves out what is binary, ignored by git, or too large to be meant."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import BufferedReader
from typing import Any, NamedTuple

from toolspace.builtin.allowed_paths import (
    AllowedPaths,
    FileLocation,
    FolderVisit,
    display_name,
    file_kind,
    missing_error,
    open_file,
    path_prefix,
    walk_folder,
)
from toolspace.builtin.globs import Glob, PathPattern
from toolspace.builtin.text_files import looks_binary
from toolspace.core.context import ToolContext
from toolspace.core.function_tool import tool
from toolspace.core.safe_regex import MatchSpan, PatternTooSlow, SafePattern
from toolspace.core.tool import Annotations
from toolspace.errors import ToolExecutionError, ToolValidationError

# MERGED from ignores: Knows which files a repository ignores: `.gitignore` files, as git reads them. Reads no othe…

_LARGEST = 256 * 1024
IGNORE_FILE_NAME = ".gitignore"


class IgnoreRule(NamedTuple):
    """One line of a `.gitignore`."""

    pattern: PathPattern
    negated: bool
    folders_only: bool
    anchored: bool
    """Held against the path from the file's own folder, not against the name."""


class IgnoreFile(NamedTuple):
    """The rules of one `.gitignore`, for what lies below its folder."""

    folder: str
    """An absolute path without a slash at its end."""
    rules: tuple[IgnoreRule, ...]

    def ignores(self, path: str, *, is_folder: bool) -> bool | None:
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
        verdict = file.ignores(path, is_folder=is_folder)
        if verdict is not None:
            return verdict
    return False


def read_ignore_file(folder: int, path: str) -> IgnoreFile | None:
    """The `.gitignore` of an open folder, if it has one."""
    file = open_file(folder, IGNORE_FILE_NAME)
    if file is None:
        return None
    with file:
        text = file.read(_LARGEST).decode("utf-8", "replace")
    return IgnoreFile(path.rstrip("/"), parse_ignore_file(text))


def parse_ignore_file(text: str) -> tuple[IgnoreRule, ...]:
    rules = (_rule(line) for line in text.removeprefix("\ufeff").split("\n"))
    return tuple(rule for rule in rules if rule is not None)


def _rule(line: str) -> IgnoreRule | None:
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
    return IgnoreRule(PathPattern(line), negated, folders_only, anchored="/" in line)


def _without_trailing_spaces(line: str) -> str:
    bare = line.rstrip(" ")
    escaped = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if len(bare) < len(line) and escaped % 2 else bare


MAX_MATCHES = 500
MAX_MATCH_CHARACTERS = 200_000
"""How many characters all matches have together at most."""
MAX_FILE_BYTES = 10 * 1024 * 1024
"""Larger files are left out, unless the search is in that very file."""
MAX_LINE_LENGTH = 500
"""Longer lines are shown in part."""
_MOST_CONTEXT = 50
_LINE_IN_MEMORY = 1024 * 1024
_LONG_LINE = 10_000
_SLOW_LINES = 3
_HEAD = 8192


@tool(category="file", annotations=Annotations(read_only=True, idempotent=True, open_world=False))
def grep_files(
    pattern: str,
    path: str | None = None,
    glob: str | None = None,
    context: int = 0,
    ignoreCase: bool = False,
    *,
    call: ToolContext,
) -> dict[str, Any]:
    """Searches files for lines that match a regular expression. Leaves out binary files and what .gitignore names.

    Args:
        pattern: Python regular expression.
        path: Folder or file to search; without it, all that may be read.
        glob: Only files that match, such as *.ts or src/**/*.py.
        context: Lines to show before and after each match.
        ignoreCase: Whether upper and lower case are the same.
    """
    if not 0 <= context <= _MOST_CONTEXT:
        raise ToolValidationError(f"context: expected 0 to {_MOST_CONTEXT} lines, got {context}")
    search = _Search(SafePattern(pattern, ignore_case=ignoreCase), Glob(glob, "glob") if glob else None, context, call)
    bounds = AllowedPaths.from_context(call)
    for start in [path] if path is not None else bounds.search_roots():
        _search_from(start, bounds, search)
    return search.result()


def _search_from(path: str, bounds: AllowedPaths, search: _Search) -> None:
    with bounds.locate(path) as place:
        status = place.status()
        if status is None:
            raise missing_error(path)
        if stat.S_ISREG(status.st_mode):
            with place.open() as file:
                search.file(file, path)
        elif stat.S_ISDIR(status.st_mode):
            search.folder(place, _ignore_files_above(bounds, place))
        else:
            raise ToolExecutionError(f"{path!r} is a {file_kind(status)}; only regular files are searched")


class _Search:
    """One search and what it has found so far."""

    def __init__(self, pattern: SafePattern, glob: Glob | None, around: int, call: ToolContext) -> None:
        self._pattern = pattern
        self._glob = glob
        self._around = around
        self._call = call
        self._matches: list[dict[str, Any]] = []
        self._room = MAX_MATCH_CHARACTERS
        self._slow = 0
        self._full = False
        self._incomplete = False

    def result(self) -> dict[str, Any]:
        matches = sorted(self._matches, key=lambda match: (match["path"].split("/"), match["line"]))
        return {"matches": matches, "truncated": self._full or self._incomplete}

    def folder(self, place: FileLocation, above: list[IgnoreFile]) -> None:
        """Searches the files of a folder and of those below."""
        prefix, root = path_prefix(place.path), place.real_path.rstrip("/")
        ignores = {"": above}
        with place.open_folder() as folder, closing(walk_folder(folder, self._call)) as visits:
            for visit in visits:
                at = f"{root}/{visit.path}" if visit.path else root
                rules = ignores.pop(visit.path)
                own = read_ignore_file(visit.folder_fd, at)
                if own is not None:
                    rules = [*rules, own]
                for entry in visit.entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if entry.name == ".git" or is_ignored(f"{at}/{entry.name}", rules, is_folder=is_folder):
                        continue
                    inside = visit.entry_path(entry.name)
                    if not is_folder:
                        self._entry(visit, entry.name, prefix)
                    elif self._glob is None or self._glob.can_match_below(inside):
                        ignores[inside] = rules
                        visit.pending_folders.append(inside)
                    if self._full:
                        return

    def _entry(self, visit: FolderVisit, name: str, prefix: str) -> None:
        inside = visit.entry_path(name)
        if self._glob is not None and not self._glob.matches(inside):
            return
        file = open_file(visit.folder_fd, name)
        if file is not None:
            with file:
                if os.fstat(file.fileno()).st_size <= MAX_FILE_BYTES:
                    self.file(file, prefix + inside, whole=True)

    def file(self, file: BufferedReader, path: str, *, whole: bool = False) -> None:
        """Searches one file line by line. `whole` first looks whether it is worth it, for which it loads the file."""
        if looks_binary(file.peek(_HEAD)):
            return
        if whole:
            data = file.read(MAX_FILE_BYTES).replace(b"\r\n", b"\n")
            text = data.decode("utf-8", "replace").removeprefix("\ufeff")
            if "\r" not in text and not self._pattern.may_match(text):
                return
            file.seek(0)
        before: deque[str] = deque(maxlen=self._around)
        open_ended: list[list[str]] = []
        for number, line in enumerate(self._lines(file), 1):
            self._call.check_canceled()
            shown_line = self._shorten(line, 0) if self._around else ""
            for after in open_ended:
                after.append(shown_line)
                self._room -= len(shown_line)
            open_ended = [after for after in open_ended if len(after) < self._around]
            found = None if self._full else self._find(line, path, number)
            if found is not None and self._has_room():
                match = self._keep(path, number, self._shorten(line, found.start()))
                if self._around:
                    match["before"] = [*before]
                    match["after"] = after = list[str]()
                    open_ended.append(after)
                    self._room -= sum(map(len, before))
            if self._full and not open_ended:
                return
            before.append(shown_line)

    def _has_room(self) -> bool:
        self._full = len(self._matches) >= MAX_MATCHES or self._room <= 0
        return not self._full

    def _keep(self, path: str, number: int, text: str) -> dict[str, Any]:
        match: dict[str, Any] = {"path": display_name(path), "line": number, "text": text}
        self._matches.append(match)
        self._room -= len(text)
        return match

    def _find(self, line: str, path: str, number: int) -> MatchSpan | None:
        try:
            return self._pattern.search(line)
        except PatternTooSlow as error:
            self._slow += 1
            if len(line) > _LONG_LINE and self._slow <= _SLOW_LINES:
                # A whole program on one line is slow for patterns that are fine elsewhere.
                self._incomplete = True
                return None
            raise ToolExecutionError(f"{error} (line {number} of {display_name(path)!r})") from None

    def _lines(self, file: BufferedReader) -> Iterator[str]:
        first = True
        while raw := file.readline(_LINE_IN_MEMORY):
            rest = raw
            while len(rest) == _LINE_IN_MEMORY and not rest.endswith(b"\n"):
                self._incomplete = True
                self._call.check_canceled()
                rest = file.readline(_LINE_IN_MEMORY)
            line = raw.rstrip(b"\r\n").decode("utf-8", "replace")
            yield line.removeprefix("\ufeff") if first else line
            first = False

    @staticmethod
    def _shorten(line: str, at: int) -> str:
        """The part of a long line around a position."""
        if len(line) <= MAX_LINE_LENGTH:
            return line
        start = max(0, min(at - MAX_LINE_LENGTH // 4, len(line) - MAX_LINE_LENGTH))
        end = start + MAX_LINE_LENGTH
        return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")


def _ignore_files_above(bounds: AllowedPaths, place: FileLocation) -> list[IgnoreFile]:
    """The rules of the folders around the one to search, from the top of its repository on."""
    found: list[IgnoreFile] = []
    if _has_git(place.folder_fd, f"{place.name}/.git"):
        return found
    for folder, path in bounds.folders_above(place):
        if _has_git(folder, ".git"):
            found.clear()
        rules = read_ignore_file(folder, path)
        if rules is not None:
            found.append(rules)
    return found


def _has_git(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True

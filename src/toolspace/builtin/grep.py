"""The tool `grep_files`, and globs such as `*.ts`, `src/**/*.py` and `*.{js,jsx}`, which `files` uses too.

It skips binary files, files that `.gitignore` files ignore, and very large files.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from io import BufferedReader
from typing import Any, NamedTuple

from toolspace.builtin.allowed_paths import (
    AllowedPaths,
    FileLocation,
    FolderVisit,
    display_name,
    file_kind,
    open_file,
    path_prefix,
    walk_folder,
)
from toolspace.builtin.file_io import is_binary
from toolspace.core.safe_regex import MatchSpan, PatternTooSlow, SafePattern
from toolspace.core.tool import Annotations, tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolExecutionError, ToolValidationError

MAX_MATCHES = 500
MAX_MATCH_CHARACTERS = 200_000
"""The maximum number of characters of all matches together."""
MAX_FILE_BYTES = 10 * 1024 * 1024
"""Larger files are skipped, unless `path` names the file itself."""
MAX_LINE_LENGTH = 500
"""Longer lines are shortened."""
_MAX_CONTEXT_LINES = 50
_MAX_LINE_BYTES = 1024 * 1024
_LONG_LINE = 10_000
_MAX_SLOW_LINES = 3
_HEAD_BYTES = 8192
_IGNORE_FILE_NAME = ".gitignore"
_MAX_IGNORE_FILE_BYTES = 256 * 1024
_MAX_IGNORE_LINES = 2_000
"""Further lines of a `.gitignore` are not read: every rule is compared with every file below it."""
_MAX_IGNORE_RULES = 5_000
"""The maximum number of rules that apply to one folder, its own first."""
_MAX_ALTERNATIVES = 64
_MAX_GLOB_LENGTH = 1000
_INNERMOST_BRACES = re.compile(r"\{((?:[^{},]|\{[^{},]*\})*+(?:,(?:[^{},]|\{[^{},]*\})*+)++)\}")
"""Choices between commas. A choice may contain braces without a comma, which are ordinary characters."""


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
    """Searches files for lines that match a regular expression. Skips binary files and files that .gitignore ignores.

    Args:
        pattern: A Python regular expression.
        path: The folder or file to search; without it, everything that may be read.
        glob: Search only files that match, such as *.ts or src/**/*.py.
        context: The number of lines to show before and after each match.
        ignoreCase: Whether to ignore upper and lower case.
    """
    if not 0 <= context <= _MAX_CONTEXT_LINES:
        raise ToolValidationError(f"context: expected 0 to {_MAX_CONTEXT_LINES} lines, got {context}")
    compiled_glob = Glob(glob, "glob") if glob else None
    allowed_paths = AllowedPaths.from_context(call)
    search = _Search(SafePattern(pattern, ignore_case=ignoreCase), compiled_glob, context, call, allowed_paths)
    for start in [path] if path is not None else allowed_paths.search_roots():
        _search_from(start, allowed_paths, search)
    return search.result()


def _search_from(path: str, allowed_paths: AllowedPaths, search: _Search) -> None:
    with allowed_paths.locate(path) as location:
        status = location.get_status()
        if stat.S_ISREG(status.st_mode):
            with location.open() as file:
                search.search_file(file, path)
        elif stat.S_ISDIR(status.st_mode):
            search.search_folder(location, _read_rules_above(allowed_paths, location))
        else:
            raise ToolExecutionError(f"{path!r} is a {file_kind(status)}; only regular files are searched")


class _Search:
    """One search and its matches."""

    def __init__(
        self,
        pattern: SafePattern,
        glob: Glob | None,
        context_lines: int,
        call: ToolContext,
        allowed_paths: AllowedPaths,
    ) -> None:
        self._pattern = pattern
        self._glob = glob
        self._context_lines = context_lines
        self._call = call
        self._allowed_paths = allowed_paths
        self._matches: list[dict[str, Any]] = []
        self._remaining_characters = MAX_MATCH_CHARACTERS
        self._slow_lines = 0
        self._is_full = False
        self._is_incomplete = False

    def result(self) -> dict[str, Any]:
        matches = sorted(self._matches, key=lambda match: (match["path"].split("/"), match["line"]))
        return {"matches": matches, "truncated": self._is_full or self._is_incomplete}

    def search_folder(self, location: FileLocation, rules_above: list[IgnoreRule]) -> None:
        """Searches the files of a folder and of the folders below it."""
        prefix, root = path_prefix(location.path), location.real_path.rstrip("/")
        rules_by_folder = {"": rules_above}
        with location.open_folder() as folder_fd, closing(walk_folder(folder_fd, self._call)) as visits:
            for visit in visits:
                folder = f"{root}/{visit.path}" if visit.path else root
                rules = [*rules_by_folder.pop(visit.path), *_read_rules(visit.folder_fd, folder)][-_MAX_IGNORE_RULES:]
                for entry in visit.entries:
                    self._call.check_canceled()
                    is_folder = entry.is_dir(follow_symlinks=False)
                    real_path = f"{folder}/{entry.name}"
                    if entry.name == ".git" or _is_ignored(real_path, rules, is_folder=is_folder):
                        continue
                    if self._allowed_paths.is_private(real_path):
                        continue
                    entry_path = visit.entry_path(entry.name)
                    if not is_folder:
                        self._search_entry(visit, entry.name, prefix)
                    elif self._glob is None or self._glob.can_match_below(entry_path):
                        rules_by_folder[entry_path] = rules
                        visit.pending_folders.append(entry_path)
                    if self._is_full:
                        return

    def _search_entry(self, visit: FolderVisit, name: str, prefix: str) -> None:
        entry_path = visit.entry_path(name)
        if self._glob is not None and not self._glob.matches(entry_path):
            return
        file = open_file(visit.folder_fd, name)
        if file is not None:
            with file:
                status = os.fstat(file.fileno())
                if status.st_size <= MAX_FILE_BYTES and not self._allowed_paths.is_private_file(status):
                    self.search_file(file, prefix + entry_path, is_small=True)

    def search_file(self, file: BufferedReader, path: str, *, is_small: bool = False) -> None:
        """Searches one file line by line. A small file is first loaded and searched as a whole, which is faster."""
        if is_binary(file.peek(_HEAD_BYTES)):
            return
        if is_small:
            data = file.read(MAX_FILE_BYTES).replace(b"\r\n", b"\n")
            text = data.decode("utf-8", "replace").removeprefix("\ufeff")
            if "\r" not in text and not self._pattern.may_match(text):
                return
            file.seek(0)
        lines_before: deque[str] = deque(maxlen=self._context_lines)
        unfinished_contexts: list[list[str]] = []
        for number, line in enumerate(self._read_lines(file), 1):
            self._call.check_canceled()
            context_line = _shorten(line, 0) if self._context_lines else ""
            for lines_after in unfinished_contexts:
                lines_after.append(context_line)
                self._remaining_characters -= len(context_line)
            unfinished_contexts = [lines for lines in unfinished_contexts if len(lines) < self._context_lines]
            span = None if self._is_full else self._find_match(line, path, number)
            if span is not None:
                self._is_full = len(self._matches) >= MAX_MATCHES or self._remaining_characters <= 0
            if span is not None and not self._is_full:
                text = _shorten(line, span.start())
                match: dict[str, Any] = {"path": display_name(path), "line": number, "text": text}
                self._matches.append(match)
                self._remaining_characters -= len(text)
                if self._context_lines:
                    match["before"] = [*lines_before]
                    match["after"] = lines_after = list[str]()
                    unfinished_contexts.append(lines_after)
                    self._remaining_characters -= sum(map(len, lines_before))
            if self._is_full and not unfinished_contexts:
                return
            lines_before.append(context_line)

    def _find_match(self, line: str, path: str, number: int) -> MatchSpan | None:
        try:
            return self._pattern.search(line)
        except PatternTooSlow as error:
            self._slow_lines += 1
            if len(line) > _LONG_LINE and self._slow_lines <= _MAX_SLOW_LINES:
                # A minified program on one line is slow for patterns that are fine elsewhere.
                self._is_incomplete = True
                return None
            raise ToolExecutionError(f"{error} (line {number} of {display_name(path)!r})") from None

    def _read_lines(self, file: BufferedReader) -> Iterator[str]:
        is_first = True
        while data := file.readline(_MAX_LINE_BYTES):
            rest = data
            while len(rest) == _MAX_LINE_BYTES and not rest.endswith(b"\n"):
                self._is_incomplete = True
                self._call.check_canceled()
                rest = file.readline(_MAX_LINE_BYTES)
            line = data.rstrip(b"\r\n").decode("utf-8", "replace")
            yield line.removeprefix("\ufeff") if is_first else line
            is_first = False


def _shorten(line: str, position: int) -> str:
    """The part of a long line around a position."""
    if len(line) <= MAX_LINE_LENGTH:
        return line
    start = max(0, min(position - MAX_LINE_LENGTH // 4, len(line) - MAX_LINE_LENGTH))
    end = start + MAX_LINE_LENGTH
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")


# Ignored files


class IgnoreRule(NamedTuple):
    """One line of a `.gitignore`. It applies to everything below the folder of that file."""

    folder: str
    """An absolute path without a slash at its end."""
    pattern: PathPattern
    is_negated: bool
    folders_only: bool
    is_anchored: bool
    """Whether it matches the path from the folder of the file, instead of the name."""

    def matches(self, path: str, *, is_folder: bool) -> bool:
        """Whether it matches an absolute path."""
        if self.folders_only and not is_folder:
            return False
        parts = path[len(self.folder) + 1 :].split("/")
        return self.pattern.matches(parts if self.is_anchored else parts[-1:])


def _is_ignored(path: str, rules: Sequence[IgnoreRule], *, is_folder: bool) -> bool:
    """Whether an absolute path is ignored. The last rule that matches decides; those of inner folders come last."""
    rule = next((rule for rule in reversed(rules) if rule.matches(path, is_folder=is_folder)), None)
    return rule is not None and not rule.is_negated


def _read_rules_above(allowed_paths: AllowedPaths, location: FileLocation) -> list[IgnoreRule]:
    """The rules of the folders above a location, from the root of its repository on."""
    rules: list[IgnoreRule] = []
    if _has_entry(location.folder_fd, f"{location.name}/.git"):
        return rules
    for folder_fd, path in allowed_paths.folders_above(location):
        if _has_entry(folder_fd, ".git"):
            rules.clear()
        rules += _read_rules(folder_fd, path)
    return rules


def _has_entry(folder_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def _read_rules(folder_fd: int, path: str) -> list[IgnoreRule]:
    """The rules in the `.gitignore` of an open folder, if it has one."""
    file = open_file(folder_fd, _IGNORE_FILE_NAME)
    if file is None:
        return []
    with file:
        text = file.read(_MAX_IGNORE_FILE_BYTES).decode("utf-8", "replace")
    lines = text.removeprefix("\ufeff").split("\n", _MAX_IGNORE_LINES)[:_MAX_IGNORE_LINES]
    rules = (_parse_rule(line, path.rstrip("/")) for line in lines if len(line) <= _MAX_GLOB_LENGTH)
    return [rule for rule in rules if rule is not None]


def _parse_rule(line: str, folder: str) -> IgnoreRule | None:
    line = _strip_trailing_spaces(line.removesuffix("\r"))
    if line.startswith("#"):
        return None
    is_negated, folders_only = line.startswith("!"), line.endswith("/")
    line = line.removeprefix("!").rstrip("/")
    return IgnoreRule(folder, PathPattern(line), is_negated, folders_only, is_anchored="/" in line) if line else None


def _strip_trailing_spaces(line: str) -> str:
    """Removes trailing spaces, except one that a backslash escapes."""
    stripped_line = line.rstrip(" ")
    backslashes = len(stripped_line) - len(stripped_line.rstrip("\\"))
    return stripped_line + " " if len(stripped_line) < len(line) and backslashes % 2 else stripped_line


# Globs


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
        braces = _INNERMOST_BRACES.search(text)
        if braces is None:
            globs.append(text)
        else:
            pending_globs += [text[: braces.start()] + choice + text[braces.end() :] for choice in braces[1].split(",")]
        if len(pending_globs) + len(globs) > _MAX_ALTERNATIVES:
            raise ToolValidationError(
                f"{parameter}: {pattern[:60]!r} stands for more than {_MAX_ALTERNATIVES} globs; use fewer braces"
            )
    return globs

"""Walks through a folder and what is below it, from open folder to open folder. Follows no link."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator
from typing import NamedTuple

from toolspace.builtin.paths import enter
from toolspace.core.context import ToolContext


class Visit(NamedTuple):
    """One folder of a walk; open until the next one is asked for."""

    folder: int
    path: str
    """Relative to where the walk began; empty there."""
    entries: list[os.DirEntry[str]]
    """Sorted by name."""
    ahead: deque[str]
    """Folders still to visit. The visitor adds those that are worth it."""

    def inside(self, name: str) -> str:
        """The path of an entry."""
        return f"{self.path}/{name}" if self.path else name


def walk(start: int, context: ToolContext) -> Generator[Visit]:
    """Visits a folder, then those that the visitor added to `ahead`, the nearest first.

    Only one folder besides the first is open at a time, however deep the tree. A folder that vanished, was replaced
    by a link or cannot be read is left out.
    """
    ahead: deque[str] = deque([""])
    while ahead:
        context.check_canceled()
        path = ahead.popleft()
        folder = os.dup(start) if not path else _enter(start, path)
        if folder is None:
            continue
        try:
            entries = _entries(folder, optional=bool(path))
            if entries is not None:
                yield Visit(folder, path, entries, ahead)
        finally:
            os.close(folder)


def prefix_of(path: str) -> str:
    """What to put before a path inside a folder, so that the other file tools find it."""
    plain = path.removeprefix("./").rstrip("/")
    if plain in ("", "."):
        return "/" if path.startswith("/") else ""
    return plain + "/"


def _enter(start: int, path: str) -> int | None:
    try:
        return enter(os.dup(start), path.split("/"))
    except OSError:
        return None


def _entries(folder: int, *, optional: bool) -> list[os.DirEntry[str]] | None:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=_name)
    except OSError:
        if optional:
            return None
        raise


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name

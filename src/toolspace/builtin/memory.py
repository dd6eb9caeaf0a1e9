"""The memory tools: an agent's notes as markdown files in its memory folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import Any

from toolspace.builtin import text_files
from toolspace.builtin.allowed_paths import (
    AllowedPaths,
    FileLocation,
    FileMissingError,
    display_name,
    open_file,
    walk_folder,
)
from toolspace.builtin.atomic_files import folder_lock, replace_file
from toolspace.builtin.files import replace_single
from toolspace.core.context import ToolContext
from toolspace.core.function_tool import tool
from toolspace.core.tool import Annotations
from toolspace.errors import ToolValidationError

MOST_FILES = 5000
"""How many files `memory_list` gives at most."""
_HEAD = 64 * 1024
_SUMMARY = re.compile(r"^[ ]{0,3}>[ \t]*Summary:[ \t]*(.*?)[ \t\r]*$", re.IGNORECASE | re.MULTILINE)
_TITLE = re.compile(r"\s*#{1,6}[ \t][^\n]*(?:\n|$)")

_READS = Annotations(read_only=True, idempotent=True, open_world=False)


@tool(category="memory", annotations=_READS)
def memory_list(*, context: ToolContext) -> list[dict[str, Any]]:
    """Lists the memory files with their summaries."""
    found: list[dict[str, Any]] = []
    root = _memory_dir(context)
    try:
        with (
            _bounds(root).locate(root) as place,
            place.open_folder() as folder,
            closing(walk_folder(folder, context)) as visits,
        ):
            for visit in visits:
                for entry in visit.entries:
                    inside = visit.entry_path(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        visit.pending_folders.append(inside)
                    elif entry.name.lower().endswith(".md") and len(found) < MOST_FILES:
                        found += _describe(visit.folder_fd, entry.name, inside)
    except FileMissingError:
        return []  # Nothing was ever remembered.
    return sorted(found, key=lambda item: item["path"].split("/"))


@tool(category="memory", annotations=_READS)
def memory_read(path: str, *, context: ToolContext) -> str:
    """Reads a memory file.

    Args:
        path: Such as facts/user.md.
    """
    with _find(path, context) as place:
        return _read(place)


@tool(
    category="memory",
    annotations=Annotations(read_only=False, destructive=True, idempotent=True, open_world=False),
)
def memory_write(path: str, content: str, *, context: ToolContext) -> dict[str, Any]:
    """Writes a whole memory file, replacing what was there.

    Args:
        path: Such as facts/user.md or episodes/2026-01-31.md.
        content: Markdown. A line "> Summary: …" is shown by memory_list.
    """
    return _change(path, lambda _: content, context, create=True)


@tool(category="memory", annotations=Annotations(read_only=False, destructive=True, open_world=False))
def memory_patch(path: str, old_str: str, new_str: str, *, context: ToolContext) -> dict[str, Any]:
    """Replaces a piece of text in a memory file.

    Args:
        path: Such as facts/user.md.
        old_str: Exact text that occurs once in the file.
        new_str: The text in its place.
    """
    if not old_str:
        raise ToolValidationError("old_str: it is empty; give the text to replace")

    def patch(text: str | None) -> str:
        return replace_single(text or "", old_str, new_str, parameter="old_str", path=path)

    return _change(path, patch, context)


@tool(category="memory", annotations=Annotations(read_only=False, destructive=False, open_world=False))
def memory_append(path: str, entry: str, summary: str | None = None, *, context: ToolContext) -> dict[str, Any]:
    """Adds an entry at the end of a memory file, which is made if it is missing.

    Args:
        path: Such as episodes/2026-01-31.md.
        entry: Markdown to add.
        summary: New text for the file's summary line.
    """
    if not entry.strip() and not summary:
        raise ToolValidationError("entry: it is empty; give the text to add")
    return _change(path, lambda text: _appended(text or "", entry, summary), context, create=True)


memory_tools = (memory_list, memory_read, memory_write, memory_patch, memory_append)


def _memory_dir(context: ToolContext) -> str:
    return os.path.abspath(os.path.expanduser(context.memory_dir or os.path.join(".toolspace", "memory")))


def _bounds(root: str) -> AllowedPaths:
    return AllowedPaths([root], base=root, setting="memoryDir")


@contextmanager
def _find(path: str, context: ToolContext, *, create: bool = False) -> Generator[FileLocation]:
    if not path.lower().endswith(".md"):
        raise ToolValidationError(f"path: {path[:80]!r} is no markdown file; memory files end with .md: facts/user.md")
    try:
        with _bounds(_memory_dir(context)).locate(path, create=create) as place:
            yield place
    except FileMissingError:
        raise FileMissingError(f"{path!r} not found in the memory; memory_list shows what is there") from None


def _change(
    path: str, change: Callable[[str | None], str], context: ToolContext, *, create: bool = False
) -> dict[str, Any]:
    """Changes a file while nobody else does. `change` gets None where there is none yet."""
    with _find(path, context, create=create) as place, folder_lock(place, context):
        before = None if create and place.status() is None else _read(place)
        data = text_files.encode_text(change(before), "utf-8")
        context.check_canceled()
        size = replace_file(place, [data])
        root = os.path.realpath(_memory_dir(context))
        return {"path": display_name(os.path.relpath(place.real_path, root)), "size": size}


def _read(place: FileLocation) -> str:
    with place.open() as file:
        data = text_files.read_all(file, place.path, os.fstat(file.fileno()).st_size)
    return text_files.decode_text(data, place.path)


def _describe(folder: int, name: str, path: str) -> list[dict[str, Any]]:
    file = open_file(folder, name)
    if file is None:
        return []
    with file:
        found = _SUMMARY.search(file.read(_HEAD).decode("utf-8", "replace"))
        size = os.fstat(file.fileno()).st_size
    return [{"path": display_name(path), "summary": found[1] if found and found[1] else None, "size": size}]


def _appended(text: str, entry: str, summary: str | None) -> str:
    """The text with the entry after exactly one line end, and with one summary line at most."""
    head, tail = text.rstrip("\r\n"), entry.strip("\r\n")
    joined = "\n".join(part for part in (head, tail) if part.strip())
    return _with_summary(joined + "\n", summary)


def _with_summary(text: str, summary: str | None) -> str:
    line = None if summary is None else f"> Summary: {' '.join(summary.split())}"
    kept: list[str] = []
    seen = False
    for one in text.split("\n"):
        if _SUMMARY.fullmatch(one) is None:
            kept.append(one)
        elif not seen:
            kept.append(one if line is None else line)
            seen = True
    text = "\n".join(kept)
    if line is None or seen:
        return text
    title = _TITLE.match(text)
    head, rest = (text[: title.end()], text[title.end() :]) if title else ("", text)
    # A blank line, or the text that follows would belong to the quotation.
    gap = "" if not rest.strip() or rest.startswith(("\n", "\r")) else "\n"
    return f"{head}{line}\n{gap}{rest}"

"""The memory tools: an agent's notes as markdown files in its memory folder (`memoryDir`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import Any

from toolspace.builtin import file_io
from toolspace.builtin.allowed_paths import (
    AllowedPaths,
    FileLocation,
    FileMissingError,
    OutsideAllowedPaths,
    display_name,
    open_file,
    walk_folder,
)
from toolspace.builtin.file_io import folder_lock, replace_file
from toolspace.builtin.files import replace_single
from toolspace.builtin.forbidden_paths import is_inside
from toolspace.core.tool import Annotations, tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolPermissionError, ToolValidationError

MAX_MEMORY_FILES = 5000
"""The maximum number of files that `memory_list` returns."""
_HEAD_BYTES = 64 * 1024
_SUMMARY_LINE = re.compile(r"^[ ]{0,3}>[ \t]*Summary:[ \t]*(.*?)[ \t\r]*$", re.IGNORECASE | re.MULTILINE)
_TITLE = re.compile(r"\s*#{1,6}[ \t][^\n]*(?:\n|$)")

_READS = Annotations(read_only=True, idempotent=True, open_world=False)


@tool(category="memory", annotations=_READS)
def memory_list(*, context: ToolContext) -> list[dict[str, Any]]:
    """Lists the memory files with their summaries."""
    files: list[dict[str, Any]] = []
    allowed_paths, root = _memory_root(context)
    try:
        with (
            allowed_paths.locate(root) as location,
            location.open_folder() as folder_fd,
            closing(walk_folder(folder_fd, context)) as visits,
        ):
            for visit in visits:
                for entry in visit.entries:
                    entry_path = visit.entry_path(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        visit.pending_folders.append(entry_path)
                    elif entry.name.lower().endswith(".md") and len(files) < MAX_MEMORY_FILES:
                        files += _describe_file(visit.folder_fd, entry.name, entry_path)
    except FileMissingError:
        return []  # The first write creates the folder.
    return sorted(files, key=lambda file: file["path"].split("/"))


@tool(category="memory", annotations=_READS)
def memory_read(path: str, *, context: ToolContext) -> str:
    """Reads a memory file.

    Args:
        path: Such as facts/user.md.
    """
    with _locate(path, context) as location:
        return file_io.read_text(location)


@tool(category="memory", annotations=Annotations(read_only=False, destructive=True, idempotent=True, open_world=False))
def memory_write(path: str, content: str, *, context: ToolContext) -> dict[str, Any]:
    """Writes a whole memory file and replaces its previous content.

    Args:
        path: Such as facts/user.md or episodes/2026-01-31.md.
        content: Markdown. memory_list shows the text of a line "> Summary: …".
    """
    return _change(path, lambda _: content, context, create=True)


@tool(category="memory", annotations=Annotations(read_only=False, destructive=True, open_world=False))
def memory_patch(path: str, old_str: str, new_str: str, *, context: ToolContext) -> dict[str, Any]:
    """Replaces a piece of text in a memory file.

    Args:
        path: Such as facts/user.md.
        old_str: The exact text to replace. It must occur once in the file.
        new_str: The replacement.
    """
    if not old_str:
        raise ToolValidationError("old_str: it is empty; give the text to replace")

    def patch(text: str | None) -> str:
        return replace_single(text or "", old_str, new_str, parameter="old_str", path=path)

    return _change(path, patch, context)


@tool(category="memory", annotations=Annotations(read_only=False, destructive=False, open_world=False))
def memory_append(path: str, entry: str, summary: str | None = None, *, context: ToolContext) -> dict[str, Any]:
    """Appends an entry to a memory file. Creates the file if it is missing.

    Args:
        path: Such as episodes/2026-01-31.md.
        entry: The markdown to append.
        summary: A new text for the summary line of the file.
    """
    if not entry.strip() and not summary:
        raise ToolValidationError("entry: it is empty; give the text to add")
    return _change(path, lambda text: _append(text or "", entry, summary), context, create=True)


memory_tools = (memory_list, memory_read, memory_write, memory_patch, memory_append)


def _memory_root(context: ToolContext) -> tuple[AllowedPaths, str]:
    """The memory folder: the only allowed path, and its name."""
    root = os.path.abspath(os.path.expanduser(context.memory_dir or os.path.join(".toolspace", "memory")))
    private_paths = context.private_paths or ()
    return AllowedPaths([root], base=root, setting="memoryDir", private_paths=private_paths), root


@contextmanager
def _locate(path: str, context: ToolContext, *, create: bool = False) -> Generator[FileLocation]:
    root = os.path.abspath(_memory_root(context)[1])
    full_path = os.path.normpath(os.path.join(root, path))
    if not any(is_inside(full_path, folder) for folder in (root, os.path.realpath(root))):
        raise _escape_error(path)
    if not path.lower().endswith(".md"):
        raise ToolValidationError(
            f"path: {path[:80]!r} is not a markdown file; memory files end with .md, such as facts/user.md"
        )
    try:
        with _memory_root(context)[0].locate(path, create=create) as location:
            yield location
    except OutsideAllowedPaths:  # A symbolic link leads outside.
        raise _escape_error(path) from None
    except FileMissingError:
        raise FileMissingError(f"{path!r} not found in the memory; use memory_list to see what exists") from None


def _escape_error(path: str) -> ToolPermissionError:
    return ToolPermissionError(f'Path "{path}" escapes memory directory')


def _change(
    path: str, change: Callable[[str | None], str], context: ToolContext, *, create: bool = False
) -> dict[str, Any]:
    """Changes a file under the folder lock. `change` gets the previous text, or None if there is no file."""
    with _locate(path, context, create=create) as location, folder_lock(location, context):
        is_new = create and location.find_status() is None
        previous_text = None if is_new else file_io.read_text(location)
        data = file_io.encode_text(change(previous_text), "utf-8")
        context.check_canceled()
        size = replace_file(location, [data])
        root = os.path.realpath(_memory_root(context)[1])
        return {"path": display_name(os.path.relpath(location.real_path, root)), "size": size}


def _describe_file(folder_fd: int, name: str, path: str) -> list[dict[str, Any]]:
    file = open_file(folder_fd, name)
    if file is None:
        return []
    with file:
        match = _SUMMARY_LINE.search(file.read(_HEAD_BYTES).decode("utf-8", "replace"))
        size = os.fstat(file.fileno()).st_size
    return [{"path": display_name(path), "summary": match[1] if match and match[1] else None, "size": size}]


def _append(text: str, entry: str, summary: str | None) -> str:
    """The text with the entry on a new line, and with at most one summary line."""
    head, tail = text.rstrip("\r\n"), entry.strip("\r\n")
    joined_text = "\n".join(part for part in (head, tail) if part.strip())
    return _set_summary(joined_text + "\n", summary)


def _set_summary(text: str, summary: str | None) -> str:
    """Replaces the first summary line, or adds one below the title; removes the other summary lines."""
    summary_line = None if summary is None else f"> Summary: {' '.join(summary.split())}"
    lines: list[str] = []
    has_summary = False
    for line in text.split("\n"):
        if _SUMMARY_LINE.fullmatch(line) is None:
            lines.append(line)
        elif not has_summary:
            lines.append(line if summary_line is None else summary_line)
            has_summary = True
    text = "\n".join(lines)
    if summary_line is None or has_summary:
        return text
    title = _TITLE.match(text)
    head, rest = (text[: title.end()], text[title.end() :]) if title else ("", text)
    # An empty line, because markdown would otherwise add the following text to the quotation.
    gap = "" if not rest.strip() or rest.startswith(("\n", "\r")) else "\n"
    return f"{head}{summary_line}\n{gap}{rest}"

"""The tool that edits a file: exact text for exact text, all edits or none."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict

from toolspace.builtin import atomic_files, text_files
from toolspace.builtin.allowed_paths import (
    AllowedPaths,
    FileLocation,
    FileMissingError,
    FolderVisit,
    display_name,
    file_kind,
    missing_error,
    path_prefix,
    walk_folder,
)
from toolspace.builtin.atomic_files import folder_lock, replace_file
from toolspace.builtin.data import decode_base64
from toolspace.builtin.globs import Glob
from toolspace.builtin.grep import grep_files
from toolspace.core.context import ToolContext
from toolspace.core.function_tool import tool
from toolspace.core.tool import Annotations
from toolspace.errors import ToolExecutionError, ToolValidationError

_MOST_COUNTED = 1000


class TextReplacement(TypedDict):
    """One replacement."""

    old: str
    new: str
    replaceAll: NotRequired[bool]


# A raw schema keeps the shape of an edit in its place; from the hints it would be a reference, which costs more
# tokens and which some models cannot follow.
@tool(
    category="file",
    annotations=Annotations(read_only=False, destructive=True, idempotent=False, open_world=False),
    input_schema={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The file."},
            "edits": {
                "type": "array",
                "minItems": 1,
                "description": "Applied in order, each to the result of the one before.",
                "items": {
                    "type": "object",
                    "properties": {
                        "old": {"type": "string", "description": "Exact text in the file; must occur once."},
                        "new": {"type": "string", "description": "The text in its place."},
                        "replaceAll": {
                            "type": "boolean",
                            "description": "Whether to replace every occurrence.",
                            "default": False,
                        },
                    },
                    "required": ["old", "new"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["path", "edits"],
        "additionalProperties": False,
    },
)
def edit_file(path: str, edits: Sequence[TextReplacement], *, context: ToolContext) -> dict[str, Any]:
    """Replaces exact text in a file. Applies all edits or, if one does not fit, none."""
    if not edits:
        raise ToolValidationError("edits: it is empty; give at least one {old, new}")
    with AllowedPaths.from_context(context).locate(path, write=True) as place, folder_lock(place, context):
        with place.open() as file:
            text = text_files.decode_text(text_files.read_all(file, path, os.fstat(file.fileno()).st_size), path)
        windows = "\r\n" in text and text.count("\n") == text.count("\r\n")
        for index, edit in enumerate(edits):
            context.check_canceled()
            text = _apply(text, edit, f"edits[{index}]", path, windows)
        replace_file(place, [text_files.encode_text(text, "utf-8")])
    return {"applied": len(edits)}


def _apply(text: str, edit: TextReplacement, which: str, path: str, windows: bool) -> str:
    old, new = edit["old"], edit["new"]
    if not old:
        raise ToolValidationError(f"{which}.old: it is empty; give the text to replace")
    if windows and "\r" not in old + new:
        # Every line of the file ends with \r\n. An edit that knows only \n means the same line ends.
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    if edit.get("replaceAll", False):
        count = text.count(old)
        if count == 0:
            raise _absent(which, path)
        if len(text) + count * (len(new) - len(old)) > text_files.MAX_TEXT_BYTES:
            raise ToolValidationError(f"{which}: {path!r} would grow beyond {text_files.MAX_TEXT_BYTES:,} characters")
        return text.replace(old, new)
    return replace_single(text, old, new, parameter=f"{which}.old", path=path, way_out=" or set replaceAll")


def replace_single(text: str, old: str, new: str, *, parameter: str, path: str, way_out: str = "") -> str:
    """The text with its only occurrence of `old` replaced. Raises where there is none, or more than one."""
    at = text.find(old)
    if at < 0:
        raise _absent(parameter, path)
    count = _count(text, old, at)
    if count > 1:
        number = f"{count}" if count < _MOST_COUNTED else f"{_MOST_COUNTED} or more"
        raise ToolValidationError(
            f"{parameter}: the text occurs {number} times in {path!r}; give more of the text around it{way_out}. "
            "Nothing was changed"
        )
    return text[:at] + new + text[at + len(old) :]


def _count(text: str, old: str, first: int) -> int:
    """How often the text occurs, overlaps included: `aa` fits into `aaa` at two places."""
    count, at = 0, first
    while at >= 0 and count < _MOST_COUNTED:
        count += 1
        at = text.find(old, at + 1)
    return count


def _absent(parameter: str, path: str) -> ToolValidationError:
    return ToolValidationError(
        f"{parameter}: the text occurs 0 times in {path!r} (not found); copy it exactly, spaces and line ends "
        "included. Nothing was changed"
    )


# MERGED from files: The file tools: read, write, list, delete, move, and what is known of a file. All inside the a…

MAX_ENTRIES = 5000
"""How many entries `list_files` gives at most."""

_READS = Annotations(read_only=True, idempotent=True, open_world=False)


@tool(category="file", annotations=_READS)
def read_file(
    path: str,
    encoding: str = "utf-8",
    offset: int | None = None,
    limit: int | None = None,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Reads a file, or some lines of it. `totalLines` counts the whole file.

    Args:
        path: The file.
        encoding: A text encoding, or base64 for binary files.
        offset: First line to read, counted from 1.
        limit: Number of lines to read.
    """
    for name, value in (("offset", offset), ("limit", limit)):
        if value is not None and value < 0:
            raise ToolValidationError(f"{name}: expected a number of lines from 0 up, got {value}")
    binary = encoding.lower() == "base64"
    if binary and (offset is not None or limit is not None):
        raise ToolValidationError("offset and limit count lines of text; leave them out with encoding base64")
    codec = "" if binary else text_files.check_encoding(encoding)
    with AllowedPaths.from_context(context).locate(path) as place, place.open() as file:
        size = os.fstat(file.fileno()).st_size
        if binary:
            data = text_files.read_all(file, path, size)
            lines = data.count(b"\n") + (data[-1:] not in (b"\n", b""))
            return {"content": base64.b64encode(data).decode("ascii"), "size": size, "totalLines": lines}
        if offset is None and limit is None and size > text_files.MAX_TEXT_BYTES:
            raise text_files.too_large_error(path, f"it has {size:,} bytes, so read it in parts with offset and limit")
        first = max(offset or 1, 1) - 1
        window = text_files.read_lines(file, path, codec, first=first, count=limit, check=context.check_canceled)
        return {"content": window.content, "size": size, "totalLines": window.total_lines}


@tool(
    category="file",
    annotations=Annotations(read_only=False, destructive=True, idempotent=True, open_world=False),
)
def write_file(path: str, content: str, encoding: str = "utf-8", *, context: ToolContext) -> dict[str, Any]:
    """Writes a whole file, replacing what was there. Makes missing folders.

    Args:
        path: The file.
        content: Everything it shall hold.
        encoding: A text encoding, or base64 where content is base64 of binary data.
    """
    if encoding.lower() == "base64":
        data = decode_base64(content, "content")
    else:
        data = text_files.encode_text(content, text_files.check_encoding(encoding))
    _check_names_file("path", path)
    with (
        AllowedPaths.from_context(context).locate(path, create=True, write=True) as place,
        folder_lock(place, context),
    ):
        context.check_canceled()
        return {"bytesWritten": replace_file(place, [data])}


@tool(category="file", annotations=_READS)
def list_files(
    path: str, recursive: bool = False, pattern: str | None = None, *, context: ToolContext
) -> dict[str, Any]:
    """Lists a folder.

    Args:
        path: The folder.
        recursive: Whether to list what is in its folders too (except in .git).
        pattern: Glob such as *.ts or src/**/*.py; without a slash it is held against names.
    """
    glob = Glob(pattern, "pattern") if pattern else None
    deep = recursive or (glob is not None and glob.has_folders)
    files: list[dict[str, Any]] = []
    with AllowedPaths.from_context(context).locate(path) as place:
        _check_folder(place)
        prefix = path_prefix(path)
        with place.open_folder() as folder, closing(walk_folder(folder, context)) as visits:
            for visit in visits:
                for entry in visit.entries:
                    inside = visit.entry_path(entry.name)
                    if glob is None or glob.matches(inside):
                        info = _entry_info(entry, prefix + inside)
                        if len(files) == MAX_ENTRIES:
                            return {"files": _sorted(files), "truncated": True}
                        if info is not None:
                            files.append(info)
                    if deep:
                        _go_on(visit, entry, inside, glob)
    return {"files": _sorted(files)}


@tool(category="file", annotations=Annotations(read_only=False, destructive=True, open_world=False))
def delete_file(path: str, *, context: ToolContext) -> dict[str, Any]:
    """Deletes a file. A symbolic link is deleted itself, not what it points to.

    Args:
        path: The file; folders are refused.
    """
    with AllowedPaths.from_context(context).locate(path, follow=False, write=True) as place:
        status = place.status()
        if status is None:
            raise missing_error(path)
        if stat.S_ISDIR(status.st_mode):
            raise ToolExecutionError(f"{path!r} is a folder, not a file; folders are not deleted")
        os.unlink(place.name, dir_fd=place.folder_fd)
    return {"deleted": True}


# A raw schema, because `from` can be no parameter of a Python function.
@tool(
    category="file",
    annotations=Annotations(read_only=False, destructive=True, open_world=False),
    input_schema={
        "type": "object",
        "properties": {
            "from": {"type": "string", "description": "What to move."},
            "to": {"type": "string", "description": "The whole new path. Missing folders are made."},
            "overwrite": {
                "type": "boolean",
                "description": "Whether to replace a file that is there already.",
                "default": False,
            },
        },
        "required": ["from", "to"],
        "additionalProperties": False,
    },
)
def move_file(*, to: str, overwrite: bool = False, context: ToolContext, **others: str) -> dict[str, Any]:
    """Moves or renames a file or a folder."""
    start = others["from"]
    _check_names_file("to", to)
    bounds = AllowedPaths.from_context(context)
    with bounds.locate(start, follow=False, write=True) as source:
        atomic_files.check_source(source)
        bounds.check_movable(source)
        with bounds.locate(to, follow=False, create=True, write=True) as target:
            bounds.check_movable(target)
            atomic_files.move_path(source, target, overwrite=overwrite, context=context)
    return {"success": True}


@tool(category="file", annotations=_READS)
def get_file_info(path: str, *, context: ToolContext) -> dict[str, Any]:
    """Tells whether a file or folder exists, its size in bytes, when it was modified, and what it is.

    Args:
        path: The file or folder.
    """
    try:
        with AllowedPaths.from_context(context).locate(path) as place:
            status = place.status()
    except FileMissingError:
        status = None
    if status is None:
        return {"exists": False, "size": None, "modified": None, "type": None}
    return {"exists": True, "size": status.st_size, "modified": _modified(status), "type": file_kind(status)}


file_tools = (read_file, write_file, list_files, delete_file, move_file, get_file_info, edit_file, grep_files)


def _check_names_file(parameter: str, path: str) -> None:
    if path.endswith(("/", "/.", "/..")) or path in (".", ".."):
        raise ToolValidationError(f"{parameter}: {path[:80]!r} names a folder; add the file's name")


def _check_folder(place: FileLocation) -> None:
    status = place.status()
    if status is None:
        raise missing_error(place.path)
    if not stat.S_ISDIR(status.st_mode):
        raise ToolExecutionError(f"{place.path!r} is a {file_kind(status)}, not a folder; get_file_info tells about it")


def _go_on(visit: FolderVisit, entry: os.DirEntry[str], inside: str, glob: Glob | None) -> None:
    # Inside .git is what git keeps for itself: thousands of files that would crowd out the rest.
    if entry.name != ".git" and entry.is_dir(follow_symlinks=False) and (glob is None or glob.can_match_below(inside)):
        visit.pending_folders.append(inside)


def _entry_info(entry: os.DirEntry[str], path: str) -> dict[str, Any] | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None  # It vanished meanwhile.
    return {
        "name": display_name(entry.name),
        "path": display_name(path),
        "type": file_kind(status),
        "size": status.st_size,
        "modified": _modified(status),
    }


def _modified(status: os.stat_result) -> str | None:
    try:
        moment = datetime.fromtimestamp(status.st_mtime, UTC)
    except (ValueError, OverflowError, OSError):
        return None  # Some file systems hold times that no calendar does.
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sorted(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(files, key=_steps)


def _steps(info: dict[str, Any]) -> list[str]:
    return info["path"].split("/")

"""The file tools: read, write, list, delete, move, edit and inspect. They access only the allowed paths."""

from __future__ import annotations

import base64
import itertools
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict

from toolspace.builtin import file_io
from toolspace.builtin.allowed_paths import (
    AllowedPaths,
    FileLocation,
    FileMissingError,
    display_name,
    file_kind,
    path_prefix,
    walk_folder,
)
from toolspace.builtin.data import decode_base64
from toolspace.builtin.file_io import check_movable_kind, folder_lock, move_path, moved_folder_lock, replace_file
from toolspace.builtin.grep import Glob, grep_files
from toolspace.core.tool import Annotations, tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolExecutionError, ToolValidationError

MAX_ENTRIES = 5000
"""The maximum number of entries that `list_files` returns."""

_MAX_COUNTED_OCCURRENCES = 1000
_READS = Annotations(read_only=True, idempotent=True, open_world=False)


class TextReplacement(TypedDict):
    """One edit of `edit_file`."""

    old: str
    new: str
    replaceAll: NotRequired[bool]


@tool(category="file", annotations=_READS)
def read_file(
    path: str, encoding: str = "utf-8", offset: int | None = None, limit: int | None = None, *, context: ToolContext
) -> dict[str, Any]:
    """Reads a file, or some of its lines. `totalLines` counts the whole file.

    Args:
        path: The file.
        encoding: A text encoding, or base64 for binary files.
        offset: The first line to read, counted from 1.
        limit: The number of lines to read.
    """
    for name, value in (("offset", offset), ("limit", limit)):
        if value is not None and value < 0:
            raise ToolValidationError(f"{name}: expected 0 or more lines, got {value}")
    is_base64 = encoding.lower() == "base64"
    if is_base64 and (offset is not None or limit is not None):
        raise ToolValidationError("offset and limit count lines of text; leave them out with encoding base64")
    codec = "" if is_base64 else file_io.check_encoding(encoding)
    with AllowedPaths.from_context(context).locate(path) as location, location.open() as file:
        size = os.fstat(file.fileno()).st_size
        if is_base64:
            data = file_io.read_all(file, path)
            line_count = data.count(b"\n") + (data[-1:] not in (b"\n", b""))
            return {"content": base64.b64encode(data).decode("ascii"), "size": size, "totalLines": line_count}
        if offset is None and limit is None and size > file_io.MAX_TEXT_BYTES:
            raise file_io.too_large_error(path, f"it has {size:,} bytes, so read it in parts with offset and limit")
        first = max(offset or 1, 1) - 1
        content, line_count = file_io.read_lines(
            file, path, codec, first=first, count=limit, check=context.check_canceled
        )
        return {"content": content, "size": size, "totalLines": line_count}


@tool(category="file", annotations=Annotations(read_only=False, destructive=True, idempotent=True, open_world=False))
def write_file(path: str, content: str, encoding: str = "utf-8", *, context: ToolContext) -> dict[str, Any]:
    """Writes a whole file and replaces its previous content. Creates missing folders.

    Args:
        path: The file.
        content: The whole new content.
        encoding: A text encoding, or base64 if content is base64 of binary data.
    """
    if encoding.lower() == "base64":
        data = decode_base64(content, "content")
    else:
        data = file_io.encode_text(content, file_io.check_encoding(encoding))
    _check_file_path("path", path)
    with (
        AllowedPaths.from_context(context).locate(path, create=True, write=True) as location,
        folder_lock(location, context),
    ):
        context.check_canceled()
        return {"bytesWritten": replace_file(location, [data])}


@tool(category="file", annotations=_READS)
def list_files(
    path: str, recursive: bool = False, pattern: str | None = None, *, context: ToolContext
) -> dict[str, Any]:
    """Lists the files and folders in a folder.

    Args:
        path: The folder.
        recursive: Whether to list its subfolders too (except .git).
        pattern: A glob such as *.ts or src/**/*.py. Without a slash it matches names.
    """
    glob = Glob(pattern, "pattern") if pattern else None
    is_recursive = recursive or (glob is not None and glob.has_folders)
    allowed_paths = AllowedPaths.from_context(context)
    with allowed_paths.locate(path) as location:
        status = location.get_status()
        if not stat.S_ISDIR(status.st_mode):
            raise ToolExecutionError(f"{path!r} is a {file_kind(status)}, not a folder; use get_file_info")
        matching_entries = _walk_entries(allowed_paths, location, glob, context, is_recursive=is_recursive)
        with closing(matching_entries):
            entries = list(itertools.islice(matching_entries, MAX_ENTRIES + 1))
    is_truncated = len(entries) > MAX_ENTRIES
    entries = sorted(entries[:MAX_ENTRIES], key=lambda info: info["path"].split("/"))
    return {"files": entries, "truncated": True} if is_truncated else {"files": entries}


@tool(category="file", annotations=Annotations(read_only=False, destructive=True, open_world=False))
def delete_file(path: str, *, context: ToolContext) -> dict[str, Any]:
    """Deletes a file. If it is a symbolic link, deletes the link and not its target.

    Args:
        path: The file. Folders are not deleted.
    """
    with AllowedPaths.from_context(context).locate(path, follow=False, write=True) as location:
        if stat.S_ISDIR(location.get_status().st_mode):
            raise ToolExecutionError(f"{path!r} is a folder, not a file; folders are not deleted")
        os.unlink(location.name, dir_fd=location.folder_fd)
    return {"deleted": True}


# A raw schema, because `from` cannot name a parameter of a Python function.
@tool(
    category="file",
    annotations=Annotations(read_only=False, destructive=True, open_world=False),
    input_schema={
        "type": "object",
        "properties": {
            "from": {"type": "string", "description": "The file or folder to move."},
            "to": {"type": "string", "description": "The whole new path. Missing folders are created."},
            "overwrite": {"type": "boolean", "description": "Whether to replace an existing file.", "default": False},
        },
        "required": ["from", "to"],
        "additionalProperties": False,
    },
)
def move_file(*, to: str, overwrite: bool = False, context: ToolContext, **arguments: str) -> dict[str, Any]:
    """Moves or renames a file or a folder."""
    _check_file_path("to", to)
    allowed_paths = AllowedPaths.from_context(context)
    with allowed_paths.locate(arguments["from"], follow=False, write=True) as source:
        check_movable_kind(source)
        allowed_paths.check_movable(source)
        with allowed_paths.locate(to, follow=False, create=True, write=True) as target:
            allowed_paths.check_movable(target)
            with moved_folder_lock(source, context), folder_lock(target, context):
                allowed_paths.check_package(source, target)
                move_path(source, target, overwrite=overwrite, context=context)
    return {"success": True}


@tool(category="file", annotations=_READS)
def get_file_info(path: str, *, context: ToolContext) -> dict[str, Any]:
    """Returns whether a file or folder exists, its size in bytes, its modification time and its type.

    Args:
        path: The file or folder.
    """
    try:
        with AllowedPaths.from_context(context).locate(path) as location:
            status = location.get_status()
    except FileMissingError:
        return {"exists": False, "size": None, "modified": None, "type": None}
    return {"exists": True, "size": status.st_size, "modified": _format_mtime(status), "type": file_kind(status)}


# A raw schema contains the schema of an edit. From the type hints it would be a reference, which costs more tokens and
# which some models cannot follow.
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
                "description": "The edits, applied in order, each to the result of the previous one.",
                "items": {
                    "type": "object",
                    "properties": {
                        "old": {"type": "string", "description": "The exact text to replace; it must occur once."},
                        "new": {"type": "string", "description": "The replacement."},
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
    """Replaces exact text in a file. Applies all edits, or none if one of them fails."""
    if not edits:
        raise ToolValidationError("edits: it is empty; give at least one {old, new}")
    with AllowedPaths.from_context(context).locate(path, write=True) as location, folder_lock(location, context):
        text = file_io.read_text(location)
        uses_crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
        for index, edit in enumerate(edits):
            context.check_canceled()
            text = _apply_edit(text, edit, f"edits[{index}]", path, uses_crlf)
        replace_file(location, [file_io.encode_text(text, "utf-8")])
    return {"applied": len(edits)}


file_tools = (read_file, write_file, list_files, delete_file, move_file, get_file_info, edit_file, grep_files)


def _apply_edit(text: str, edit: TextReplacement, parameter: str, path: str, uses_crlf: bool) -> str:
    old, new = edit["old"], edit["new"]
    if not old:
        raise ToolValidationError(f"{parameter}.old: it is empty; give the text to replace")
    if uses_crlf and "\r" not in old + new:
        # Every line of the file ends with \r\n, so the \n of the edit means the same.
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    if edit.get("replaceAll", False):
        count = text.count(old)
        if count == 0:
            raise _no_occurrence_error(parameter, path)
        if len(text) + count * (len(new) - len(old)) > file_io.MAX_TEXT_BYTES:
            raise ToolValidationError(
                f"{parameter}: {path!r} would have more than {file_io.MAX_TEXT_BYTES:,} characters"
            )
        return text.replace(old, new)
    return replace_single(text, old, new, parameter=f"{parameter}.old", path=path, hint=" or set replaceAll")


def replace_single(text: str, old: str, new: str, *, parameter: str, path: str, hint: str = "") -> str:
    """Replaces the only occurrence of `old`. Raises `ToolValidationError` if there is none, or more than one."""
    position = text.find(old)
    if position < 0:
        raise _no_occurrence_error(parameter, path)
    count = _count_occurrences(text, old, position)
    if count > 1:
        number = f"{count}" if count < _MAX_COUNTED_OCCURRENCES else f"{_MAX_COUNTED_OCCURRENCES} or more"
        raise ToolValidationError(
            f"{parameter}: the text occurs {number} times in {path!r}; give more of the text around it{hint}. "
            "Nothing was changed"
        )
    return text[:position] + new + text[position + len(old) :]


def _count_occurrences(text: str, old: str, first: int) -> int:
    """Counts overlapping occurrences: `aa` occurs twice in `aaa`."""
    count, position = 0, first
    while position >= 0 and count < _MAX_COUNTED_OCCURRENCES:
        count += 1
        position = text.find(old, position + 1)
    return count


def _no_occurrence_error(parameter: str, path: str) -> ToolValidationError:
    return ToolValidationError(
        f"{parameter}: the text occurs 0 times in {path!r} (not found); copy it exactly, with spaces and line ends. "
        "Nothing was changed"
    )


def _check_file_path(parameter: str, path: str) -> None:
    if path.endswith(("/", "/.", "/..")) or path in (".", ".."):
        raise ToolValidationError(f"{parameter}: {path[:80]!r} names a folder; add the file's name")


def _walk_entries(
    allowed_paths: AllowedPaths, location: FileLocation, glob: Glob | None, context: ToolContext, *, is_recursive: bool
) -> Generator[dict[str, Any]]:
    """The entries of a folder that match, and of the folders below it, without the private ones."""
    prefix, root = path_prefix(location.path), location.real_path.rstrip("/")
    with location.open_folder() as folder_fd, closing(walk_folder(folder_fd, context)) as visits:
        for visit in visits:
            for entry in visit.entries:
                entry_path = visit.entry_path(entry.name)
                if allowed_paths.is_private(f"{root}/{entry_path}"):
                    continue
                if glob is None or glob.matches(entry_path):
                    yield from _describe_entry(entry, prefix + entry_path, allowed_paths)
                # Not .git: its thousands of files are internal to git.
                is_folder = is_recursive and entry.name != ".git" and entry.is_dir(follow_symlinks=False)
                if is_folder and (glob is None or glob.can_match_below(entry_path)):
                    visit.pending_folders.append(entry_path)


def _describe_entry(entry: os.DirEntry[str], path: str, allowed_paths: AllowedPaths) -> Iterator[dict[str, Any]]:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return  # The file was deleted meanwhile.
    if allowed_paths.is_private_file(status):
        return
    yield {
        "name": display_name(entry.name),
        "path": display_name(path),
        "type": file_kind(status),
        "size": status.st_size,
        "modified": _format_mtime(status),
    }


def _format_mtime(status: os.stat_result) -> str | None:
    try:
        time = datetime.fromtimestamp(status.st_mtime, UTC)
    except (ValueError, OverflowError, OSError):
        return None  # Some file systems store times outside the calendar.
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")

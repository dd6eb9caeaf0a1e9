"""The file tools: read, write, list, delete, move, and what is known of a file. All inside the allowed folders."""

from __future__ import annotations

import base64
import os
import stat
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from toolspace.builtin import moving, textfiles
from toolspace.builtin.data import bytes_of_base64
from toolspace.builtin.edit import edit_file
from toolspace.builtin.globs import Glob
from toolspace.builtin.grep import grep_files
from toolspace.builtin.paths import Bounds, FileMissing, Place, kind_of, missing, shown
from toolspace.builtin.replacing import exclusively, replace
from toolspace.builtin.walking import Visit, prefix_of, walk
from toolspace.core.context import ToolContext
from toolspace.core.function import tool
from toolspace.core.tool import Annotations
from toolspace.errors import ToolExecutionError, ToolValidationError

MOST_ENTRIES = 5000
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
    codec = "" if binary else textfiles.check_encoding(encoding)
    with Bounds.of(context).find(path) as place, place.open() as file:
        size = os.fstat(file.fileno()).st_size
        if binary:
            data = textfiles.read_all(file, path, size)
            lines = data.count(b"\n") + (data[-1:] not in (b"\n", b""))
            return {"content": base64.b64encode(data).decode("ascii"), "size": size, "totalLines": lines}
        if offset is None and limit is None and size > textfiles.LARGEST:
            raise textfiles.too_large(path, f"it has {size:,} bytes, so read it in parts with offset and limit")
        first = max(offset or 1, 1) - 1
        window = textfiles.read_lines(file, path, codec, first=first, count=limit, check=context.check_canceled)
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
        data = bytes_of_base64(content, "content")
    else:
        data = textfiles.encode(content, textfiles.check_encoding(encoding))
    _check_names_file("path", path)
    with Bounds.of(context).find(path, create=True, write=True) as place, exclusively(place, context):
        context.check_canceled()
        return {"bytesWritten": replace(place, [data])}


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
    with Bounds.of(context).find(path) as place:
        _check_folder(place)
        prefix = prefix_of(path)
        with place.open_folder() as folder, closing(walk(folder, context)) as visits:
            for visit in visits:
                for entry in visit.entries:
                    inside = visit.inside(entry.name)
                    if glob is None or glob.matches(inside):
                        info = _entry_info(entry, prefix + inside)
                        if len(files) == MOST_ENTRIES:
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
    with Bounds.of(context).find(path, follow=False, write=True) as place:
        status = place.status()
        if status is None:
            raise missing(path)
        if stat.S_ISDIR(status.st_mode):
            raise ToolExecutionError(f"{path!r} is a folder, not a file; folders are not deleted")
        os.unlink(place.name, dir_fd=place.folder)
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
    bounds = Bounds.of(context)
    with bounds.find(start, follow=False, write=True) as source:
        moving.check_source(source)
        bounds.check_movable(source)
        with bounds.find(to, follow=False, create=True, write=True) as target:
            bounds.check_movable(target)
            moving.move(source, target, overwrite=overwrite, context=context)
    return {"success": True}


@tool(category="file", annotations=_READS)
def get_file_info(path: str, *, context: ToolContext) -> dict[str, Any]:
    """Tells whether a file or folder exists, its size in bytes, when it was modified, and what it is.

    Args:
        path: The file or folder.
    """
    try:
        with Bounds.of(context).find(path) as place:
            status = place.status()
    except FileMissing:
        status = None
    if status is None:
        return {"exists": False, "size": None, "modified": None, "type": None}
    return {"exists": True, "size": status.st_size, "modified": _modified(status), "type": kind_of(status)}


file_tools = (read_file, write_file, list_files, delete_file, move_file, get_file_info, edit_file, grep_files)


def _check_names_file(parameter: str, path: str) -> None:
    if path.endswith(("/", "/.", "/..")) or path in (".", ".."):
        raise ToolValidationError(f"{parameter}: {path[:80]!r} names a folder; add the file's name")


def _check_folder(place: Place) -> None:
    status = place.status()
    if status is None:
        raise missing(place.path)
    if not stat.S_ISDIR(status.st_mode):
        raise ToolExecutionError(f"{place.path!r} is a {kind_of(status)}, not a folder; get_file_info tells about it")


def _go_on(visit: Visit, entry: os.DirEntry[str], inside: str, glob: Glob | None) -> None:
    # Inside .git is what git keeps for itself: thousands of files that would crowd out the rest.
    if entry.name != ".git" and entry.is_dir(follow_symlinks=False) and (glob is None or glob.reaches(inside)):
        visit.ahead.append(inside)


def _entry_info(entry: os.DirEntry[str], path: str) -> dict[str, Any] | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None  # It vanished meanwhile.
    return {
        "name": shown(entry.name),
        "path": shown(path),
        "type": kind_of(status),
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

"""Moves a file from one place to another, over file systems too. Overwrites nothing unless told to."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from toolspace.builtin.paths import Place, kind_of, missing
from toolspace.builtin.replacing import sync_folder, temporary_name, write_beside
from toolspace.core.context import ToolContext
from toolspace.errors import ToolExecutionError, ToolValidationError

_PIECE = 1024 * 1024
_NO_LINKS = frozenset((errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))


def check_source(source: Place) -> os.stat_result:
    """What is to be moved: a file, a link or a folder."""
    status = source.status()
    if status is None:
        raise missing(source.path)
    if kind_of(status) not in ("file", "directory", "symlink"):
        raise ToolExecutionError(f"{source.path!r} is a {kind_of(status)}, which cannot be moved")
    return status


def move(source: Place, target: Place, *, overwrite: bool, context: ToolContext) -> None:
    """Moves what is at one place to another. A link is moved itself, not what it points to."""
    status = check_source(source)
    if target.real.startswith(source.real + "/"):
        raise ToolValidationError(f"to: {target.path!r} is inside {source.path!r}, which is to be moved")
    there = target.status()
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise ToolExecutionError(f"{target.path!r} is a folder; give the whole new path, with the file's name")
    if there is not None and not overwrite:
        raise _taken(target)
    if there is not None and stat.S_ISDIR(status.st_mode):
        raise ToolExecutionError(f"{target.path!r} is a file, which no folder can replace; choose another name")
    try:
        _put(source.folder, source.name, target, overwrite=overwrite or stat.S_ISDIR(status.st_mode))
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_over(source, target, status, overwrite, context)
    sync_folder(source.folder)
    sync_folder(target.folder)


def _put(folder: int, name: str, target: Place, *, overwrite: bool) -> None:
    """Renames within one file system. Without `overwrite`, not even a file that appears right now is replaced."""
    if overwrite:
        os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=target.folder)
        return
    try:
        # Linking refuses to replace, which renaming cannot be asked to do from Python.
        os.link(name, target.name, src_dir_fd=folder, dst_dir_fd=target.folder, follow_symlinks=False)
    except FileExistsError:
        raise _taken(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.status() is not None:
            raise _taken(target) from None
        os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=target.folder)
        return
    try:
        os.unlink(name, dir_fd=folder)
    except BaseException:
        os.unlink(target.name, dir_fd=target.folder)
        raise


def _move_over(source: Place, target: Place, status: os.stat_result, overwrite: bool, context: ToolContext) -> None:
    """To another file system: a whole copy under a temporary name, then the new name, then the old one goes."""
    if stat.S_ISDIR(status.st_mode):
        raise ToolExecutionError(f"{source.path!r} is a folder on another file system; move its files one by one")

    def commit(temporary: str) -> None:
        times = (status.st_atime_ns, status.st_mtime_ns)
        os.utime(temporary, ns=times, dir_fd=target.folder, follow_symlinks=False)
        _put(target.folder, temporary, target, overwrite=overwrite)

    if stat.S_ISLNK(status.st_mode):
        temporary = temporary_name()
        os.symlink(os.readlink(source.name, dir_fd=source.folder), temporary, dir_fd=target.folder)
        try:
            commit(temporary)
        except BaseException:
            os.unlink(temporary, dir_fd=target.folder)
            raise
    else:
        write_beside(target, _pieces(source, context), like=status, commit=commit)
    os.unlink(source.name, dir_fd=source.folder)


def _pieces(source: Place, context: ToolContext) -> Iterator[bytes]:
    with source.open() as file:
        while piece := file.read(_PIECE):
            context.check_canceled()
            yield piece


def _taken(target: Place) -> ToolExecutionError:
    return ToolExecutionError(f"{target.path!r} exists already; choose another name, or set overwrite to true")

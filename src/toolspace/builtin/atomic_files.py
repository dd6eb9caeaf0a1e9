"""Replaces, moves and locks files so that readers see the old content or the new, never a part of it.

The file and memory tools use it. It works on locations that `allowed_paths` has opened and does not check paths.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress

from toolspace.builtin.allowed_paths import FileLocation, file_kind, missing_error
from toolspace.core.context import ToolContext
from toolspace.errors import ToolExecutionError, ToolPermissionError, ToolValidationError

_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_TIMEOUT = 20.0
_LOCK_POLL_INTERVAL = 0.01
_LOCKS_UNSUPPORTED = frozenset((errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
_LINKS_UNSUPPORTED = frozenset((errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
_COPY_BYTES = 1024 * 1024


def replace_file(location: FileLocation, pieces: Iterable[bytes]) -> int:
    """Writes a file, keeping owner and mode of the previous one. Returns the number of bytes."""
    previous = location.status()
    if previous is not None:
        location.check_file(previous)
        # Renaming over a file needs no write permission on it, but its owner has protected it.
        if not os.access(location.name, os.W_OK, dir_fd=location.folder_fd):
            raise ToolPermissionError(f"{location.path!r} is write-protected; change its mode first")

    def commit(temporary: str) -> None:
        os.replace(temporary, location.name, src_dir_fd=location.folder_fd, dst_dir_fd=location.folder_fd)

    return _write_temporary(location, pieces, like=previous, commit=commit)


def check_movable_kind(source: FileLocation) -> os.stat_result:
    """The status of a file, link or folder. Raises for anything else."""
    status = source.status()
    if status is None:
        raise missing_error(source.path)
    if file_kind(status) not in ("file", "directory", "symlink"):
        raise ToolExecutionError(f"{source.path!r} is a {file_kind(status)}, which cannot be moved")
    return status


def move_path(source: FileLocation, target: FileLocation, *, overwrite: bool, context: ToolContext) -> None:
    """Moves a file, link or folder, to another file system too. A link is moved itself, not its target."""
    status = check_movable_kind(source)
    is_folder = stat.S_ISDIR(status.st_mode)
    if target.real_path.startswith(source.real_path + "/"):
        raise ToolValidationError(f"to: {target.path!r} is inside {source.path!r}, which is to be moved")
    target_status = target.status()
    if target_status is not None:
        if stat.S_ISDIR(target_status.st_mode):
            raise ToolExecutionError(f"{target.path!r} is a folder; give the whole new path, with the file's name")
        if not overwrite:
            raise _exists_error(target)
        if is_folder:
            raise ToolExecutionError(f"{target.path!r} is a file, which a folder cannot replace; choose another name")
    try:
        _rename(source.folder_fd, source.name, target, overwrite=overwrite or is_folder)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_across_file_systems(source, target, status, overwrite, context)
    _sync_folder(source.folder_fd)
    _sync_folder(target.folder_fd)


def _write_temporary(
    location: FileLocation, pieces: Iterable[bytes], *, like: os.stat_result | None, commit: Callable[[str], None]
) -> int:
    """Writes a temporary file beside a location and calls `commit` with its name. Removes it if that fails."""
    temporary = _temporary_name()
    file_fd = os.open(temporary, _NEW_FILE_FLAGS, 0o666, dir_fd=location.folder_fd)
    try:
        with os.fdopen(file_fd, "wb") as file:
            byte_count = sum(map(file.write, pieces))
            file.flush()
            if like is not None:
                _copy_owner_and_mode(file.fileno(), like)
            os.fsync(file.fileno())
        commit(temporary)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=location.folder_fd)
        raise
    _sync_folder(location.folder_fd)
    return byte_count


def _temporary_name() -> str:
    return f".toolspace-{secrets.token_hex(8)}.tmp"


def _sync_folder(folder_fd: int) -> None:
    """Makes a rename survive a power failure, if the file system can."""
    with suppress(OSError):
        os.fsync(folder_fd)


def _copy_owner_and_mode(file_fd: int, like: os.stat_result) -> None:
    status = os.fstat(file_fd)
    if (status.st_uid, status.st_gid) != (like.st_uid, like.st_gid):
        with suppress(PermissionError):
            os.fchown(file_fd, like.st_uid, like.st_gid)
    os.fchmod(file_fd, stat.S_IMODE(like.st_mode))


def _rename(folder_fd: int, name: str, target: FileLocation, *, overwrite: bool) -> None:
    """Renames within a file system. Without `overwrite`, a file that appears at the last moment is kept."""
    if overwrite:
        os.replace(name, target.name, src_dir_fd=folder_fd, dst_dir_fd=target.folder_fd)
        return
    try:
        # Linking fails if the target exists; Python cannot ask this of a rename.
        os.link(name, target.name, src_dir_fd=folder_fd, dst_dir_fd=target.folder_fd, follow_symlinks=False)
    except FileExistsError:
        raise _exists_error(target) from None
    except OSError as error:
        if error.errno not in _LINKS_UNSUPPORTED:
            raise
        if target.status() is not None:
            raise _exists_error(target) from None
        os.replace(name, target.name, src_dir_fd=folder_fd, dst_dir_fd=target.folder_fd)
        return
    try:
        os.unlink(name, dir_fd=folder_fd)
    except BaseException:
        os.unlink(target.name, dir_fd=target.folder_fd)
        raise


def _move_across_file_systems(
    source: FileLocation, target: FileLocation, status: os.stat_result, overwrite: bool, context: ToolContext
) -> None:
    """Copies the file under a temporary name, renames the copy, then deletes the source."""
    if stat.S_ISDIR(status.st_mode):
        raise ToolExecutionError(f"{source.path!r} is a folder on another file system; move its files one by one")

    def commit(temporary: str) -> None:
        times = (status.st_atime_ns, status.st_mtime_ns)
        os.utime(temporary, ns=times, dir_fd=target.folder_fd, follow_symlinks=False)
        _rename(target.folder_fd, temporary, target, overwrite=overwrite)

    if stat.S_ISLNK(status.st_mode):
        temporary = _temporary_name()
        os.symlink(os.readlink(source.name, dir_fd=source.folder_fd), temporary, dir_fd=target.folder_fd)
        try:
            commit(temporary)
        except BaseException:
            os.unlink(temporary, dir_fd=target.folder_fd)
            raise
    else:
        _write_temporary(target, _read_pieces(source, context), like=status, commit=commit)
    os.unlink(source.name, dir_fd=source.folder_fd)


def _read_pieces(source: FileLocation, context: ToolContext) -> Iterator[bytes]:
    with source.open() as file:
        while piece := file.read(_COPY_BYTES):
            context.check_canceled()
            yield piece


def _exists_error(target: FileLocation) -> ToolExecutionError:
    return ToolExecutionError(f"{target.path!r} exists already; choose another name, or set overwrite to true")


class _ProcessLock:
    """A lock that can be referenced weakly, so that locks of unused folders are freed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_process_locks: weakref.WeakValueDictionary[tuple[int, int], _ProcessLock] = weakref.WeakValueDictionary()
_process_locks_guard = threading.Lock()


@contextmanager
def folder_lock(location: FileLocation, context: ToolContext) -> Generator[None]:
    """Locks the folder of a location, in this process and against other processes that use the same lock.

    For changes that read first: of two concurrent edits, neither may be lost. The folder is locked, because every
    replacement creates a new file. Raises `ToolExecutionError` if the lock is not free in time.
    """
    status = os.fstat(location.folder_fd)
    with _process_locks_guard:
        process_lock = _process_locks.setdefault((status.st_dev, status.st_ino), _ProcessLock())
    deadline = time.monotonic() + _LOCK_TIMEOUT
    _wait_for_lock(lambda: process_lock.lock.acquire(timeout=_LOCK_POLL_INTERVAL), 0.0, deadline, location, context)
    try:
        _wait_for_lock(lambda: _try_lock(location.folder_fd), _LOCK_POLL_INTERVAL, deadline, location, context)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(location.folder_fd, fcntl.LOCK_UN)
    finally:
        process_lock.lock.release()


def _try_lock(folder_fd: int) -> bool:
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems cannot lock folders; then only the lock of this process protects.
        if error.errno not in _LOCKS_UNSUPPORTED:
            raise
    return True


def _wait_for_lock(
    acquire: Callable[[], bool], pause: float, deadline: float, location: FileLocation, context: ToolContext
) -> None:
    while not acquire():
        context.check_canceled()
        if time.monotonic() > deadline:
            raise ToolExecutionError(
                f"{location.path!r} was not changed: its folder has been locked for {_LOCK_TIMEOUT:g} s; try again"
            )
        time.sleep(pause)

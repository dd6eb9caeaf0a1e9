"""Replaces files whole: readers see the old content or the new, never a half. Decides nothing about paths."""

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

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PATIENCE = 20.0
_PAUSE = 0.01
_NO_LOCKS = frozenset((errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))


def replace_file(place: FileLocation, pieces: Iterable[bytes]) -> int:
    """Writes the file at a place, keeping the mode of the one that was there. Gives the number of bytes."""
    before = place.status()
    if before is not None:
        place.check_file(before)
        # Renaming over a file needs no right to write to it; its owner meant the protection all the same.
        if not os.access(place.name, os.W_OK, dir_fd=place.folder_fd):
            raise ToolPermissionError(f"{place.path!r} is write-protected; change its mode first")

    def commit(temporary: str) -> None:
        os.replace(temporary, place.name, src_dir_fd=place.folder_fd, dst_dir_fd=place.folder_fd)

    return write_temporary(place, pieces, like=before, commit=commit)


def write_temporary(
    place: FileLocation, pieces: Iterable[bytes], *, like: os.stat_result | None, commit: Callable[[str], None]
) -> int:
    """Writes a temporary file next to a place and has it committed under its name; it never stays behind."""
    temporary = temporary_name()
    file = os.open(temporary, _NEW, 0o666, dir_fd=place.folder_fd)
    try:
        with os.fdopen(file, "wb") as out:
            written = sum(map(out.write, pieces))
            out.flush()
            if like is not None:
                _copy_owner_and_mode(out.fileno(), like)
            os.fsync(out.fileno())
        commit(temporary)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=place.folder_fd)
        raise
    sync_folder(place.folder_fd)
    return written


def temporary_name() -> str:
    return f".toolspace-{secrets.token_hex(8)}.tmp"


def sync_folder(folder: int) -> None:
    """Makes a rename survive a power cut, where the file system can."""
    with suppress(OSError):
        os.fsync(folder)


def _copy_owner_and_mode(file: int, like: os.stat_result) -> None:
    own = os.fstat(file)
    if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
        with suppress(PermissionError):
            os.fchown(file, like.st_uid, like.st_gid)
    os.fchmod(file, stat.S_IMODE(like.st_mode))


class _FolderLock:
    """A lock that can be held weakly, so that folders nobody writes to cost nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_locks: weakref.WeakValueDictionary[tuple[int, int], _FolderLock] = weakref.WeakValueDictionary()
_guard = threading.Lock()


@contextmanager
def folder_lock(place: FileLocation, context: ToolContext) -> Generator[None]:
    """Holds everyone else off the folder of a place, in this process and others that use the same lock.

    For changes that read first: of two edits at once, neither may lose the other's. The lock is on the folder,
    because the file itself is another one after each replacement.
    """
    status = os.fstat(place.folder_fd)
    with _guard:
        own = _locks.setdefault((status.st_dev, status.st_ino), _FolderLock())
    deadline = time.monotonic() + _PATIENCE
    _wait_for_lock(lambda: own.lock.acquire(timeout=_PAUSE), 0.0, deadline, place, context)
    try:
        _wait_for_lock(lambda: _try_lock(place.folder_fd), _PAUSE, deadline, place, context)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(place.folder_fd, fcntl.LOCK_UN)
    finally:
        own.lock.release()


def _try_lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems lock no folders; then the lock of this process has to do.
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _wait_for_lock(
    taken: Callable[[], bool], pause: float, deadline: float, place: FileLocation, context: ToolContext
) -> None:
    while not taken():
        context.check_canceled()
        if time.monotonic() > deadline:
            raise ToolExecutionError(
                f"{place.path!r} was not changed: others have held its folder for {_PATIENCE:g} s; try again"
            )
        time.sleep(pause)


# MERGED from moving: Moves a file from one place to another, over file systems too. Overwrites nothing unless told…

_PIECE = 1024 * 1024
_NO_LINKS = frozenset((errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))


def check_source(source: FileLocation) -> os.stat_result:
    """What is to be moved: a file, a link or a folder."""
    status = source.status()
    if status is None:
        raise missing_error(source.path)
    if file_kind(status) not in ("file", "directory", "symlink"):
        raise ToolExecutionError(f"{source.path!r} is a {file_kind(status)}, which cannot be moved")
    return status


def move_path(source: FileLocation, target: FileLocation, *, overwrite: bool, context: ToolContext) -> None:
    """Moves what is at one place to another. A link is moved itself, not what it points to."""
    status = check_source(source)
    if target.real_path.startswith(source.real_path + "/"):
        raise ToolValidationError(f"to: {target.path!r} is inside {source.path!r}, which is to be moved")
    there = target.status()
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise ToolExecutionError(f"{target.path!r} is a folder; give the whole new path, with the file's name")
    if there is not None and not overwrite:
        raise _exists_error(target)
    if there is not None and stat.S_ISDIR(status.st_mode):
        raise ToolExecutionError(f"{target.path!r} is a file, which no folder can replace; choose another name")
    try:
        _rename(source.folder_fd, source.name, target, overwrite=overwrite or stat.S_ISDIR(status.st_mode))
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_across_file_systems(source, target, status, overwrite, context)
    sync_folder(source.folder_fd)
    sync_folder(target.folder_fd)


def _rename(folder: int, name: str, target: FileLocation, *, overwrite: bool) -> None:
    """Renames within one file system. Without `overwrite`, not even a file that appears right now is replaced."""
    if overwrite:
        os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=target.folder_fd)
        return
    try:
        # Linking refuses to replace, which renaming cannot be asked to do from Python.
        os.link(name, target.name, src_dir_fd=folder, dst_dir_fd=target.folder_fd, follow_symlinks=False)
    except FileExistsError:
        raise _exists_error(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.status() is not None:
            raise _exists_error(target) from None
        os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=target.folder_fd)
        return
    try:
        os.unlink(name, dir_fd=folder)
    except BaseException:
        os.unlink(target.name, dir_fd=target.folder_fd)
        raise


def _move_across_file_systems(
    source: FileLocation, target: FileLocation, status: os.stat_result, overwrite: bool, context: ToolContext
) -> None:
    """To another file system: a whole copy under a temporary name, then the new name, then the old one goes."""
    if stat.S_ISDIR(status.st_mode):
        raise ToolExecutionError(f"{source.path!r} is a folder on another file system; move its files one by one")

    def commit(temporary: str) -> None:
        times = (status.st_atime_ns, status.st_mtime_ns)
        os.utime(temporary, ns=times, dir_fd=target.folder_fd, follow_symlinks=False)
        _rename(target.folder_fd, temporary, target, overwrite=overwrite)

    if stat.S_ISLNK(status.st_mode):
        temporary = temporary_name()
        os.symlink(os.readlink(source.name, dir_fd=source.folder_fd), temporary, dir_fd=target.folder_fd)
        try:
            commit(temporary)
        except BaseException:
            os.unlink(temporary, dir_fd=target.folder_fd)
            raise
    else:
        write_temporary(target, _read_pieces(source, context), like=status, commit=commit)
    os.unlink(source.name, dir_fd=source.folder_fd)


def _read_pieces(source: FileLocation, context: ToolContext) -> Iterator[bytes]:
    with source.open() as file:
        while piece := file.read(_PIECE):
            context.check_canceled()
            yield piece


def _exists_error(target: FileLocation) -> ToolExecutionError:
    return ToolExecutionError(f"{target.path!r} exists already; choose another name, or set overwrite to true")

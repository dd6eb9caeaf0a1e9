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
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress

from toolspace.builtin.paths import Place
from toolspace.core.context import ToolContext
from toolspace.errors import ToolExecutionError, ToolPermissionError

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PATIENCE = 20.0
_PAUSE = 0.01
_NO_LOCKS = frozenset((errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))


def replace(place: Place, pieces: Iterable[bytes]) -> int:
    """Writes the file at a place, keeping the mode of the one that was there. Gives the number of bytes."""
    before = place.status()
    if before is not None:
        place.check_file(before)
        # Renaming over a file needs no right to write to it; its owner meant the protection all the same.
        if not os.access(place.name, os.W_OK, dir_fd=place.folder):
            raise ToolPermissionError(f"{place.path!r} is write-protected; change its mode first")

    def commit(temporary: str) -> None:
        os.replace(temporary, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)

    return write_beside(place, pieces, like=before, commit=commit)


def write_beside(
    place: Place, pieces: Iterable[bytes], *, like: os.stat_result | None, commit: Callable[[str], None]
) -> int:
    """Writes a temporary file next to a place and has it committed under its name; it never stays behind."""
    temporary = temporary_name()
    file = os.open(temporary, _NEW, 0o666, dir_fd=place.folder)
    try:
        with os.fdopen(file, "wb") as out:
            written = sum(map(out.write, pieces))
            out.flush()
            if like is not None:
                _take_after(out.fileno(), like)
            os.fsync(out.fileno())
        commit(temporary)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=place.folder)
        raise
    sync_folder(place.folder)
    return written


def temporary_name() -> str:
    return f".toolspace-{secrets.token_hex(8)}.tmp"


def sync_folder(folder: int) -> None:
    """Makes a rename survive a power cut, where the file system can."""
    with suppress(OSError):
        os.fsync(folder)


def _take_after(file: int, like: os.stat_result) -> None:
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
def exclusively(place: Place, context: ToolContext) -> Generator[None]:
    """Holds everyone else off the folder of a place, in this process and others that use the same lock.

    For changes that read first: of two edits at once, neither may lose the other's. The lock is on the folder,
    because the file itself is another one after each replacement.
    """
    status = os.fstat(place.folder)
    with _guard:
        own = _locks.setdefault((status.st_dev, status.st_ino), _FolderLock())
    deadline = time.monotonic() + _PATIENCE
    _wait(lambda: own.lock.acquire(timeout=_PAUSE), 0.0, deadline, place, context)
    try:
        _wait(lambda: _take(place.folder), _PAUSE, deadline, place, context)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(place.folder, fcntl.LOCK_UN)
    finally:
        own.lock.release()


def _take(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems lock no folders; then the lock of this process has to do.
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _wait(taken: Callable[[], bool], pause: float, deadline: float, place: Place, context: ToolContext) -> None:
    while not taken():
        context.check_canceled()
        if time.monotonic() > deadline:
            raise ToolExecutionError(
                f"{place.path!r} was not changed: others have held its folder for {_PATIENCE:g} s; try again"
            )
        time.sleep(pause)

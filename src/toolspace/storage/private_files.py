"""Folders and files that only their owner may enter or read, whatever the umask. Knows nothing of what is in them.

Everything is opened through the descriptor of its folder and never through a symbolic link, so that neither a
handle that a model made up nor a link that someone planted leads anywhere else. POSIX only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Not blocking: a planted pipe must not hang the thread that opens it.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private_folder(path: Path) -> None:
    """Makes a folder for its owner only. One that exists stays as it is: it may be the user's own."""
    if path.is_dir():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        path.chmod(0o700)
    except FileExistsError as error:
        if not path.is_dir():  # Else another process was first.
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None


def open_root(path: Path) -> int:
    """The descriptor of a folder that is named by configuration, so may be reached through a link."""
    return os.open(path, _FOLDER)


def open_folder(name: str, *, within: int, create: bool = False) -> int:
    """The descriptor of a folder of ours. Raises `OSError` where it is a link or belongs to someone else."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=within)
    folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=within)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"the folder {name!r} belongs to another user")
        if create and stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(folder, 0o700)
    except BaseException:
        os.close(folder)
        raise
    return folder


def create_file(name: str, *, within: int) -> int:
    """A new file, open for writing, and locked as long as it is open."""
    file = os.open(name, _CREATE, 0o600, dir_fd=within)
    try:
        os.fchmod(file, 0o600)
        with contextlib.suppress(OSError):  # Some network file systems cannot lock: then age alone decides.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def open_file(name: str, *, within: int) -> int:
    """A regular file, open for reading."""
    file = os.open(name, _READ, dir_fd=within)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(f"{name!r} is not a file")
    return file


def write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def is_locked(file: int) -> bool:
    """Whether a living writer still holds the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def remove(name: str, *, within: int) -> bool:
    """Removes a file; says whether it was this call that did."""
    try:
        os.unlink(name, dir_fd=within)
    except FileNotFoundError:
        return False
    return True

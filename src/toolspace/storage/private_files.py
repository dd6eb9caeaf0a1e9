"""Folders and files that only their owner may enter or read, whatever the umask. Does not look into them.

Everything is opened through the descriptor of its folder and never through a symbolic link, so that neither a
handle that a model made up nor a link that someone planted leads out of the folder. POSIX only.
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
    """Creates a folder for its owner only. One that exists stays as it is: the user may have created it."""
    if path.is_dir():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        path.chmod(0o700)
    except FileExistsError as error:
        if not path.is_dir():  # Otherwise another process was faster.
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None


def open_root(path: Path) -> int:
    """The descriptor of a folder that the configuration names, so it may be a link."""
    return os.open(path, _FOLDER)


def open_folder(name: str, *, parent: int, create: bool = False) -> int:
    """The descriptor of one of our folders. Raises `OSError` if it is a link or belongs to another user."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
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


def create_file(name: str, *, folder: int) -> int:
    """Creates a file, open for writing, and locked as long as it is open."""
    file = os.open(name, _CREATE, 0o600, dir_fd=folder)
    try:
        os.fchmod(file, 0o600)
        # Some network file systems cannot lock: then only the age of the file counts.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def open_file(name: str, *, folder: int) -> int:
    """Opens a regular file for reading."""
    file = os.open(name, _READ, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(f"{name!r} is not a file")
    return file


def write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def is_locked(file: int) -> bool:
    """Whether a writer still has the file open."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def remove(name: str, *, folder: int) -> bool:
    """Removes a file. False if it was removed already."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True

"""Reads, replaces, moves and locks files. Decodes text within size limits.

Readers of a file that is replaced see the old content or the new, never a part of it. The file, memory and task tools
use it. It works on locations that `allowed_paths` has opened and does not check paths.
"""

from __future__ import annotations

import codecs
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
from io import BufferedReader

from toolspace.builtin.allowed_paths import FileLocation, file_kind
from toolspace.core.http_messages import find_codec
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolExecutionError, ToolLimitError, ToolPermissionError, ToolValidationError

MAX_TEXT_BYTES = 10 * 1024 * 1024
"""The maximum size of a file in memory, in bytes or in characters of its text."""
_READ_BYTES = 256 * 1024
_HEAD_BYTES = 8192
_COPY_BYTES = 1024 * 1024
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_TIMEOUT = 20.0
_LOCK_POLL_INTERVAL = 0.01
_LOCKS_UNSUPPORTED = frozenset((errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
_LINKS_UNSUPPORTED = frozenset((errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))


# Reading and decoding


def check_encoding(encoding: str) -> str:
    """The name of Python's codec. Raises `ToolValidationError` if there is none for text."""
    codec = find_codec(encoding)
    if codec is None:
        raise ToolValidationError(
            f'encoding: {encoding[:40]!r} is not a text encoding; use "utf-8", another such as "latin-1", or "base64"'
        )
    return codec


def read_lines(
    file: BufferedReader, path: str, encoding: str, *, first: int, count: int | None, check: Callable[[], None]
) -> tuple[str, int]:
    """`count` lines from line `first` (counted from 0) on, with their line ends, and the number of all lines.

    Does not load the other lines. `check` is called between reads and may raise to stop.
    """
    end = None if count is None else first + count
    pieces: list[str] = []
    size = line_count = 0
    text = ""
    for text in _decode_pieces(file, path, encoding, check):
        line_ends = text.count("\n")
        start = _skip_lines(text, first - line_count, line_ends)
        stop = len(text) if end is None else _skip_lines(text, end - line_count, line_ends)
        if start < stop:
            pieces.append(text[start:stop])
            size += stop - start
            if size > MAX_TEXT_BYTES:
                raise too_large_error(path, "the requested lines are too many or too long, so lower limit")
        line_count += line_ends
    has_unfinished_line = bool(text) and not text.endswith("\n")
    return "".join(pieces), line_count + has_unfinished_line


def read_all(file: BufferedReader, path: str) -> bytes:
    """The whole file. Raises `ToolLimitError` if it is too large."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(MAX_TEXT_BYTES + 1) if size <= MAX_TEXT_BYTES else b""
    if size > MAX_TEXT_BYTES or len(data) > MAX_TEXT_BYTES:
        raise too_large_error(path, f"it has {max(size, len(data)):,} bytes")
    return data


def read_text(location: FileLocation) -> str:
    """A whole UTF-8 file, with byte order mark and line ends. Raises `ToolExecutionError` for a binary file."""
    with location.open() as file:
        data = read_all(file, location.path)
    if is_binary(data):
        raise _not_text_error(location.path, "it contains null bytes", "utf-8")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_text_error(location.path, f"byte {error.start} is 0x{data[error.start]:02x}", "utf-8") from None


def encode_text(text: str, encoding: str) -> bytes:
    """Encodes the argument `content`. Raises `ToolValidationError` that names the first invalid character."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise ToolValidationError(
            f'content: character {error.start}, {character!a}, does not exist in {encoding}; use "utf-8"'
            if encoding != "utf-8"
            else f"content: character {error.start}, {character!a}, is half of a surrogate pair; leave it out"
        ) from None


def is_binary(head: bytes) -> bool:
    """Whether the beginning of a file shows that it is not text."""
    return b"\0" in head[:_HEAD_BYTES]


def too_large_error(path: str, reason: str) -> ToolLimitError:
    return ToolLimitError(f"{path!r} was not read: {reason}; at most {MAX_TEXT_BYTES:,} bytes are read at once")


def _decode_pieces(file: BufferedReader, path: str, encoding: str, check: Callable[[], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    position = 0
    while True:
        check()
        piece = file.read(_READ_BYTES)
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeError as error:
            reason = f"near byte {position + getattr(error, 'start', 0)}: {getattr(error, 'reason', error)}"
            raise _not_text_error(path, reason, encoding) from None
        if position == 0 and "\0" in text[:_HEAD_BYTES]:
            raise _not_text_error(path, "it contains null characters", encoding)
        if text:
            yield text
        if not piece:
            return
        position += len(piece)


def _skip_lines(text: str, count: int, line_ends: int) -> int:
    """The position after `count` lines; the end of the text if it has fewer than that."""
    if count > line_ends:
        return len(text)
    position = 0
    for _ in range(count):
        position = text.index("\n", position) + 1
    return position


def _not_text_error(path: str, reason: str, encoding: str) -> ToolExecutionError:
    return ToolExecutionError(
        f'{path!r} is not {encoding} text ({reason}); read it with its own encoding, or with encoding "base64"'
    )


# Writing and moving


def replace_file(location: FileLocation, pieces: Iterable[bytes]) -> int:
    """Writes a file, keeping owner and mode of the previous one. Returns the number of bytes."""
    previous_status = location.find_status()
    if previous_status is not None:
        location.check_file(previous_status)
        # Renaming over a file needs no write permission on it, but its owner has protected it.
        if not os.access(location.name, os.W_OK, dir_fd=location.folder_fd):
            raise ToolPermissionError(f"{location.path!r} is write-protected; change its mode first")

    def commit(temporary: str) -> None:
        os.replace(temporary, location.name, src_dir_fd=location.folder_fd, dst_dir_fd=location.folder_fd)

    return _write_temporary(location, pieces, like=previous_status, commit=commit)


def check_movable_kind(source: FileLocation) -> os.stat_result:
    """The status of a file, link or folder. Raises for anything else."""
    status = source.get_status()
    if file_kind(status) not in ("file", "directory", "symlink"):
        raise ToolExecutionError(f"{source.path!r} is a {file_kind(status)}, which cannot be moved")
    return status


def move_path(source: FileLocation, target: FileLocation, *, overwrite: bool, context: ToolContext) -> None:
    """Moves a file, link or folder, to another file system too. A link is moved itself, not its target."""
    status = check_movable_kind(source)
    is_folder = stat.S_ISDIR(status.st_mode)
    if target.real_path.startswith(source.real_path + "/"):
        raise ToolValidationError(f"to: {target.path!r} is inside {source.path!r}, which is to be moved")
    target_status = target.find_status()
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
        if target.find_status() is not None:
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


# Locks

_process_locks: weakref.WeakValueDictionary[tuple[int, int], threading.Lock] = weakref.WeakValueDictionary()
"""Locks by device and inode of their folders. Weak, so that locks of unused folders are freed."""
_process_locks_guard = threading.Lock()


@contextmanager
def folder_lock(location: FileLocation, context: ToolContext) -> Generator[None]:
    """Locks the folder of a location, in this process and against other processes that use the same lock.

    For changes that read first: of two concurrent edits, neither may be lost. The folder is locked, because every
    replacement creates a new file. Raises `ToolExecutionError` if the lock is not free in time, or if the folder was
    moved since the location was opened: other rules may hold where it is now.
    """
    status = os.fstat(location.folder_fd)
    with _process_locks_guard:
        process_lock = _process_locks.setdefault((status.st_dev, status.st_ino), threading.Lock())
    deadline = time.monotonic() + _LOCK_TIMEOUT
    _wait_for_lock(lambda: process_lock.acquire(timeout=_LOCK_POLL_INTERVAL), 0.0, deadline, location, context)
    try:
        _wait_for_lock(lambda: _try_lock(location.folder_fd), _LOCK_POLL_INTERVAL, deadline, location, context)
        try:
            _check_not_moved(location, status)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(location.folder_fd, fcntl.LOCK_UN)
    finally:
        process_lock.release()


@contextmanager
def moved_folder_lock(source: FileLocation, context: ToolContext) -> Generator[None]:
    """Locks a folder that is to be moved, so that nothing is written into it between the checks and the move.

    Does nothing for a file or a link.
    """
    if not stat.S_ISDIR(source.get_status().st_mode):
        yield
        return
    with source.open_folder() as folder_fd:
        inner_location = FileLocation(folder_fd, ".", source.path, os.path.join(source.real_path, "."))
        with folder_lock(inner_location, context):
            yield


def _check_not_moved(location: FileLocation, folder_status: os.stat_result) -> None:
    with suppress(OSError):
        if os.path.samestat(os.lstat(os.path.dirname(location.real_path)), folder_status):
            return
    raise ToolExecutionError(f"{location.path!r} was not changed: its folder was moved meanwhile; try again")


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

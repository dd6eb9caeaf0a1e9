"""Opens files and folders inside allowed folders and nowhere else. Knows nothing of their content.

A path is resolved twice. First as text, through every symbolic link, to find out whether its target is allowed. Then by
opening folder after folder from the allowed root, without following any link. A link that appears between the two steps
is not followed, so the second step cannot leave the root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from toolspace.builtin.forbidden_paths import ForbiddenPaths, is_inside, path_parts
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolExecutionError, ToolPermissionError, ToolValidationError

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, because opening a pipe would otherwise wait for its other end. No terminal becomes the controlling one.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FILE_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}
_MAX_PATH_BYTES = 4096
_MAX_ATTEMPTS = 4


class FileMissingError(ToolExecutionError):
    """There is no file at a path."""


class OutsideAllowedPaths(ToolPermissionError):
    """A path leads outside the allowed folders."""


class _LinkAppearedError(OSError):
    """A symbolic link was created after the path was resolved."""

    def __init__(self) -> None:
        super().__init__(errno.ELOOP, os.strerror(errno.ELOOP))


class FileLocation(NamedTuple):
    """A name in an open folder. The name is not a link, or it is used without following it."""

    folder_fd: int
    """The descriptor of the open folder."""
    name: str
    path: str
    """As the caller wrote it, for messages."""
    real_path: str

    def find_status(self) -> os.stat_result | None:
        """The status of the file or folder; None if there is none."""
        try:
            return os.stat(self.name, dir_fd=self.folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def get_status(self) -> os.stat_result:
        """The status of the file or folder. Raises `FileMissingError` if there is none."""
        status = self.find_status()
        if status is None:
            raise missing_error(self.path)
        return status

    def open(self) -> BufferedReader:
        """Opens a regular file for reading."""
        self.check_file(self.get_status())
        file = os.fdopen(os.open(self.name, _FILE_FLAGS, dir_fd=self.folder_fd), "rb")
        try:
            # Checked again on the open file: the first check only avoids opening pipes and devices.
            self.check_file(os.fstat(file.fileno()))
        except BaseException:
            file.close()
            raise
        return file

    @contextmanager
    def open_folder(self) -> Generator[int]:
        """Opens a folder; yields its descriptor."""
        folder_fd = os.open(self.name, _FOLDER_FLAGS, dir_fd=self.folder_fd)
        try:
            yield folder_fd
        finally:
            os.close(folder_fd)

    def check_file(self, status: os.stat_result) -> None:
        """Raises unless the status is that of a regular file."""
        if stat.S_ISDIR(status.st_mode):
            raise _folder_error(self.path)
        if not stat.S_ISREG(status.st_mode):
            raise ToolExecutionError(f"{self.path!r} is a {file_kind(status)}; only regular files are read and written")


class AllowedPaths:
    """The folders that a call may access. Relative paths start at `base`."""

    def __init__(
        self,
        roots: Sequence[str | Path],
        *,
        base: str,
        setting: str,
        protected_files: Sequence[str | Path] = (),
        private_paths: Sequence[str | Path] = (),
        writable_code: Sequence[str | Path] = (),
    ) -> None:
        """`setting` names the setting in error messages. `ForbiddenPaths` explains the last three."""
        self._base = base
        self._setting = setting
        root_paths = [os.path.join(base, os.path.expanduser(root)) for root in roots]
        self._roots = sorted({os.path.realpath(root) for root in root_paths}, key=len, reverse=True)
        self._forbidden = ForbiddenPaths(
            private_paths=private_paths, protected_files=protected_files, writable_code=writable_code
        )
        self._immovable = {*self._roots, *map(os.path.normpath, root_paths)}

    @classmethod
    def from_context(cls, context: ToolContext) -> AllowedPaths:
        """The paths that the file tools of a call may access: `allowed_paths`, otherwise the current folder."""
        with translate_os_errors("."):
            current = os.getcwd()
        roots = [current] if context.allowed_paths is None else context.allowed_paths
        return cls(
            roots,
            base=current,
            setting="allowedPaths",
            protected_files=context.protected_paths or (),
            private_paths=context.private_paths or (),
            writable_code=context.writable_code or (),
        )

    @contextmanager
    def locate(
        self, path: str, *, follow: bool = True, create: bool = False, write: bool = False
    ) -> Generator[FileLocation]:
        """Opens the folder of a path. The file itself may not exist.

        `follow` resolves a link at the end of the path; `create` creates missing folders; `write` raises
        for protected files. Raises for private files. Operating system errors inside the block become tool errors.
        """
        check_path_text(path)
        with translate_os_errors(path):
            location = self._locate(path, follow, create, write)
            try:
                self._check_not_linked(location)
                yield location
            finally:
                os.close(location.folder_fd)

    def is_private(self, real_path: str) -> bool:
        """Whether a path without links is a private one, or inside one."""
        root = next((root for root in self._roots if is_inside(real_path, root)), None)
        return root is not None and self._forbidden.is_private(real_path, root)

    def is_private_file(self, status: os.stat_result) -> bool:
        """Whether a file is a hard link to a private file."""
        return self._forbidden.is_private_file(status)

    def search_roots(self) -> list[str]:
        """Where a search without a path starts: the current folder if it is allowed, otherwise every root."""
        real_base = os.path.realpath(self._base)
        is_allowed = any(is_inside(real_base, root) for root in self._roots)
        return ["."] if is_allowed else sorted(root for root in self._roots if os.path.exists(root))

    def check_movable(self, location: FileLocation) -> None:
        """Raises for an allowed root and the folders above it: moving one would change what is allowed."""
        if any(is_inside(root, location.real_path) for root in self._immovable):
            raise ToolPermissionError(
                f"{location.path!r} is one of the allowed folders, or contains one; it cannot be moved"
            )

    def check_package(self, source: FileLocation, target: FileLocation) -> None:
        """Raises if the source is a Python package that would be imported in place of code of the toolspace."""
        with suppress(OSError):  # Not a folder, so not a package.
            for name in os.listdir(source.real_path):
                if name.startswith("__init__."):
                    self._check_writable(os.path.join(target.path, name), os.path.join(target.real_path, name))

    def folders_above(self, location: FileLocation) -> Iterator[tuple[int, str]]:
        """The folders from the allowed root to the location's folder: descriptor and path. Only the last is open."""
        root = self._find_root(location.path, location.real_path)
        if location.real_path == root:
            return
        *parts, _ = path_parts(root, location.real_path)
        folder_fd, path = os.open(root, _FOLDER_FLAGS), root
        try:
            yield folder_fd, path
            for part in parts:
                inner_fd = _open_subfolder(folder_fd, part, create=False)
                os.close(folder_fd)
                folder_fd, path = inner_fd, os.path.join(path, part)
                yield folder_fd, path
        finally:
            os.close(folder_fd)

    def _check_not_linked(self, location: FileLocation) -> None:
        status = location.find_status()
        if status is not None and self.is_private_file(status):
            raise _private_error(location.path)

    def _check_writable(self, path: str, real_path: str) -> None:
        if self._forbidden.contains_private(real_path):
            raise _private_error(path)
        if self._forbidden.is_protected(real_path):
            raise ToolPermissionError(
                f"{path!r} is, or contains, configuration or code of a toolspace; tools may only read it, "
                "unless it is code that tools.allowWritingCode matches"
            )

    def _locate(self, path: str, follow: bool, create: bool, write: bool) -> FileLocation:
        for _ in range(_MAX_ATTEMPTS):
            real_path = self._resolve(path, follow)
            root = self._find_root(path, real_path)
            if self.is_private(real_path):  # Before a missing folder is created.
                raise _private_error(path)
            if write:
                self._check_writable(path, real_path)
            try:
                if real_path == root:
                    folder_fd, name = os.open(os.path.dirname(root), _FOLDER_FLAGS), os.path.basename(root) or "."
                else:
                    *parts, name = path_parts(root, real_path)
                    folder_fd = _open_from_root(root, parts, create=create)
                location = FileLocation(folder_fd, name, path, real_path)
                try:
                    status = location.find_status()
                    if follow and status is not None and stat.S_ISLNK(status.st_mode):
                        raise _LinkAppearedError
                except BaseException:
                    os.close(folder_fd)
                    raise
                return location
            except _LinkAppearedError:
                continue
        raise ToolPermissionError(f"{path!r} leads through symbolic links that are circular or keep changing")

    def _resolve(self, path: str, follow: bool) -> str:
        full_path = os.path.join(self._base, path)
        head, tail = os.path.split(full_path)
        if follow or tail in ("", ".", ".."):
            return os.path.realpath(full_path)
        return os.path.join(os.path.realpath(head), tail)

    def _find_root(self, path: str, real_path: str) -> str:
        for root in self._roots:
            if is_inside(real_path, root):
                return root
        roots = ", ".join(map(repr, reversed(self._roots))) or "none"
        # The same message whether the file exists or not: callers must not learn what lies outside.
        raise OutsideAllowedPaths(
            f"{path!r} is outside the allowed folders ({roots}); use a path inside them, or set {self._setting}"
        )


def _open_from_root(root: str, parts: Sequence[str], *, create: bool) -> int:
    """Opens the folder at `parts` below a root, part by part. The caller closes it."""
    try:
        folder_fd = os.open(root, _FOLDER_FLAGS)
    except FileNotFoundError:
        if not create:
            raise
        os.makedirs(root, exist_ok=True)
        folder_fd = os.open(root, _FOLDER_FLAGS)
    return open_below(folder_fd, parts, create=create)


def open_below(folder_fd: int, parts: Sequence[str], *, create: bool = False) -> int:
    """Opens a folder below an open one without following links. Closes the given descriptor, returns the new one."""
    for part in parts:
        try:
            inner_fd = _open_subfolder(folder_fd, part, create)
        finally:
            os.close(folder_fd)
        folder_fd = inner_fd
    return folder_fd


def _open_subfolder(folder_fd: int, name: str, create: bool) -> int:
    try:
        return os.open(name, _FOLDER_FLAGS, dir_fd=folder_fd)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):  # Another process created it; opening it checks that it is no link.
            os.mkdir(name, dir_fd=folder_fd)
        return os.open(name, _FOLDER_FLAGS, dir_fd=folder_fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        if stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
            raise _LinkAppearedError from None
        raise


def open_file(folder_fd: int, name: str) -> BufferedReader | None:
    """Opens a regular file in an open folder; None if it is not a regular file, or not readable."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
            return None
        file = os.fdopen(os.open(name, _FILE_FLAGS, dir_fd=folder_fd), "rb")
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None


class FolderVisit(NamedTuple):
    """One folder of a walk. It is open until the next visit."""

    folder_fd: int
    path: str
    """Relative to the start of the walk; empty for the start."""
    entries: list[os.DirEntry[str]]
    """Sorted by name."""
    pending_folders: deque[str]
    """The folders to visit next. The visitor appends them."""

    def entry_path(self, name: str) -> str:
        """The path of an entry, relative to the start of the walk."""
        return f"{self.path}/{name}" if self.path else name


def walk_folder(start_fd: int, context: ToolContext) -> Generator[FolderVisit]:
    """Visits an open folder, then the folders that the visitor appends to `pending_folders`, in that order.

    Only one folder besides the first is open at a time. Folders that vanished, became links or cannot be read are
    skipped. Follows no links.
    """
    pending_folders: deque[str] = deque([""])
    while pending_folders:
        context.check_canceled()
        path = pending_folders.popleft()
        try:
            folder_fd = open_below(os.dup(start_fd), path.split("/") if path else ())
        except OSError:
            continue
        try:
            try:
                with os.scandir(folder_fd) as scan:
                    entries = sorted(scan, key=lambda entry: entry.name)
            except OSError:
                if not path:
                    raise
                continue
            yield FolderVisit(folder_fd, path, entries, pending_folders)
        finally:
            os.close(folder_fd)


def path_prefix(path: str) -> str:
    """The prefix that turns a path inside a folder into a path that the other file tools accept."""
    folder = path.removeprefix("./").rstrip("/")
    if folder in ("", "."):
        return "/" if path.startswith("/") else ""
    return folder + "/"


@contextmanager
def translate_os_errors(path: str) -> Generator[None]:
    """Turns operating system errors into tool errors that name the path and say what to do."""
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: str) -> Exception:
    match error.errno:
        case errno.ENOENT:
            return missing_error(path)
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return ToolPermissionError(f"the operating system refuses access to {path!r} ({error.strerror})")
        case errno.ENOTDIR:
            return FileMissingError(f"{path!r} not found: a part of it is a file, not a folder")
        case errno.EISDIR:
            return _folder_error(path)
        case errno.ENAMETOOLONG:
            return ToolValidationError(f"path: {_shorten(path)!r} is longer than the file system allows; shorten it")
        case errno.ELOOP:
            return ToolPermissionError(f"{path!r} became a symbolic link while it was opened; try again")
        case _:
            return ToolExecutionError(f"{path!r}: {error.strerror or error}")


def _private_error(path: str) -> ToolPermissionError:
    return ToolPermissionError(
        f"{path!r} is, or contains, state of Toolspace (database, keys, caches, stored outputs); "
        "file tools cannot read or change it. Use another path, or set storage.dir to a folder of its own"
    )


def check_path_text(path: str) -> None:
    """Raises for a text that cannot be a path, or that a shell would read differently."""
    if not path.strip():
        raise ToolValidationError('path: it is empty; use "." for the current folder')
    if "\0" in path:
        raise ToolValidationError(f"path: {_shorten(path)!r} contains a null character")
    if path == "~" or path.startswith("~/"):
        raise ToolValidationError(
            f"path: ~ is not expanded ({_shorten(path)!r}); give the whole path, or a relative one"
        )
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise ToolValidationError(f"path: {_shorten(path)!r} contains half of a surrogate pair") from None
    if length > _MAX_PATH_BYTES:
        raise ToolValidationError(f"path: {_shorten(path)!r} has {length} bytes; at most {_MAX_PATH_BYTES} are allowed")


def missing_error(path: str) -> FileMissingError:
    hint = "" if os.path.isabs(path) else "; relative paths start at the current folder"
    return FileMissingError(f"{path!r} not found{hint}; use list_files to see what exists")


def _folder_error(path: str) -> ToolExecutionError:
    return ToolExecutionError(f"{path!r} is a folder, not a file; use list_files to list it")


def file_kind(status: os.stat_result) -> str:
    """`file`, `directory`, `symlink`, `pipe`, `socket` or `device`."""
    return _FILE_KINDS.get(stat.S_IFMT(status.st_mode), "device")


def display_name(name: str) -> str:
    """A file name as valid text, whatever bytes it has."""
    return os.fsencode(name).decode("utf-8", "replace")


def _shorten(path: str) -> str:
    return path if len(path) <= 80 else f"{path[:80]}…"

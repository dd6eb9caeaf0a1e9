"""Opens files inside allowed folders and nowhere else. Knows nothing of what they hold.

A path is resolved twice. First as text, through every symbolic link, to learn where it leads and whether that is
allowed. Then for real: folder by folder from the allowed root, following no link at all. Whatever is swapped in
between, the second walk stays inside the root: a link that was not there the first time stops it.
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

from toolspace.core.context import ToolContext
from toolspace.errors import ToolExecutionError, ToolPermissionError, ToolValidationError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, because opening a pipe would else wait for its other end; no terminal may become ours.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LONGEST = 4096
_ATTEMPTS = 4


_CONFIGURES = frozenset(f"toolspace.{ending}" for ending in ("yaml", "yml", "json", "toml"))
"""Names that a toolspace is configured by. A tool that could write one could give itself every right."""


class FileMissingError(ToolExecutionError):
    """There is nothing at a path."""


class _Swapped(OSError):
    """A link stands where the first look saw none."""

    def __init__(self) -> None:
        super().__init__(errno.ELOOP, os.strerror(errno.ELOOP))


class FileLocation(NamedTuple):
    """The last step to a file: an open folder inside the bounds, and a name in it that is no link to follow."""

    folder_fd: int
    """A file descriptor."""
    name: str
    path: str
    """As the caller wrote it, for messages."""
    real_path: str

    def status(self) -> os.stat_result | None:
        """What is there now; None if nothing is."""
        try:
            return os.stat(self.name, dir_fd=self.folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(self) -> BufferedReader:
        """The regular file that is there, to read its bytes."""
        self.check_file(self.status())
        file = os.fdopen(os.open(self.name, _FILE, dir_fd=self.folder_fd), "rb")
        try:
            # Once more on what was opened: the first look is only there to leave pipes and devices untouched.
            self.check_file(os.fstat(file.fileno()))
        except BaseException:
            file.close()
            raise
        return file

    @contextmanager
    def open_folder(self) -> Generator[int]:
        """The folder that is there, as a descriptor."""
        folder = os.open(self.name, _FOLDER, dir_fd=self.folder_fd)
        try:
            yield folder
        finally:
            os.close(folder)

    def check_file(self, status: os.stat_result | None) -> os.stat_result:
        """Raises unless it is a regular file."""
        if status is None:
            raise missing_error(self.path)
        if stat.S_ISDIR(status.st_mode):
            raise ToolExecutionError(f"{self.path!r} is a folder, not a file; list_files shows what is in it")
        if not stat.S_ISREG(status.st_mode):
            raise ToolExecutionError(f"{self.path!r} is a {file_kind(status)}; only regular files are read and written")
        return status


class AllowedPaths:
    """The folders that calls may touch. Relative paths start at `base`."""

    def __init__(
        self, roots: Sequence[str | Path], *, base: str, setting: str, protected: Sequence[str | Path] = ()
    ) -> None:
        self._base = base
        self._setting = setting
        written = [os.path.join(base, os.path.expanduser(root)) for root in roots]
        self._roots = sorted({os.path.realpath(root) for root in written}, key=len, reverse=True)
        self._protected = {os.path.realpath(file) for file in protected}
        self._pinned = {*self._roots, *map(os.path.normpath, written)}

    @classmethod
    def from_context(cls, context: ToolContext) -> AllowedPaths:
        """Where the file tools of this call may work: `allowed_paths`, else the current folder."""
        with translate_os_errors("."):
            here = os.getcwd()
        roots = [here] if context.allowed_paths is None else context.allowed_paths
        return cls(roots, base=here, setting="allowedPaths", protected=context.protected_paths or ())

    @contextmanager
    def locate(
        self, path: str, *, follow: bool = True, create: bool = False, write: bool = False
    ) -> Generator[FileLocation]:
        """The place that a path names. With `follow` a link at its end is resolved too; `create` makes missing
        folders on the way; `write` says that it is going to be changed. Errors of the operating system inside the
        block come out as errors of the tool."""
        check_path_text(path)
        with translate_os_errors(path):
            place = self._locate(path, follow, create)
            try:
                if write:
                    self._check_unprotected(place)
                yield place
            finally:
                os.close(place.folder_fd)

    def search_roots(self) -> list[str]:
        """Where to begin when no path is said: the current folder, else every root."""
        real = os.path.realpath(self._base)
        inside = any(real == root or real.startswith(root.rstrip("/") + "/") for root in self._roots)
        return ["."] if inside else sorted(root for root in self._roots if os.path.exists(root))

    def check_movable(self, place: FileLocation) -> None:
        """Raises for a folder that bounds hang on: with it replaced, they would mean something else."""
        prefix = place.real_path.rstrip("/") + "/"
        if any(root == place.real_path or root.startswith(prefix) for root in self._pinned):
            raise ToolPermissionError(
                f"{place.path!r} is one of the allowed folders, or holds one; it stays where it is"
            )

    def _check_unprotected(self, place: FileLocation) -> None:
        prefix = place.real_path.rstrip("/") + "/"
        folder, name = os.path.split(place.real_path)
        configures = name.casefold() in _CONFIGURES or any(
            file == place.real_path or file.startswith(prefix) for file in self._protected
        )
        if not configures and name.endswith(".py"):
            # Beside code that is loaded, any module can be imported in another's place.
            configures = any(file.endswith(".py") and os.path.dirname(file) == folder for file in self._protected)
        if configures:
            raise ToolPermissionError(
                f"{place.path!r} is, or holds, what configures a toolspace; tools may read it, not change or make it"
            )

    def folders_above(self, place: FileLocation) -> Iterator[tuple[int, str]]:
        """The folders from the allowed root down to the one that holds the place, each open while it is current."""
        root = self._root_of(place.path, place.real_path)
        if place.real_path == root:
            return
        *parts, _ = _below(root, place.real_path)
        folder, path = os.open(root, _FOLDER), root
        try:
            yield folder, path
            for part in parts:
                below = _step(folder, part, create=False)
                os.close(folder)
                folder, path = below, os.path.join(path, part)
                yield folder, path
        finally:
            os.close(folder)

    def _locate(self, path: str, follow: bool, create: bool) -> FileLocation:
        for _ in range(_ATTEMPTS):
            real = self._resolve(path, follow)
            root = self._root_of(path, real)
            try:
                if real == root:
                    folder, name = os.open(os.path.dirname(root), _FOLDER), os.path.basename(root) or "."
                else:
                    *parts, name = _below(root, real)
                    folder = _descend(root, parts, create=create)
                place = FileLocation(folder, name, path, real)
                try:
                    status = place.status()
                    if follow and status is not None and stat.S_ISLNK(status.st_mode):
                        raise _Swapped
                except BaseException:
                    os.close(folder)
                    raise
                return place
            except _Swapped:
                continue
        raise ToolPermissionError(f"{path!r} leads through symbolic links that go in a circle or keep changing")

    def _resolve(self, path: str, follow: bool) -> str:
        whole = os.path.join(self._base, path)
        head, tail = os.path.split(whole)
        if follow or tail in ("", ".", ".."):
            return os.path.realpath(whole)
        return os.path.join(os.path.realpath(head), tail)

    def _root_of(self, path: str, real: str) -> str:
        for root in self._roots:
            if real == root or real.startswith(root.rstrip("/") + "/"):
                return root
        roots = ", ".join(map(repr, reversed(self._roots))) or "none"
        # The same words whether the file exists or not: what lies outside is nobody's business.
        raise ToolPermissionError(
            f"{path!r} leads outside the allowed folders ({roots}); use a path inside them, or set {self._setting}"
        )


def _below(root: str, real: str) -> list[str]:
    return real[len(root) :].strip("/").split("/")


def _descend(root: str, parts: Sequence[str], *, create: bool) -> int:
    """Opens the folder at `parts` below the root, one step at a time. The caller closes it."""
    try:
        folder = os.open(root, _FOLDER)
    except FileNotFoundError:
        if not create:
            raise
        os.makedirs(root, exist_ok=True)
        folder = os.open(root, _FOLDER)
    return open_below(folder, parts, create=create)


def open_below(folder: int, parts: Sequence[str], *, create: bool = False) -> int:
    """Goes down from an open folder without following links. Closes it, and gives the last one open."""
    for part in parts:
        try:
            below = _step(folder, part, create)
        finally:
            os.close(folder)
        folder = below
    return folder


def _step(folder: int, part: str, create: bool) -> int:
    try:
        return os.open(part, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):  # Someone else was quicker; what they made is checked like any step.
            os.mkdir(part, dir_fd=folder)
        return os.open(part, _FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _Swapped from None
        raise


def open_file(folder: int, name: str) -> BufferedReader | None:
    """A regular file in an open folder; None where it is anything else, or cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return None
        file = os.fdopen(os.open(name, _FILE, dir_fd=folder), "rb")
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None


@contextmanager
def translate_os_errors(path: str) -> Generator[None]:
    """Turns errors of the operating system into ones that name the path and the way out."""
    try:
        yield
    except OSError as error:
        raise _explain(error, path) from error


def _explain(error: OSError, path: str) -> Exception:
    match error.errno:
        case errno.ENOENT:
            return missing_error(path)
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return ToolPermissionError(f"the operating system refuses access to {path!r} ({error.strerror})")
        case errno.ENOTDIR:
            return FileMissingError(f"{path!r} not found: a part of it is a file, not a folder")
        case errno.EISDIR:
            return ToolExecutionError(f"{path!r} is a folder, not a file; list_files shows what is in it")
        case errno.ENAMETOOLONG:
            return ToolValidationError(f"path: {_short(path)!r} is longer than the file system allows; shorten it")
        case errno.ELOOP:
            return ToolPermissionError(f"{path!r} became a symbolic link while it was opened; try again")
        case _:
            return ToolExecutionError(f"{path!r}: {error.strerror or error}")


def check_path_text(path: str) -> None:
    """Raises for text that cannot be a path, or would not mean what its writer thinks."""
    if not path.strip():
        raise ToolValidationError('path: it is empty; use "." for the current folder')
    if "\0" in path:
        raise ToolValidationError(f"path: {_short(path)!r} holds a null character, which no path can")
    if path == "~" or path.startswith("~/"):
        raise ToolValidationError(f"path: ~ is not expanded ({_short(path)!r}); give the whole path, or a relative one")
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise ToolValidationError(f"path: {_short(path)!r} holds half a character, which no path can") from None
    if length > _LONGEST:
        raise ToolValidationError(f"path: {_short(path)!r} has {length} bytes; at most {_LONGEST} are allowed")


def missing_error(path: str) -> FileMissingError:
    start = "" if os.path.isabs(path) else "; relative paths start at the current folder"
    return FileMissingError(f"{path!r} not found{start}; list_files shows what is there")


def file_kind(status: os.stat_result) -> str:
    """`file`, `directory`, `symlink`, or what else it is."""
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "symlink"
    if stat.S_ISFIFO(mode):
        return "pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"


def display_name(name: str) -> str:
    """A file name as text that JSON can carry, whatever bytes it is made of."""
    return os.fsencode(name).decode("utf-8", "replace")


def _short(path: str) -> str:
    return path if len(path) <= 80 else f"{path[:80]}…"


# MERGED from walking: Walks through a folder and what is below it, from open folder to open folder. Follows no link.


class FolderVisit(NamedTuple):
    """One folder of a walk; open until the next one is asked for."""

    folder_fd: int
    path: str
    """Relative to where the walk began; empty there."""
    entries: list[os.DirEntry[str]]
    """Sorted by name."""
    pending_folders: deque[str]
    """Folders still to visit. The visitor adds those that are worth it."""

    def entry_path(self, name: str) -> str:
        """The path of an entry."""
        return f"{self.path}/{name}" if self.path else name


def walk_folder(start: int, context: ToolContext) -> Generator[FolderVisit]:
    """Visits a folder, then those that the visitor added to `ahead`, the nearest first.

    Only one folder besides the first is open at a time, however deep the tree. A folder that vanished, was replaced
    by a link or cannot be read is left out.
    """
    pending_folders: deque[str] = deque([""])
    while pending_folders:
        context.check_canceled()
        path = pending_folders.popleft()
        folder = os.dup(start) if not path else _open_folder(start, path)
        if folder is None:
            continue
        try:
            entries = _list_entries(folder, optional=bool(path))
            if entries is not None:
                yield FolderVisit(folder, path, entries, pending_folders)
        finally:
            os.close(folder)


def path_prefix(path: str) -> str:
    """What to put before a path inside a folder, so that the other file tools find it."""
    plain = path.removeprefix("./").rstrip("/")
    if plain in ("", "."):
        return "/" if path.startswith("/") else ""
    return plain + "/"


def _open_folder(start: int, path: str) -> int | None:
    try:
        return open_below(os.dup(start), path.split("/"))
    except OSError:
        return None


def _list_entries(folder: int, *, optional: bool) -> list[os.DirEntry[str]] | None:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=_entry_name)
    except OSError:
        if optional:
            return None
        raise


def _entry_name(entry: os.DirEntry[str]) -> str:
    return entry.name

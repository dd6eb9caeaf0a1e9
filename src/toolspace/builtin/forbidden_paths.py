"""What file tools must not touch inside their allowed folders: private state, and files that decide what runs.

`allowed_paths` asks it about every path that it opens. All paths here are real paths, without links.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path

_MAX_PRIVATE_FILES = 100_000
_CONFIGURATION_NAMES = frozenset(f"toolspace.{suffix}" for suffix in ("yaml", "yml", "json", "toml"))
"""Configuration files. A tool that could write one could give itself every permission."""
_STATE_FOLDER = ".toolspace"
"""The state directory of a project. A tool that could write one could give a project a database with its own keys."""
_MODULE_SUFFIXES = tuple(suffix.casefold() for suffix in importlib.machinery.all_suffixes())


class ForbiddenPaths:
    """Private paths, which can be neither read nor changed, and protected files, which can only be read.

    Every folder `.toolspace` is private, also that of another project, or one that does not exist yet. A private path
    that contains an allowed root does not hold below this root. Modules may be written beside
    protected ones where a pattern of `writable_code` matches.
    """

    def __init__(
        self,
        *,
        private_paths: Sequence[str | Path],
        protected_files: Sequence[str | Path],
        writable_code: Sequence[str | Path],
    ) -> None:
        self._private_paths = tuple(map(str, private_paths))
        self._protected_paths = protected_files
        self._writable_code = [_fold(os.path.realpath(pattern)) for pattern in writable_code]

    def is_private(self, path: str, root: str) -> bool:
        """Whether a path below an allowed root is private. Ignores case, as some file systems do."""
        folded_path = _fold(path)
        if _STATE_FOLDER in folded_path and _STATE_FOLDER in path_parts(_fold(root), folded_path):
            return True
        return any(is_inside(folded_path, private) for private in _list_private_paths(root, self._private_paths))

    def contains_private(self, path: str) -> bool:
        """Whether a path is a private one, or a folder that contains one."""
        return any(is_inside(_fold(private), _fold(path)) for private in self._private_paths)

    def is_private_file(self, status: os.stat_result) -> bool:
        """Whether a file is a hard link to a private file."""
        if status.st_nlink < 2 or not stat.S_ISREG(status.st_mode):
            return False
        return (status.st_dev, status.st_ino) in self._private_file_ids

    @cached_property
    def _private_file_ids(self) -> frozenset[tuple[int, int]]:
        """Device and inode of the private files with several names."""
        statuses = itertools.islice(_walk_statuses(self._private_paths), _MAX_PRIVATE_FILES)
        return frozenset((status.st_dev, status.st_ino) for status in statuses if status.st_nlink > 1)

    @cached_property
    def _protected_files(self) -> frozenset[str]:
        # With the path itself: if it is a link, the link decides which file is used.
        return frozenset(
            _fold(path(file)) for file in self._protected_paths for path in (os.path.realpath, os.path.abspath)
        )

    def is_protected(self, path: str) -> bool:
        """Whether a path is, contains or would replace a file that decides what runs."""
        folded_path = _fold(path)
        if os.path.basename(folded_path) in _CONFIGURATION_NAMES:
            return True
        if any(is_inside(file, folded_path) for file in self._protected_files):
            return True
        if any(fnmatchcase(folded_path, pattern) for pattern in self._writable_code):
            return False
        # A package is imported in place of the module with the same name.
        module_path = f"{folded_path}.py" if os.path.lexists(f"{path}.py") else folded_path
        return any(_would_replace_module(file, module_path) for file in self._protected_files)


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is the given folder or lies below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def path_parts(root: str, real_path: str) -> list[str]:
    return real_path[len(root) :].strip("/").split("/")


def _would_replace_module(module_file: str, path: str) -> bool:
    """Whether Python could import the path in place of a module beside the file, or of the file itself.

    A module, package, extension or compiled file in the folder of loaded code is found before those elsewhere.
    """
    folder, file_name = os.path.split(module_file)
    if not file_name.endswith(".py") or path == folder or not is_inside(path, folder):
        return False
    first, *rest = path_parts(folder, path)
    if first == "__pycache__":
        return True
    if not rest:
        return first.endswith(_MODULE_SUFFIXES)
    return len(rest) == 1 and rest[0].startswith("__init__.") and rest[0].endswith(_MODULE_SUFFIXES)


def _fold(path: str) -> str:
    """The path as a file system compares it that ignores case. Two spellings of a private path are both private."""
    return unicodedata.normalize("NFC", path).casefold()


@lru_cache(maxsize=256)
def _list_private_paths(root: str, private_paths: tuple[str, ...]) -> tuple[str, ...]:
    """The outermost private paths that hold for a root, in the form in which they are compared."""
    outermost: list[str] = []
    for path in sorted({_fold(path) for path in private_paths if not is_inside(root, path)}):
        if not any(is_inside(path, folder) for folder in outermost):
            outermost.append(path)
    return tuple(outermost)


def _walk_statuses(paths: Sequence[str]) -> Iterator[os.stat_result]:
    """The status of every file below the paths. Skips what cannot be read."""
    for path in paths:
        with suppress(OSError):
            yield os.lstat(path)
    for path in paths:
        for folder, _, names in os.walk(path):
            for name in names:
                with suppress(OSError):
                    yield os.lstat(os.path.join(folder, name))

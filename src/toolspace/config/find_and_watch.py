"""Finds the configuration file of a directory and the state directory, and watches files for changes.

Used by `Toolspace` and the CLI. Reads no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

CONFIG_NAMES = ("toolspace.yaml", "toolspace.yml", "toolspace.json", "toolspace.toml")
MAX_WAIT = 10
"""How many checks a change may take to settle before it is reported nevertheless."""
PROJECT_STATE_FOLDER = ".toolspace"
"""The state directory of a project, beside its configuration file."""
STATE_MARKER = "without-configuration"
"""A file in the user's state directory: the state there belongs to commands without a configuration file."""
_STATE_FOLDERS = ("conversations", "logins", "mcp-tools", "outputs", "run", "sessions")
_STATE_DATABASES = ("toolspace.db", "cache.db")
_LASTING_STATE = ("toolspace.db", "conversations", "logins", "sessions")
"""What cannot be made again, unlike caches and outputs."""
_DATABASE_SUFFIXES = ("", "-wal", "-shm", "-journal", ".lock", ".restored")
REMOVED_AFTER = 3
"""After how many checks a missing file counts as removed: editors remove it for a moment while they save."""

FileStamp = tuple[int, int, int]
"""Changes when the file does: its modification time, its size, and its inode, which a save by rename replaces."""
FileStamps = dict[Path, FileStamp | None]


def find_config(start: Path) -> Path | None:
    """The nearest configuration file from a directory upwards, or None. YAML takes precedence over JSON and TOML."""
    start = start.absolute()
    for directory in (start, *start.parents):
        for name in CONFIG_NAMES:
            path = directory / name
            try:
                if path.is_file():
                    return path
            except OSError:  # A directory without access has no configuration for us.
                break
    return None


def default_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The user's state directory: `$XDG_STATE_HOME/toolspace`, else `~/.local/state/toolspace`."""
    environ = os.environ if environ is None else environ
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # The XDG standard says to ignore a relative path.
        return Path(state) / "toolspace"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".local" / "state" / "toolspace"


class StateLocation(NamedTuple):
    """The state directory of a configuration."""

    path: Path
    new_path: Path | None = None
    """Where the state belongs, if `path` is the directory that all projects of a user shared in earlier versions."""


def find_state_dir(config_path: Path | None, environ: Mapping[str, str] | None = None) -> StateLocation:
    """The state directory of a configuration without `storage.dir`: `.toolspace` beside its file.

    Without a file it is the user's state directory. That directory is also used for a project without state of its
    own, if an earlier version has left state there.
    """
    user_dir = default_state_dir(environ)
    if config_path is None:
        return StateLocation(user_dir)
    project_dir = config_path.parent / PROJECT_STATE_FOLDER
    is_left_over = _has_any(user_dir, _LASTING_STATE) and not (user_dir / STATE_MARKER).exists()
    if is_left_over and not _has_any(project_dir, (*_STATE_FOLDERS, *_STATE_DATABASES)):
        return StateLocation(user_dir, project_dir)
    return StateLocation(project_dir)


def mark_user_state(state_dir: Path) -> None:
    """Marks a state directory that has no lasting state yet. Call it before something lasting is stored there.

    Without the mark, state in the user's state directory would look like that of earlier versions, which shared it
    among all projects.
    """
    if not _has_any(state_dir, _LASTING_STATE):
        with contextlib.suppress(OSError):  # Whoever stores something next reports it.
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (state_dir / STATE_MARKER).touch(mode=0o600)


def _has_any(folder: Path, names: Iterable[str]) -> bool:
    return any(os.path.lexists(folder / name) for name in names)


def key_memory_root(memory_dir: str | Path) -> Path:
    """The directory with the memory directories of keys: beside `memoryDir`, whose tools list everything in it."""
    return Path(f"{memory_dir}-keys")


def agent_memory_root(memory_dir: str | Path) -> Path:
    """The directory with the memory directories of agents, beside `memoryDir` too."""
    return Path(f"{memory_dir}-agents")


def list_state_paths(
    state_dir: Path, database_file: Path | None = None, other_dirs: Iterable[Path] = ()
) -> tuple[str, ...]:
    """The real paths that file tools may neither read nor change: the state directory, and each part of the state.

    The parts are listed too, for the case that the state directory itself is an allowed path. `other_dirs`: parts of
    the state that are configured to be elsewhere.
    """
    real_dir = os.path.realpath(state_dir)
    folders = [_resolve_link(os.path.join(real_dir, name)) for name in _STATE_FOLDERS]
    folders += map(os.path.realpath, other_dirs)
    databases = [_resolve_link(os.path.join(real_dir, name)) for name in _STATE_DATABASES]
    if database_file is not None:
        databases.append(os.path.realpath(database_file))
    return (real_dir, *folders, *(file for path in databases for file in _list_database_files(path)))


def _list_database_files(path: str) -> Iterator[str]:
    """The files of an SQLite database, whether they exist or not, and the older databases that `restore` has kept."""
    yield from (path + suffix for suffix in _DATABASE_SUFFIXES)
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):  # There is no such folder.
        for entry in os.listdir(folder):
            if entry.startswith(f"{name}.before-restore-"):
                yield os.path.join(folder, entry)


def _resolve_link(path: str) -> str:
    """The real path of a file whose folder is a real path."""
    return os.path.realpath(path) if os.path.islink(path) else path


def watch_files(files: Callable[[], Iterable[Path]], *, interval: float = 1.0) -> AsyncIterator[None]:
    """Yields each time one of the files has changed and settled, checking every `interval` seconds.

    The first check happens now, not at the first step: call it before reading the files, and no change is lost.
    `files` is called again before every check; a file that is new in the list is no change.
    """
    return _watch(files, interval, _read_stamps(files()))


async def _watch(files: Callable[[], Iterable[Path]], interval: float, previous: FileStamps) -> AsyncIterator[None]:
    missing_counts: dict[Path, int] = {}
    while True:
        await asyncio.sleep(interval)
        current = await asyncio.to_thread(_read_stamps, list(files()))
        if not _has_changed(previous, current, missing_counts):
            for path, stamp in current.items():
                previous.setdefault(path, stamp)
            continue
        for _ in range(MAX_WAIT):
            await asyncio.sleep(interval)
            later = await asyncio.to_thread(_read_stamps, list(files()))
            if later == current:
                break
            current = later
        previous = dict(current)
        missing_counts.clear()
        yield


def _has_changed(previous: FileStamps, current: FileStamps, missing_counts: dict[Path, int]) -> bool:
    has_changed = False
    for path, stamp in current.items():
        if path not in previous or previous[path] == stamp:
            missing_counts.pop(path, None)
        elif stamp is not None:
            has_changed = True
        else:
            missing_counts[path] = missing_counts.get(path, 0) + 1
            has_changed = has_changed or missing_counts[path] >= REMOVED_AFTER
    return has_changed


def _read_stamps(paths: Iterable[Path]) -> FileStamps:
    return {path: _read_stamp(path) for path in paths}


def _read_stamp(path: Path) -> FileStamp | None:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

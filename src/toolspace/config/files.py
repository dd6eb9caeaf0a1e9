"""Says when files change, by looking at them. Reads none of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path

Stamp = tuple[int, int, int]
"""What changes when a file does: its time, its size, and the file itself, if a save renames another to it."""
Stamps = dict[Path, Stamp | None]

MAX_WAIT = 10
"""How many looks a change may take to come to rest, before it is reported all the same."""
GONE_AFTER = 3
"""After how many looks a missing file counts as removed: editors take it away for a moment while saving."""


def watch_files(files: Callable[[], Iterable[Path]], *, interval: float = 1.0) -> AsyncIterator[None]:
    """Yields each time one of the files changed and has come to rest, looking every `interval` seconds.

    The files are first looked at now, not at the first step: call it before reading them, and no change is
    lost. `files` is asked again before every look; a file that is new to the list is no change.
    """
    return _changes(files, interval, _look(files()))


async def _changes(files: Callable[[], Iterable[Path]], interval: float, seen: Stamps) -> AsyncIterator[None]:
    missing: dict[Path, int] = {}
    while True:
        await asyncio.sleep(interval)
        now = await asyncio.to_thread(_look, list(files()))
        if not _differs(seen, now, missing):
            for path, stamp in now.items():
                seen.setdefault(path, stamp)
            continue
        for _ in range(MAX_WAIT):
            await asyncio.sleep(interval)
            later = await asyncio.to_thread(_look, list(files()))
            if later == now:
                break
            now = later
        seen = dict(now)
        missing.clear()
        yield


def _differs(seen: Stamps, now: Stamps, missing: dict[Path, int]) -> bool:
    changed = False
    for path, stamp in now.items():
        if path not in seen or seen[path] == stamp:
            missing.pop(path, None)
        elif stamp is not None:
            changed = True
        else:
            missing[path] = missing.get(path, 0) + 1
            changed = changed or missing[path] >= GONE_AFTER
    return changed


def _look(paths: Iterable[Path]) -> Stamps:
    return {path: _stamp(path) for path in paths}


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


# MERGED from locate: Finds the configuration file that holds for a folder, and the folder of the state. Reads noth…

CONFIG_NAMES = ("toolspace.yaml", "toolspace.yml", "toolspace.json", "toolspace.toml")


def find_config(start: Path) -> Path | None:
    """The nearest configuration from a folder upwards, or None. YAML comes before JSON and TOML."""
    folder = start.absolute()
    for candidate in (folder, *folder.parents):
        for name in CONFIG_NAMES:
            path = candidate / name
            try:
                if path.is_file():
                    return path
            except OSError:  # A folder that may not be looked into holds no configuration for us.
                break
    return None


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's state is kept: `$XDG_STATE_HOME/toolspace`, else `~/.local/state/toolspace`."""
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # A relative one is to be ignored, says the standard.
        return Path(state) / "toolspace"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".local" / "state" / "toolspace"

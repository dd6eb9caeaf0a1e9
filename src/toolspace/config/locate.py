"""Finds the configuration file that holds for a folder, and the folder of the state. Reads nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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

"""Finds the configuration file that holds for a folder. Reads nothing."""

from __future__ import annotations

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

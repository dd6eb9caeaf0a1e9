"""Where the database is that configuration names: a SQLite file, or a PostgreSQL elsewhere. Opens nothing."""

from __future__ import annotations

from pathlib import Path

from toolspace.core.postgres import shown_address

FILE = "toolspace.db"
_SQLITE = "sqlite:///"


def database_file(url: str | None, state_dir: Path) -> Path | None:
    """The file that `storage.url` means; None where it means a PostgreSQL."""
    if url is None:
        return state_dir / FILE
    return Path(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) else None


def database_place(url: str | None, state_dir: Path) -> str:
    """Where the data is, as people may see it: without the password that leads there."""
    file = database_file(url, state_dir)
    return str(file) if file is not None else f"postgresql://{shown_address(url or '')}"

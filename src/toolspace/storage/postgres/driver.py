"""What all who speak to PostgreSQL share: its driver, loaded when it is needed, and its address as it may be shown."""

from __future__ import annotations

import importlib
from typing import Any
from urllib.parse import parse_qs

from toolspace.errors import StorageError

SCHEMES = ("postgresql://", "postgres://")


def load_driver() -> Any:
    """The module `asyncpg`. Raises `StorageError` where it is not installed."""
    try:
        return importlib.import_module("asyncpg")
    except ImportError as error:
        raise StorageError(
            "PostgreSQL needs the package asyncpg, which is not installed: pip install 'toolspace[postgres]'"
        ) from error


def shown_address(url: str) -> str:
    """Host and database of a URL, without who connects: a password is in no message and no log."""
    # Not parsed as a URL: one that is written wrong must not show its password either.
    rest = url.partition("://")[2]
    rest, _, query = rest.partition("?")
    authority, slash, database = rest.rpartition("@")[2].partition("/")
    host = authority or next(iter(parse_qs(query).get("host", ())), "localhost")
    return f"{host}{slash}{database}"


def faults(driver: Any) -> tuple[type[Exception], ...]:
    """What the driver raises where a server, or the way to it, fails. The last: where that happens in an answer."""
    return OSError, driver.PostgresError, driver.InterfaceError, driver.InternalClientError

"""The driver of PostgreSQL, loaded when it is needed, and addresses without passwords. Connects to nothing."""

from __future__ import annotations

import importlib
from typing import Any
from urllib.parse import parse_qs

from toolspace.errors import StorageError

SCHEMES = ("postgresql://", "postgres://")


def load_driver() -> Any:
    """The module `asyncpg`. Raises `StorageError` if it is not installed."""
    try:
        return importlib.import_module("asyncpg")
    except ImportError as error:
        raise StorageError(
            "PostgreSQL needs the package asyncpg, which is not installed: pip install 'toolspace[postgres]'"
        ) from error


def shown_address(url: str) -> str:
    """Host and database of a URL, without user and password, for messages and logs."""
    # Not parsed as a URL: a malformed one must not show its password either.
    rest = url.partition("://")[2]
    rest, _, query = rest.partition("?")
    authority, slash, database = rest.rpartition("@")[2].partition("/")
    host = authority or next(iter(parse_qs(query).get("host", ())), "localhost")
    return f"{host}{slash}{database}"


def connection_errors(driver: Any) -> tuple[type[Exception], ...]:
    """What the driver raises if the server or the connection fails; the last, if a response cannot be parsed."""
    return OSError, driver.PostgresError, driver.InterfaceError, driver.InternalClientError


def describe_error(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return str(error) or type(error).__name__

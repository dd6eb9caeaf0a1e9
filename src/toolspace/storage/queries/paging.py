"""Pages that end where they get large: each row may be as large as its writer liked, and one answer has to hold all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from toolspace.storage.database import Program

T = TypeVar("T")

MOST_BYTES: Final = 4 * 1024 * 1024
"""Of one page, about; a single row may be larger."""
_FIRST: Final = 16
"""Rows that are read before it is known how large they are."""


def page(
    read: Callable[[T | None, int], Program[list[T]]], size: Callable[[T], int], limit: int, *, most: int = MOST_BYTES
) -> Program[tuple[list[T], bool]]:
    """Up to `limit` rows, fewer where they are large, and whether there may be more behind them.

    `read` gives so many behind a row, or from the beginning.
    """
    found: list[T] = []
    total = 0
    wanted = min(_FIRST, limit + 1)
    while wanted > 0:
        some = yield from read(found[-1] if found else None, wanted)
        found += some
        if len(some) < wanted:
            return found[:limit], len(found) > limit
        total += sum(map(size, some))
        fitting = (most - total) * len(found) // max(total, 1)
        wanted = min(fitting, limit + 1 - len(found))
    return found[:limit], True

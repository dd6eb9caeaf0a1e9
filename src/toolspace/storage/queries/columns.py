"""Builds the parts of SQL statements that follow from a list of columns, and decodes rows. For `queries/` alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from toolspace.core import json_text
from toolspace.storage.database import Row

R = TypeVar("R", bound=msgspec.Struct)


class Columns(Generic[R]):
    """The columns of one table that make up a record: one for each field, of the same name and in the same order."""

    def __init__(
        self,
        record: type[R],
        *,
        names: Mapping[str, str] | None = None,
        json: Collection[str] = (),
        flags: Collection[str] = (),
        decoders: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        """`names`: columns that are named otherwise than their field. `json`, `flags`: fields that are stored as JSON
        text, and as 0 or 1. `decoders`: what else turns a value that is not NULL into a field."""
        self._record = record
        self._fields = record.__struct_fields__
        self._decoders = {
            **dict.fromkeys(json, json_text.decode),
            **dict.fromkeys(flags, bool),
            **(decoders or {}),
        }
        self.names = tuple((names or {}).get(field, field) for field in self._fields)
        self.sql = ", ".join(self.names)
        """For SELECT and RETURNING. More columns may follow: `decode` does not look at them."""

    def __len__(self) -> int:
        return len(self.names)

    def decode(self, row: Row) -> R:
        values = dict(zip(self._fields, row, strict=False))
        for field, decoder in self._decoders.items():
            if values[field] is not None:
                values[field] = decoder(values[field])
        return self._record(**values)

    def decode_first(self, rows: list[Row]) -> R | None:
        """The record of the only row; None if there is no row."""
        return self.decode(rows[0]) if rows else None

    def decode_all(self, rows: Iterable[Row]) -> list[R]:
        return [self.decode(row) for row in rows]


def placeholders(values: Collection[Any]) -> str:
    """One `?` for each value."""
    return ", ".join("?" * len(values))


def insert_into(table: str, columns: Collection[str]) -> str:
    """An INSERT of one row that gives a value to each of these columns."""
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({placeholders(columns)})"

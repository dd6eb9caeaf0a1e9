"""Builds statements from the columns of a record, and decodes rows. For `queries/` alone.

Everything here that returns a `Program` runs exactly one statement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec

from toolspace.core import json_text
from toolspace.storage.database import Program, Row

R = TypeVar("R", bound=msgspec.Struct)


class Table(Generic[R]):
    """A table whose rows are records: one column for each field, of the same name and in the same order."""

    def __init__(
        self,
        name: str,
        record: type[R],
        *,
        columns: Mapping[str, str] | None = None,
        json: Collection[str] = (),
        flags: Collection[str] = (),
        decoders: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        """`columns`: those that are named otherwise than their field. `json`, `flags`: fields that are stored as JSON
        text, and as 0 or 1. `decoders`: what else turns a value that is not NULL into a field."""
        self.name = name
        self._record = record
        self._fields = record.__struct_fields__
        self._encoders = {**dict.fromkeys(json, json_text.encode_for_storage), **dict.fromkeys(flags, int)}
        self._decoders = {**dict.fromkeys(json, json_text.decode), **dict.fromkeys(flags, bool), **(decoders or {})}
        self._column_of = columns or {}
        self.columns = tuple(self._column_of.get(field, field) for field in self._fields)
        self.sql = ", ".join(self.columns)
        """For SELECT and RETURNING. More columns may follow: `decode` does not look at them."""

    def select(self, clauses: str, *values: Any) -> Program[list[R]]:
        """The records of a SELECT with these clauses: `WHERE … ORDER BY … LIMIT …`."""
        return self.decode_all((yield f"SELECT {self.sql} FROM {self.name} {clauses}", values))

    def find(self, clauses: str, *values: Any) -> Program[R | None]:
        """The only record of a SELECT with these clauses."""
        rows = yield f"SELECT {self.sql} FROM {self.name} {clauses}", values
        return self.decode(rows[0]) if rows else None

    def update(self, assignments: str, *values: Any) -> Program[R | None]:
        """The record that `UPDATE … SET` has changed, as it is now. The WHERE clause ends the assignments."""
        rows = yield f"UPDATE {self.name} SET {assignments} RETURNING {self.sql}", values
        return self.decode(rows[0]) if rows else None

    def insert(self, on_conflict: str = "ON CONFLICT (id) DO NOTHING", /, **values: Any) -> Program[R | None]:
        """Adds a row with these values, by field, or by column if no field has it. The other columns are NULL.

        Returns the record as it is stored; None if the row conflicts with another one.
        """
        for field, encode in self._encoders.items():
            if field in values:
                values[field] = encode(values[field])
        insert = insert_into(self.name, [self._column_of.get(field, field) for field in values])
        rows = yield f"{insert} {on_conflict} RETURNING {self.sql}", tuple(values.values())
        return self.decode(rows[0]) if rows else None

    def on_conflict_update(self, key: str, *, except_columns: Collection[str]) -> str:
        """Makes an INSERT replace the row of this key, except some columns."""
        changes = ", ".join(f"{name} = excluded.{name}" for name in self.columns if name not in except_columns)
        return f"ON CONFLICT ({key}) DO UPDATE SET {changes}"

    def decode(self, row: Row) -> R:
        values = dict(zip(self._fields, row, strict=False))
        for field, decode in self._decoders.items():
            if values[field] is not None:
                values[field] = decode(values[field])
        return self._record(**values)

    def decode_all(self, rows: Iterable[Row]) -> list[R]:
        return [self.decode(row) for row in rows]


def first_column(select: str, *values: Any) -> Program[list[Any]]:
    """The first value of each row."""
    rows = yield select, values
    return [row[0] for row in rows]


def first_value(select: str, *values: Any) -> Program[Any]:
    """The first value of the first row; None if there is no row."""
    rows = yield select, values
    return rows[0][0] if rows else None


def count_changes(statement: str, *values: Any) -> Program[int]:
    """How many rows an INSERT, UPDATE or DELETE changes."""
    return len((yield f"{statement} RETURNING 1", values))


def has_changed(statement: str, *values: Any) -> Program[bool]:
    """Whether an INSERT, UPDATE or DELETE changes a row."""
    return bool((yield f"{statement} RETURNING 1", values))


def delete_selected(table: str, key: str, clauses: str, *values: Any) -> Program[list[Row]]:
    """Deletes the rows that a SELECT with these clauses finds; returns their keys."""
    return (yield f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} {clauses}) RETURNING {key}", values)


def json_or_null(value: object) -> str | None:
    """The JSON text of a value that may be left out."""
    return None if value is None else json_text.encode_for_storage(value)


def placeholders(values: Collection[Any]) -> str:
    """One `?` for each value."""
    return ", ".join("?" * len(values))


def insert_into(table: str, columns: Collection[str]) -> str:
    """An INSERT of one row that gives a value to each of these columns."""
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({placeholders(columns)})"


def where_clause(*conditions: tuple[str, Any]) -> tuple[str, list[Any]]:
    """A WHERE clause of the conditions whose value is not None, and the values of its placeholders.

    A condition has one placeholder, or one for each value of a list.
    """
    clauses: list[str] = []
    values: list[Any] = []
    for condition, value in conditions:
        if value is not None:
            clauses.append(condition)
            values += cast("list[Any]", value) if isinstance(value, list) else (value,)
    return f"WHERE {' AND '.join(clauses)} " if clauses else "", values


def without_index(column: str) -> str:
    """A text column as an expression, so that no index of it is used: another condition selects fewer rows.

    SQLite has no statistics, and would take an index of a status that most rows have.
    """
    return f"COALESCE({column}, '')"

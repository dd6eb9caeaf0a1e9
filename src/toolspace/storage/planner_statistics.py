"""What the tables of a gateway look like that has run for long: a million rows, few of them open.

SQLite gets these numbers instead of counting (`storage/sqlite/database_file.py`): without them it may prefer an index
of all rows to an index of the open ones. The test of all plans plans with them on both databases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from toolspace.storage.database import Program

ROWS: Final = 1_000_000
OPEN_ROWS: Final = 1_000
"""Rows in an index of open work."""
SMALL_TABLES: Final[Mapping[str, str]] = {
    "migrations": "one row for each migration",
    "nodes": "one row for each gateway",
    "secrets": "some values of the gateway itself",
}
"""Tables that do not grow, and why."""

_OTHER_DISTINCT_VALUES: Final = 10_000
_DISTINCT_VALUES: Final[Mapping[str, int]] = {
    "agent_entity_id": 1_000,
    "entity_id": 1_000,
    "members.entity_id": 100_000,
    "members.space_id": 100_000,
    "session_id": 5_000,
    "space_id": 1_000,
    "node_id": 10,
    "tool_name": 100,
    "run_id": 100_000,
    "principal": 1_000,
    "created_at": 500_000,
    "completed_at": 500_000,
    "at": 500_000,
    "id": ROWS,
    "call_id": ROWS,
    "event_id": ROWS,
    "key": ROWS,
    "stream": 50_000,
    "holder": 100_000,
    "word": 100_000,
    "status": 5,
    "priority": 4,
    "type": 5,
    "kind": 3,
    "exposure": 3,
    "visible": 2,
    "pauses": 2,
    "execution_type": 4,
    "delivery": 2,
    "decision": 2,
}
"""How many values a column has, by its name, or by table and name."""
_COLUMNS_OF_FEW_ROWS: Final = {
    "sessions": ("run_id", "scope_key"),
    "presence": ("left_at",),
    "approvals": ("node_id",),
    "calls": ("due_at", "wait_until", "worker_id IS NOT NULL", "'waiting'"),
    "keys": ("revoked_at",),
    "spaces": ("deleted_at",),
    "runs": ("'running'",),
}
"""Texts in the conditions of partial indexes that few rows are in."""
_CONDITIONS_OF_MOST_ROWS: Final = ("'processed'", "IS NOT NULL", "<> ''")


class Index(NamedTuple):
    """An index and how many rows it has."""

    name: str
    table: str
    columns: Sequence[str]
    condition: str | None = None
    """Of a partial index."""
    is_unique: bool = False

    @property
    def rows(self) -> int:
        if self.condition is None:
            return ROWS
        is_of_most = any(text in self.condition for text in _CONDITIONS_OF_MOST_ROWS)
        is_of_few = any(text in self.condition for text in _COLUMNS_OF_FEW_ROWS.get(self.table, ()))
        return ROWS if is_of_most and not is_of_few else OPEN_ROWS

    def rows_per_key(self, columns: int) -> int:
        """How many rows have the same values in the first columns, on average."""
        if self.is_unique and columns >= len(self.columns):
            return 1
        keys = math.prod(count_distinct_values(self.table, column) for column in self.columns[:columns])
        return max(1, self.rows // min(self.rows, keys))


def count_distinct_values(table: str, column: str) -> int:
    return _DISTINCT_VALUES.get(f"{table}.{column}") or _DISTINCT_VALUES.get(column, _OTHER_DISTINCT_VALUES)


# SQLite


def list_sqlite_indexes() -> Program[list[Index]]:
    """The indexes of all tables that grow."""
    indexes: list[Index] = []
    tables = yield "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name", ()
    for (table,) in tables:
        if table in SMALL_TABLES:
            continue
        for _, name, is_unique, _, is_partial in (yield f"PRAGMA index_list({table})", ()):
            columns = [row[2] for row in (yield f"PRAGMA index_info({name})", ())]
            condition: str | None = None
            if is_partial:
                rows = yield "SELECT sql FROM sqlite_master WHERE name = ?", (name,)
                condition = rows[0][0].partition(" WHERE ")[2]
            indexes.append(Index(name, table, columns, condition, bool(is_unique)))
    return indexes


def write_sqlite_statistics() -> Program[None]:
    """Stores the statistics of all indexes. They hold from the next time that a connection reads the schema."""
    statistics: list[tuple[str, str, str]] = []
    for index in (yield from list_sqlite_indexes()):
        sizes = index.rows, *(index.rows_per_key(count) for count in range(1, len(index.columns) + 1))
        statistics.append((index.table, index.name, " ".join(map(str, sizes))))
    yield "ANALYZE migrations", ()  # Creates the table of the statistics.
    yield "DELETE FROM sqlite_stat1", ()
    for row in statistics:
        yield "INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (?, ?, ?)", row
    yield "ANALYZE sqlite_master", ()  # Reads the table, without counting anything.

"""Makes PostgreSQL plan statements as if its tables had a million rows, without filling them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from toolspace.storage.database import Program
from toolspace.storage.planner_statistics import ROWS, SMALL_TABLES, Index, count_distinct_values

_STATUSES: Final[Mapping[str, Mapping[str, float]]] = {
    "calls": {"completed": 0.699, "resolved": 0.25, "failed": 0.05, "running": 3e-4, "waiting": 3e-4, "pending": 4e-4},
    "runs": {"completed": 0.949, "failed": 0.05, "running": 5e-4, "waiting_tool": 5e-4},
    "inbox": {"processed": 0.989, "failed": 0.01, "pending": 5e-4, "processing": 5e-4},
    "messages": {"complete": 0.998, "running": 0.001, "error": 0.001},
    "tasks": {"completed": 0.949, "failed": 0.05, "running": 0.001},
    "approvals": {"approved": 0.949, "denied": 0.05, "requested": 0.001},
    "plans": {"completed": 0.9, "active": 0.1},
}
"""How often each status occurs, by table."""
_MOSTLY_NULL: Final = {
    ("sessions", "run_id"),
    ("sessions", "node_id"),
    ("presence", "left_at"),
    ("approvals", "node_id"),
    ("calls", "due_at"),
    ("calls", "wait_until"),
    ("calls", "worker_id"),
    ("spaces", "deleted_at"),
}


def write_statistics() -> Program[dict[str, Index]]:
    """Sets the statistics; returns the indexes of all tables that grow, by name. Each table must have a row."""
    indexes: dict[str, Index] = {}
    for (table,) in (yield "SELECT tablename FROM pg_tables WHERE schemaname = 'public'", ()):
        if table in SMALL_TABLES:
            continue
        (size,) = (yield "SELECT pg_relation_size(CAST(? AS text)::regclass)", (table,))[0]
        assert size, f"the table {table} is empty: give it a row in statement_samples.seed"
        rows = yield (
            "SELECT c.relname, pg_get_expr(i.indpred, i.indrelid), i.indisunique, ARRAY(SELECT a.attname "
            "FROM pg_attribute a WHERE a.attrelid = i.indexrelid ORDER BY a.attnum) FROM pg_index i "
            "JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = CAST(? AS text)::regclass",
            (table,),
        )
        indexes |= {row[0]: Index(row[0], table, row[3], row[1], row[2]) for row in rows}
        # The planner multiplies the rows of a page by the pages of the file, which are few here.
        for name, count in ((table, ROWS), *((row[0], indexes[row[0]].rows) for row in rows)):
            yield "UPDATE pg_class SET reltuples = ?, relpages = 1 WHERE relname = ?", (count, name)
        columns = "SELECT attname FROM pg_attribute WHERE attrelid = CAST(? AS text)::regclass AND attnum > 0"
        for (column,) in (yield columns, (table,)):
            yield _restore(table, column), (table, column)
    return indexes


def _restore(table: str, column: str) -> str:
    distinct = count_distinct_values(table, column)
    null_fraction = 0.999 if (table, column) in _MOSTLY_NULL else 0.0
    common_values = ""
    if column == "status" and table in _STATUSES:
        distinct = len(_STATUSES[table])
        statuses, shares = ",".join(_STATUSES[table]), ",".join(map(str, _STATUSES[table].values()))
        common_values = f", 'most_common_vals', '{{{statuses}}}'::text, 'most_common_freqs', '{{{shares}}}'::real[]"
    return (
        "SELECT pg_restore_attribute_stats('schemaname', 'public', 'relname', CAST(? AS text), 'attname', "
        f"CAST(? AS text), 'inherited', false, 'null_frac', {null_fraction}::real, 'avg_width', 20, "
        f"'n_distinct', {-1 if distinct >= ROWS else distinct}::real{common_values})"
    )

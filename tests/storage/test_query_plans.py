"""Every statement of the product uses an index, on both databases, with the statistics of a million rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import toolspace
from tests.storage import postgres_statistics
from tests.storage.statement_collection import Collection
from tests.storage.statement_samples import seed
from toolspace.storage.database import Database, Program
from toolspace.storage.planner_statistics import OPEN_ROWS, ROWS, SMALL_TABLES, Index, list_sqlite_indexes
from toolspace.storage.sqlite.database import SqliteDatabase

_FEW_ROWS: Final = 5 * OPEN_ROWS
"""How many rows a statement may read besides those that its LIMIT allows."""
_HIGHEST_COST: Final = 5_000
"""Of a plan of PostgreSQL. Reading a million rows costs 10,000."""

ALLOWED: Final[Mapping[str, str]] = {
    "entities_and_spaces.list_agents_of_several_people": "once, at the start of a process, and in `toolspace doctor`",
    "inbox.end_impossible_delays": "once, at the start of the only process of an SQLite file",
    "sessions.release_all_leases": "once, at the start of the only process of an SQLite file",
    "workers_and_presence.delete_node": "once for a dead process; `presence` has rows of connections alone",
    "workers_and_presence.disconnect_workers_of_node": "once for a dead process",
    "workers_and_presence.list_connected": "after a lost connection to the database",
    "workers_and_presence.list_workers": "reads all workers, for an operator",
}
"""Programs that may read a whole table, and why."""


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection()


@pytest.mark.spec("26.2")
def test_every_statement_of_the_queries_is_collected(collection: Collection) -> None:
    assert not collection.missed_lines, "these lines never ran; give them a sample in statement_samples.py"
    assert len(collection.statements) > 300


@pytest.mark.spec("26.2")
def test_no_module_outside_the_storage_layer_has_statements() -> None:
    source = Path(toolspace.__file__).parent
    statement = re.compile(r"""["'](SELECT|UPDATE|DELETE FROM|INSERT INTO|WITH) [^"']* (FROM|SET|VALUES|WHERE) """)
    modules = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "storage" not in path.relative_to(source).parts[:1] and statement.search(path.read_text("utf-8"))
    ]
    # `toolspace doctor` reads the database of a gateway that it has not opened.
    assert set(modules) <= {"cli/doctor.py"}


@pytest.mark.spec("26.2")
async def test_every_statement_uses_an_index(database: Database, collection: Collection) -> None:
    is_sqlite = isinstance(database, SqliteDatabase)
    if is_sqlite:
        indexes = {index.name: index for index in await database.run(list_sqlite_indexes)}
    else:
        for program in seed():
            await database.run(lambda program=program: program)
        indexes = await database.run(postgres_statistics.write_statistics)
    explain = "EXPLAIN QUERY PLAN" if is_sqlite else "EXPLAIN (FORMAT JSON)"
    reports: list[str] = []
    for sql, (values, program_name) in collection.statements.items():
        if program_name in ALLOWED:
            continue
        rows = await database.run(lambda sql=sql, values=values: _run(f"{explain} {sql}", values))
        if is_sqlite:
            plan = [row[3] for row in rows]
            faults = [*_find_sqlite_faults(sql, plan, indexes)]
        else:
            plan = json.loads(rows[0][0])[0]["Plan"]
            faults = [*_find_postgres_faults(plan, indexes)]
        if faults:
            reports.append(f"{program_name}: {'; '.join(faults)}\n{sql}\n{json.dumps(plan, indent=1)}")
    assert not reports, "\n\n".join(reports)


@pytest.mark.spec("26.2")
async def test_every_reference_between_tables_has_an_index(tmp_path: Path) -> None:
    """Without it, each deleted row would make the database read the whole table that refers to it."""
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    indexes = await database.run(list_sqlite_indexes)
    for table in sorted({index.table for index in indexes}):
        references: dict[int, list[str]] = {}
        for row in await database.run(lambda table=table: _run(f"PRAGMA foreign_key_list({table})", ())):
            references.setdefault(row[0], []).append(row[3])
        for columns in references.values():
            own_indexes = [i for i in indexes if i.table == table and i.condition is None]
            assert any(set(i.columns[: len(columns)]) == set(columns) for i in own_indexes), (table, columns)
    await database.aclose()


def _run(sql: str, values: Sequence[Any]) -> Program[Any]:
    return (yield sql, values)


# SQLite

_SCAN = re.compile(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?")
_SEARCH = re.compile(r"SEARCH (\w+) USING (AUTOMATIC )?(?:PARTIAL )?(?:COVERING )?INDEX (\w*) ?\(?(.*?)\)?$")
_ALIAS = re.compile(r"\b(?:FROM|JOIN) (\w+)(?: AS)? (\w+)")


def _find_sqlite_faults(sql: str, plan: Sequence[str], indexes: Mapping[str, Index]) -> Iterator[str]:
    tables = {index.table for index in indexes.values()}
    aliases = {alias: table for table, alias in _ALIAS.findall(sql)}
    # Only the ties of the index are sorted, in `RIGHT PART OF ORDER BY`.
    is_sorted = any(re.search(r"TEMP B-TREE FOR (ORDER BY|GROUP BY|DISTINCT)", step) for step in plan)
    is_limited = " LIMIT " in sql and not is_sorted
    for step in plan:
        if scan := _SCAN.search(step):
            table, index_name = aliases.get(scan[1], scan[1]), scan[2]
            if table in SMALL_TABLES or table not in tables:
                continue  # A result of a part of the statement.
            index = indexes.get(index_name or "")
            is_bounded = index is not None and (index.rows < ROWS or (is_limited and " WHERE " not in sql))
            if not is_bounded:
                yield step
        elif search := _SEARCH.search(step):
            if search[2]:
                yield step  # It builds an index for each execution.
            index = indexes.get(search[3])
            columns = search[4].count("=?")
            if index is not None and not is_limited and index.rows_per_key(columns) > _FEW_ROWS:
                yield step


# PostgreSQL


def _find_postgres_faults(plan: Mapping[str, Any], indexes: Mapping[str, Index]) -> Iterator[str]:
    if plan["Total Cost"] > _HIGHEST_COST:
        yield f"the plan costs {plan['Total Cost']}"
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", ())
        table = node.get("Relation Name")
        if node["Node Type"] == "Seq Scan" and table not in SMALL_TABLES:
            yield f"reads all rows of {table}"
        index = indexes.get(node.get("Index Name", ""))
        if index is not None and index.rows == ROWS and "Index Cond" not in node and "Filter" in node:
            yield f"reads all rows of {index.name}"

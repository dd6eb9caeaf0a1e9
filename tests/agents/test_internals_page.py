"""The page about the internals of agents names a test for every row of its recovery tables."""

from __future__ import annotations

from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "agents.md").read_text()


def test_every_row_of_the_recovery_tables_names_a_test() -> None:
    recovery = PAGE.partition("## Recovery after kill -9")[2].partition("\n## ")[0]
    lines = [line for line in recovery.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| ---", "| State ", "| Guarantee "))]
    assert len(rows) == 16
    assert [row for row in rows if "`tests/agents/" not in row] == []

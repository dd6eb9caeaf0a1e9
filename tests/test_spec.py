"""Every line of the contract in docs/spec.md has a test that is marked with its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = re.findall(r"^\*\*([\d.]+)\*\* ", (ROOT / "docs" / "spec.md").read_text(), re.MULTILINE)


def _marker_counts() -> dict[str, int]:
    """How many markers name each line, over all test files."""
    counts: dict[str, int] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for line in re.findall(r"""mark\.spec\(\s*["']([\d.]+)["']\s*\)""", path.read_text()):
            counts[line] = counts.get(line, 0) + 1
    return counts


def test_the_page_lists_lines_once_and_in_order() -> None:
    assert len(LINES) == len(set(LINES)) > 40
    assert sorted(LINES, key=lambda line: [int(part) for part in line.split(".")]) == LINES


@pytest.mark.parametrize("line", LINES)
def test_a_listed_line_has_a_test(line: str) -> None:
    assert _marker_counts().get(line), f"no test is marked @pytest.mark.spec({line!r})"

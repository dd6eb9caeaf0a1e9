"""Every line of the contract that docs/spec.md lists has a test that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LISTED = re.findall(r"^\*\*([\d.]+)\*\* ", (ROOT / "docs" / "spec.md").read_text(), re.MULTILINE)


def _shown() -> dict[str, int]:
    """How many times each line is named by a mark, over all test files."""
    found: dict[str, int] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for line in re.findall(r"""mark\.spec\(\s*["']([\d.]+)["']\s*\)""", path.read_text()):
            found[line] = found.get(line, 0) + 1
    return found


def test_the_page_lists_lines_once_and_in_order() -> None:
    assert len(LISTED) == len(set(LISTED)) > 40
    assert sorted(LISTED, key=lambda line: [int(part) for part in line.split(".")]) == LISTED


@pytest.mark.parametrize("line", LISTED)
def test_a_listed_line_has_a_test(line: str) -> None:
    assert _shown().get(line), f"no test is marked @pytest.mark.spec({line!r})"

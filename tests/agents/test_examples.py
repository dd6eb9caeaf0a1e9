"""The examples of the page about agents without a gateway print what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["agent", "agent_conversation", "agent_team"])
def test_the_example_prints_what_its_page_says(name: str) -> None:
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert process.stdout == (EXAMPLES / f"{name}.out").read_text()
    assert process.stderr == ""

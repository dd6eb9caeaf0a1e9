from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Toolspace
from toolspace.config.load import load_config

pytestmark = pytest.mark.spec("17.1")


def test_init_writes_a_file_that_loads_and_says_what_to_try(toolspace: Toolspace, tmp_path: Path) -> None:
    done = toolspace("init", cwd=tmp_path)

    assert done.returncode == 0
    assert load_config(tmp_path / "toolspace.yaml", environ={}).path is not None
    assert "toolspace list\n" in done.stderr
    assert "toolspace doctor\n" in done.stderr


def test_init_refuses_to_replace_a_file_unless_it_is_forced(toolspace: Toolspace, project: Path) -> None:
    before = (project / "toolspace.yaml").read_text()

    refused = toolspace("init")
    kept = (project / "toolspace.yaml").read_text()
    forced = toolspace("init", str(project), "--force", "--json")

    assert (refused.returncode, kept) == (2, before)
    assert "--force" in refused.stderr
    assert json.loads(forced.stdout) == {"path": str(project / "toolspace.yaml")}
    assert (project / "toolspace.yaml").read_text() != before


@pytest.mark.parametrize("path", ["missing/toolspace.yaml", "toolspace.json", "nowhere"])
def test_init_says_in_one_line_why_it_cannot_write(toolspace: Toolspace, tmp_path: Path, path: str) -> None:
    done = toolspace("init", path, cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {path}")

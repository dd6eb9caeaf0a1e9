from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, Toolspace

pytestmark = pytest.mark.spec("17.1")


def found(done: Run, state: str) -> list[dict[str, Any]]:
    return [check for check in json.loads(done.stdout)["checks"] if check["state"] == state]


def test_a_healthy_project_has_no_problem(toolspace: Toolspace) -> None:
    done = toolspace("doctor")

    assert done.returncode == 0, done.stdout
    assert "✓ Python: 3." in done.stdout
    assert "✓ functions: ./tools.py: echo, " in done.stdout
    assert "✗" not in done.stdout


def test_every_error_of_the_configuration_is_told_with_its_fix(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text("defalts: {}\nqueues: {slow: {concurrent: 0}}\n")

    done = toolspace("doctor", "--json")

    problems = found(done, "problem")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    assert [problem["fix"] for problem in problems] == ["mend toolspace.yaml:1", "mend toolspace.yaml:2"]
    assert "defaults" in problems[0]["found"]


def test_functions_that_do_not_import_and_queues_that_do_not_exist_are_problems(
    toolspace: Toolspace, project: Path
) -> None:
    (project / "broken.py").write_text("import no_such_module\n")
    (project / "toolspace.yaml").write_text("functions: [./tools.py, ./broken.py]\n")

    problems = found(toolspace("doctor", "--json"), "problem")

    assert [problem["what"] for problem in problems] == ["queues", "functions"]
    assert 'lines asks for the queue "slow"' in problems[0]["found"]
    assert "No module named 'no_such_module'" in problems[1]["found"]
    assert all(problem["fix"] for problem in problems)


def test_storage_that_cannot_be_used_is_a_problem(toolspace: Toolspace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    done = toolspace("doctor", TOOLSPACE_STORAGE_DIR=str(tmp_path / "file" / "state"))

    assert done.returncode == 1
    assert f"✗ storage: {tmp_path / 'file'} is not a folder" in done.stdout
    assert "to fix: " in done.stdout


def test_a_folder_that_others_may_write_and_a_cache_on_disk_are_looked_at(toolspace: Toolspace, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    done = toolspace("doctor", "--json", TOOLSPACE_STORAGE_DIR=str(tmp_path / "open"), TOOLSPACE_STORAGE_CACHE="disk")

    assert done.returncode == 0
    assert found(done, "warning")[0]["fix"] == f"chmod 700 {tmp_path / 'open'}"
    assert {"state": "ok", "what": "cache", "found": str(tmp_path / "open" / "cache.db")} in found(done, "ok")

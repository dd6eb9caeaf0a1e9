"""The search for the configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolspace.config.find_and_watch import CONFIG_NAMES, find_config


@pytest.mark.spec("17.2")
def test_the_nearest_file_upwards_is_found(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "toolspace.toml").touch()
    assert find_config(deep) == tmp_path / "toolspace.toml"
    (tmp_path / "a" / "toolspace.json").touch()
    assert find_config(deep) == tmp_path / "a" / "toolspace.json"


def test_yaml_takes_precedence_and_a_directory_of_that_name_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "toolspace.yaml").mkdir()
    for name in CONFIG_NAMES[1:]:
        (tmp_path / name).touch()
    assert find_config(tmp_path) == tmp_path / "toolspace.yml"


def test_a_relative_start_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolspace.yaml").touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert find_config(Path()) == tmp_path / "toolspace.yaml"


def test_without_a_file_none_is_found() -> None:
    assert find_config(Path("/nowhere/at/all")) is None

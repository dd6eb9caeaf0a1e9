"""Fixtures that write configuration files, load them, and return their problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolspace.config.configuration import AgentSpec, Config
from toolspace.config.load import load_config
from toolspace.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "toolspace.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def load(write: Any) -> Any:
    def load(text: str, name: str = "toolspace.yaml", **environ: str) -> Config:
        return load_config(write(text, name), environ=environ)

    return load


@pytest.fixture
def find_problems(load: Any) -> Any:
    def find_problems(text: str, name: str = "toolspace.yaml", **environ: str) -> list[str]:
        with pytest.raises(ConfigError) as error_info:
            load(text, name, **environ)
        return str(error_info.value).splitlines()

    return find_problems


@pytest.fixture
def agent(load: Any) -> Any:
    def agent(text: str) -> AgentSpec:
        return load("agents:\n  a: {" + text + "}\n").agents["a"]

    return agent

"""`TOOLSPACE_*` variables override settings, by one rule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from toolspace.config.configuration import Config
from toolspace.config.environment_variables import RESERVED, list_variables
from toolspace.config.load import load_config
from toolspace.errors import ConfigError

FILE = """\
defaults: {toolTimeout: 30s, contextWindow: 1000}
tools:
  - {name: t, executionType: space}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "toolspace.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def load(**environ: str) -> Config:
        return load_config(tmp_path / "sub" / "toolspace.yaml", environ=environ)

    return load


@pytest.mark.spec("17.3")
def test_a_variable_overrides_the_file(load: Any) -> None:
    config = load(TOOLSPACE_TOOL_TIMEOUT="5s", TOOLSPACE_TRACE_MCP="true", TOOLSPACE_SERVER_PORT="99")
    assert config.defaults.tool_timeout == 5
    assert config.defaults.trace_mcp is True
    assert config.server.port == 99
    assert config.source("defaults", "toolTimeout") == "TOOLSPACE_TOOL_TIMEOUT (environment)"
    assert config.source("server", "port") == "TOOLSPACE_SERVER_PORT (environment)"


@pytest.mark.spec("17.3")
def test_variables_work_without_a_file() -> None:
    config = load_config(None, environ={"TOOLSPACE_TOOL_TIMEOUT": "1500", "TOOLSPACE_STORAGE_DIR": "/state"})
    assert config.defaults.tool_timeout == 1.5
    assert config.state_dir == Path("/state")


def test_path_lists_are_separated_as_in_path_and_others_by_commas(load: Any, tmp_path: Path) -> None:
    config = load(
        TOOLSPACE_TOOLS_ALLOWED_PATHS=os.pathsep.join(["/a", "b"]),
        TOOLSPACE_TOOLS_BUILTINS="read_file, http_*",
        TOOLSPACE_FUNCTIONS="pkg.mod:name,tools.py",
    )
    assert config.tools.allowed_paths == (Path("/a"), tmp_path / "b")
    assert config.tools.builtins == ("read_file", "http_*")
    # A file in a variable is relative to where one works, not to a configuration that may lie elsewhere.
    assert config.functions == ("pkg.mod:name", str(tmp_path / "tools.py"))
    assert load(TOOLSPACE_TOOLS_BUILTINS="false").tools.builtins is False


def test_a_list_of_tools_in_the_file_stays_besides_overrides(load: Any) -> None:
    config = load(TOOLSPACE_TOOLS_WEB_SEARCH_PROVIDER="tavily", TOOLSPACE_TOOLS_WEB_SEARCH_API_KEY="k")
    assert list(config.tools.definitions) == ["t"]
    assert config.tools.web_search is not None
    assert config.tools.web_search.api_key == "k"


def test_null_is_written_none_and_an_empty_variable_is_not_set(load: Any) -> None:
    assert load(TOOLSPACE_CONTEXT_WINDOW="none").defaults.context_window is None
    assert load(TOOLSPACE_CONTEXT_WINDOW="").defaults.context_window == 1000


@pytest.mark.spec("17.3")
def test_a_wrong_value_names_the_variable(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"^TOOLSPACE_TOOL_TIMEOUT \(environment\): expected .*, got \"soon\"$"):
        load(TOOLSPACE_TOOL_TIMEOUT="soon")


def test_a_similar_variable_is_a_warning_and_others_are_ignored(load: Any) -> None:
    config = load(TOOLSPACE_TOOLTIMEOUT="5s", TOOLSPACE_CONFIG="x", TOOLSPACE_LOG="debug", TOOLSPACE_QQQ="1", OTHER="1")
    assert config.warnings == (
        "TOOLSPACE_TOOLTIMEOUT (environment): is no setting; did you mean TOOLSPACE_TOOL_TIMEOUT?",
    )


def test_every_variable_means_one_setting_and_none_is_reserved() -> None:
    variables = list_variables()
    assert len({path for path, _ in variables.values()}) == len(variables)
    assert not RESERVED & set(variables)
    assert variables["TOOLSPACE_MCP_INIT_CONCURRENCY"][0] == ("defaults", "mcpInitConcurrency")
    assert "TOOLSPACE_TOOLS_TIMEOUT" not in variables

"""Loading: the defaults, every section, paths, and the source of every value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolspace.config.load import load_config
from toolspace.config.server_settings import (
    StorageSettings,
)
from toolspace.config.tool_settings import DefaultSettings, QueueSettings
from toolspace.config.value_types import RateSetting


@pytest.mark.spec("5.1")
def test_without_a_file_all_settings_have_their_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, environ={"HOME": "/home/me"})
    assert config.defaults == DefaultSettings(
        tool_timeout=30,
        tool_response_max_bytes=100_000,
        tool_output_ttl=86_400,
        max_tool_calls_per_turn=None,
        max_concurrent_tools=None,
        context_window=None,
        tool_search_threshold=20_000,
    )
    assert config.path is None
    assert config.base_dir == tmp_path
    assert config.state_dir == Path("/home/me/.local/state/toolspace")
    assert config.files() == ()
    assert config.source("defaults", "toolTimeout") == "default"


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"XDG_STATE_HOME": "/var/state"}, "/var/state/toolspace"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/toolspace"),
    ],
)
def test_the_state_directory_without_a_file_follows_the_xdg_standard(environ: dict[str, str], path: str) -> None:
    assert load_config(None, environ=environ).state_dir == Path(path)


@pytest.mark.spec("5.1")
def test_every_section_is_read(load: Any, tmp_path: Path) -> None:
    config = load(
        """
defaults: {toolTimeout: 5s, maxToolCallsPerTurn: 10, toolSearchThreshold: null, traceMCP: true}
queues:
  q: {concurrent: 2, rate: 100/minute, maxWaiting: 0, waitTimeout: 1m}
tools:
  builtins: [read_*, current_time]
  allowedPaths: [./data, /abs, ~/x/../y]
  allowedEnv: MY_*
  memoryDir: mem
  webSearch: {provider: Google, apiKey: k, cx: 123}
  aliases: {find: grep_files}
  overrides:
    "http_*": {timeout: 1500, queue: q, cache: off, cachePerUser: yes, maxBytes: 5, enabled: no, visible: true}
storage: {url: "postgresql://h/db", redis: "redis://h", cache: disk}
server: {host: 0.0.0.0, port: 80}
functions: ./tools.py
router: {destinations: [a, b]}
agents: {a: {system: x}, b: {system: y}}
"""
    )
    assert config.defaults.tool_timeout == 5
    assert config.defaults.max_tool_calls_per_turn == 10
    assert config.defaults.tool_search_threshold is None
    assert config.defaults.trace_mcp is True
    rate = RateSetting(count=100, seconds=60)
    assert config.queues == {"q": QueueSettings(concurrent=2, rate=rate, max_waiting=0, wait_timeout=60)}
    assert config.tools.builtins == ("read_*", "current_time")
    assert config.tools.allowed_paths == (tmp_path / "data", Path("/abs"), Path.home() / "y")
    assert config.tools.allowed_env == ("MY_*",)
    assert config.tools.memory_dir == tmp_path / "mem"
    assert config.tools.web_search is not None
    assert config.tools.web_search.provider == "google"
    assert config.tools.web_search.search_engine_id == "123"
    override = config.tools.overrides["http_*"]
    assert (override.timeout, override.queue, override.cache, override.max_bytes) == (1.5, "q", 0, 5)
    assert (override.cache_scope, override.enabled, override.visible) == ("principal", False, True)
    assert config.storage == StorageSettings(url="postgresql://h/db", redis="redis://h", cache="disk")
    assert (config.server.host, config.server.port) == ("0.0.0.0", 80)
    assert config.functions == ("./tools.py",)
    assert config.router.destinations == ("a", "b")
    assert config.files() == (tmp_path / "toolspace.yaml", tmp_path / "tools.py")


def test_the_repr_of_a_configuration_shows_no_secret(load: Any) -> None:
    config = load(
        "tools: {webSearch: {provider: tavily, apiKey: hunter2}}\n"
        "mcpServers: {a: {command: x, args: [hunter2], env: {K: hunter2}, headers: {A: hunter2}, other: hunter2}}\n"
        "restTools: {r: {url: 'http://u?k=hunter2', headers: {A: hunter2}}}\nstorage: {url: 'postgresql://a:hunter2@b/c'}\n"
        "server: {secretKey: sk_hunter2_hunter2, jwtSecret: hunter2-hunter2-hunter2-hunter2-hunter2}\n"
        "tools2: {}\n".replace("tools2: {}\n", "")
    )
    assert "hunter2" not in repr(config)
    assert config.mcp_servers["a"].env == {"K": "hunter2"}


@pytest.mark.spec("5.3")
def test_a_setting_has_a_source(load: Any) -> None:
    config = load(
        "defaults:\n  toolTimeout: 5s\nmcpServers:\n- name: gh\n  transport: stdio\n  command: x\n  cache: 5m\n"
        "  allowedTools: [a]\ntools:\n- name: t\n  executionType: space\n  timeout: 9\n",
        TOOLSPACE_MCP_INIT_CONCURRENCY="2",
    )
    assert config.source("defaults", "toolTimeout") == "toolspace.yaml:2 (defaults.toolTimeout)"
    assert config.source("defaults", "mcpInitConcurrency") == "TOOLSPACE_MCP_INIT_CONCURRENCY (environment)"
    assert config.source("defaults", "contextWindow") == "default"
    assert config.source("mcpServers", "gh", "cache") == "toolspace.yaml:7 (mcpServers[0].cache)"
    assert config.source("mcpServers", "gh", "toolsAllowed") == "toolspace.yaml:8 (mcpServers[0].allowedTools)"
    assert config.source("mcpServers", "gh") == "toolspace.yaml:4 (mcpServers[0])"
    assert config.source("mcpServers", "gh", "queue") == "default"
    assert config.source("tools", "definitions", "t", "timeout") == "toolspace.yaml:12 (tools[0].timeout)"
    assert config.source("tools", "definitions", "t", "visible") == "default"
    assert config.source("nothing") == "default"


def test_defaults_take_precedence_over_the_same_setting_in_tools(load: Any) -> None:
    config = load("tools:\n  timeout: 5s\n  maxConcurrent: 3\n")
    assert (config.defaults.tool_timeout, config.defaults.max_concurrent_tools) == (5, 3)
    assert config.source("defaults", "toolTimeout") == "toolspace.yaml:2 (tools.timeout)"
    config = load("tools: {timeout: 5s}\ndefaults: {toolTimeout: 7s}\n")
    assert config.defaults.tool_timeout == 7
    assert config.warnings == (
        "toolspace.yaml:1: tools.timeout: has no effect, as defaults.toolTimeout says otherwise",
    )


def test_paths_are_relative_to_the_file_not_to_the_working_folder(write: Any, tmp_path: Path) -> None:
    path = write(
        "functions: [./tools.py, '../shared.py:search', pkg.mod]\nopenapi: {a: ./api.json, b: 'https://x/y.json'}\n"
        "tools: {allowedPaths: [.]}\nmcpServers: {a: {command: x, cwd: srv}}\n",
        "deep/toolspace.yaml",
    )
    config = load_config(path, environ={})
    assert config.base_dir == tmp_path / "deep"
    assert config.tools.allowed_paths == (tmp_path / "deep",)
    assert config.mcp_servers["a"].cwd == tmp_path / "deep" / "srv"
    assert config.openapi["a"].spec == str(tmp_path / "deep" / "api.json")
    assert config.openapi["b"].spec == "https://x/y.json"
    assert [file.name for file in config.files()] == ["toolspace.yaml", "tools.py", "shared.py", "api.json"]


def test_a_relative_path_to_the_file_works(write: Any, tmp_path: Path) -> None:
    write("functions: t.py", "sub/toolspace.yaml")
    config = load_config(Path("sub/toolspace.yaml"), environ={})
    assert config.base_dir == tmp_path / "sub"
    assert config.path == tmp_path / "sub" / "toolspace.yaml"


def test_keys_that_begin_with_x_are_ignored(load: Any) -> None:
    config = load(
        "$schema: u\nx-common: &c {queue: q}\nqueues: {q: {concurrent: 1}}\nmcpServers: {a: {<<: *c, command: x}}"
    )
    assert config.mcp_servers["a"].queue == "q"


def test_a_disabled_entry_may_be_incomplete(load: Any) -> None:
    config = load("mcpServers: {a: {type: http, enabled: false, queue: gone, headers: {A: '${NOPE}'}}}")
    assert config.mcp_servers["a"].enabled is False


def test_equal_files_give_equal_sections(load: Any) -> None:
    text = "queues: {q: {concurrent: 1, rate: 1/s}}\nmcpServers: {a: {command: x, queue: q}}"
    first, second = load(text), load(text + "\n# touched\n")
    assert first.queues == second.queues
    assert first.mcp_servers == second.mcp_servers

"""Loading: typed settings, all problems at once, and the source of every value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolspace.config.load import Config, load_config
from toolspace.config.server_settings import StorageSettings
from toolspace.config.tool_settings import DefaultSettings, QueueSettings
from toolspace.config.value_types import RateSetting
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
def faults(load: Any) -> Any:
    def faults(text: str, name: str = "toolspace.yaml", **environ: str) -> list[str]:
        with pytest.raises(ConfigError) as error_info:
            load(text, name, **environ)
        return str(error_info.value).splitlines()

    return faults


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


def test_the_state_directory_follows_the_xdg_standard(load: Any, tmp_path: Path) -> None:
    assert load("", XDG_STATE_HOME="/var/state").state_dir == Path("/var/state/toolspace")
    assert load("", XDG_STATE_HOME="relative", HOME="/h").state_dir == Path("/h/.local/state/toolspace")
    assert load("storage: {dir: ./state}", XDG_STATE_HOME="/var/state").state_dir == tmp_path / "state"


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
    assert (override.cache_per_user, override.enabled, override.visible) == (True, False, True)
    assert config.storage == StorageSettings(url="postgresql://h/db", redis="redis://h", cache="disk")
    assert (config.server.host, config.server.port) == ("0.0.0.0", 80)
    assert config.functions == ("./tools.py",)
    assert config.router.destinations == ("a", "b")
    assert config.files() == (tmp_path / "toolspace.yaml", tmp_path / "tools.py")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1500", 1.5), ("250ms", 0.25), ("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86400), ("1w", 604800)],
)
def test_durations_are_milliseconds_or_text(load: Any, text: str, seconds: float) -> None:
    assert load(f"defaults: {{toolTimeout: {text}}}").defaults.tool_timeout == seconds


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("5/second", (5, 1)),
        ("5/s", (5, 1)),
        ("7/minute", (7, 60)),
        ("7/min", (7, 60)),
        ("9 / hour", (9, 3600)),
        ("9/h", (9, 3600)),
    ],
)
def test_rates_are_a_number_per_period(load: Any, text: str, rate: tuple[int, float]) -> None:
    read = load(f"queues: {{q: {{concurrent: 1, rate: {text}}}}}").queues["q"].rate
    assert (read.count, read.seconds) == rate


def test_a_string_from_a_variable_is_converted_to_the_type_of_the_setting(load: Any) -> None:
    config = load(
        "queues: {q: {concurrent: '${N}'}}\nserver: {port: '${PORT:-99}'}\ndefaults: {traceMCP: '${T}'}", N="3", T="on"
    )
    assert (config.queues["q"].concurrent, config.server.port, config.defaults.trace_mcp) == (3, 99, True)


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults:\n  toolTimeot: 5", '2: defaults.toolTimeot: unknown key; did you mean "toolTimeout"?'),
        ("default: {}", '1: default: unknown key; did you mean "defaults"?'),
        (
            "\nqueues:\n  github: {concurrent: three}",
            '3: queues.github.concurrent: expected an integer of at least 1, got "three"',
        ),
        ("queues: {q: {concurrent: true}}", "1: queues.q.concurrent: expected an integer of at least 1, got true"),
        ("queues: {q: {concurrent: 0}}", "1: queues.q.concurrent: expected an integer of at least 1, got 0"),
        ("queues: {q: {concurrent: 1.5}}", "1: queues.q.concurrent: expected an integer of at least 1, got 1.5"),
        ("queues: {q: {}}", '1: queues.q: "concurrent" is missing; expected an integer of at least 1'),
        ("queues: {q: }", "1: queues.q: is empty; expected a mapping"),
        (
            "queues: {q: {concurrent: 1, rate: 5/day}}",
            '1: queues.q.rate: expected a rate such as "5/second", "100/minute" or "1000/hour", got "5/day"',
        ),
        ("queues: {q: {concurrent: 1, rate: 0/s}}", "1: queues.q.rate: expected a rate"),
        ("queues: [1]", "1: queues[0]: expected a mapping, got 1"),
        ("queues: 5", "1: queues: expected a mapping of queues by name, or a list of them with a name each, got 5"),
        (
            "defaults: {toolTimeout: soon}",
            '1: defaults.toolTimeout: expected milliseconds or a duration such as "30s", got "soon"',
        ),
        ("defaults: {toolTimeout: 0}", "1: defaults.toolTimeout: expected a duration longer than 0, got 0"),
        ("defaults: {toolTimeout: -5}", "1: defaults.toolTimeout: expected milliseconds or a duration"),
        ("defaults: {toolTimeout: .nan}", "1: defaults.toolTimeout: expected milliseconds or a duration"),
        ("defaults: []", "1: defaults: expected a mapping, got a list"),
        ("defaults: {traceMCP: maybe}", '1: defaults.traceMCP: expected true or false, got "maybe"'),
        ("tools: 5", "1: tools: expected a mapping, got 5"),
        ("tools: {builtins: 5}", "1: tools.builtins: expected true, false, or a list of names or globs, got 5"),
        ("tools: {allowedPaths: [5]}", "1: tools.allowedPaths[0]: expected a path, got 5"),
        (
            "tools: {webSearch: {provider: gogle}}",
            '1: tools.webSearch.provider: expected one of tavily, google, bing, duckduckgo, got "gogle"; did you mean',
        ),
        ("tools: {aliases: {a: a}}", "1: tools.aliases.a: the alias leads back to itself: a → a"),
        ("tools: {aliases: {a: b, b: a}}", "1: tools.aliases.a: the alias leads back to itself: a → b → a"),
        ('tools: {overrides: {"x*": {cahce: 5}}}', '1: tools.overrides.x*.cahce: unknown key; did you mean "cache"?'),
        (
            "queues: {github: {concurrent: 1}}\nmcpServers: {a: {command: x, queue: githb}}",
            '2: mcpServers.a.queue: there is no queue "githb"; did you mean "github"?',
        ),
        (
            "tools: {overrides: {x: {queue: q}}}",
            '1: tools.overrides.x.queue: there is no queue "q"; add it: queues: {q: {concurrent: 3}}',
        ),
        ("restTools: {w: {url: u, queue: q}}", '1: restTools.w.queue: there is no queue "q"'),
        ("restTools: {w: {method: GET}}", '1: restTools.w: "url" is missing; expected a string'),
        ("restTools: {w: {url: u, method: FETCH}}", "1: restTools.w.method: expected one of GET, POST"),
        ("openapi: {w: {}}", '1: openapi.w: "spec" is missing; expected a URL or the path of a file'),
        (
            "mcpServers: {a: {type: carrier-pigeon}}",
            "1: mcpServers.a.type: expected one of stdio, http, sse, websocket",
        ),
        (
            "mcpServers: {a: {type: stdio, url: u}}",
            '1: mcpServers.a: "command" is missing, which the transport stdio needs',
        ),
        (
            "mcpServers: {a: {type: http, command: x}}",
            '1: mcpServers.a: "url" is missing, which the transport http needs',
        ),
        (
            "mcpServers: {a: {type: http, transport: sse, url: u}}",
            '1: mcpServers.a.transport: means the same as "type", which is given too; remove one',
        ),
        ("mcpServers:\n- command: x", '2: mcpServers[0]: "name" is missing; expected a string'),
        (
            "mcpServers:\n- {name: a, command: x}\n- {name: a, command: y}",
            '3: mcpServers[1]: the name "a" is given twice, first in line 2',
        ),
        (
            "mcpServers: {a: {command: x}}\nservers:\n  a: {command: x}",
            '3: servers.a: the name "a" is given twice, first in toolspace.yaml:1',
        ),
        ("server: {port: 70000}", "1: server.port: expected an integer of at least 0 and at most 65535, got 70000"),
        ("storage: {cache: disc}", '1: storage.cache: expected one of memory, disk, got "disc"; did you mean "disk"?'),
        ("functions: {a: b}", "1: functions: expected a list such as"),
        ("model: {}", "1: model: unknown key"),
    ],
)
def test_a_wrong_setting_is_reported_with_line_key_and_remedy(faults: Any, text: str, message: str) -> None:
    assert any(fault.startswith(f"toolspace.yaml:{message}") for fault in faults(text)), faults(text)


@pytest.mark.spec("5.2")
def test_all_problems_are_reported_at_once_from_top_to_bottom(faults: Any) -> None:
    problems = faults(
        "defaults: {toolTimeot: 5}\nqueues: {q: {concurrent: x}}\nmcpServers:\n  a: {command: c, env: {K: '${NOPE}'}}\n"
        "  b: {command: c, queue: r}\nrestTol: {}\n",
        TOOLSPACE_SERVER_PORT="none",
    )
    assert [fault.split(" ")[0] for fault in problems] == [
        "toolspace.yaml:1:",
        "toolspace.yaml:2:",
        "toolspace.yaml:4:",
        "toolspace.yaml:5:",
        "toolspace.yaml:6:",
        "TOOLSPACE_SERVER_PORT",
    ]


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("toolspace.yaml", "mcpServers:\n  gh:\n    command: x\n    env: {KEY: '${GH_KEY}'}\n"),
        ("toolspace.json", '{"mcpServers": {\n "gh": {\n  "command": "x",\n  "env": {"KEY": "${GH_KEY}"}}}}'),
        ("toolspace.toml", '[mcpServers.gh]\ncommand = "x"\n[mcpServers.gh.env]\nKEY = "${GH_KEY}"\n'),
    ],
)
def test_an_unset_variable_names_file_key_and_variable(faults: Any, name: str, text: str) -> None:
    (fault,) = faults(text, name)
    assert fault.startswith(f"{name}:4: mcpServers.gh.env.KEY: the variable GH_KEY is not set")


def test_messages_never_show_the_value_of_a_variable(faults: Any) -> None:
    (fault,) = faults("server: {port: '${TOKEN}'}", TOKEN="hunter2")
    assert "hunter2" not in fault
    assert 'got what "${TOKEN}" expands to' in fault


def test_an_invalid_value_is_reported_once(faults: Any) -> None:
    assert len(faults("server: {port: '${PORT}'}")) == 1


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


keys = st.sampled_from(
    [
        "defaults",
        "queues",
        "tools",
        "mcpServers",
        "servers",
        "mcp",
        "restTools",
        "openapi",
        "agents",
        "router",
        "storage",
        "server",
        "functions",
        "notifications",
        "webhook",
        "smtp",
        "embeddings",
        "agent",
        "model",
        "loop",
        "limits",
        "destinations",
        "spaces",
        "name",
        "executionType",
        "execution",
        "definitions",
        "overrides",
        "webSearch",
        "enabled",
        "disabled",
        "queue",
        "cache",
        "timeout",
        "command",
        "url",
        "env",
        "args",
        "type",
        "aliases",
        "concurrent",
        "rate",
        "inputSchema",
        "annotations",
        "spec",
        "mode",
        "x",
        "x-y",
        "builtins",
    ]
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**20)
    | st.floats()
    | st.sampled_from(
        [
            "",
            "q",
            "basic",
            "stdio",
            "http",
            "a",
            "b:c",
            "./a.yaml",
            "5s",
            "${X}",
            "${",
            "*",
            "~nobody/x",
            "\0",
            "\x1b[31m",
        ]
    )
    | st.text(st.characters(codec="utf-8"), max_size=5)
)
trees = st.dictionaries(
    keys,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | leaves.map(str), inner, max_size=4)
    ),
    max_size=4,
)


def attempt(path: Path) -> tuple[Config | None, str]:
    try:
        return load_config(path, environ={}), ""
    except ConfigError as error:
        return None, str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(trees)
def test_no_data_raises_anything_but_a_configuration_error(tmp_path: Path, data: dict[str, Any]) -> None:
    import yaml

    path = tmp_path / "toolspace.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    config, complaint = attempt(path)
    assert "\x1b" not in complaint
    assert (str(path) in complaint) is (config is None)
    if config is None:
        return
    repr(config)
    config.files()
    for name in config.origins:
        config.source(*name)


@pytest.mark.spec("3.2")
def test_providers_are_read(load: Any, tmp_path: Path) -> None:
    config = load(
        """
queues: {q: {concurrent: 1}}
providers:
  weather: {}
  notes: ./notes.py:NotesProvider
  archive:
    uses: my_package.notes:NotesProvider
    namespace: old
    settings: {file: "${FILE}", sizes: [1, 2]}
    enabled: no
    required: yes
    toolsAllowed: read*
    excludeTools: [read_all]
    queue: q
    cache: 5m
    requestTimeoutMs: 1500
""",
        FILE="/data/a.db",
    )
    weather, notes, archive = config.providers.values()
    assert (weather.name, weather.uses, weather.enabled, weather.settings) == ("weather", None, True, {})
    assert (notes.name, notes.uses) == ("notes", "./notes.py:NotesProvider")
    assert (archive.uses, archive.namespace) == ("my_package.notes:NotesProvider", "old")
    assert archive.settings == {"file": "/data/a.db", "sizes": [1, 2]}
    assert (archive.enabled, archive.required) == (False, True)
    assert (archive.tools_allowed, archive.tools_denied) == (("read*",), ("read_all",))
    assert (archive.queue, archive.cache, archive.request_timeout) == ("q", 300, 1.5)
    assert config.files() == (tmp_path / "toolspace.yaml", tmp_path / "notes.py")
    assert config.source("providers", "archive", "queue").endswith("toolspace.yaml:14 (providers.archive.queue)")


@pytest.mark.spec("5.2")
def test_problems_of_providers_have_their_place(faults: Any) -> None:
    problems = faults(
        """
providers:
  a: {use: x}
  b: {uses: 5, namespace: " ", settings: [1]}
  c: {queue: nowhere}
  d: {settings: {key: "${NOT_SET_ANYWHERE}"}}
  e: {enabled: false, queue: nowhere, settings: {key: "${NOT_SET_ANYWHERE}"}}
"""
    )
    assert [line.partition("toolspace.yaml:")[2].partition("; ")[0] for line in problems] == [
        "3: providers.a.use: unknown key",
        "4: providers.b.uses: expected a name, got 5",
        '4: providers.b.namespace: expected a name, got " "',
        "4: providers.b.settings: expected a mapping, got a list",
        '5: providers.c.queue: there is no queue "nowhere"',
        "6: providers.d.settings.key: the variable NOT_SET_ANYWHERE is not set",
    ]


@pytest.mark.spec("4.11")
def test_the_repr_of_a_provider_hides_its_settings(load: Any) -> None:
    config = load("providers: {a: {settings: {key: opensesame, of: {b: [opensesame]}}}}")
    assert "sesame" not in repr(config)
    assert "sesame" not in repr(config.providers["a"])
    assert "name='a'" in repr(config.providers["a"])

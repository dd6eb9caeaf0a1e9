"""Values are converted to the type of their setting; problems are reported with their place, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolspace.config.configuration import Config
from toolspace.config.load import load_config
from toolspace.errors import ConfigError


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
        "queues: {q: {concurrent: '${N}'}}\nserver: {port: '${PORT:-99}'}\ndefaults: {traceMCP: '${T}'}",
        N="3",
        T="on",
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
        (
            "tools: {builtins: 5}",
            "1: tools.builtins: expected true, false, or a list of tools: names, globs or collections, got 5",
        ),
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
def test_a_wrong_setting_is_reported_with_line_key_and_remedy(find_problems: Any, text: str, message: str) -> None:
    assert any(fault.startswith(f"toolspace.yaml:{message}") for fault in find_problems(text)), find_problems(text)


@pytest.mark.spec("5.2")
def test_all_problems_are_reported_at_once_from_top_to_bottom(find_problems: Any) -> None:
    problems = find_problems(
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
def test_an_unset_variable_names_file_key_and_variable(find_problems: Any, name: str, text: str) -> None:
    (fault,) = find_problems(text, name)
    assert fault.startswith(f"{name}:4: mcpServers.gh.env.KEY: the variable GH_KEY is not set")


def test_messages_never_show_the_value_of_a_variable(find_problems: Any) -> None:
    (fault,) = find_problems("server: {port: '${TOKEN}'}", TOKEN="hunter2")
    assert "hunter2" not in fault
    assert 'got what "${TOKEN}" expands to' in fault


def test_an_invalid_value_is_reported_once(find_problems: Any) -> None:
    assert len(find_problems("server: {port: '${PORT}'}")) == 1


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

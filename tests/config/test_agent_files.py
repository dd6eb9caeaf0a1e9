"""Agents in the main file and in files of their own: names, references, routers, own tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolspace.config.agent_settings import AgentLoopSettings, AgentModelSettings
from toolspace.config.load import load_config
from toolspace.core.names import RESERVED_AGENT_NAMES

SEEDS = Path(__file__).parent / "agents"


# Where agents are described


@pytest.mark.spec("5.1")
def test_agents_in_place_and_in_files_have_the_name_of_their_entry(load: Any, write: Any, tmp_path: Path) -> None:
    write("agent: {name: someone, system: From a file.}\nknowledge: ./notes\n", "agents/r.yaml")
    config = load("agents:\n  researcher: ./agents/r.yaml\n  writer: {system: In place.}\n")
    assert [(agent.name, agent.system) for agent in config.agents.values()] == [
        ("researcher", "From a file."),
        ("writer", "In place."),
    ]
    assert config.agents["researcher"].path == tmp_path / "agents" / "r.yaml"
    assert config.agents["researcher"].knowledge == (tmp_path / "agents" / "notes",)
    assert config.agent is None


@pytest.mark.spec("5.1")
def test_agents_in_a_list_have_the_names_of_their_definitions(load: Any, write: Any) -> None:
    write('{"agent": {"name": "one"}}', "a.json")
    write('[agent]\nname = "two"\n', "sub/b.toml")
    config = load("agents: [a.json, sub/b.toml, {name: three}, {agent: {name: four}}]")
    assert list(config.agents) == ["one", "two", "three", "four"]


@pytest.mark.spec("5.1")
def test_the_main_file_can_describe_an_agent(load: Any, write: Any) -> None:
    write("agent: {name: helper}\n", "helper.yaml")
    config = load("agent: {name: boss, system: Lead.}\nagents: [helper.yaml]\ntools: {builtins: false}\ndemo: false\n")
    assert list(config.agents) == ["boss", "helper"]
    assert config.agent is config.agents["boss"]
    assert config.agents["boss"].agents == ("helper",)
    assert not config.agents["boss"].has_own_tools, "what the file has is there for all"
    assert config.demo is False
    assert load("").demo is True


@pytest.mark.spec("11.1")
def test_sub_agents_are_loaded_too_and_files_may_refer_to_each_other(load: Any, write: Any, tmp_path: Path) -> None:
    write("agent: {name: a}\nagents: {b: ./deep/b.yaml, extra: {system: x}}\n", "a.yaml")
    write("agent: {name: b}\nagents: [../a.yaml]\nfunctions: ./tools.py\n", "deep/b.yaml")
    config = load("agents: {first: ./a.yaml}")
    assert {name: spec.agents for name, spec in config.agents.items()} == {
        "first": ("b", "extra"),
        "b": ("first",),
        "extra": (),
    }
    assert config.files() == tuple(
        tmp_path / name for name in ("toolspace.yaml", "a.yaml", "deep/b.yaml", "deep/tools.py")
    )


def test_a_long_chain_of_files_is_followed_to_its_end(load: Any, write: Any) -> None:
    for number in range(300):
        write(json.dumps({"agent": {"name": f"n{number}"}, "agents": [f"./{number + 1}.json"]}), f"{number}.json")
    write('{"agent": {"name": "last"}}', "300.json")
    assert len(load("agents: ./0.json").agents) == 301


def test_several_entries_may_refer_to_one_file(load: Any, write: Any) -> None:
    write("agent: {system: Work.}\n", "w.yaml")
    config = load("agents: {left: ./w.yaml, right: ./w.yaml}")
    assert [spec.system for spec in config.agents.values()] == ["Work.", "Work."]


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agents: {a: ./gone.yaml}", '1: agents.a: "gone.yaml": there is no such file'),
        ("agents: {a: ./plain.txt}", '1: agents.a: "plain.txt": the name must end in .yaml, .yml, .json or .toml'),
        ("agents: {a: .}", '1: agents.a: ".": cannot be read'),
        (
            "agents: {a: }",
            "1: agents.a: expected the path of an agent's file, or a mapping that describes it, got null",
        ),
        ("agents: [{}]", '1: agents[0]: "name" is missing; expected a name'),
        ("agents: [{name: a}, {name: a}]", '1: agents[1]: there is another agent "a", in toolspace.yaml:1; rename one'),
        ("agents:\n- {name: a}\n- a.yaml", '3: agents[1]: there is another agent "a", in toolspace.yaml:2; rename one'),
        ("agents: [x, {name: xy}]", '1: agents[0]: there is no agent "x"'),
        ("agents: x", '1: agents: there is no agent "x"; describe it under agents'),
        ("agent: {}", '1: agent: "name" is missing; expected a name'),
        ("agent: {name: a}\nagents: a", "2: agents: an agent cannot call itself"),
        ("agent: {name: a}\nagents: ./toolspace.yaml", "2: agents: an agent cannot call itself"),
        ("agents: {a: {agents: [b]}, bb: {}}", '1: agents.a.agents[0]: there is no agent "b"; did you mean "bb"?'),
        ("agents: {a: {agents: [b]}, xyz: {}}", '1: agents.a.agents[0]: there is no agent "b"; the agents are a, xyz'),
    ],
)
def test_an_entry_without_an_agent_is_reported(find_problems: Any, write: Any, text: str, message: str) -> None:
    write("agent: {name: a}\n", "a.yaml")
    write("words\n", "plain.txt")
    problems = find_problems(text)
    assert any(fault.startswith(f"toolspace.yaml:{message}") for fault in problems), problems


@pytest.mark.spec("5.2")
def test_problems_in_other_files_are_reported_with_their_place(find_problems: Any, write: Any) -> None:
    write("agent: {name: a}\nmodle: {}\nlimits: {maxDepth: '${DEEP}'}\nagents: [b]\n", "a.yaml")
    write("model: {}\n", "none.yaml")
    write("agent: {name: [}\n", "broken.yaml")
    problems = find_problems("server: {port: x}\nagents: {a: ./a.yaml, none: ./none.yaml, broken: ./broken.yaml}\n")
    assert [fault.split(" ")[0] for fault in problems] == [
        "toolspace.yaml:1:",
        "a.yaml:2:",
        "a.yaml:3:",
        "a.yaml:4:",
        "none.yaml:",
        "broken.yaml:1:16:",
    ]
    assert 'modle: unknown key; did you mean "model"?' in problems[1]
    assert "the variable DEEP is not set" in problems[2]
    assert 'there is no agent "b"' in problems[3]
    assert '"agent" is missing; expected a mapping' in problems[4]


def test_references_to_an_invalid_agent_are_not_reported(find_problems: Any) -> None:
    problems = find_problems("agents: {a: {agents: [b], router: {destinations: [b]}}, b: ./gone.yaml}")
    assert len(problems) == 1


def test_settings_of_the_process_have_no_effect_outside_the_main_file(load: Any, write: Any) -> None:
    write("agent: {name: a}\nserver: {port: 1}\n", "a.yaml")
    config = load("agents: [a.yaml]")
    assert config.server.port == 8787
    assert config.warnings == ("a.yaml:2: server: has no effect, as another file names this one; say it there",)


# Names


@pytest.mark.spec("3.40")
@pytest.mark.parametrize("name", ["goal-aware-assistant", "Support Desk", "a.b", "x" * 57, "Zoë", "42"])
def test_a_name_that_can_name_a_tool_is_accepted(load: Any, name: str) -> None:
    assert list(load(json.dumps({"agents": {name: {}}}), "t.json").agents) == [name]


@pytest.mark.spec("3.40")
@pytest.mark.parametrize("name", ["", "x" * 58, "a/b", "a\nb", "-", "研究員", " a", "a ", "a\0", "\ud800"])
def test_a_name_that_cannot_name_a_tool_is_refused(find_problems: Any, name: str) -> None:
    (problems,) = find_problems(json.dumps({"agents": {name: {}}}), "t.json")
    assert "cannot name an agent; use 1 to 57 letters, digits, spaces, and _ - ." in problems or "half" in problems


@pytest.mark.spec("3.40")
def test_names_of_internal_tools_are_refused(find_problems: Any) -> None:
    for name in RESERVED_AGENT_NAMES:
        (problems,) = find_problems(f"agents: {{{name.replace('_', '-')}: {{}}}}")
        assert f"cannot name an agent, as every agent has a tool agent__{name}; take another name" in problems


def test_the_reserved_names_are_those_of_the_internal_tools() -> None:
    from toolspace.providers.internal_tools import InternalProvider
    from toolspace.storage.memory_outputs import MemoryOutputs

    provider = InternalProvider(search=lambda *_: [], outputs=MemoryOutputs(), has_stored_output=lambda _: False)
    assert {tool.name for tool in provider.list_tools()} == RESERVED_AGENT_NAMES


@pytest.mark.spec("3.40")
def test_two_names_with_the_same_tool_name_are_refused(find_problems: Any) -> None:
    (problems,) = find_problems("agents:\n  help-desk: {}\n  Help_Desk: {}\n")
    assert problems.startswith("toolspace.yaml:3: agents.Help_Desk: ")
    assert '"Help_Desk" and "help-desk" would be one tool, agent__Help_Desk; rename one' in problems


# Routers


@pytest.mark.spec("3.41")
def test_destinations_must_be_agents(find_problems: Any) -> None:
    assert find_problems("router: {destinations: [suport]}\nagents: {support: {}}") == [
        'toolspace.yaml:1: router.destinations[0]: there is no agent "suport"; did you mean "support"?'
    ]
    assert find_problems("agents:\n  a:\n    router:\n      destinations:\n        - b\n        - c\n  b: {}\n") == [
        'toolspace.yaml:6: agents.a.router.destinations[1]: there is no agent "c"; the agents are a, b'
    ]


@pytest.mark.spec("3.41")
def test_a_router_does_not_hand_off_to_itself(find_problems: Any) -> None:
    assert find_problems("agents: {a: {router: {destinations: a}}}") == [
        'toolspace.yaml:1: agents.a.router.destinations: an agent cannot hand off to itself; take "a" out'
    ]


@pytest.mark.spec("3.41")
def test_a_cycle_of_routers_is_refused_with_its_route_and_place(find_problems: Any, write: Any) -> None:
    write("agent: {name: b}\n\nrouter: {destinations: [c]}\n", "b.yaml")
    problems = find_problems(
        "agents:\n"
        "  first: {router: {destinations: [a]}}\n"
        "  a: {router: {destinations: [x, b]}}\n"
        "  b: ./b.yaml\n"
        "  c: {router: {destinations: [a, x]}}\n"
        "  x: {}\n"
    )
    assert problems == [
        "toolspace.yaml:3: agents.a.router.destinations[1]: handing off could go in a circle: a → b → c → a; "
        "take one of them out"
    ]


@pytest.mark.spec("3.41")
def test_routers_with_a_shared_destination_are_no_cycle(load: Any) -> None:
    config = load(
        "agent: {name: main}\nrouter: {destinations: [a, b]}\n"
        "agents: {a: {router: {destinations: [b, c]}}, b: {router: {destinations: [c]}}, c: {agents: [a]}}\n"
    )
    assert config.router.destinations == config.agents["main"].router.destinations == ("a", "b")


def test_every_cycle_is_reported_once(find_problems: Any) -> None:
    names = "abcd"
    definitions = ", ".join(f"{name}: {{router: {{destinations: [{', '.join(names)}]}}}}" for name in names)
    problems = find_problems(f"agents: {{{definitions}}}")
    assert len(problems) == len(set(problems))
    assert any("a → b → a" in fault for fault in problems)


# Its own tools


@pytest.mark.spec("11.1")
def test_tools_of_an_agent_belong_to_it_alone(load: Any, write: Any, tmp_path: Path) -> None:
    write(
        """
agent: {name: a}
functions: ./mine.py
mcp: {servers: [{name: gh, url: "https://mcp.example.com", allowedTools: [list], queue: shared}]}
mcpServers: {files: {command: fs, cwd: here}}
restTools: {weather: {url: "https://w.example.com"}}
tools:
- {name: ask, executionType: space, queue: own}
queues: {own: {concurrent: 1}}
""",
        "deep/a.yaml",
    )
    config = load(
        "agents: [deep/a.yaml]\nmcpServers: {theirs: {command: x}}\nqueues: {shared: {concurrent: 2}}\n"
        "tools: {allowedPaths: [./data], toolsDenied: [delete_file]}\nstorage: {dir: ./state}\n"
    )
    assert list(config.mcp_servers) == ["theirs"]
    assert config.tools.definitions == {}
    own_config = config.agents["a"].config
    assert own_config is not None
    assert config.agents["a"].has_own_tools
    assert set(own_config.mcp_servers) == {"gh", "files"}
    assert own_config.mcp_servers["files"].cwd == tmp_path / "deep" / "here"
    assert list(own_config.tools.definitions) == ["ask"]
    assert list(own_config.rest_tools) == ["weather"]
    assert own_config.functions == ("./mine.py",)
    assert own_config.base_dir == tmp_path / "deep"
    assert own_config.state_dir == config.state_dir
    assert set(own_config.queues) == {"shared", "own"}
    assert own_config.tools.builtins is False, "those that all share are there already"
    assert own_config.tools.allowed_paths == (tmp_path / "data",)
    assert tmp_path / "deep" / "mine.py" in config.files()


@pytest.mark.spec("11.1")
def test_an_agent_inherits_the_settings_of_tools_that_it_leaves_out(load: Any) -> None:
    config = load(
        "defaults:\n  toolTimeout: 7s\n  maxConcurrentTools: 4\ntools: {builtins: [read_*], allowedEnv: [A_*]}\n"
        "agents:\n  a:\n    tools:\n      allowedPaths: [.]\n      maxConcurrent: 2\n"
        "  b:\n    defaults: {toolTimeout: 1s}\n"
    )
    a, b = config.agents["a"].config, config.agents["b"].config
    assert a is not None
    assert b is not None
    assert (a.defaults.tool_timeout, a.defaults.max_concurrent_tools) == (7, 2)
    assert (a.tools.builtins, a.tools.allowed_env) == (("read_*",), ("A_*",))
    assert a.tools.allowed_paths is not None
    assert (b.defaults.tool_timeout, b.defaults.max_concurrent_tools) == (1, 4)
    assert a.source("defaults", "toolTimeout") == "toolspace.yaml:2 (defaults.toolTimeout)"
    assert a.source("defaults", "maxConcurrentTools") == "toolspace.yaml:9 (agents.a.tools.maxConcurrent)"
    assert a.source("tools", "allowedPaths") == "toolspace.yaml:8 (agents.a.tools.allowedPaths)"
    assert a.source("tools", "allowedEnv") == "toolspace.yaml:4 (tools.allowedEnv)"
    assert b.source("defaults", "toolTimeout") == "toolspace.yaml:11 (agents.b.defaults.toolTimeout)"
    assert b.source("defaults", "maxConcurrentTools") == "toolspace.yaml:3 (defaults.maxConcurrentTools)"
    assert b.source("tools", "definitions", "x") == "default"


def test_a_variable_overrides_the_main_file_and_not_its_agents(load: Any) -> None:
    config = load(
        "agents: {a: {defaults: {toolTimeout: 1s}}, b: {tools: {maxConcurrent: 1}}}", TOOLSPACE_TOOL_TIMEOUT="9s"
    )
    a, b = config.agents["a"].config, config.agents["b"].config
    assert a is not None
    assert b is not None
    assert (a.defaults.tool_timeout, b.defaults.tool_timeout) == (1, 9)
    assert b.source("defaults", "toolTimeout") == "TOOLSPACE_TOOL_TIMEOUT (environment)"


def test_secrets_in_the_file_of_an_agent_are_masked_everywhere(load: Any, write: Any) -> None:
    write("agent: {name: a}\nmodel: {provider: o, name: n, apiKey: hunter2}\ntools: {timeout: 1s}\n", "a.yaml")
    config = load("agents: [a.yaml]")
    assert "hunter2" in config.secret_values
    assert "hunter2" not in repr(config)


# Agents as people have them


@pytest.mark.spec("11.1")
def test_a_goal_aware_assistant_loads_unchanged() -> None:
    config = load_config(SEEDS / "goal_aware_assistant.json", environ={})
    assert config.warnings == ()
    spec = config.agent
    assert spec is not None
    assert (spec.name, spec.version) == ("goal-aware-assistant", "1.0")
    assert spec.model == AgentModelSettings(provider="openai", name="gpt-4o", temperature=0.7, max_output_tokens=1500)
    assert spec.loop == AgentLoopSettings(max_steps=10, tool_choice="auto")
    assert spec.runtime == {"response": {"type": "ui-message-stream"}}
    assert [(tool.execution_type, tool.visible) for tool in config.tools.definitions.values()] == [
        ("prebuilt", False),
        ("prebuilt", False),
    ]


@pytest.mark.spec("11.1")
def test_several_agent_files_of_other_programs_load_together() -> None:
    config = load_config(SEEDS / "toolspace.yaml", environ={})
    assert config.warnings == ()
    assert list(config.agents) == ["goal-aware-assistant", "github-helper", "support-agent", "travel-agent"]
    own_configs = {name: spec.config for name, spec in config.agents.items()}
    goals, github, support, travel = own_configs.values()
    assert goals is not None
    assert list(goals.tools.definitions) == ["setGoals", "getGoals"]
    assert github is not None
    server = github.mcp_servers["github-tools"]
    assert (server.url, server.transport) == ("https://mcp.github.com", "http")
    assert server.tools_allowed == ("list_prs", "create_issue")
    assert support is not None
    assert [
        (tool.name, tool.execution_type, tool.execution["method"]) for tool in support.tools.definitions.values()
    ] == [
        ("fetchWeather", "gateway", "GET"),
        ("lookUpOrder", "gateway", "POST"),
    ]
    assert travel is not None
    tools = travel.tools.definitions
    assert (tools["confirmAction"].execution_type, tools["confirmAction"].is_async) == ("space", True)
    assert (tools["fetchExternalData"].visible, tools["fetchExternalData"].timeout) == (False, 10)
    assert (tools["displayChart"].execution_type, tools["displayChart"].visible) == ("internal", True)
    assert (tools["getUserApproval"].execution_type, tools["getUserApproval"].pauses_run) == ("external", True)

"""Agents of a configuration file, in the library and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolspace import Toolspace
from toolspace.core.language_model import ResultsTurn, UserTurn
from toolspace.errors import ConfigError
from toolspace.models.scripted import ScriptedModel, call

FUNCTIONS = '''
from toolspace import tool

@tool
async def shout(text: str) -> str:
    """Shouts."""
    return text.upper() + MARK
'''


def write_config(directory: Path, text: str, *, mark: str = "!") -> Path:
    (directory / "own.py").write_text(FUNCTIONS + f"\nMARK = {mark!r}\n")
    (directory / "toolspace.yaml").write_text(text)
    return directory / "toolspace.yaml"


def last_results(model: ScriptedModel) -> list[str]:
    turn = model.requests[-1].turns[-1]
    assert isinstance(turn, ResultsTurn), turn
    return [answer.text for answer in turn.results]


def set_script(ts: Toolspace, name: str, *script: Any) -> ScriptedModel:
    """Gives an agent a scripted model."""
    model = ScriptedModel(script)
    ts.agents.get(name).model = model
    return model


TWO = """
storage: {dir: ./state}
tools:
  definitions:
    - {name: pong, executionType: static, execution: {output: pong}}
    - {name: secret, executionType: static, execution: {output: "42"}}
agents:
  researcher:
    description: Finds things out.
    system: You research.
    model: demo
    functions: [./own.py]
    tools: {toolsDenied: [secret]}
    limits: {maxTokens: 1000}
    loop: {maxSteps: 3, maxToolCallsPerTurn: 9}
  writer:
    model: demo
    agents: [researcher]
"""


@pytest.mark.spec("11.1")
async def test_agents_run_as_the_configuration_file_describes(tmp_path: Path) -> None:
    async with Toolspace.open(write_config(tmp_path, TWO)) as ts:
        assert not [warning for warning in ts.warnings if "not in effect" in warning]
        listing = {tool_item.name: tool_item.description for tool_item in ts.list_tools()}
        assert listing["agent__researcher"] == "Finds things out."
        assert "shout" not in listing
        model = set_script(
            ts, "researcher", [call("shout", {"text": "hi"}), call("pong"), call("secret"), call("current_time")], "ok"
        )
        result = await ts.run_agent("researcher", "Go.")
        assert result.text == "ok"
        assert model.requests[0].system.startswith("You research.")
        assert last_results(model)[:2] == ["HI!", "pong"]
        assert "not found" in last_results(model)[2]
        agent = ts.agents.get("researcher")
        assert (agent.limits.max_tokens, agent.settings.max_steps, agent.settings.max_tool_calls_per_turn) == (
            1000,
            3,
            9,
        )
        assert ts.agents.get("writer").subagents == ("researcher",)


@pytest.mark.spec("6.1")
@pytest.mark.parametrize("kind", ["agent", "ai-agent"])
@pytest.mark.parametrize("key", ["agent", "agentName", "name", "agentId"])
async def test_a_configured_tool_may_be_an_agent(tmp_path: Path, kind: str, key: str) -> None:
    definition = f"  - {{name: research, description: Researches., executionType: {kind}, execution: {{{key}: r}}}}\n"
    text = f"storage: {{dir: ./state}}\nagents: {{r: {{model: demo}}}}\ntools:\n{definition}"
    async with Toolspace.open(write_config(tmp_path, text)) as ts:
        model = set_script(ts, "r", "Found.", "Found again.")
        tool = ts.find_tool("research")
        assert tool is not None
        assert set(tool.input_schema["properties"]) == {"prompt", "reason"}
        result = await ts.call("research", {"prompt": "What?", "reason": "curious", "depth": 2})
        assert (result.result, result.tool, result.extras["agent"]) == ("Found.", "research", "r")
        assert model.requests[0].turns == (UserTurn('What?\n\nREASON: curious\n\nINPUT: {"depth":2}'),)


async def test_a_configured_agent_tool_can_have_its_own_input_schema(tmp_path: Path) -> None:
    text = """
storage: {dir: ./state}
agents: {r: {model: demo}}
tools:
  - name: research
    description: Find out about a topic.
    executionType: agent
    execution: {agent: r}
    inputSchema: {type: object, properties: {topic: {type: string}}, required: [topic], additionalProperties: false}
"""
    async with Toolspace.open(write_config(tmp_path, text)) as ts:
        model = set_script(ts, "r", "Found.")
        assert (await ts.call("research", {"prompt": "x"})).error_kind == "invalid_parameters"
        assert (await ts.call("research", {"topic": "tools"})).result == "Found."
        assert model.requests[0].turns == (UserTurn('Find out about a topic.\n\nINPUT: {"topic":"tools"}'),)


async def test_a_configured_agent_tool_ignores_the_agents_list_but_not_recursion(tmp_path: Path) -> None:
    text = """
storage: {dir: ./state}
agents: {a: {model: demo}, b: {model: demo}}
tools:
  - {name: ask_a, executionType: agent, execution: {agent: a}}
  - {name: ask_b, executionType: agent, execution: {agent: b}}
"""
    async with Toolspace.open(write_config(tmp_path, text)) as ts:
        a = set_script(ts, "a", [call("ask_b", {"prompt": "x"}), call("ask_a", {"prompt": "x"})], "ok")
        set_script(ts, "b", "b answers")
        assert (await ts.run_agent("a", "Go.")).text == "ok"
        assert last_results(a) == ["b answers", "(tool failed: Recursion detected: a → a)"]


def test_a_tool_of_an_unknown_agent_is_a_configuration_error(tmp_path: Path) -> None:
    text = """
agents: {researcher: {model: demo}}
tools:
  - {name: research, executionType: agent, execution: {agent: reseacher}}
"""
    with pytest.raises(ConfigError, match=r'yaml:4 .*there is no agent "reseacher"; did you mean "researcher"'):
        Toolspace.open(write_config(tmp_path, text))


async def test_a_tool_without_an_agent_logs_a_warning_and_fails(tmp_path: Path) -> None:
    text = "storage: {dir: ./state}\ntools: [{name: research, executionType: ai-agent}]\n"
    async with Toolspace.open(write_config(tmp_path, text)) as ts:
        [warning] = ts.warnings
        assert "it names no agent" in warning
        assert "say which under execution.agent" in ((await ts.call("research", {"prompt": "x"})).error or "")


async def test_a_reload_changes_agents_without_interrupting_runs(tmp_path: Path) -> None:
    path = write_config(tmp_path, TWO)
    async with Toolspace.open(path) as ts:
        set_script(ts, "researcher", call("shout", {"text": "a"}), "ok")
        await ts.run_agent("researcher", "Go.")
        write_config(tmp_path, TWO.replace("You research.", "You dig.").replace("writer:", "poet:"), mark="?")
        await ts.reload()
        assert [agent.name for agent in ts.agents] == ["researcher", "poet"]
        assert "agent__poet" in {tool_item.name for tool_item in ts.list_tools()}
        assert (await ts.call("agent__writer", {"prompt": "x"})).error_kind == "unknown_tool"
        model = set_script(ts, "researcher", call("shout", {"text": "a"}), "ok")
        await ts.run_agent("researcher", "Go.")
        assert model.requests[0].system.startswith("You dig.")
        assert last_results(model) == ["A?"]
        write_config(tmp_path, TWO.replace("functions: [./own.py]", "").replace("tools: {toolsDenied: [secret]}", ""))
        await ts.reload()
        model = set_script(ts, "researcher", [call("shout", {"text": "a"}), call("secret")], "ok")
        await ts.run_agent("researcher", "Go.")
        assert last_results(model)[1] == "42"
        assert "not found" in last_results(model)[0]


async def test_a_reload_keeps_the_agents_of_the_program(tmp_path: Path) -> None:
    from toolspace import Agent

    async with Toolspace.open(write_config(tmp_path, TWO)) as ts:
        ts.agents.add([Agent("guest", model=ScriptedModel(["Hello."]))])
        await ts.reload()
        assert (await ts.run_agent("guest", "Hello?")).text == "Hello."


async def test_the_tool_settings_of_an_agent_apply_to_its_own_tools_only(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "x.txt").write_text("hidden")
    text = f"""
storage: {{dir: ./state}}
tools: {{allowedPaths: ["{tmp_path}"]}}
agents:
  guest:
    model: demo
    tools: {{allowedPaths: ["{tmp_path}/open"]}}
"""
    path = write_config(tmp_path, text)
    async with Toolspace.open(path) as ts:
        file = {"path": str(tmp_path / "closed" / "x.txt")}
        config = {"path": str(path), "content": "agents: {}"}
        model = set_script(ts, "guest", [call("read_file", file), call("write_file", config)], "ok")
        await ts.run_agent("guest", "Go.")
        assert all("(tool failed" in text for text in last_results(model))
        assert (await ts.call("read_file", file)).ok


def run_cli(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toolspace", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_STATE_HOME": str(directory / "state")},
    )


@pytest.mark.spec("17.1")
def test_agents_are_listed_and_called_on_the_command_line(tmp_path: Path) -> None:
    write_config(tmp_path, TWO)
    listing = run_cli(tmp_path, "--json", "list")
    assert {"agent__researcher", "agent__writer"} <= {tool_item["name"] for tool_item in json.loads(listing.stdout)}
    process = run_cli(tmp_path, "--json", "call", "agent__writer", "prompt=Hello")
    result = json.loads(process.stdout)
    assert (process.returncode, result["ok"], result["extras"]["agent"]) == (0, True, "writer")


RULES_FOR_AGENT_TOOLS = """
storage: {dir: ./state}
tools:
  toolsDenied: [agent__hidden]
  overrides: {agent__batch: {enabled: false}, "*": {timeout: 9s}}
agents:
  hidden: {model: demo}
  helper: {model: demo}
  shared: {model: demo, agents: [helper, hidden]}
  own:
    model: demo
    agents: [helper, hidden]
    functions: [./own.py]
    tools: {toolsDenied: [agent__h*, agent__task_status]}
"""


@pytest.mark.parametrize(
    ("agent", "denied_names"),
    [
        ("shared", {"agent__batch", "agent__hidden"}),
        ("own", {"agent__batch", "agent__hidden", "agent__helper", "agent__task_status"}),
    ],
)
async def test_deny_lists_and_overrides_remove_agent_tools(tmp_path: Path, agent: str, denied_names: set[str]) -> None:
    names = ["agent__batch", "agent__hidden", "agent__helper", "agent__task_status"]
    path = write_config(tmp_path, RULES_FOR_AGENT_TOOLS)
    async with Toolspace.open(path) as ts:
        for name in ("hidden", "helper"):
            set_script(ts, name, "Here.")
        model = set_script(ts, agent, [call(name, {"prompt": "x"}) for name in names], "ok", "ok")
        await ts.run_agent(agent, "Go.")
        offered_names = {tool.name for tool in model.requests[0].tools}
        assert denied_names.isdisjoint(offered_names)
        assert set(names) - denied_names <= offered_names
        assert "agent__final_report" in offered_names
        for name, text in zip(names, last_results(model), strict=True):
            assert ("Permission denied" in text or "not found" in text) is (name in denied_names), text
        explanation = ts.orchestrator.explain("agent__helper")
        assert explanation is not None
        assert explanation[1].timeout.value != 9  # "*" is for the tools that do the work.


async def test_a_reload_applies_rules_of_agent_tools_to_agents_with_own_tools(tmp_path: Path) -> None:
    path = write_config(tmp_path, RULES_FOR_AGENT_TOOLS)
    async with Toolspace.open(path) as ts:
        set_script(ts, "own", "ok")
        await ts.run_agent("own", "Go.")
        write_config(tmp_path, RULES_FOR_AGENT_TOOLS.replace("agent__batch: {enabled: false}, ", ""))
        await ts.reload()
        model = set_script(ts, "own", "ok")
        await ts.run_agent("own", "Go.")
    assert "agent__batch" in {tool.name for tool in model.requests[0].tools}

"""Tool settings in the configuration of an agent apply to its calls only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.scripted_agents import (
    agent_config,
    list_result_texts,
    offered_tools,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from toolspace import Toolspace

OWN = {"name": "tide", "description": "Tells the tide.", "executionType": "static", "execution": {"output": "high"}}


@pytest.mark.spec("11.1")
async def test_the_tools_of_an_agent_are_only_its_own(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        agents = {
            "ada": agent_config(model_server, tools=[{**OWN, "visible": False}]),
            "bob": agent_config(model_server, model={"name": "of-bob"}),
        }
        async with open_agent_gateway(tmp_path, model_server, agents=agents) as setup:
            for model in ("m", "of-bob"):
                model_server.script(tool_calls_turn(("tide", {})), model=model)
            await setup.say("How is the tide?")
            await setup.wait_for_run_end()
            await setup.wait_for_run_end(agent="bob")
        hers, his = model_server.list_requests("m"), model_server.list_requests("of-bob")
        assert ("tide" in offered_tools(hers[0]), "tide" in offered_tools(his[0])) == (True, False)
        assert list_result_texts(hers[1]) == ["high"]
        assert '"tide" not found' in list_result_texts(his[1])[0]


@pytest.mark.spec("11.4")
async def test_the_folders_of_an_agent_are_only_its_own(tmp_path: Path) -> None:
    note = tool_calls_turn(("memory_write", {"path": "facts/tide.md", "content": "high at noon"}))
    async with open_model_server() as model_server:
        short = {"maxTokens": 1, "minRecentCycles": 1}
        own_settings = {"memoryDir": "./hers/notes", "sessionDir": "./hers/past"}
        agents = {
            "ada": agent_config(model_server, tools=own_settings, consciousness=short),
            "bob": agent_config(model_server, model={"name": "of-bob"}, consciousness=short),
        }
        shared = {"memoryDir": "./notes", "sessionDir": "./past", "builtins": ["memory_*"]}
        async with open_agent_gateway(tmp_path, model_server, agents=agents, tools=shared) as setup:
            for model in ("m", "of-bob"):
                model_server.script(note, model=model)
            for count in (1, 2):
                await setup.say("Remember the tide.")
                await setup.wait_for_run_end(count)
                await setup.wait_for_run_end(count, agent="bob")
            for model in ("m", "of-bob"):
                await model_server.wait_for_requests(4, model)  # For a summary, after the first cycle was stored.
    for notes, past in (("hers/notes", "hers/past/ada"), ("notes-agents/bob/main", "past/bob")):
        assert (tmp_path / notes / "facts" / "tide.md").read_text() == "high at noon"
        assert [file.name for file in (tmp_path / past).iterdir()] == ["cycles-000001-000001.md"]


@pytest.mark.parametrize("section", ["main", "own"])
async def test_results_are_cut_to_the_configured_context_window(section: str, tmp_path: Path) -> None:
    long = {**OWN, "visible": False, "execution": {"output": "high and low " * 2_000}}
    bound = {"defaults": {"contextWindow": 3_000}}
    async with open_model_server() as model_server:
        ada = agent_config(model_server, model={"name": "gpt-4o"}, tools=[long], **(bound if section == "own" else {}))
        async with open_agent_gateway(
            tmp_path, model_server, agents={"ada": ada}, **(bound if section == "main" else {})
        ) as setup:
            model_server.script(tool_calls_turn(("tide", {})), model="gpt-4o")
            await setup.push_event("go")
            await setup.wait_for_run_end()
            path = setup.gateway.toolspace.config_path
        async with Toolspace.open(path, environ={}) as ts:
            model_server.script(tool_calls_turn(("tide", {})), model="gpt-4o")
            await ts.run_agent("ada", "go")
    for request in model_server.list_requests("gpt-4o")[1::2]:
        assert '"reason":"token_budget"' in list_result_texts(request)[0]


@pytest.mark.spec("4.7")
async def test_the_results_of_all_turns_count_even_if_the_model_reports_fewer_tokens(tmp_path: Path) -> None:
    long = {**OWN, "visible": False, "execution": {"output": "high and low " * 500}}
    async with open_model_server() as model_server:
        ada = agent_config(model_server, tools=[long], defaults={"contextWindow": 3_000})
        async with open_agent_gateway(tmp_path, model_server, agents={"ada": ada}) as setup:
            model_server.script(tool_calls_turn(("tide", {})), tool_calls_turn(("tide", {})), "Done.")
            await setup.push_event("go")
            await setup.wait_for_run_end()
    first_result, second_result = list_result_texts(model_server.list_requests()[-1])
    assert first_result.startswith("high and low")
    assert '"reason":"token_budget"' in second_result


@pytest.mark.spec("4.7")
async def test_a_run_whose_budget_was_exceeded_says_so_in_the_api(tmp_path: Path) -> None:
    long = {**OWN, "visible": False, "execution": {"output": "high and low " * 2_000}}
    async with open_model_server() as model_server:
        ada = agent_config(model_server, model={"name": "gpt-4o"}, tools=[long], defaults={"contextWindow": 20})
        async with open_agent_gateway(tmp_path, model_server, agents={"ada": ada}) as setup:
            model_server.script(tool_calls_turn(("tide", {})), "Done.", "Done.", model="gpt-4o")
            for count in (1, 2):
                await setup.push_event("go")
                await setup.wait_for_run_end(count)
            runs = await setup.list_runs()
            assert sorted(run["toolBudgetExceeded"] for run in runs) == [False, True]
            exceeded_run = next(run for run in runs if run["toolBudgetExceeded"])
            assert (await setup.api.get(f"/api/runs/{exceeded_run['id']}")).data["toolBudgetExceeded"] is True
    assert list_result_texts(model_server.list_requests("gpt-4o")[1]) == [
        "(tool failed: context window budget exceeded)"
    ]

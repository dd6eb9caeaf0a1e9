"""What an agent of a gateway says of tools in its own configuration holds for its calls, and for nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.thinking import calls, described, housed, results, thinking, tools
from toolspace import Toolspace

OWN = {"name": "tide", "description": "Tells the tide.", "executionType": "static", "execution": {"output": "high"}}


@pytest.mark.spec("11.1")
async def test_tools_of_one_agent_are_not_anothers(tmp_path: Path) -> None:
    async with thinking() as brain:
        agents = {
            "ada": described(brain, tools=[{**OWN, "visible": False}]),
            "bob": described(brain, model={"name": "of-bob"}),
        }
        async with housed(tmp_path, brain, agents=agents) as house:
            for model in ("m", "of-bob"):
                brain.script(calls(("tide", {})), model=model)
            await house.say("How is the tide?")
            await house.ended()
            await house.ended(agent="bob")
        hers, his = brain.asked_of("m"), brain.asked_of("of-bob")
        assert ("tide" in tools(hers[0]), "tide" in tools(his[0])) == (True, False)
        assert results(hers[1]) == ["high"]
        assert '"tide" not found' in results(his[1])[0]


@pytest.mark.spec("11.4")
async def test_folders_that_an_agent_names_are_used_for_it_alone(tmp_path: Path) -> None:
    note = calls(("memory_write", {"path": "facts/tide.md", "content": "high at noon"}))
    async with thinking() as brain:
        short = {"maxTokens": 1, "minRecentCycles": 1}
        own = {"memoryDir": "./hers/notes", "sessionDir": "./hers/past"}
        agents = {
            "ada": described(brain, tools=own, consciousness=short),
            "bob": described(brain, model={"name": "of-bob"}, consciousness=short),
        }
        shared = {"memoryDir": "./notes", "sessionDir": "./past"}
        async with housed(tmp_path, brain, agents=agents, tools=shared) as house:
            for model in ("m", "of-bob"):
                brain.script(note, model=model)
            for count in (1, 2):
                await house.say("Remember the tide.")
                await house.ended(count)
                await house.ended(count, agent="bob")
            for model in ("m", "of-bob"):
                await brain.until_asked(4, model)  # For a summary, when the first cycle was written to its file.
    for notes, past in (("hers/notes", "hers/past/ada"), ("notes", "past/bob")):
        assert (tmp_path / notes / "facts" / "tide.md").read_text() == "high at noon"
        assert [file.name for file in (tmp_path / past).iterdir()] == ["cycles-000001-000001.md"]


@pytest.mark.parametrize("where", ["main", "own"])
async def test_results_are_kept_within_the_context_window_that_is_configured(where: str, tmp_path: Path) -> None:
    long = {**OWN, "visible": False, "execution": {"output": "high and low " * 2_000}}
    bound = {"defaults": {"contextWindow": 3_000}}
    async with thinking() as brain:
        ada = described(brain, model={"name": "gpt-4o"}, tools=[long], **(bound if where == "own" else {}))
        async with housed(tmp_path, brain, agents={"ada": ada}, **(bound if where == "main" else {})) as house:
            brain.script(calls(("tide", {})), model="gpt-4o")
            await house.push("go")
            await house.ended()
            path = house.gateway.toolspace.config_path
        async with Toolspace.open(path, environ={}) as ts:
            brain.script(calls(("tide", {})), model="gpt-4o")
            await ts.run_agent("ada", "go")
    for request in brain.asked_of("gpt-4o")[1::2]:
        assert '"reason":"token_budget"' in results(request)[0]

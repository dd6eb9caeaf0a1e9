"""Configuration changes of agents while the gateway runs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.http_servers import http_server
from tests.server.gateway_api import write_config
from tests.server.gateway_process import open_process_api, start_gateway_process
from tests.server.scripted_agents import (
    AgentGateway,
    HeldTurn,
    ScriptedModelServer,
    agent_config,
    list_input_texts,
    list_result_texts,
    message_turns,
    open_agent_gateway,
    open_model_server,
    open_single_agent_gateway,
    tool_calls_turn,
)
from tests.test_agent_settings import accept
from toolspace.agents.agent import entity_id_for

pytestmark = pytest.mark.spec("5.3")


def bob(model_server: ScriptedModelServer, **settings: Any) -> dict[str, Any]:
    return agent_config(model_server, model={"name": "of-bob"}, **settings)


async def change(setup: AgentGateway, **agents: Any) -> None:
    """Reloads the gateway with these agents."""
    setup.write_config(agents=agents)
    await setup.gateway.toolspace.reload()


@pytest.mark.spec("11.1")
async def test_an_agent_that_is_added_to_the_configuration_joins_its_space_and_answers(tmp_path: Path) -> None:
    async with open_model_server() as model_server, open_agent_gateway(tmp_path, model_server) as setup:
        await change(setup, ada=agent_config(model_server), bob=bob(model_server, spaces=["Room", "Garden"]))
        names = [agent["name"] for agent in (await setup.api.get("/api/agents")).data["items"]]
        assert sorted(names) == ["ada", "bob"]
        model_server.script(*message_turns("I am new here."), model="of-bob")
        await setup.say("Who are you?")
        await setup.wait_for_run_end(agent="bob")
        assert await setup.list_agent_messages("bob") == ["I am new here."]
        assert "Garden" in {space["name"] for space in (await setup.api.get("/api/spaces")).data["items"]}


async def test_a_removed_agent_is_not_woken_and_reads_its_inbox_when_it_is_added_again(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        both = {"ada": agent_config(model_server), "bob": bob(model_server)}
        async with open_agent_gateway(tmp_path, model_server, agents=both) as setup:
            await setup.say("One")
            await setup.wait_for_run_end(agent="bob")
            await change(setup, ada=agent_config(model_server))
            await setup.say("Two")
            await setup.wait_for_run_end(2)
            assert len(model_server.list_requests("of-bob")) == 1
            await change(setup, **both)
            await setup.wait_for_run_end(2, agent="bob")
            assert 'Husam (human): "Two"' in list_input_texts(model_server.list_requests("of-bob")[1])[-1]


async def test_an_agent_removed_during_a_run_ends_that_run_and_starts_no_other(tmp_path: Path) -> None:
    async with open_model_server() as model_server, open_agent_gateway(tmp_path, model_server) as setup:
        gate = HeldTurn()
        model_server.script(gate)
        await setup.push_event("one")
        await model_server.wait_for_requests()
        await setup.push_event("two")
        await change(setup, bob=bob(model_server))
        gate.open()
        assert (await setup.wait_for_run_end())["status"] == "completed"
        await setup.push_event("three", agent="bob")
        await setup.wait_for_run_end(agent="bob")
        assert len(await setup.list_runs()) == 1
        inbox = (await setup.api.get(f"/api/agents/{entity_id_for('ada')}/inbox")).data["items"]
        assert [(event["status"], event["attempts"]) for event in inbox if event["status"] != "processed"] == [
            ("pending", 0)
        ]


async def test_a_changed_agent_configuration_applies_from_the_next_cycle(tmp_path: Path) -> None:
    async with (
        open_model_server() as model_server,
        http_server(accept) as hook,
        open_agent_gateway(tmp_path, model_server) as setup,
    ):
        gate = HeldTurn(tool_calls_turn(("get_goals", {})))
        model_server.script(gate)
        await setup.push_event("one")
        await model_server.wait_for_requests()
        changed_files = {
            "system": "You are brief.",
            "loop": {"maxSteps": 1},
            "notifications": {"webhook": hook.url()},
        }
        await change(setup, ada=agent_config(model_server, model={"temperature": 0.1}, **changed_files))
        gate.open()
        assert (await setup.wait_for_run_end())["steps"] == 2
        assert [list_input_texts(request)[0].partition("\n")[0] for request in model_server.list_requests()] == [
            "You are helpful."
        ] * 2
        model_server.script(tool_calls_turn(("send_notification", {"title": "a", "body": "b"})))
        await setup.push_event("two")
        run = await setup.wait_for_run_end(2)
        last = model_server.list_requests()[-1]
        assert (list_input_texts(last)[0].partition("\n")[0], last["temperature"], run["steps"]) == (
            "You are brief.",
            0.1,
            1,
        )
        assert len(hook.requests) == 1


async def test_documents_removed_from_the_configuration_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("The key is under the mat.")
    async with open_single_agent_gateway(tmp_path, ada={"knowledge": "./a.md"}) as setup:
        await setup.wait_for_documents()
        await change(setup, ada=agent_config(setup.model_server))
        await setup.wait_for_documents(0)
        setup.model_server.script(tool_calls_turn(("search_knowledge", {"query": "key"})))
        await setup.push_event("Where is the key?")
        await setup.wait_for_run_end()
        assert "mat" not in list_result_texts(setup.model_server.list_requests()[1])[0]


async def test_an_invalid_configuration_file_changes_nothing(tmp_path: Path) -> None:
    async with open_model_server() as model_server, open_agent_gateway(tmp_path, model_server) as setup:
        with pytest.raises(Exception, match="router"):
            await change(setup, ada=agent_config(model_server, router={"destinations": ["nobody"]}))
        await setup.push_event("one")
        assert (await setup.wait_for_run_end())["status"] == "completed"


@pytest.mark.spec("11.1")
async def test_a_signal_reloads_the_agents_of_a_gateway(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        config = write_config(tmp_path, agents={})
        async with start_gateway_process(tmp_path, config) as process, open_process_api(process) as api:
            write_config(tmp_path, agents={"bob": bob(model_server)})
            process.process.send_signal(signal.SIGHUP)
            path = f"/api/agents/{entity_id_for('bob')}/inbox"
            while (await api.post(path, {"data": "go"})).status == 404:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.02)
            await model_server.wait_for_requests(model="of-bob")

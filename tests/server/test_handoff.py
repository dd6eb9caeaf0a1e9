"""Handoffs between agents of a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.scripted_agents import (
    agent_config,
    list_input_texts,
    message_turns,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from toolspace.agents.agent import entity_id_for

HAND_ON = tool_calls_turn(("router__handoff-to", {"agent": "clerk", "message": "They are in a hurry."}))

pytestmark = pytest.mark.spec("10.6")


async def test_the_answer_of_the_receiving_agent_is_not_handed_off_again(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        agents = {
            "desk": agent_config(model_server, model={"name": "of-desk"}, router={"destinations": ["clerk"]}),
            "clerk": agent_config(model_server, model={"name": "of-clerk"}, spaces=[]),
        }
        async with open_agent_gateway(tmp_path, model_server, agents=agents) as setup:
            model_server.script(HAND_ON, model="of-desk")
            model_server.script(*message_turns("At noon."), model="of-clerk")
            await setup.say("When does it sail?")
            await setup.wait_for_run_end(agent="clerk")
            model_server.script("I have nothing to add.", model="of-desk")
            await setup.push_event("Look around.", agent="desk")
            await setup.wait_for_run_end(2, agent="desk")
            assert len(await setup.list_runs("desk")) == 2  # The answer did not wake the first agent,
            assert "At noon." in "\n".join(
                list_input_texts(model_server.list_requests("of-desk")[-1])
            )  # but it is in its history.
            assert await setup.list_agent_messages("clerk") == ["At noon."]


async def test_a_receiving_agent_in_the_space_gets_only_the_id_of_a_message_that_it_has(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        agents = {
            "desk": agent_config(model_server, model={"name": "of-desk"}, router={"destinations": ["clerk"]}),
            "clerk": agent_config(model_server, model={"name": "of-clerk"}),
        }
        async with open_agent_gateway(tmp_path, model_server, agents=agents) as setup:
            model_server.script(HAND_ON, model="of-desk")
            message = await setup.say("When does it sail?")
            await setup.wait_for_run_end(agent="desk")
            inbox = (await setup.api.get(f"/api/agents/{entity_id_for('clerk')}/inbox")).data["items"]
            (handoff_event,) = [event for event in inbox if event["eventId"].startswith("handoff:")]
            assert (handoff_event["data"]["heard"], handoff_event["data"]["request"]) == (
                [f"space_message:{message['id']}"],
                None,
            )
            await setup.wait_for_run_end(len(await setup.list_runs("clerk")), agent="clerk")
            all_texts = [
                line for request in model_server.list_requests("of-clerk")[-1:] for line in list_input_texts(request)
            ]
            assert sum("When does it sail?" in text for text in all_texts) == 1

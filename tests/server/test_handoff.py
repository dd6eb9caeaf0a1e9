"""Requests that an agent hands on to another one, in a gateway: who gets them, who answers, and who hears of that."""

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
from toolspace.agents.host import entity_id_for

HAND_ON = tool_calls_turn(("router__handoff-to", {"agent": "clerk", "message": "They are in a hurry."}))

pytestmark = pytest.mark.spec("10.6")


async def test_the_answer_of_the_receiving_agent_is_not_handed_off_again(tmp_path: Path) -> None:
    async with open_model_server() as brain:
        agents = {
            "desk": agent_config(brain, model={"name": "of-desk"}, router={"destinations": ["clerk"]}),
            "clerk": agent_config(brain, model={"name": "of-clerk"}, spaces=[]),
        }
        async with open_agent_gateway(tmp_path, brain, agents=agents) as house:
            brain.script(HAND_ON, model="of-desk")
            brain.script(*message_turns("At noon."), model="of-clerk")
            await house.say("When does it sail?")
            await house.wait_for_run_end(agent="clerk")
            brain.script("I have nothing to add.", model="of-desk")
            await house.push_event("Look around.", agent="desk")
            await house.wait_for_run_end(2, agent="desk")
            assert len(await house.list_runs("desk")) == 2  # The answer did not wake it,
            assert "At noon." in "\n".join(list_input_texts(brain.list_requests("of-desk")[-1]))  # and it knows of it.
            assert await house.list_agent_messages("clerk") == ["At noon."]


async def test_a_receiving_agent_in_the_space_gets_only_the_id_of_a_message_that_it_has(tmp_path: Path) -> None:
    async with open_model_server() as brain:
        agents = {
            "desk": agent_config(brain, model={"name": "of-desk"}, router={"destinations": ["clerk"]}),
            "clerk": agent_config(brain, model={"name": "of-clerk"}),
        }
        async with open_agent_gateway(tmp_path, brain, agents=agents) as house:
            brain.script(HAND_ON, model="of-desk")
            message = await house.say("When does it sail?")
            await house.wait_for_run_end(agent="desk")
            inbox = (await house.api.get(f"/api/agents/{entity_id_for('clerk')}/inbox")).data["items"]
            (handed,) = [event for event in inbox if event["eventId"].startswith("handoff:")]
            assert (handed["data"]["heard"], handed["data"]["request"]) == ([f"space_message:{message['id']}"], None)
            await house.wait_for_run_end(len(await house.list_runs("clerk")), agent="clerk")
            everything = [
                line for request in brain.list_requests("of-clerk")[-1:] for line in list_input_texts(request)
            ]
            assert sum("When does it sail?" in text for text in everything) == 1

"""Requests that an agent hands on to another one, in a gateway: who gets them, who answers, and who hears of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.thinking import answer, calls, described, housed, thinking, told
from toolspace.agents.host import entity_of

HAND_ON = calls(("router__handoff-to", {"agent": "clerk", "message": "They are in a hurry."}))

pytestmark = pytest.mark.spec("10.6")


async def test_the_answer_of_whom_a_request_was_handed_on_to_is_not_handed_on_again(tmp_path: Path) -> None:
    async with thinking() as brain:
        agents = {
            "desk": described(brain, model={"name": "of-desk"}, router={"destinations": ["clerk"]}),
            "clerk": described(brain, model={"name": "of-clerk"}, spaces=[]),
        }
        async with housed(tmp_path, brain, agents=agents) as house:
            brain.script(HAND_ON, model="of-desk")
            brain.script(*answer("At noon."), model="of-clerk")
            await house.say("When does it sail?")
            await house.ended(agent="clerk")
            brain.script("I have nothing to add.", model="of-desk")
            await house.push("Look around.", agent="desk")
            await house.ended(2, agent="desk")
            assert len(await house.runs("desk")) == 2  # The answer did not wake it,
            assert "At noon." in "\n".join(told(brain.asked_of("of-desk")[-1]))  # and it knows of it.
            assert await house.said("clerk") == ["At noon."]


async def test_who_is_in_the_space_is_told_what_it_heard_already_by_its_id_alone(tmp_path: Path) -> None:
    async with thinking() as brain:
        agents = {
            "desk": described(brain, model={"name": "of-desk"}, router={"destinations": ["clerk"]}),
            "clerk": described(brain, model={"name": "of-clerk"}),
        }
        async with housed(tmp_path, brain, agents=agents) as house:
            brain.script(HAND_ON, model="of-desk")
            said = await house.say("When does it sail?")
            await house.ended(agent="desk")
            inbox = (await house.api.get(f"/api/agents/{entity_of('clerk')}/inbox")).data["items"]
            (handed,) = [one for one in inbox if one["eventId"].startswith("handoff:")]
            assert (handed["data"]["heard"], handed["data"]["request"]) == ([f"space_message:{said['id']}"], None)
            await house.ended(len(await house.runs("clerk")), agent="clerk")
            everything = [line for asked in brain.asked_of("of-clerk")[-1:] for line in told(asked)]
            assert sum("When does it sail?" in one for one in everything) == 1

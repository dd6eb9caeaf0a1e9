"""Agents of a gateway whose configuration changes while it runs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.builtin.http_servers import http_server
from tests.server.processes import asking_process, served
from tests.server.serving import write_config
from tests.server.thinking import (
    Brain,
    Gate,
    House,
    answer,
    at_home,
    calls,
    described,
    housed,
    results,
    thinking,
    told,
)
from tests.test_agent_settings import accept
from toolspace.agents.host import entity_of

pytestmark = pytest.mark.spec("5.3")


def bob(brain: Brain, **settings: Any) -> dict[str, Any]:
    return described(brain, model={"name": "of-bob"}, **settings)


async def change(house: House, **agents: Any) -> None:
    """Has the gateway read a configuration with these agents."""
    house.write(agents=agents)
    await house.gateway.toolspace.reload()


@pytest.mark.spec("11.1")
async def test_a_new_agent_gets_its_place_and_answers(tmp_path: Path) -> None:
    async with thinking() as brain, housed(tmp_path, brain) as house:
        await change(house, ada=described(brain), bob=bob(brain, spaces=["Room", "Garden"]))
        names = [one["name"] for one in (await house.api.get("/api/agents")).data["items"]]
        assert sorted(names) == ["ada", "bob"]
        brain.script(*answer("I am new here."), model="of-bob")
        await house.say("Who are you?")
        await house.ended(agent="bob")
        assert await house.said("bob") == ["I am new here."]
        assert "Garden" in {one["name"] for one in (await house.api.get("/api/spaces")).data["items"]}


async def test_an_agent_that_is_gone_is_not_woken_and_one_that_is_back_reads_what_waits(tmp_path: Path) -> None:
    async with thinking() as brain:
        both = {"ada": described(brain), "bob": bob(brain)}
        async with housed(tmp_path, brain, agents=both) as house:
            await house.say("One")
            await house.ended(agent="bob")
            await change(house, ada=described(brain))
            await house.say("Two")
            await house.ended(2)
            assert len(brain.asked_of("of-bob")) == 1
            await change(house, **both)
            await house.ended(2, agent="bob")
            assert 'Husam (human): "Two"' in told(brain.asked_of("of-bob")[1])[-1]


async def test_an_agent_that_goes_while_it_thinks_ends_its_run_and_begins_no_other(tmp_path: Path) -> None:
    async with thinking() as brain, housed(tmp_path, brain) as house:
        gate = Gate()
        brain.script(gate)
        await house.push("one")
        await brain.until_asked()
        await house.push("two")
        await change(house, bob=bob(brain))
        gate.open()
        assert (await house.ended())["status"] == "completed"
        await house.push("three", agent="bob")
        await house.ended(agent="bob")
        assert len(await house.runs()) == 1
        inbox = (await house.api.get(f"/api/agents/{entity_of('ada')}/inbox")).data["items"]
        assert [(one["status"], one["attempts"]) for one in inbox if one["status"] != "processed"] == [("pending", 0)]


async def test_what_is_changed_of_an_agent_holds_from_its_next_cycle(tmp_path: Path) -> None:
    async with thinking() as brain, http_server(accept) as hook, housed(tmp_path, brain) as house:
        gate = Gate(calls(("get_goals", {})))
        brain.script(gate)
        await house.push("one")
        await brain.until_asked()
        changed = {
            "system": "You are brief.",
            "loop": {"maxSteps": 1},
            "notifications": {"webhook": hook.url()},
        }
        await change(house, ada=described(brain, model={"temperature": 0.1}, **changed))
        gate.open()
        assert (await house.ended())["steps"] == 2
        assert [told(one)[0].partition("\n")[0] for one in brain.asked_of()] == ["You are helpful."] * 2
        brain.script(calls(("send_notification", {"title": "a", "body": "b"})))
        await house.push("two")
        run = await house.ended(2)
        last = brain.asked_of()[-1]
        assert (told(last)[0].partition("\n")[0], last["temperature"], run["steps"]) == ("You are brief.", 0.1, 1)
        assert len(hook.seen) == 1


async def test_documents_that_are_configured_no_more_are_found_no_more(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("The key is under the mat.")
    async with at_home(tmp_path, ada={"knowledge": "./a.md"}) as house:
        await house.known()
        await change(house, ada=described(house.brain))
        await house.known(0)
        house.brain.script(calls(("search_knowledge", {"query": "key"})))
        await house.push("Where is the key?")
        await house.ended()
        assert "mat" not in results(house.brain.asked_of()[1])[0]


async def test_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    async with thinking() as brain, housed(tmp_path, brain) as house:
        with pytest.raises(Exception, match="router"):
            await change(house, ada=described(brain, router={"destinations": ["nobody"]}))
        await house.push("one")
        assert (await house.ended())["status"] == "completed"


@pytest.mark.spec("11.1")
async def test_a_gateway_hears_of_changed_agents_by_a_signal(tmp_path: Path) -> None:
    async with thinking() as brain:
        config = write_config(tmp_path, agents={})
        async with served(tmp_path, config) as process, asking_process(process) as api:
            write_config(tmp_path, agents={"bob": bob(brain)})
            process.process.send_signal(signal.SIGHUP)
            path = f"/api/agents/{entity_of('bob')}/inbox"
            while (await api.post(path, {"data": "go"})).status == 404:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.02)
            await brain.until_asked(model="of-bob")

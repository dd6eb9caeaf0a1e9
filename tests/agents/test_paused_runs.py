"""A run that waits for a result: its agent is free meanwhile, and it goes on where it was, in whichever process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import Village, agent, village
from tests.agents.chaos.job_agent import elsewhere
from tests.agents.crashing_database import Mortal
from toolspace import Tool, tool
from toolspace.config.agent_settings import ConsciousnessSettings
from toolspace.core.context import ToolContext
from toolspace.core.model import ModelCall, ModelRequest, ResultsTurn, Turn, UserTurn
from toolspace.core.tool import Annotations
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import runs
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import sessions


def asking() -> Tool:
    return elsewhere("ask", "external", pauses_run=True, visible=False)


def answers(turn: Turn) -> list[str]:
    assert isinstance(turn, ResultsTurn), turn
    return [one.text for one in turn.results]


def results(request: ModelRequest) -> list[list[str]]:
    """All results that the model was given."""
    return [answers(turn) for turn in request.turns if isinstance(turn, ResultsTurn)]


async def answer(town: Village, result: Any, about: str | None = None, **options: Any) -> None:
    """Brings the result of the call that is open; of the one with this argument, if there are more."""
    [asked] = [one for one in await town.open_calls() if about is None or one.args.get("about") == about]
    await town.submit(asked.call_id, result, **options)


@pytest.mark.spec("6.8")
@pytest.mark.spec("11.4")
async def test_a_paused_run_goes_on_in_another_process_with_the_result_in_the_place_of_the_call(
    database: Database, tmp_path: Path
) -> None:
    first = ScriptedModel([call("ask", {"about": "it"})])
    async with village(database, agent("ada", first), tools=[asking()], folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        paused = await town.paused()
        assert paused.steps == 1
        assert [event.status for event in await town.inbox()] == ["processed"]
    second = ScriptedModel(["They said yes."])
    async with village(database, agent("ada", second), tools=[asking()], folder=tmp_path, owns=False) as town:
        await answer(town, {"said": "yes"})
        run = await town.run_ended()
        assert (run.id, run.status, run.steps) == (paused.id, "completed", 2)
        [request] = second.requests
        assert [type(turn).__name__ for turn in request.turns] == ["UserTurn", "ModelTurn", "ResultsTurn"]
        assert answers(request.turns[-1]) == ['{"said":"yes"}']
        assert len(await town.runs()) == 1
        assert {event.status for event in await town.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
async def test_the_agent_is_free_for_other_things_while_a_run_waits(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "Good morning.", "They said no."])
    async with village(database, agent("ada", model), tools=[asking()], folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        paused = await town.paused()
        await town.say("Good morning!")
        between = await town.run_ended()
        assert between.id != paused.id
        assert "no result yet" in results(model.requests[1])[0][0]
        await answer(town, "no")
        await town.run_ended(2)
        assert [run.status for run in await town.runs()] == ["completed", "completed"]
        request = model.requests[2]
        assert results(request) == [["no"]]
        last = request.turns[-1]
        assert isinstance(last, UserTurn)  # Else it would think that it was asked good morning.
        assert last.text.startswith("CONTINUE:")


@pytest.mark.spec("6.8")
@pytest.mark.parametrize("together", [False, True])
async def test_a_run_that_waits_for_two_results_goes_on_with_both(
    database: Database, tmp_path: Path, together: bool
) -> None:
    model = ScriptedModel([[call("ask", {"about": "tea"}), call("ask", {"about": "milk"})], "Tea with milk."])
    tools = [asking()]
    async with village(database, agent("ada", model), tools=tools, folder=tmp_path, owns=False) as town:
        await town.say("Ask about tea and milk.")
        paused = await town.paused()
        if not together:
            await answer(town, "milk", "milk")
            await answer(town, "tea", "tea")
    if together:  # Both are there when the next process begins.
        async with village(database, folder=tmp_path, owns=False, names=["ada"]) as town:
            await answer(town, "milk", "milk")
            await answer(town, "tea", "tea")
    async with village(database, agent("ada", model), tools=tools, folder=tmp_path, owns=False) as town:
        run = await town.run_ended()
        assert (run.id, run.status) == (paused.id, "completed")
        assert results(model.requests[-1]) == [["tea", "milk"]]
        assert len(model.requests) == 2
        assert {event.status for event in await town.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
async def test_two_runs_that_wait_go_on_one_after_the_other(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask", {"about": "tea"}), call("ask", {"about": "milk"})])
    tools = [asking()]
    async with village(database, agent("ada", model), tools=tools, folder=tmp_path, owns=False) as town:
        await town.say("Ask about tea.")
        tea = await town.paused()
        await town.say("Ask about milk.")
        milk = await town.paused(2)
    async with village(database, folder=tmp_path, owns=False, names=["ada"]) as town:
        await answer(town, "milk!", "milk")
        await answer(town, "tea!", "tea")
    model = ScriptedModel(["Milk is there.", "Tea is there."])
    async with village(database, agent("ada", model), tools=tools, folder=tmp_path, owns=False) as town:
        await town.run_ended(2)
        assert {run.id: run.status for run in await town.runs()} == {tea.id: "completed", milk.id: "completed"}
        assert "milk!" in str(model.requests[0].turns[-1])
        assert "tea!" in str(model.requests[1].turns[-1])


@pytest.mark.spec("6.8")
async def test_a_result_that_is_an_error_goes_on_as_one(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "A pity."])
    async with village(database, agent("ada", model), tools=[asking()], folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        await town.paused()
        await answer(town, "nobody is there", is_error=True)
        run = await town.run_ended()
        assert run.status == "completed"
        last = model.requests[1].turns[-1]
        assert isinstance(last, ResultsTurn)
        assert last.results[0].is_error
        assert "nobody is there" in last.results[0].text


@pytest.mark.spec("6.9")
async def test_a_call_that_expires_lets_its_run_go_on(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "Nobody answered."])
    tools = [elsewhere("ask", "external", pauses_run=True, visible=False, expires_after=0.05)]
    async with village(database, agent("ada", model), tools=tools, folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        run = await town.run_ended()
        assert (run.status, run.steps) == ("completed", 2)
        assert "expired" in answers(model.requests[1].turns[-1])[0]


@pytest.mark.spec("6.8")
async def test_a_paused_run_that_is_canceled_stays_so_and_the_agent_goes_on(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "Good morning."])
    async with village(database, agent("ada", model), tools=[asking()], folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        paused = await town.paused()
        await town.ledger.commit(runs.cancel_run, paused.id)
        await town.say("Good morning!")
        await town.run_ended(2)
        assert [run.status for run in await town.runs()] == ["canceled", "completed"]
        assert await town.open_calls() == []
        assert {event.status for event in await town.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
@pytest.mark.spec("7.3")
async def test_a_result_is_not_lost_where_the_model_fails_when_the_run_goes_on(
    database: Database, tmp_path: Path
) -> None:
    model = ScriptedModel([call("ask"), ModelError("unavailable", "gone for a moment"), "They said yes."])
    options: dict[str, Any] = {"tools": [asking()], "folder": tmp_path, "owns": False, "retry_delays": (10,)}
    async with village(database, agent("ada", model), **options) as town:
        await town.say("Ask them.")
        await town.paused()
        await answer(town, "yes")
        run = await town.run_ended()
        assert run.status == "completed"
        assert len(await town.runs()) == 1
        last = model.requests[-1].turns[-1]
        assert isinstance(last, ResultsTurn)
        assert "yes" in last.results[0].text
        assert {event.status for event in await town.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
async def test_a_result_for_a_run_that_failed_meanwhile_comes_as_any_late_one(
    database: Database, tmp_path: Path
) -> None:
    model = ScriptedModel([[call("ask", {"about": "tea"}), call("ask", {"about": "milk"})], "Milk came late."])
    async with village(database, agent("ada", model), tools=[asking()], folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        paused = await town.paused()
        await town.ledger.commit(runs.close_run, paused.id, "failed", error="an operator gave it up")
        await answer(town, "milk", "milk")
        await town.run_ended(2)
        last = model.requests[-1].turns[-1]
        assert isinstance(last, UserTurn)
        assert last.text.startswith("INBOX:\n[tool_result ")


@pytest.mark.spec("11.4")
@pytest.mark.spec("6.8")
async def test_what_a_paused_run_is_about_outlasts_the_summary_of_older_cycles(
    database: Database, tmp_path: Path
) -> None:
    def thinks(request: ModelRequest) -> str | ModelCall:
        if request.system.startswith("You keep the memory"):
            return "There was some talk."
        last = request.turns[-1]
        if "Ask them." in str(last):
            return call("ask")
        return "They said yes." if "CONTINUE" in str(last) else "Hm."

    model = ScriptedModel(thinks)
    mind = ConsciousnessSettings(max_tokens=50, min_recent_cycles=1)
    ada = agent("ada", model, consciousness=mind)
    async with village(database, ada, tools=[asking()], folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        paused = await town.paused()
        for number in range(1, 5):
            await town.say(f"Number {number}: {'talk ' * 20}")
            await town.run_ended(number)
        await answer(town, "yes")
        await town.run_ended(5)
        assert {run.id: run.status for run in await town.runs()}[paused.id] == "completed"
        request = model.requests[-1] if "CONTINUE" in str(model.requests[-1].turns) else model.requests[-2]
        assert "There was some talk." in str(request.turns[0])
        assert results(request) == [["yes"]]


@pytest.mark.spec("6.8")
async def test_a_result_that_comes_before_the_run_has_paused_is_not_waited_for(
    database: Database, tmp_path: Path
) -> None:
    @tool(visible=False)
    async def slow() -> str:
        """Ends after the answer has come."""
        await town.until_asked()
        await answer(town, "yes")
        return "at last"

    model = ScriptedModel([[call("ask"), call("slow")], "They said yes.", "You are welcome."])
    async with village(database, agent("ada", model), tools=[asking(), slow], folder=tmp_path, owns=False) as town:
        await town.say("Ask them.")
        run = await town.run_ended()
        assert (run.status, run.steps, len(await town.runs())) == ("completed", 2, 1)
        assert results(model.requests[1]) == [["yes", "at last"]]
        await town.say("Thank you.")
        await town.run_ended(2)
        assert "tool_result" not in str(model.requests[2].turns[-1])  # It was given once.
        assert {event.status for event in await town.inbox()} == {"processed"}


@pytest.mark.spec("11.6")
@pytest.mark.spec("6.8")
async def test_a_call_that_a_process_made_after_it_was_taken_for_dead_is_found(
    database: Database, tmp_path: Path
) -> None:
    mortal = Mortal(database)
    in_flight = asyncio.Event()

    @tool(visible=False, annotations=Annotations(read_only=True))
    async def look() -> str:
        """Looks."""
        if not in_flight.is_set():
            in_flight.set()
            mortal.die()
            await mortal.live()
        # The other was not dead: what it had begun to write arrives now.
        asked = (await town.history())[1].stored.call_ids[2]
        room = GatewayCallHost(town.desk, run_id=(await town.runs())[0].id, agent_entity_id=town.agent)
        context = ToolContext(call_id=asked, host=room)
        await room.wait_for_result(asking(), {}, context)
        return "looked"

    calls = [call("look"), call("enter_space", {"spaceId": "spc_room"}), call("ask")]
    first = agent("ada", ScriptedModel([calls]))
    async with village(mortal, first, tools=[look, asking()], folder=tmp_path, owns=False) as town:
        await town.say("Look, and ask.")
        await in_flight.wait()
    await Ledger(database).write(sessions.release_all_leases, "")
    model = ScriptedModel(["They said yes."])
    async with village(database, agent("ada", model), tools=[look, asking()], folder=tmp_path, owns=False) as town:
        await town.paused()
        await answer(town, "yes")
        run = await town.run_ended()
        assert (run.status, len(await town.runs())) == ("completed", 1)
        assert results(model.requests[0])[0][2] == "yes"
        assert [one.tool_name for one in await town.calls(run.id)].count("ask") == 1

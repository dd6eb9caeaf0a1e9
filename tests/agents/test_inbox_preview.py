"""What arrives while an agent thinks: it sees that before its next step, and may take it then, or in its next cycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.agent_harness import agent, village
from tests.agents.chaos.job_agent import elsewhere
from toolspace import tool
from toolspace.core.model import ModelCall, ModelRequest, ResultsTurn, UserTurn
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database


@tool(visible=False)
async def look() -> str:
    """Looks."""
    return "looked"


def told(request: ModelRequest) -> str:
    """What the model was told last."""
    turn = request.turns[-1]
    assert isinstance(turn, UserTurn), turn
    return turn.text


@pytest.mark.spec("11.2")
@pytest.mark.spec("9.1")
async def test_a_correction_in_the_middle_of_a_cycle_is_previewed_taken_and_not_delivered_again(
    database: Database, tmp_path: Path
) -> None:
    async def hears_of_it(request: ModelRequest) -> ModelCall:
        await town.say("No, make that two.")
        return call("look")

    model = ScriptedModel([hears_of_it, call("peek_inbox", {"count": 5}), "Two, then.", "Again?"])
    async with village(database, agent("ada", model), tools=[look], folder=tmp_path, owns=False) as town:
        await town.say("One, please.")
        run = await town.run_ended()
        assert run.status == "completed"
        first, second, third = model.requests
        assert "PREVIEW" not in told(first)
        assert told(second).startswith("[INBOX PREVIEW — 1 waiting]")
        assert 'Husam: "No, make that two."' in told(second)
        taken = third.turns[-1]
        assert isinstance(taken, ResultsTurn)  # No preview any more: it was taken.
        assert "No, make that two." in taken.results[0].text
        assert [event.status for event in await town.inbox()] == ["processed", "processed"]
        await town.say("Thank you.")
        await town.run_ended(2)
        assert told(model.requests[3]).count("\n") == 1  # The one message, under its title.
        assert not any("PREVIEW" in row.stored.turn.text for row in await town.history() if row.seq == 1)


@pytest.mark.spec("11.2")
async def test_what_is_not_taken_comes_in_the_next_cycle(database: Database, tmp_path: Path) -> None:
    async def hears_of_it(request: ModelRequest) -> ModelCall:
        await town.say("And a coffee.")
        return call("look")

    model = ScriptedModel([hears_of_it, "One.", "A coffee."])
    async with village(database, agent("ada", model), tools=[look], folder=tmp_path, owns=False) as town:
        await town.say("One, please.")
        await town.run_ended(2)
        assert "And a coffee." in told(model.requests[1])
        assert told(model.requests[2]).startswith("INBOX:")
        assert "And a coffee." in told(model.requests[2])
        previews = [turn for turn in model.requests[2].turns if isinstance(turn, UserTurn) and "PREVIEW" in turn.text]
        assert previews == []  # A preview is of its moment: nobody remembers it.
        assert len(await town.runs()) == 2


@pytest.mark.spec("11.2")
async def test_a_preview_is_short_and_the_oldest_come_first(database: Database, tmp_path: Path) -> None:
    async def hears_much(request: ModelRequest) -> ModelCall:
        await town.push({"note": "from a service"})
        for number in range(1, 13):
            await town.say(f"{number}. {'blah ' * 200}\nnew line")
        return call("look")

    model = ScriptedModel([hears_much, "One.", "All of it."])
    async with village(database, agent("ada", model), tools=[look], folder=tmp_path, owns=False) as town:
        await town.say("One, please.")
        await town.run_ended(2)
        lines = told(model.requests[1]).splitlines()
        assert lines[0] == "[INBOX PREVIEW — 13 waiting]"
        assert lines[1].startswith("  [service] ")  # A person's message is more important. It is not older.
        assert [line.split('"')[1].split(".")[0] for line in lines[2:9]] == [str(number) for number in range(1, 8)]
        assert lines[9] == "  … and 5 more"
        assert max(map(len, lines)) < 150


@pytest.mark.spec("9.1")
@pytest.mark.spec("6.8")
async def test_peek_inbox_leaves_the_result_that_a_run_waits_for(database: Database, tmp_path: Path) -> None:
    async def answers_the_first(request: ModelRequest) -> ModelCall:
        [asked] = await town.open_calls()
        await town.submit(asked.call_id, "yes")
        return call("look")

    async def is_told(request: ModelRequest) -> ModelCall:
        assert "PREVIEW" not in str(request.turns[-1])  # It is not for this run.
        return call("peek_inbox", {"count": 10})

    model = ScriptedModel([call("ask"), answers_the_first, is_told, "Nothing there.", "It is yes."])
    tools = [look, elsewhere("ask", "external", pauses_run=True, visible=False)]
    async with village(database, agent("ada", model), tools=tools, folder=tmp_path, owns=False) as town:
        await town.say("Ask.")
        paused = await town.paused()
        await town.say("And look.")
        await town.run_ended(2)
        taken = model.requests[3].turns[-1]
        assert isinstance(taken, ResultsTurn)
        assert '"events":[]' in taken.results[0].text.replace(" ", "")
        assert [run.status for run in await town.runs()] == ["completed", "completed"]
        assert (await town.runs())[0].id == paused.id

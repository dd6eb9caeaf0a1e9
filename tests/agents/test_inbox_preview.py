"""Events that arrive during a cycle: the model sees them before its next step and can take them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.agent_harness import agent, run_agents
from tests.agents.chaos.job_agent import external_tool
from toolspace import tool
from toolspace.core.language_model import ModelCall, ModelRequest, ResultsTurn, UserTurn
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database


@tool(visible=False)
async def look() -> str:
    """Looks."""
    return "looked"


def last_text(request: ModelRequest) -> str:
    """What the model was told last."""
    turn = request.turns[-1]
    assert isinstance(turn, UserTurn), turn
    return turn.text


@pytest.mark.spec("11.2")
@pytest.mark.spec("9.1")
async def test_an_event_that_peek_inbox_takes_is_not_delivered_again(database: Database, tmp_path: Path) -> None:
    async def hears_of_it(request: ModelRequest) -> ModelCall:
        await harness.send_message("No, make that two.")
        return call("look")

    model = ScriptedModel([hears_of_it, call("peek_inbox", {"count": 5}), "Two, then.", "Again?"])
    async with run_agents(database, agent("ada", model), tools=[look], session_dir=tmp_path) as harness:
        await harness.send_message("One, please.")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        first, second, third = model.requests
        assert "PREVIEW" not in last_text(first)
        assert last_text(second).startswith("[INBOX PREVIEW — 1 waiting]")
        assert 'Husam: "No, make that two."' in last_text(second)
        results_turn = third.turns[-1]
        assert isinstance(results_turn, ResultsTurn)  # No preview any more: it was taken.
        assert "No, make that two." in results_turn.results[0].text
        assert [event.status for event in await harness.inbox()] == ["processed", "processed"]
        await harness.send_message("Thank you.")
        await harness.wait_for_run(2)
        assert last_text(model.requests[3]).count("\n") == 1  # The one message, under its title.
        assert not any("PREVIEW" in row.stored_turn.turn.text for row in await harness.history() if row.seq == 1)


@pytest.mark.spec("11.2")
async def test_a_previewed_event_that_is_not_taken_comes_in_the_next_cycle(database: Database, tmp_path: Path) -> None:
    async def hears_of_it(request: ModelRequest) -> ModelCall:
        await harness.send_message("And a coffee.")
        return call("look")

    model = ScriptedModel([hears_of_it, "One.", "A coffee."])
    async with run_agents(database, agent("ada", model), tools=[look], session_dir=tmp_path) as harness:
        await harness.send_message("One, please.")
        await harness.wait_for_run(2)
        assert "And a coffee." in last_text(model.requests[1])
        assert last_text(model.requests[2]).startswith("INBOX:")
        assert "And a coffee." in last_text(model.requests[2])
        previews = [turn for turn in model.requests[2].turns if isinstance(turn, UserTurn) and "PREVIEW" in turn.text]
        assert previews == []  # Previews are not part of the conversation.
        assert len(await harness.runs()) == 2


@pytest.mark.spec("11.2")
async def test_a_preview_lists_the_oldest_events_and_counts_the_rest(database: Database, tmp_path: Path) -> None:
    async def hears_much(request: ModelRequest) -> ModelCall:
        await harness.push_event({"note": "from a service"})
        for number in range(1, 13):
            await harness.send_message(f"{number}. {'blah ' * 200}\nnew line")
        return call("look")

    model = ScriptedModel([hears_much, "One.", "All of it."])
    async with run_agents(database, agent("ada", model), tools=[look], session_dir=tmp_path) as harness:
        await harness.send_message("One, please.")
        await harness.wait_for_run(2)
        lines = last_text(model.requests[1]).splitlines()
        assert lines[0] == "[INBOX PREVIEW — 13 waiting]"
        assert lines[1].startswith("  [service] ")  # A person's message is more important. It is not older.
        assert [line.split('"')[1].split(".")[0] for line in lines[2:9]] == [str(number) for number in range(1, 8)]
        assert lines[9] == "  … and 5 more"
        assert max(map(len, lines)) < 150


@pytest.mark.spec("9.1")
@pytest.mark.spec("6.8")
async def test_peek_inbox_does_not_take_results_that_a_run_waits_for(database: Database, tmp_path: Path) -> None:
    async def answers_the_first(request: ModelRequest) -> ModelCall:
        [open_call] = await harness.open_calls()
        await harness.submit(open_call.call_id, "yes")
        return call("look")

    async def is_told(request: ModelRequest) -> ModelCall:
        assert "PREVIEW" not in str(request.turns[-1])  # It is not for this run.
        return call("peek_inbox", {"count": 10})

    model = ScriptedModel([call("ask"), answers_the_first, is_told, "Nothing there.", "It is yes."])
    tools = [look, external_tool("ask", "external", pauses_run=True, visible=False)]
    async with run_agents(database, agent("ada", model), tools=tools, session_dir=tmp_path) as harness:
        await harness.send_message("Ask.")
        paused_run = await harness.wait_for_paused_run()
        await harness.send_message("And look.")
        await harness.wait_for_run(2)
        results_turn = model.requests[3].turns[-1]
        assert isinstance(results_turn, ResultsTurn)
        assert '"events":[]' in results_turn.results[0].text.replace(" ", "")
        assert [run.status for run in await harness.runs()] == ["completed", "completed"]
        assert (await harness.runs())[0].id == paused_run.id

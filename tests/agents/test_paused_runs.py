"""A run that waits for a result: its agent is free meanwhile, and it continues in any process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, CallId, run_agents
from tests.agents.agent_harness import private_agent as agent
from tests.agents.chaos.job_agent import external_tool
from tests.agents.crashing_database import CrashingDatabase
from toolspace import Tool, tool
from toolspace.config.agent_settings import ConsciousnessSettings
from toolspace.core.language_model import ModelCall, ModelRequest, ResultsTurn, Turn, UserTurn
from toolspace.core.tool import Annotations
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import runs
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import sessions


def pausing_tool() -> Tool:
    return external_tool("ask", "external", pauses_run=True, visible=False)


def result_texts(turn: Turn) -> list[str]:
    assert isinstance(turn, ResultsTurn), turn
    return [result.text for result in turn.results]


def results_by_turn(request: ModelRequest) -> list[list[str]]:
    """All results that the model was given."""
    return [result_texts(turn) for turn in request.turns if isinstance(turn, ResultsTurn)]


async def submit_result(harness: AgentHarness, result: Any, about: str | None = None, **options: Any) -> None:
    """Brings the result of the call that is open; of the one with this argument, if there are more."""
    [open_call] = [
        record for record in await harness.open_calls() if about is None or record.args.get("about") == about
    ]
    await harness.submit(open_call.call_id, result, **options)


@pytest.mark.spec("6.8")
@pytest.mark.spec("11.4")
async def test_a_paused_run_continues_in_another_process_with_its_result(database: Database, tmp_path: Path) -> None:
    first = ScriptedModel([call("ask", {"about": "it"})])
    async with run_agents(database, agent("ada", first), tools=[pausing_tool()], session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        paused_run = await harness.wait_for_paused_run()
        assert paused_run.steps == 1
        assert [event.status for event in await harness.inbox()] == ["processed"]
    second = ScriptedModel(["They said yes."])
    async with run_agents(database, agent("ada", second), tools=[pausing_tool()], session_dir=tmp_path) as harness:
        await submit_result(harness, {"said": "yes"})
        run = await harness.wait_for_run()
        assert (run.id, run.status, run.steps) == (paused_run.id, "completed", 2)
        [request] = second.requests
        assert [type(turn).__name__ for turn in request.turns] == ["UserTurn", "ModelTurn", "ResultsTurn"]
        assert result_texts(request.turns[-1]) == ['{"said":"yes"}']
        assert len(await harness.runs()) == 1
        assert {event.status for event in await harness.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
async def test_other_cycles_run_while_a_run_is_paused(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "Good morning.", "They said no."])
    async with run_agents(database, agent("ada", model), tools=[pausing_tool()], session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        paused_run = await harness.wait_for_paused_run()
        await harness.send_message("Good morning!")
        run_between = await harness.wait_for_run()
        assert run_between.id != paused_run.id
        assert "no result yet" in results_by_turn(model.requests[1])[0][0]
        await submit_result(harness, "no")
        await harness.wait_for_run(2)
        assert [run.status for run in await harness.runs()] == ["completed", "completed"]
        request = model.requests[2]
        assert results_by_turn(request) == [["no"]]
        last = request.turns[-1]
        assert isinstance(last, UserTurn)  # Without the note, the last turn would be about another request.
        assert last.text.startswith("CONTINUE:")


@pytest.mark.spec("6.8")
@pytest.mark.parametrize("together", [False, True])
async def test_a_run_that_waits_for_two_results_continues_with_both(
    database: Database, tmp_path: Path, together: bool
) -> None:
    model = ScriptedModel([[call("ask", {"about": "tea"}), call("ask", {"about": "milk"})], "Tea with milk."])
    tools = [pausing_tool()]
    async with run_agents(database, agent("ada", model), tools=tools, session_dir=tmp_path) as harness:
        await harness.send_message("Ask about tea and milk.")
        paused_run = await harness.wait_for_paused_run()
        if not together:
            await submit_result(harness, "milk", "milk")
            await submit_result(harness, "tea", "tea")
    if together:  # Both are there when the next process begins.
        async with run_agents(database, session_dir=tmp_path, names=["ada"]) as harness:
            await submit_result(harness, "milk", "milk")
            await submit_result(harness, "tea", "tea")
    async with run_agents(database, agent("ada", model), tools=tools, session_dir=tmp_path) as harness:
        run = await harness.wait_for_run()
        assert (run.id, run.status) == (paused_run.id, "completed")
        assert results_by_turn(model.requests[-1]) == [["tea", "milk"]]
        assert len(model.requests) == 2
        assert {event.status for event in await harness.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
async def test_two_paused_runs_continue_one_after_the_other(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask", {"about": "tea"}), call("ask", {"about": "milk"})])
    tools = [pausing_tool()]
    async with run_agents(database, agent("ada", model), tools=tools, session_dir=tmp_path) as harness:
        await harness.send_message("Ask about tea.")
        tea = await harness.wait_for_paused_run()
        await harness.send_message("Ask about milk.")
        milk = await harness.wait_for_paused_run(2)
    async with run_agents(database, session_dir=tmp_path, names=["ada"]) as harness:
        await submit_result(harness, "milk!", "milk")
        await submit_result(harness, "tea!", "tea")
    model = ScriptedModel(["Milk is there.", "Tea is there."])
    async with run_agents(database, agent("ada", model), tools=tools, session_dir=tmp_path) as harness:
        await harness.wait_for_run(2)
        assert {run.id: run.status for run in await harness.runs()} == {tea.id: "completed", milk.id: "completed"}
        assert "milk!" in str(model.requests[0].turns[-1])
        assert "tea!" in str(model.requests[1].turns[-1])


@pytest.mark.spec("6.8")
async def test_a_paused_run_continues_with_an_error_result(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "A pity."])
    async with run_agents(database, agent("ada", model), tools=[pausing_tool()], session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        await harness.wait_for_paused_run()
        await submit_result(harness, "nobody is there", is_error=True)
        run = await harness.wait_for_run()
        assert run.status == "completed"
        last = model.requests[1].turns[-1]
        assert isinstance(last, ResultsTurn)
        assert last.results[0].is_error
        assert "nobody is there" in last.results[0].text


@pytest.mark.spec("6.9")
async def test_a_paused_run_continues_when_its_call_expires(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "Nobody answered."])
    tools = [external_tool("ask", "external", pauses_run=True, visible=False, expires_after=0.05)]
    async with run_agents(database, agent("ada", model), tools=tools, session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("completed", 2)
        assert "expired" in result_texts(model.requests[1].turns[-1])[0]


@pytest.mark.spec("6.8")
async def test_a_cancelled_paused_run_does_not_continue(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), "Good morning."])
    async with run_agents(database, agent("ada", model), tools=[pausing_tool()], session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        paused_run = await harness.wait_for_paused_run()
        await harness.ledger.commit(runs.cancel_run, paused_run.id)
        await harness.send_message("Good morning!")
        await harness.wait_for_run(2)
        assert [run.status for run in await harness.runs()] == ["canceled", "completed"]
        assert await harness.open_calls() == []
        assert {event.status for event in await harness.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
@pytest.mark.spec("7.3")
async def test_the_result_survives_a_failed_model_request_after_the_pause(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("ask"), ModelError("unavailable", "gone for a moment"), "They said yes."])
    options: dict[str, Any] = {"tools": [pausing_tool()], "session_dir": tmp_path, "retry_delays": (10,)}
    async with run_agents(database, agent("ada", model), **options) as harness:
        await harness.send_message("Ask them.")
        await harness.wait_for_paused_run()
        await submit_result(harness, "yes")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert len(await harness.runs()) == 1
        last = model.requests[-1].turns[-1]
        assert isinstance(last, ResultsTurn)
        assert "yes" in last.results[0].text
        assert {event.status for event in await harness.inbox()} == {"processed"}


@pytest.mark.spec("6.8")
async def test_a_result_for_a_failed_run_comes_to_the_inbox(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([[call("ask", {"about": "tea"}), call("ask", {"about": "milk"})], "Milk came late."])
    async with run_agents(database, agent("ada", model), tools=[pausing_tool()], session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        paused_run = await harness.wait_for_paused_run()
        await harness.ledger.commit(runs.close_run, paused_run.id, "failed", error="an operator gave it up")
        await submit_result(harness, "milk", "milk")
        await harness.wait_for_run(2)
        last = model.requests[-1].turns[-1]
        assert isinstance(last, UserTurn)
        assert last.text.startswith("INBOX:\n[tool_result ")


@pytest.mark.spec("11.4")
@pytest.mark.spec("6.8")
async def test_compaction_keeps_the_turns_of_a_paused_run(database: Database, tmp_path: Path) -> None:
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
    async with run_agents(database, ada, tools=[pausing_tool()], session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        paused_run = await harness.wait_for_paused_run()
        for number in range(1, 5):
            await harness.send_message(f"Number {number}: {'talk ' * 20}")
            await harness.wait_for_run(number)
        await submit_result(harness, "yes")
        await harness.wait_for_run(5)
        assert {run.id: run.status for run in await harness.runs()}[paused_run.id] == "completed"
        request = model.requests[-1] if "CONTINUE" in str(model.requests[-1].turns) else model.requests[-2]
        assert "There was some talk." in str(request.turns[0])
        assert results_by_turn(request) == [["yes"]]


@pytest.mark.spec("6.8")
async def test_a_result_before_the_pause_continues_the_run_at_once(database: Database, tmp_path: Path) -> None:
    @tool(visible=False)
    async def slow() -> str:
        """Ends after the answer has come."""
        await harness.wait_for_open_call()
        await submit_result(harness, "yes")
        return "at last"

    model = ScriptedModel([[call("ask"), call("slow")], "They said yes.", "You are welcome."])
    async with run_agents(database, agent("ada", model), tools=[pausing_tool(), slow], session_dir=tmp_path) as harness:
        await harness.send_message("Ask them.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps, len(await harness.runs())) == ("completed", 2, 1)
        assert results_by_turn(model.requests[1]) == [["yes", "at last"]]
        await harness.send_message("Thank you.")
        await harness.wait_for_run(2)
        assert "tool_result" not in str(model.requests[2].turns[-1])  # It was given once.
        assert {event.status for event in await harness.inbox()} == {"processed"}


@pytest.mark.spec("11.6")
@pytest.mark.spec("6.8")
async def test_a_call_that_the_previous_process_stores_late_is_not_repeated(database: Database, tmp_path: Path) -> None:
    crashing_database = CrashingDatabase(database)
    in_flight, second_process_runs = asyncio.Event(), asyncio.Event()

    @tool(visible=False, annotations=Annotations(read_only=True))
    async def look() -> str:
        """Looks."""
        if not in_flight.is_set():
            in_flight.set()
            crashing_database.crash()
            await crashing_database.check_alive()
        await second_process_runs.wait()  # Until then `harness` is the first process's.
        # The first process was only slow: its write arrives now.
        call_id = (await harness.history())[1].stored_turn.call_ids[2]
        run_id = (await harness.runs())[0].id
        room = GatewayCallHost(
            harness.pending_calls, run_id=run_id, agent_entity_id=harness.agent, space_id=harness.space
        )
        context = ToolContext(host=room).bind(CallId(call_id), run_id=run_id, session_id="session")
        await room.wait_for_result(pausing_tool(), {}, context)
        return "looked"

    calls = [call("look"), call("enter_space", {"spaceId": "spc_room"}), call("ask")]
    first = agent("ada", ScriptedModel([calls]))
    async with run_agents(crashing_database, first, tools=[look, pausing_tool()], session_dir=tmp_path) as harness:
        await harness.send_message("Look, and ask.")
        await in_flight.wait()
    await Ledger(database).write(sessions.release_all_leases, "")
    model = ScriptedModel(["They said yes."])
    async with run_agents(database, agent("ada", model), tools=[look, pausing_tool()], session_dir=tmp_path) as harness:
        second_process_runs.set()
        await harness.wait_for_paused_run()
        await submit_result(harness, "yes")
        run = await harness.wait_for_run()
        assert (run.status, len(await harness.runs())) == ("completed", 1)
        assert results_by_turn(model.requests[0])[0][0] == "looked"
        assert results_by_turn(model.requests[0])[0][2] == "yes"
        assert [record.tool_name for record in await harness.calls(run.id)].count("ask") == 1

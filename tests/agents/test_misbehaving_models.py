"""Faulty models and tools, and agents, spaces and runs that are deleted: no run hangs, and no event is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, run_agents
from tests.agents.agent_harness import private_agent as agent
from tests.agents.chaos.job_agent import external_tool
from toolspace import tool
from toolspace.agents import live_output
from toolspace.config.agent_settings import AgentLimits, AgentLoopSettings
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    ResultsTurn,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.server.routes.entities_and_spaces import (
    delete_entity_transaction,
    remove_member_transaction,
)
from toolspace.spaces import runs
from toolspace.spaces.space_deletion import delete_space
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, inbox, messages

ENTER = call("enter_space", {"spaceId": "spc_room"})


@tool(visible=False)
async def double(n: int) -> int:
    """Doubles; the smaller, the later."""
    await asyncio.sleep((50 - n) / 5_000)
    return 2 * n


@tool(visible=False)
async def shout(length: int) -> str:
    """Says much."""
    return "".join(f"line {number}\n" for number in range(length))


def last_results(request: ModelRequest) -> list[str]:
    """The results that the model was given last."""
    turn = next(turn for turn in reversed(request.turns) if isinstance(turn, ResultsTurn))
    return [result.text for result in turn.results]


# What models say


@pytest.mark.spec("11.3")
async def test_results_of_fifty_calls_come_in_the_order_of_the_calls(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([[call("double", {"n": n}) for n in range(50)], "Done."])
    ada = agent("ada", model, loop=AgentLoopSettings(max_tool_calls_per_turn=50))
    async with run_agents(database, ada, tools=[double], session_dir=tmp_path) as harness:
        await harness.send_message("Double them.")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert last_results(model.requests[1]) == [str(2 * n) for n in range(50)]
        assert Counter(record.status for record in await harness.calls(run.id)) == {"completed": 50}


@pytest.mark.spec("11.3")
async def test_calls_beyond_the_limit_of_a_turn_fail_and_the_others_run(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([[call("double", {"n": n}) for n in range(6)], "Done."])
    ada = agent("ada", model, loop=AgentLoopSettings(max_tool_calls_per_turn=4))
    async with run_agents(database, ada, tools=[double], session_dir=tmp_path) as harness:
        await harness.send_message("Double them.")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        results = last_results(model.requests[1])
        assert sum(text.isdigit() for text in results) == 4
        assert len(results) == 6
        assert await harness.open_calls() == []


@pytest.mark.spec("11.2")
async def test_malformed_calls_fail_and_the_run_continues(database: Database, tmp_path: Path) -> None:
    nonsense = [
        call("double", '{"n": 4'),
        call("double", "[1, 2]"),
        call("double", '"four"'),
        call("double", "null"),
        call("double", {"n": "many"}),
        call("double", ""),
        call("duoble", {"n": 4}),
        call("", {}),
        call("double", '{"n": 4, "n": 5}'),
        call("double", '{"n": 1e400}'),
        call("double", "[" * 100_000),
        call("double", {"n": 10**400}),
    ]
    model = ScriptedModel([nonsense, "Well."])
    ada = agent("ada", model, loop=AgentLoopSettings(max_tool_calls_per_turn=50))
    async with run_agents(database, ada, tools=[double], session_dir=tmp_path) as harness:
        await harness.send_message("Double them.")
        run = await harness.wait_for_run()
        assert (run.status, run.error) == ("completed", None)
        results = last_results(model.requests[1])
        assert len(results) == len(nonsense)
        assert "double" in results[6]  # The error suggests a name.
        assert all(record.status in ("failed", "completed") for record in await harness.calls(run.id))


@pytest.mark.spec("11.3")
@pytest.mark.parametrize("ids", [("", "", ""), ("same", "same", "same"), ("x" * 10_000, "\0", "\ud800")])
async def test_duplicate_and_empty_model_call_ids_are_handled(
    database: Database, tmp_path: Path, ids: tuple[str, ...]
) -> None:
    calls = tuple(ModelCall(id, "double", f'{{"n": {n}}}') for n, id in enumerate(ids, 1))
    model = ScriptedModel([lambda _: ModelTurn(calls=calls), "Done."])
    async with run_agents(database, agent("ada", model), tools=[double], session_dir=tmp_path) as harness:
        await harness.send_message("Double them.")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert last_results(model.requests[1]) == ["2", "4", "6"]
        assert len({record.call_id for record in await harness.calls(run.id)}) == 3


@pytest.mark.spec("11.2")
async def test_a_model_that_never_stops_ends_at_max_steps(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel(lambda _: call("double", {"n": 1}))
    ada = agent("ada", model, loop=AgentLoopSettings(max_steps=5))
    async with run_agents(database, ada, tools=[double], session_dir=tmp_path) as harness:
        await harness.send_message("Go on.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("failed", 5)
        assert "maxSteps" in (run.error or "")
        assert "last step" in str(model.requests[-1].turns[-1])
        assert [event.status for event in await harness.inbox()] == ["processed"]  # It was dealt with, if not well.


@pytest.mark.spec("11.2")
async def test_an_empty_turn_ends_the_run(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel.loop([ModelTurn()])
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        assert (await harness.wait_for_run()).status == "completed"
        await harness.send_message("Hello??")
        assert (await harness.wait_for_run(2)).status == "completed"


@pytest.mark.spec("4.20")
async def test_a_huge_result_is_read_back_in_a_later_cycle(database: Database, tmp_path: Path) -> None:
    def reads_on(request: ModelRequest) -> ModelCall:
        result_text = next(turn for turn in request.turns if isinstance(turn, ResultsTurn)).results[0].text
        handle = json.loads(result_text)["tool_output"]["handle"]
        return call("agent__read_output", {"handle": handle, "pattern": "line 123456$"})

    model = ScriptedModel([call("shout", {"length": 200_000}), "That was much.", reads_on, "Found it."])
    async with run_agents(database, agent("ada", model), tools=[shout], session_dir=tmp_path) as harness:
        await harness.send_message("Shout.")
        first = await harness.wait_for_run()
        assert first.status == "completed"
        assert len(last_results(model.requests[1])[0]) < 100_000
    async with run_agents(database, agent("ada", model), tools=[shout], session_dir=tmp_path) as harness:
        await harness.send_message("What was line 123456?")
        await harness.wait_for_run(2)
        assert "line 123456" in last_results(model.requests[3])[0]


@pytest.mark.spec("11.4")
async def test_huge_arguments_are_rejected_and_not_stored(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("double", {"n": 1, "more": "x" * 3_000_000}), "Sorry.", "Again."])
    async with run_agents(database, agent("ada", model), tools=[double], session_dir=tmp_path) as harness:
        await harness.send_message("Double it.")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        await harness.send_message("And again.")
        await harness.wait_for_run(2)
        model_turn = next(turn for turn in model.requests[2].turns if isinstance(turn, ModelTurn))
        assert len(model_turn.calls[0].arguments) < 100_000  # Else no model would take the conversation any more.


class SlowWriterModel(Model):
    """Streams its turns, and waits for the test before it ends the second one."""

    name = "writing:slowly"

    def __init__(self, turn: ModelTurn, *, before: Callable[[], Awaitable[None]]) -> None:
        self._turns = [ModelTurn(calls=(ModelCall("a", ENTER.name, ENTER.arguments),)), turn]
        self._before = before
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        self.requests.append(request)
        at = len(self.requests) - 1
        turn = self._turns[at] if at < 2 else ModelTurn(text="Done.")
        for index, model_call in enumerate(turn.calls):
            if listen is not None:
                listen(CallStarted(index, model_call.id, model_call.name))
                listen(CallDelta(index, model_call.arguments))
        if at == 1:
            await self._before()
        return turn


async def wait_for_streamed_message(harness: AgentHarness) -> str:
    """Waits until a message is streamed in the space. Returns its id."""
    while True:
        latest, _ = await harness.ledger.read(messages.list_latest, harness.space, limit=10)
        for message in latest:
            if message.status == "running":
                return message.id
        await asyncio.sleep(0.005)


@pytest.mark.spec("9.1")
@pytest.mark.parametrize(
    "arguments", ['{"text": "Hello", "more": 1}', '{"text": "Hello', '{"text": "Hello", "text": 5}']
)
async def test_a_streamed_message_that_may_not_be_sent_ends_with_an_error(
    database: Database, tmp_path: Path, arguments: str
) -> None:
    async def wait_for_part() -> None:
        await wait_for_streamed_message(harness)

    model = SlowWriterModel(ModelTurn(calls=(ModelCall("b", "send_message", arguments),)), before=wait_for_part)
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Say hello.")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        latest, _ = await harness.ledger.read(messages.list_latest, harness.space, limit=10)
        assert [message.status for message in latest] == ["complete", "error"]


async def test_a_streamed_call_index_cannot_exhaust_memory(database: Database, tmp_path: Path) -> None:
    class Counting(Model):
        name = "counting:far"

        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            if listen is not None:
                listen(CallDelta(3, "lost"))
                listen(CallStarted(10**9, "x", "double"))
                listen(CallDelta(10**9, "{}"))
                listen(CallDelta(-1, "{}"))
            return ModelTurn(text="Done.")

    async with run_agents(database, agent("ada", Counting()), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        assert (await harness.wait_for_run()).status == "completed"


# What models do instead of saying something


@pytest.mark.spec("7.3")
@pytest.mark.parametrize(
    "trouble",
    [ModelError("unavailable", "not now"), RuntimeError("broken"), asyncio.CancelledError(), TimeoutError(), 17, None],
    ids=["unavailable", "broken", "canceled", "timeout", "a number", "nothing"],
)
async def test_a_failed_cycle_is_retried_with_its_events(
    database: Database, tmp_path: Path, trouble: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_FIRST_DELAY", 1)

    def fails(request: ModelRequest) -> Any:
        if isinstance(trouble, BaseException):
            raise trouble
        return trouble

    model = ScriptedModel([fails, "Hello."])
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        await harness.wait_for_run(2)
        assert [run.status for run in await harness.runs()] == ["failed", "completed"]
        assert [event.status for event in await harness.inbox()] == ["processed"]
        turns = model.requests[1].turns
        assert [type(turn) for turn in turns] == [UserTurn]  # Told once: nothing came of it the first time.


@pytest.mark.spec("7.3")
async def test_an_event_fails_after_the_maximum_of_attempts(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_FIRST_DELAY", 1)
    model = ScriptedModel(lambda _: ModelError("unavailable", "no model today"))
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        await harness.wait_for_run(inbox.MAX_ATTEMPTS)
        [event] = await harness.inbox()
        assert (event.status, event.attempts) == ("failed", inbox.MAX_ATTEMPTS)
        assert "no model today" in (event.error or "")
        assert len(await harness.runs()) == inbox.MAX_ATTEMPTS
        assert await harness.history() == []


@pytest.mark.spec("11.1")
async def test_a_hanging_model_ends_at_the_timeout_of_the_run(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_FIRST_DELAY", 1)

    async def hangs(request: ModelRequest) -> str:
        await asyncio.get_running_loop().create_future()
        return "never"

    model = ScriptedModel([hangs, "Hello."])
    ada = agent("ada", model, limits=AgentLimits(timeout=0.5))
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        await harness.wait_for_run(2)
        first, second = await harness.runs()
        assert (first.status, second.status) == ("failed", "completed")
        assert "limits.timeout" in (first.error or "")


@pytest.mark.spec("11.4")
async def test_a_conversation_that_is_too_long_for_the_model_is_shortened(database: Database, tmp_path: Path) -> None:
    def minds_its_length(request: ModelRequest) -> Any:
        if len(str(request.turns)) > 20_000:
            return ModelError("too_long", "at most 20,000")
        return "Fine."

    async with run_agents(database, agent("ada", ScriptedModel(minds_its_length)), session_dir=tmp_path) as harness:
        for number in range(1, 8):
            await harness.send_message(f"{number}: {'blah ' * 1_000}")
            assert (await harness.wait_for_run(number)).status == "completed"
        await harness.send_message("x" * 50_000)
        assert (await harness.wait_for_run(8)).status == "completed"  # Some of it is better than nothing.


# What tools do


@pytest.mark.spec("11.3")
@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemError("x"), RecursionError(), MemoryError()])
async def test_a_tool_that_raises_anything_does_not_end_the_run(
    database: Database, tmp_path: Path, error: BaseException
) -> None:
    @tool(visible=False)
    async def breaks() -> str:
        """Breaks."""
        raise error

    model = ScriptedModel([[call("breaks"), call("double", {"n": 2})], "A pity."])
    async with run_agents(database, agent("ada", model), tools=[breaks, double], session_dir=tmp_path) as harness:
        await harness.send_message("Try.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("completed", 2)
        assert last_results(model.requests[1])[1] == "4"
        assert await harness.open_calls() == []
        assert not any(record.status == "running" for record in await harness.calls(run.id))


# What goes away meanwhile


class Checkpoint:
    """A point of a run at which the run waits for the test."""

    def __init__(self) -> None:
        self.reached_event = asyncio.Event()
        self.forever = asyncio.Event()

    async def wait_here(self) -> None:
        self.reached_event.set()
        await self.forever.wait()


async def _model(stage: Checkpoint) -> tuple[Model, list[Any]]:
    async def thinks(request: ModelRequest) -> str:
        await stage.wait_here()
        return "never"

    return ScriptedModel([thinks, "Next."]), []


async def _second_request(stage: Checkpoint) -> tuple[Model, list[Any]]:
    async def thinks(request: ModelRequest) -> str:
        await stage.wait_here()
        return "never"

    return ScriptedModel([call("double", {"n": 1}), thinks, "Next."]), [double]


async def _tool(stage: Checkpoint) -> tuple[Model, list[Any]]:
    @tool(visible=False)
    async def slow() -> str:
        """Is slow."""
        await stage.wait_here()
        return "never"

    # The model may get one more request: the end of the call is noticed before the end of the run.
    return ScriptedModel([[call("slow"), call("double", {"n": 1})], "Next.", "Next."]), [slow, double]


async def _waiting_model(stage: Checkpoint) -> tuple[Model, list[Any]]:
    async def enters(request: ModelRequest) -> list[ModelCall]:
        stage.reached_event.set()
        return [ENTER, call("ask")]

    # The model may get one more request: the end of the call is noticed before the end of the run.
    return ScriptedModel([enters, "Next.", "Next."]), [external_tool("ask", "space", visible=True, timeout=60.0)]


STAGES = [_model, _second_request, _tool, _waiting_model]


@pytest.mark.spec("7.1")
@pytest.mark.parametrize("create_stage", STAGES)
async def test_a_cancelled_run_ends_and_the_agent_continues(
    database: Database, tmp_path: Path, create_stage: Callable[[Checkpoint], Awaitable[tuple[Model, list[Any]]]]
) -> None:
    stage = Checkpoint()
    model, tools = await create_stage(stage)
    async with run_agents(database, agent("ada", model), tools=tools, session_dir=tmp_path) as harness:
        await harness.send_message("Begin.")
        await stage.reached_event.wait()
        if create_stage is _waiting_model:
            await harness.wait_for_open_call()
        [run] = await harness.runs()
        await harness.ledger.commit(runs.cancel_run, run.id)
        await harness.send_message("Next!")
        await harness.wait_for_run(2)
        assert [record.status for record in await harness.runs()] == ["canceled", "completed"]
        assert {event.status for event in await harness.inbox()} == {"processed"}
        assert not any(record.status in ("running", "waiting", "pending") for record in await harness.calls(run.id))


@pytest.mark.spec("7.1")
@pytest.mark.parametrize("create_stage", STAGES)
async def test_deleting_an_agent_during_its_run_does_not_affect_others(
    database: Database, tmp_path: Path, create_stage: Callable[[Checkpoint], Awaitable[tuple[Model, list[Any]]]]
) -> None:
    stage = Checkpoint()
    model, tools = await create_stage(stage)
    bob = agent("bob", ScriptedModel.loop(["Hm."]))
    async with run_agents(database, agent("ada", model), bob, tools=tools, session_dir=tmp_path) as harness:
        await harness.send_message("Begin.")
        await stage.reached_event.wait()
        if create_stage is _waiting_model:
            await harness.wait_for_open_call()
        await harness.ledger.commit(delete_entity_transaction, harness.agent)
        await harness.wait_until_idle()
        assert await harness.runs() == []
        assert await harness.inbox() == []
        assert await harness.open_calls() == []
        await harness.send_message("Still there?")
        assert (await harness.wait_for_run(2, harness.agents[1])).status == "completed"


@pytest.mark.spec("7.2")
@pytest.mark.parametrize("how", ["the space is removed", "the agent leaves"])
async def test_deleting_a_space_during_a_message_does_not_break_the_run(
    database: Database, tmp_path: Path, how: str
) -> None:
    async def goes() -> None:
        await wait_for_streamed_message(harness)
        if how == "the agent leaves":
            await harness.ledger.commit(remove_member_transaction, harness.space, harness.agent)
        else:
            await harness.ledger.commit(delete_space, harness.space)

    model = SlowWriterModel(ModelTurn(calls=(call("send_message", {"text": "Hello"}, id="b"),)), before=goes)
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Say hello.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("completed", 3)
        assert any(
            word in last_results(model.requests[2])[0] for word in ("no space", "not a member", "not in a space")
        )
        latest, _ = await harness.ledger.read(messages.list_latest, harness.space, limit=10)
        assert all(message.status != "running" for message in latest)


@pytest.mark.spec("7.2")
async def test_deleting_a_space_before_streaming_does_not_break_the_run(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_output, "FLUSH_SECONDS", 3600)

    async def goes() -> None:
        await harness.ledger.commit(delete_space, harness.space)

    model = SlowWriterModel(ModelTurn(calls=(call("send_message", {"text": "Hello"}, id="b"),)), before=goes)
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Say hello.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("completed", 3)
        assert await harness.ledger.read(entities_and_spaces.find_space, harness.space) is None

"""Models and tools that misbehave, and agents, spaces and runs that go away: no run hangs, and no event is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import Village, agent, village
from tests.agents.chaos.job_agent import elsewhere
from toolspace import tool
from toolspace.agents import live_output
from toolspace.config.agent_settings import AgentLimits, AgentLoopSettings
from toolspace.core.model import (
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
from toolspace.spaces import deletion, runs
from toolspace.storage.database import Database
from toolspace.storage.queries import entities, inbox, messages

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


def answers(request: ModelRequest) -> list[str]:
    """The results that the model was given last."""
    turn = next(turn for turn in reversed(request.turns) if isinstance(turn, ResultsTurn))
    return [one.text for one in turn.results]


# What models say


@pytest.mark.spec("11.3")
async def test_fifty_calls_at_once_are_answered_in_the_order_asked(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([[call("double", {"n": n}) for n in range(50)], "Done."])
    ada = agent("ada", model, loop=AgentLoopSettings(max_tool_calls_per_turn=50))
    async with village(database, ada, tools=[double], folder=tmp_path, owns=False) as town:
        await town.say("Double them.")
        run = await town.run_ended()
        assert run.status == "completed"
        assert answers(model.requests[1]) == [str(2 * n) for n in range(50)]
        assert Counter(one.status for one in await town.calls(run.id)) == {"completed": 50}


@pytest.mark.spec("11.3")
async def test_calls_beyond_what_a_turn_may_have_are_refused_and_the_others_made(
    database: Database, tmp_path: Path
) -> None:
    model = ScriptedModel([[call("double", {"n": n}) for n in range(6)], "Done."])
    ada = agent("ada", model, loop=AgentLoopSettings(max_tool_calls_per_turn=4))
    async with village(database, ada, tools=[double], folder=tmp_path, owns=False) as town:
        await town.say("Double them.")
        run = await town.run_ended()
        assert run.status == "completed"
        given = answers(model.requests[1])
        assert sum(text.isdigit() for text in given) == 4
        assert len(given) == 6
        assert await town.open_calls() == []


@pytest.mark.spec("11.2")
async def test_calls_that_make_no_sense_are_answered_and_the_run_goes_on(database: Database, tmp_path: Path) -> None:
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
    async with village(database, ada, tools=[double], folder=tmp_path, owns=False) as town:
        await town.say("Double them.")
        run = await town.run_ended()
        assert (run.status, run.error) == ("completed", None)
        given = answers(model.requests[1])
        assert len(given) == len(nonsense)
        assert "double" in given[6]  # What may have been meant.
        assert all(one.status in ("failed", "completed") for one in await town.calls(run.id))


@pytest.mark.spec("11.3")
@pytest.mark.parametrize("ids", [("", "", ""), ("same", "same", "same"), ("x" * 10_000, "\0", "\ud800")])
async def test_calls_under_any_ids_are_told_apart(database: Database, tmp_path: Path, ids: tuple[str, ...]) -> None:
    calls = tuple(ModelCall(id, "double", f'{{"n": {n}}}') for n, id in enumerate(ids, 1))
    model = ScriptedModel([lambda _: ModelTurn(calls=calls), "Done."])
    async with village(database, agent("ada", model), tools=[double], folder=tmp_path, owns=False) as town:
        await town.say("Double them.")
        run = await town.run_ended()
        assert run.status == "completed"
        assert answers(model.requests[1]) == ["2", "4", "6"]
        assert len({one.call_id for one in await town.calls(run.id)}) == 3


@pytest.mark.spec("11.2")
async def test_a_model_that_never_stops_is_stopped(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel(lambda _: call("double", {"n": 1}))
    ada = agent("ada", model, loop=AgentLoopSettings(max_steps=5))
    async with village(database, ada, tools=[double], folder=tmp_path, owns=False) as town:
        await town.say("Go on.")
        run = await town.run_ended()
        assert (run.status, run.steps) == ("failed", 5)
        assert "maxSteps" in (run.error or "")
        assert "last step" in str(model.requests[-1].turns[-1])
        assert [event.status for event in await town.inbox()] == ["processed"]  # It was dealt with, if not well.


@pytest.mark.spec("11.2")
async def test_a_model_that_says_nothing_at_all_is_done(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel.loop([ModelTurn()])
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        assert (await town.run_ended()).status == "completed"
        await town.say("Hello??")
        assert (await town.run_ended(2)).status == "completed"


@pytest.mark.spec("4.20")
async def test_a_huge_result_is_read_back_in_a_later_cycle(database: Database, tmp_path: Path) -> None:
    def reads_on(request: ModelRequest) -> ModelCall:
        told = next(turn for turn in request.turns if isinstance(turn, ResultsTurn)).results[0].text
        handle = json.loads(told)["tool_output"]["handle"]
        return call("agent__read_output", {"handle": handle, "pattern": "line 123456$"})

    model = ScriptedModel([call("shout", {"length": 200_000}), "That was much.", reads_on, "Found it."])
    async with village(database, agent("ada", model), tools=[shout], folder=tmp_path, owns=False) as town:
        await town.say("Shout.")
        first = await town.run_ended()
        assert first.status == "completed"
        assert len(answers(model.requests[1])[0]) < 100_000
    async with village(database, agent("ada", model), tools=[shout], folder=tmp_path, owns=False) as town:
        await town.say("What was line 123456?")
        await town.run_ended(2)
        assert "line 123456" in answers(model.requests[3])[0]


@pytest.mark.spec("11.4")
async def test_huge_arguments_are_refused_and_not_kept(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([call("double", {"n": 1, "more": "x" * 3_000_000}), "Sorry.", "Again."])
    async with village(database, agent("ada", model), tools=[double], folder=tmp_path, owns=False) as town:
        await town.say("Double it.")
        run = await town.run_ended()
        assert run.status == "completed"
        await town.say("And again.")
        await town.run_ended(2)
        kept = next(turn for turn in model.requests[2].turns if isinstance(turn, ModelTurn))
        assert len(kept.calls[0].arguments) < 100_000  # Else no model would take the conversation any more.


class Writing(Model):
    """Says one thing, piece by piece, and then waits for a sign before it goes on."""

    name = "writing:slowly"

    def __init__(self, turn: ModelTurn, *, before: Callable[[], Awaitable[None]]) -> None:
        self._turns = [ModelTurn(calls=(ModelCall("a", ENTER.name, ENTER.arguments),)), turn]
        self._before = before
        self.requests: list[ModelRequest] = []

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        self.requests.append(request)
        at = len(self.requests) - 1
        turn = self._turns[at] if at < 2 else ModelTurn(text="Done.")
        for index, one in enumerate(turn.calls):
            if listen is not None:
                listen(CallStarted(index, one.id, one.name))
                listen(CallDelta(index, one.arguments))
        if at == 1:
            await self._before()
        return turn


async def being_said(town: Village) -> str:
    """Waits until the space sees that something is being said."""
    while True:
        found, _ = await town.ledger.read(messages.list_latest, town.space, limit=10)
        for one in found:
            if one.status == "running":
                return one.id
        await asyncio.sleep(0.005)


@pytest.mark.spec("9.1")
@pytest.mark.parametrize(
    "arguments", ['{"text": "Hello", "more": 1}', '{"text": "Hello', '{"text": "Hello", "text": 5}']
)
async def test_what_was_seen_of_a_message_ends_where_it_may_not_be_said(
    database: Database, tmp_path: Path, arguments: str
) -> None:
    async def seen() -> None:
        await being_said(town)

    model = Writing(ModelTurn(calls=(ModelCall("b", "send_message", arguments),)), before=seen)
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Say hello.")
        run = await town.run_ended()
        assert run.status == "completed"
        found, _ = await town.ledger.read(messages.list_latest, town.space, limit=10)
        assert [one.status for one in found] == ["complete", "error"]


async def test_a_call_of_any_number_is_not_made_room_for(database: Database, tmp_path: Path) -> None:
    class Counting(Model):
        name = "counting:far"

        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            if listen is not None:
                listen(CallDelta(3, "lost"))
                listen(CallStarted(10**9, "x", "double"))
                listen(CallDelta(10**9, "{}"))
                listen(CallDelta(-1, "{}"))
            return ModelTurn(text="Done.")

    async with village(database, agent("ada", Counting()), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        assert (await town.run_ended()).status == "completed"


# What models do instead of saying something


@pytest.mark.spec("7.3")
@pytest.mark.parametrize(
    "trouble",
    [ModelError("unavailable", "not now"), RuntimeError("broken"), asyncio.CancelledError(), TimeoutError(), 17, None],
    ids=["unavailable", "broken", "canceled", "timeout", "a number", "nothing"],
)
async def test_a_cycle_that_fails_is_tried_again_and_its_event_is_not_lost(
    database: Database, tmp_path: Path, trouble: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_FIRST_DELAY", 1)

    def fails(request: ModelRequest) -> Any:
        if isinstance(trouble, BaseException):
            raise trouble
        return trouble

    model = ScriptedModel([fails, "Hello."])
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        await town.run_ended(2)
        assert [run.status for run in await town.runs()] == ["failed", "completed"]
        assert [event.status for event in await town.inbox()] == ["processed"]
        turns = model.requests[1].turns
        assert [type(turn) for turn in turns] == [UserTurn]  # Told once: nothing came of it the first time.


@pytest.mark.spec("7.3")
async def test_an_event_that_no_cycle_can_deal_with_is_parked_in_the_end(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_FIRST_DELAY", 1)
    model = ScriptedModel(lambda _: ModelError("unavailable", "no model today"))
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        await town.run_ended(inbox.MAX_ATTEMPTS)
        [event] = await town.inbox()
        assert (event.status, event.attempts) == ("failed", inbox.MAX_ATTEMPTS)
        assert "no model today" in (event.error or "")
        assert len(await town.runs()) == inbox.MAX_ATTEMPTS
        assert await town.history() == []


@pytest.mark.spec("11.1")
async def test_a_model_that_hangs_is_not_waited_for_longer_than_the_run_may_take(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_FIRST_DELAY", 1)

    async def hangs(request: ModelRequest) -> str:
        await asyncio.get_running_loop().create_future()
        return "never"

    model = ScriptedModel([hangs, "Hello."])
    ada = agent("ada", model, limits=AgentLimits(timeout=0.5))
    async with village(database, ada, folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        await town.run_ended(2)
        first, second = await town.runs()
        assert (first.status, second.status) == ("failed", "completed")
        assert "limits.timeout" in (first.error or "")


@pytest.mark.spec("11.4")
async def test_a_conversation_that_is_too_long_for_the_model_is_shortened(database: Database, tmp_path: Path) -> None:
    def minds_its_length(request: ModelRequest) -> Any:
        if len(str(request.turns)) > 20_000:
            return ModelError("too_long", "at most 20,000")
        return "Fine."

    async with village(database, agent("ada", ScriptedModel(minds_its_length)), folder=tmp_path, owns=False) as town:
        for number in range(1, 8):
            await town.say(f"{number}: {'blah ' * 1_000}")
            assert (await town.run_ended(number)).status == "completed"
        await town.say("x" * 50_000)
        assert (await town.run_ended(8)).status == "completed"  # Some of it is better than nothing.


# What tools do


@pytest.mark.spec("11.3")
@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemError("x"), RecursionError(), MemoryError()])
async def test_a_tool_that_breaks_in_any_way_leaves_the_run_alone(
    database: Database, tmp_path: Path, error: BaseException
) -> None:
    @tool(visible=False)
    async def breaks() -> str:
        """Breaks."""
        raise error

    model = ScriptedModel([[call("breaks"), call("double", {"n": 2})], "A pity."])
    async with village(database, agent("ada", model), tools=[breaks, double], folder=tmp_path, owns=False) as town:
        await town.say("Try.")
        run = await town.run_ended()
        assert (run.status, run.steps) == ("completed", 2)
        assert answers(model.requests[1])[1] == "4"
        assert await town.open_calls() == []
        assert not any(one.status == "running" for one in await town.calls(run.id))


# What goes away meanwhile


class Stage:
    """Something that takes until it is told to go on, and the run that it happens in."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.forever = asyncio.Event()

    async def here(self) -> None:
        self.reached.set()
        await self.forever.wait()


async def _model(stage: Stage) -> tuple[Model, list[Any]]:
    async def thinks(request: ModelRequest) -> str:
        await stage.here()
        return "never"

    return ScriptedModel([thinks, "Next."]), []


async def _second_request(stage: Stage) -> tuple[Model, list[Any]]:
    async def thinks(request: ModelRequest) -> str:
        await stage.here()
        return "never"

    return ScriptedModel([call("double", {"n": 1}), thinks, "Next."]), [double]


async def _tool(stage: Stage) -> tuple[Model, list[Any]]:
    @tool(visible=False)
    async def slow() -> str:
        """Is slow."""
        await stage.here()
        return "never"

    return ScriptedModel([[call("slow"), call("double", {"n": 1})], "Next."]), [slow, double]


async def _waiting(stage: Stage) -> tuple[Model, list[Any]]:
    async def enters(request: ModelRequest) -> list[ModelCall]:
        stage.reached.set()
        return [ENTER, call("ask")]

    # It may be asked once more: that the call is over is heard before that the run is.
    return ScriptedModel([enters, "Next.", "Next."]), [elsewhere("ask", "space", visible=True, timeout=60.0)]


STAGES = [_model, _second_request, _tool, _waiting]


@pytest.mark.spec("7.1")
@pytest.mark.parametrize("stage_of", STAGES)
async def test_a_run_that_is_canceled_ends_there_and_the_agent_goes_on(
    database: Database, tmp_path: Path, stage_of: Callable[[Stage], Awaitable[tuple[Model, list[Any]]]]
) -> None:
    stage = Stage()
    model, tools = await stage_of(stage)
    async with village(database, agent("ada", model), tools=tools, folder=tmp_path, owns=False) as town:
        await town.say("Begin.")
        await stage.reached.wait()
        if stage_of is _waiting:
            await town.until_asked()
        [run] = await town.runs()
        await town.ledger.commit(runs.cancel_run, run.id)
        await town.say("Next!")
        await town.run_ended(2)
        assert [one.status for one in await town.runs()] == ["canceled", "completed"]
        assert {event.status for event in await town.inbox()} == {"processed"}
        assert not any(one.status in ("running", "waiting", "pending") for one in await town.calls(run.id))


@pytest.mark.spec("7.1")
@pytest.mark.parametrize("stage_of", STAGES)
async def test_an_agent_that_is_removed_while_it_thinks_is_gone_and_others_go_on(
    database: Database, tmp_path: Path, stage_of: Callable[[Stage], Awaitable[tuple[Model, list[Any]]]]
) -> None:
    stage = Stage()
    model, tools = await stage_of(stage)
    bob = agent("bob", ScriptedModel.loop(["Hm."]))
    async with village(database, agent("ada", model), bob, tools=tools, folder=tmp_path, owns=False) as town:
        await town.say("Begin.")
        await stage.reached.wait()
        if stage_of is _waiting:
            await town.until_asked()
        await town.ledger.commit(deletion.delete_entity, town.agent)
        await town.quiet()
        assert await town.runs() == []
        assert await town.inbox() == []
        assert await town.open_calls() == []
        await town.say("Still there?")
        assert (await town.run_ended(2, town.agents[1])).status == "completed"


@pytest.mark.spec("7.2")
@pytest.mark.parametrize("how", ["the space is removed", "the agent leaves"])
async def test_a_space_that_goes_while_something_is_said_in_it(database: Database, tmp_path: Path, how: str) -> None:
    async def goes() -> None:
        await being_said(town)
        if how == "the agent leaves":
            await town.ledger.commit(deletion.remove_member, town.space, town.agent)
        else:
            await town.ledger.commit(deletion.delete_space, town.space)

    model = Writing(ModelTurn(calls=(call("send_message", {"text": "Hello"}, id="b"),)), before=goes)
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Say hello.")
        run = await town.run_ended()
        assert (run.status, run.steps) == ("completed", 3)
        assert any(word in answers(model.requests[2])[0] for word in ("no space", "not a member", "not in a space"))
        found, _ = await town.ledger.read(messages.list_latest, town.space, limit=10)
        assert all(one.status != "running" for one in found)


@pytest.mark.spec("7.2")
async def test_a_space_that_went_before_anything_was_shown_there(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_output, "FLUSH_SECONDS", 3600)

    async def goes() -> None:
        await town.ledger.commit(deletion.delete_space, town.space)

    model = Writing(ModelTurn(calls=(call("send_message", {"text": "Hello"}, id="b"),)), before=goes)
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Say hello.")
        run = await town.run_ended()
        assert (run.status, run.steps) == ("completed", 3)
        assert await town.ledger.read(entities.find_space, town.space) is None

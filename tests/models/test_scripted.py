"""The scripted model."""

from __future__ import annotations

import asyncio

import pytest

from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    ModelCall,
    ModelRequest,
    ModelStreamPart,
    ModelTurn,
    TextDelta,
    Turn,
    Usage,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.testing import ScriptedModel, call

HELLO = ModelRequest(system="", turns=[UserTurn("Hello")])


@pytest.mark.spec("11.7")
async def test_a_script_is_played_turn_by_turn() -> None:
    full_turn = ModelTurn(text="Hm", calls=(ModelCall("x", "f", "{}"),), usage=Usage(input_tokens=7))
    model = ScriptedModel(["Hello", call("add", {"a": 1}), [call("f"), call("g", "{bad", id="mine")], full_turn])
    first, second, third, fourth = [await model.respond(HELLO) for _ in range(4)]
    assert (first.text, first.calls, first.finish) == ("Hello", (), "stop")
    assert (second.calls, second.finish) == ((ModelCall("call_2_1", "add", '{"a":1}'),), "tools")
    assert third.calls == (ModelCall("call_3_1", "f", "{}"), ModelCall("mine", "g", "{bad"))
    assert (fourth.text, fourth.usage.input_tokens) == ("Hm", 7)
    assert first.usage.requests == 1
    assert model.remaining_steps == 0


async def test_a_step_may_be_a_function_of_the_request_or_an_error() -> None:
    async def later(request: ModelRequest) -> ModelCall:
        await asyncio.sleep(0)
        return call("f")

    model = ScriptedModel([lambda request: f"{len(request.turns)} turn", later, ValueError("no"), KeyError])
    assert (await model.respond(HELLO)).text == "1 turn"
    assert (await model.respond(HELLO)).calls[0].name == "f"
    with pytest.raises(ValueError, match="no"):
        await model.respond(HELLO)
    with pytest.raises(KeyError):
        await model.respond(HELLO)


async def test_a_function_instead_of_a_script_answers_every_request() -> None:
    model = ScriptedModel(lambda request: f"You said: {request.turns[-1].text}")  # pyright: ignore
    for _ in range(3):
        assert (await model.respond(HELLO)).text == "You said: Hello"
    assert model.remaining_steps is None


async def test_a_loop_starts_again_at_its_end() -> None:
    model = ScriptedModel.loop([call("f"), "done"])
    turns = [await model.respond(HELLO) for _ in range(4)]
    assert [turn.text for turn in turns] == ["", "done", "", "done"]


async def test_a_script_that_ran_out_reports_its_length() -> None:
    model = ScriptedModel(["a", "b"])
    await model.respond(HELLO)
    await model.respond(HELLO)
    with pytest.raises(ModelError, match="has 2 turns, and this is request 3") as error_info:
        await model.respond(HELLO)
    assert error_info.value.kind == "invalid"


async def test_an_invalid_step_is_refused() -> None:
    with pytest.raises(ModelError, match="turn 1 of the script is int"):
        await ScriptedModel([3]).respond(HELLO)  # pyright: ignore


async def test_turns_are_streamed_in_pieces() -> None:
    parts: list[ModelStreamPart] = []
    model = ScriptedModel([ModelTurn(text="It is  3.\n", calls=(call("say", {"text": "a long text"}),))])
    turn = await model.respond(HELLO, parts.append)
    assert [part.text for part in parts if isinstance(part, TextDelta)] == ["It ", "is  ", "3.\n"]
    assert CallStarted(0, "call_1_1", "say") in parts
    pieces = [part.text for part in parts if isinstance(part, CallDelta)]
    assert len(pieces) > 1
    assert "".join(pieces) == turn.calls[0].arguments


async def test_requests_are_recorded_unchanged() -> None:
    turns: list[Turn] = [UserTurn("one")]
    model = ScriptedModel(["a", "b"])
    await model.respond(ModelRequest(system="s", turns=turns))
    turns.append(UserTurn("two"))
    await model.respond(ModelRequest(system="s", turns=turns))
    assert [len(request.turns) for request in model.requests] == [1, 2]

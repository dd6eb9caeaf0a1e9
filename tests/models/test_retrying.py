"""Asking again, and giving up."""

from __future__ import annotations

import asyncio

import pytest

from tests.models.servers import Loopback, chunk, events, said, status, stream
from toolspace.core.model import (
    CallDelta,
    CallStarted,
    ModelRequest,
    ModelStreamPart,
    ResponseRestarted,
    TextDelta,
    UserTurn,
)
from toolspace.errors import ModelError, ModelErrorKind
from toolspace.models.registry import open_model
from toolspace.models.retry import RetryingModel
from toolspace.testing import ScriptedModel, call

HELLO = ModelRequest(system="", turns=[UserTurn("Hello")])


class Pauses(list[float]):
    """The pauses that were made, of which nobody has to wait for any."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)

    def near(self, *wanted: float) -> bool:
        """Whether the pauses are these, give or take what parts clients that failed together."""
        return len(self) == len(wanted) and all(
            0.5 * one <= found <= 1.1 * one for found, one in zip(self, wanted, strict=True)
        )


@pytest.fixture
def waited() -> Pauses:
    return Pauses()


def failing(kind: ModelErrorKind, **more: float) -> ModelError:
    return ModelError(kind, f"it is {kind}", **more)  # pyright: ignore[reportArgumentType]


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("kind", ["rate_limited", "overloaded", "unavailable", "broken"])
async def test_what_may_pass_is_asked_again_with_growing_pauses(kind: ModelErrorKind, waited: Pauses) -> None:
    model = ScriptedModel([failing(kind), failing(kind), failing(kind), "Hello"])
    turn = await RetryingModel(model, sleep=waited).respond(HELLO)
    assert turn.text == "Hello"
    assert waited.near(0.5, 1.0, 2.0)


@pytest.mark.parametrize("kind", ["no_key", "not_permitted", "not_found", "invalid", "too_long"])
async def test_what_cannot_pass_is_asked_once(kind: ModelErrorKind, waited: Pauses) -> None:
    model = ScriptedModel([failing(kind), "Hello"])
    with pytest.raises(ModelError):
        await RetryingModel(model, sleep=waited).respond(HELLO)
    assert (len(model.requests), waited) == (1, [])


async def test_it_gives_up_after_so_many_retries(waited: Pauses) -> None:
    model = ScriptedModel.loop([failing("overloaded")])
    with pytest.raises(ModelError, match="it is overloaded"):
        await RetryingModel(model, retries=2, sleep=waited).respond(HELLO)
    assert len(model.requests) == 3


async def test_a_provider_is_waited_for_as_long_as_it_asks(waited: Pauses) -> None:
    model = ScriptedModel([failing("rate_limited", retry_after=7.0), failing("rate_limited", retry_after=0.0), "ok"])
    await RetryingModel(model, sleep=waited).respond(HELLO)
    assert waited.near(7.0, 0.0)
    assert waited[0] >= 7.0


async def test_a_provider_that_asks_for_too_long_is_given_up_at_once(waited: Pauses) -> None:
    model = ScriptedModel([failing("rate_limited", retry_after=3600.0), "ok"])
    with pytest.raises(ModelError) as caught:
        await RetryingModel(model, sleep=waited).respond(HELLO)
    assert caught.value.retry_after == 3600.0
    assert waited == []


async def test_no_new_attempt_begins_after_the_time_is_up(waited: Pauses) -> None:
    model = ScriptedModel.loop([failing("unavailable")])
    with pytest.raises(ModelError):
        await RetryingModel(model, max_seconds=0.0, sleep=waited).respond(HELLO)
    assert len(model.requests) == 1


@pytest.mark.spec("11.7")
async def test_listeners_are_told_to_forget_a_half_answer(server: Loopback, waited: Pauses) -> None:
    cut = stream(events(chunk({"content": "Hel"})), end=False)
    server.reply(status(529), cut, status(429, b"", retry_after="1"), stream(said("Hello")))
    asked = open_model("openai", "x", base_url=server.url, api_key="k", environ={}, retries=0)
    model = RetryingModel(asked, sleep=waited)
    heard: list[ModelStreamPart] = []
    turn = await model.respond(HELLO, heard.append)
    await model.aclose()
    assert turn.text == "Hello"
    assert heard == [TextDelta("Hel"), ResponseRestarted(), TextDelta("Hello")]
    assert len(server.asked) == 4


async def test_a_call_that_was_half_written_is_forgotten_too(waited: Pauses) -> None:
    class Breaking(ScriptedModel):
        async def respond(self, request: ModelRequest, listen: object = None) -> object:  # type: ignore[override]
            turn = await super().respond(request, listen)  # pyright: ignore
            if len(self.requests) == 1:
                raise failing("broken")
            return turn

    heard: list[ModelStreamPart] = []
    model = RetryingModel(Breaking([call("add", {"a": 1}, id="a"), "ok"]), sleep=waited)
    await model.respond(HELLO, heard.append)
    assert heard == [CallStarted(0, "a", "add"), CallDelta(0, '{"a":1}'), ResponseRestarted(), TextDelta("ok")]


async def test_cancelling_ends_a_pause_at_once() -> None:
    asked = asyncio.Event()

    def fail(request: ModelRequest) -> ModelError:
        asked.set()
        return failing("rate_limited", retry_after=50.0)

    asking = asyncio.create_task(RetryingModel(ScriptedModel(fail)).respond(HELLO))
    await asked.wait()
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await asking

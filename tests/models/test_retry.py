"""Retries of model requests."""

from __future__ import annotations

import asyncio

import pytest

from tests.models.model_server import ModelTestServer, chat_chunk, error_reply, events, stream_reply, text_completion
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    ModelRequest,
    ModelStreamPart,
    ResponseRestarted,
    TextDelta,
    UserTurn,
)
from toolspace.errors import ModelError, ModelErrorKind
from toolspace.models.http import RetryingModel
from toolspace.models.registry import open_model
from toolspace.testing import ScriptedModel, call

HELLO = ModelRequest(system="", turns=[UserTurn("Hello")])


class Pauses(list[float]):
    """Records the delays instead of sleeping."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)

    def is_near(self, *expected_delays: float) -> bool:
        """Whether the delays are these, apart from the jitter."""
        return len(self) == len(expected_delays) and all(
            0.5 * expected_delay <= delay <= 1.1 * expected_delay
            for delay, expected_delay in zip(self, expected_delays, strict=True)
        )


@pytest.fixture
def delays() -> Pauses:
    return Pauses()


def model_error(kind: ModelErrorKind, **more: float) -> ModelError:
    return ModelError(kind, f"it is {kind}", **more)  # pyright: ignore[reportArgumentType]


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("kind", ["rate_limited", "overloaded", "unavailable", "broken"])
async def test_transient_errors_are_retried_with_growing_delays(kind: ModelErrorKind, delays: Pauses) -> None:
    model = ScriptedModel([model_error(kind), model_error(kind), model_error(kind), "Hello"])
    turn = await RetryingModel(model, sleep=delays).respond(HELLO)
    assert turn.text == "Hello"
    assert delays.is_near(0.5, 1.0, 2.0)


@pytest.mark.parametrize("kind", ["no_key", "not_permitted", "not_found", "invalid", "too_long"])
async def test_permanent_errors_are_not_retried(kind: ModelErrorKind, delays: Pauses) -> None:
    model = ScriptedModel([model_error(kind), "Hello"])
    with pytest.raises(ModelError):
        await RetryingModel(model, sleep=delays).respond(HELLO)
    assert (len(model.requests), delays) == (1, [])


async def test_retries_are_limited(delays: Pauses) -> None:
    model = ScriptedModel.loop([model_error("overloaded")])
    with pytest.raises(ModelError, match="it is overloaded"):
        await RetryingModel(model, retries=2, sleep=delays).respond(HELLO)
    assert len(model.requests) == 3


async def test_the_delay_is_the_one_that_the_provider_asks_for(delays: Pauses) -> None:
    model = ScriptedModel(
        [model_error("rate_limited", retry_after=7.0), model_error("rate_limited", retry_after=0.0), "ok"]
    )
    await RetryingModel(model, sleep=delays).respond(HELLO)
    assert delays.is_near(7.0, 0.0)
    assert delays[0] >= 7.0


async def test_a_too_long_delay_fails_at_once(delays: Pauses) -> None:
    model = ScriptedModel([model_error("rate_limited", retry_after=3600.0), "ok"])
    with pytest.raises(ModelError) as error_info:
        await RetryingModel(model, sleep=delays).respond(HELLO)
    assert error_info.value.retry_after == 3600.0
    assert delays == []


async def test_no_attempt_starts_after_the_total_time(delays: Pauses) -> None:
    model = ScriptedModel.loop([model_error("unavailable")])
    with pytest.raises(ModelError):
        await RetryingModel(model, max_seconds=0.0, sleep=delays).respond(HELLO)
    assert len(model.requests) == 1


@pytest.mark.spec("11.7")
async def test_listeners_are_told_to_discard_a_partial_response(server: ModelTestServer, delays: Pauses) -> None:
    cut = stream_reply(events(chat_chunk({"content": "Hel"})), end=False)
    server.reply(error_reply(529), cut, error_reply(429, b"", retry_after="1"), stream_reply(text_completion("Hello")))
    model = open_model("openai", "x", base_url=server.url, api_key="k", environ={}, retries=0)
    model = RetryingModel(model, sleep=delays)
    parts: list[ModelStreamPart] = []
    turn = await model.respond(HELLO, parts.append)
    await model.aclose()
    assert turn.text == "Hello"
    assert parts == [TextDelta("Hel"), ResponseRestarted(), TextDelta("Hello")]
    assert len(server.requests) == 4


async def test_a_partial_call_is_discarded_too(delays: Pauses) -> None:
    class Breaking(ScriptedModel):
        async def respond(self, request: ModelRequest, listen: object = None) -> object:  # type: ignore[override]
            turn = await super().respond(request, listen)  # pyright: ignore
            if len(self.requests) == 1:
                raise model_error("broken")
            return turn

    parts: list[ModelStreamPart] = []
    model = RetryingModel(Breaking([call("add", {"a": 1}, id="a"), "ok"]), sleep=delays)
    await model.respond(HELLO, parts.append)
    assert parts == [CallStarted(0, "a", "add"), CallDelta(0, '{"a":1}'), ResponseRestarted(), TextDelta("ok")]


async def test_cancelling_ends_a_delay_at_once() -> None:
    request_sent = asyncio.Event()

    def fail(request: ModelRequest) -> ModelError:
        request_sent.set()
        return model_error("rate_limited", retry_after=50.0)

    request_task = asyncio.create_task(RetryingModel(ScriptedModel(fail)).respond(HELLO))
    await request_sent.wait()
    await asyncio.sleep(0)
    request_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await request_task

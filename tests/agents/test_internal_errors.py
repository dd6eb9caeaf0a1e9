"""Runs that end with an internal error: their events are retried only if the run has taken no step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import private_agent as agent
from tests.agents.agent_harness import run_agents
from toolspace import tool
from toolspace.core.language_model import Model, ModelCall, ModelListener, ModelRequest, ModelTurn
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database
from toolspace.storage.queries import inbox

PAY = call("pay", {"amount": 5}, id="pay")
SEND = [call("enter_space", {"spaceId": "spc_room"}), call("send_message", {"text": "Paid."})]


def paying_tool() -> tuple[Any, list[int]]:
    """A tool with an effect that must not happen twice, and its effects."""
    payments: list[int] = []

    @tool(visible=False)
    async def pay(amount: int) -> str:
        """Pays."""
        payments.append(amount)
        return "paid"

    return pay, payments


@pytest.mark.spec("7.3")
@pytest.mark.parametrize("step", [PAY, SEND], ids=["a call", "a message"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), asyncio.CancelledError()], ids=["error", "canceled"])
async def test_events_of_a_run_with_steps_are_set_aside_after_an_internal_error(
    database: Database, tmp_path: Path, step: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "_FIRST_DELAY", 1)

    def breaks(request: ModelRequest) -> Any:
        raise error

    pay, payments = paying_tool()
    model = ScriptedModel([step, breaks, step, "Done."])
    async with run_agents(database, agent("ada", model), tools=[pay], session_dir=tmp_path) as harness:
        first_message = await harness.send_message("Pay.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("failed", 1)
        assert (run.error or "").startswith("internal error: ")
        [event] = await harness.inbox()
        assert (event.status, event.attempts) == ("failed", 1)
        assert (run.error or "") in (event.error or "")
        assert run.id in (event.error or "")

        # Later events run, and the failed one does not come back with them.
        request_count = len(model.requests)
        await harness.push_event({"text": "Later."})
        await harness.wait_for_run(2)
        assert first_message.id not in str(model.requests[request_count].turns[-1])
        assert [event.status for event in await harness.inbox()].count("failed") == 1
        effects = payments if step is PAY else await harness.sent_texts(harness.agent)
        assert len(effects) == 2  # One of each run.


@pytest.mark.spec("7.3")
async def test_an_operator_retries_an_event_that_was_set_aside(database: Database, tmp_path: Path) -> None:
    pay, payments = paying_tool()
    model = ScriptedModel([PAY, RuntimeError("broken"), "It is paid already."])
    async with run_agents(database, agent("ada", model), tools=[pay], session_dir=tmp_path) as harness:
        await harness.send_message("Pay.")
        await harness.wait_for_run()
        [event] = await harness.inbox()
        assert await harness.ledger.write(inbox.retry, harness.agent, event.event_id)
        harness.ledger.waiters.wake(f"inbox:{harness.agent}")
        assert (await harness.wait_for_run(2)).status == "completed"
        assert [event.status for event in await harness.inbox()] == ["processed"]
        assert "paid" in str(model.requests[-1].turns)  # The model sees what the failed run did.
        assert payments == [5]


@pytest.mark.spec("7.3")
async def test_a_turn_that_cannot_be_stored_ends_the_run_once(database: Database, tmp_path: Path) -> None:
    class Careless(Model):
        """Sends arguments that are no text."""

        name = "careless:1"
        requests = 0

        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            self.requests += 1
            if self.requests == 2:
                return ModelTurn(calls=(ModelCall("x", "pay", {object(): 1}),))  # pyright: ignore
            return ModelTurn(calls=(ModelCall("pay", "pay", '{"amount": 5}'),))

    pay, payments = paying_tool()
    model = Careless()
    async with run_agents(database, agent("ada", model), tools=[pay], session_dir=tmp_path) as harness:
        await harness.send_message("Pay.")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("failed", 1)
        assert [event.status for event in await harness.inbox()] == ["failed"]
        assert (payments, model.requests) == ([5], 2)

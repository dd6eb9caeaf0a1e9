"""Cycles: from the inbox to the end of a run, with each step stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.agent_harness import private_agent as agent
from tests.agents.agent_harness import run_agents
from toolspace.core.language_model import UserTurn
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database


@pytest.mark.spec("11.2")
async def test_a_cycle_answers_a_message_in_its_space(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel(
        [
            call("enter_space", {"spaceId": "spc_room"}),
            call("send_message", {"text": "Hello, Husam."}),
            "Said hello.",
        ]
    )
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert run.steps == 3
        assert await harness.sent_texts() == ["Hello?", "Hello, Husam."]
        first = model.requests[0].turns[-1]
        assert isinstance(first, UserTurn)
        assert 'Husam (human): "Hello?"' in first.text
        assert [event.status for event in await harness.inbox()] == ["processed"]
        kinds = [type(row.stored_turn.turn).__name__ for row in await harness.history()]
        assert kinds == ["UserTurn", "ModelTurn", "ResultsTurn", "ModelTurn", "ResultsTurn", "ModelTurn"]


@pytest.mark.spec("11.6")
async def test_a_run_whose_model_is_overloaded_continues_later(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel(
        [
            call("enter_space", {"spaceId": "spc_room"}),
            call("send_message", {"text": "One moment."}),
            ModelError("overloaded", "try later"),
            call("send_message", {"text": "Here you are."}),
            "Done.",
        ]
    )
    options = {"retry_delays": (10,)}
    async with run_agents(database, agent("ada", model), session_dir=tmp_path, **options) as harness:
        await harness.send_message("Hello?")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert await harness.sent_texts(harness.agent) == ["One moment.", "Here you are."]
        assert len(await harness.runs()) == 1
        assert [event.attempts for event in await harness.inbox()] == [1]

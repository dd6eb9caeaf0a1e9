"""Cycles: from the inbox to the end of a run, each step kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.agent_harness import agent, village
from toolspace.core.model import UserTurn
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database


@pytest.mark.spec("11.2")
async def test_a_message_is_answered_in_the_space_that_it_came_from(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel(
        [
            call("enter_space", {"spaceId": "spc_room"}),
            call("send_message", {"text": "Hello, Husam."}),
            "Said hello.",
        ]
    )
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        run = await town.run_ended()
        assert run.status == "completed"
        assert run.steps == 3
        assert await town.said() == ["Hello?", "Hello, Husam."]
        first = model.requests[0].turns[-1]
        assert isinstance(first, UserTurn)
        assert 'Husam (human): "Hello?"' in first.text
        assert [event.status for event in await town.inbox()] == ["processed"]
        kinds = [type(row.stored.turn).__name__ for row in await town.history()]
        assert kinds == ["UserTurn", "ModelTurn", "ResultsTurn", "ModelTurn", "ResultsTurn", "ModelTurn"]


@pytest.mark.spec("11.6")
async def test_a_run_whose_model_went_away_in_the_middle_goes_on_where_it_was(
    database: Database, tmp_path: Path
) -> None:
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
    async with village(database, agent("ada", model), folder=tmp_path, owns=False, **options) as town:
        await town.say("Hello?")
        run = await town.run_ended()
        assert run.status == "completed"
        assert await town.said(town.agent) == ["One moment.", "Here you are."]
        assert len(await town.runs()) == 1
        assert [event.attempts for event in await town.inbox()] == [1]

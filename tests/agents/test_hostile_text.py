"""What a hostile model, or whoever it listens to, can write: nothing of it breaks an agent, or passes for another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agents.agent_harness import agent, village
from toolspace import tool
from toolspace.agents.host import entity_id_for
from toolspace.config.agent_settings import ConsciousnessSettings, RouterSettings
from toolspace.core import json_text
from toolspace.core.model import ModelTurn, UserTurn
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database
from toolspace.storage.queries import entities, sessions

VILE = "a\0b\ud800c\u2028d\x1b[2J"
"""What no column of a database, no line and no terminal takes as it is."""


@pytest.mark.spec("11.2")
@pytest.mark.parametrize("error", [ModelError("invalid", f"no: {VILE}"), RuntimeError("a\0b"), ValueError("x" * 10**6)])
async def test_an_error_of_any_text_ends_the_run(database: Database, tmp_path: Path, error: Exception) -> None:
    model = ScriptedModel([error, "Well."])
    async with village(database, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        run = await town.run_ended()
        assert run.status == "failed"
        assert run.error is not None
        assert "\0" not in run.error
        assert len(run.error) < 20_000


@pytest.mark.spec("11.2")
@pytest.mark.spec("11.4")
async def test_a_turn_of_any_text_is_kept_and_the_run_goes_on(database: Database, tmp_path: Path) -> None:
    @tool
    async def stumble(text: str) -> str:
        """Fails."""
        raise RuntimeError(VILE + text)

    model = ScriptedModel(
        [
            ModelTurn(text=VILE, calls=(call(VILE, VILE, id=VILE), call("stumble", {"text": "\0"}, id="b"))),
            ModelTurn(
                calls=(call("send_message", {"text": "x\0y"}, id="c"), call("set_goals", '{"goals": "\ud800"}', id="d"))
            ),
            ModelTurn(
                calls=(
                    call("enter_space", {"spaceId": "\0"}, id="e"),
                    call("reply", {"text": "x", "channelId": "\0"}, id="f"),
                )
            ),
            ModelTurn(calls=(call("spawn_task", json.dumps({"description": VILE, "input": "x"}), id="g"),)),
            ModelTurn(text=VILE),
            "Again.",
        ]
    )
    async with village(database, agent("ada", model), tools=[stumble], folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        run = await town.run_ended()
        assert (run.status, run.error) == ("completed", None)
        assert run.steps == 5
        await town.say("And again?")
        assert (await town.run_ended(2)).status == "completed"


@pytest.mark.spec("11.4")
async def test_a_summary_of_any_text_is_kept(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel(lambda request: VILE)
    ada = agent("ada", model, consciousness=ConsciousnessSettings(max_tokens=1, min_recent_cycles=1))
    async with village(database, ada, folder=tmp_path, owns=False) as town:
        for count in range(1, 4):
            await town.say("Hello?")
            assert (await town.run_ended(count)).status == "completed"
        session = await town.ledger.read(sessions.find, town.agent)
        assert session is not None
        assert (session.summary or "").startswith("a\ufffdb?c")


@pytest.mark.spec("11.2")
async def test_a_turn_of_any_size_is_kept_within_bounds(sqlite: Database, tmp_path: Path) -> None:
    many = tuple(call("get_goals", {}, id=str(number)) for number in range(5_000))
    model = ScriptedModel(
        [
            ModelTurn(text="x" * 3_000_000, calls=many),
            ModelTurn(calls=(call("set_goals", '{"goals": [' + " " * 3_000_000, id="a"),)),
            "Done.",
        ]
    )
    async with village(sqlite, agent("ada", model), folder=tmp_path, owns=False) as town:
        await town.say("Hello?")
        run = await town.run_ended()
        assert (run.status, run.steps) == ("completed", 3)
        told = model.requests[1].turns[-1]
        assert told == UserTurn("REVIEW: 4000 calls of your turn were not executed; make fewer calls at once.")
        turns = [row.stored.turn for row in await town.history()]
        assert sum(len(one.calls) for one in turns if isinstance(one, ModelTurn)) == 1_001
        assert len(json_text.encode(turns)) < 2_000_000
        events = await town.events(f"run:{run.id}")
        assert max(len(json_text.encode(event.data)) for event in events) < 1_100_000


@pytest.mark.spec("3.41")
async def test_a_hand_off_lets_nobody_into_a_space_that_the_agent_is_not_in(sqlite: Database, tmp_path: Path) -> None:
    router = agent(
        "router",
        ScriptedModel([call("router__handoff-to", {"agent": "bob"})]),
        router=RouterSettings(destinations=("bob",)),
    )
    bob = agent("bob", ScriptedModel(["Well."]))
    async with village(sqlite, router, bob, folder=tmp_path, owns=False) as town:
        await town.ledger.write(entities.create_space, "spc_vault", "Vault", {})
        await town.push({"spaceId": "spc_vault", "order": 1})
        await town.run_ended(agent=entity_id_for("bob"))
        assert await town.ledger.read(entities.list_members, "spc_vault") == []
        (handed,) = await town.inbox(entity_id_for("bob"))
        assert handed.data["spaceId"] is None

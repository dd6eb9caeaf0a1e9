"""Hostile text of a model or its sources breaks no agent and cannot pass for another part of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agents.agent_harness import agent, run_agents
from toolspace import tool
from toolspace.agents.agent import entity_id_for
from toolspace.config.agent_settings import ConsciousnessSettings, RouterSettings
from toolspace.core import json_text
from toolspace.core.language_model import ModelTurn, UserTurn
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, sessions

VILE = "a\0b\ud800c\u2028d\x1b[2J"
"""What no column of a database, no line and no terminal takes as it is."""


@pytest.mark.spec("11.2")
@pytest.mark.parametrize("error", [ModelError("invalid", f"no: {VILE}"), RuntimeError("a\0b"), ValueError("x" * 10**6)])
async def test_an_error_with_any_characters_ends_the_run(database: Database, tmp_path: Path, error: Exception) -> None:
    model = ScriptedModel([error, "Well."])
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        run = await harness.wait_for_run()
        assert run.status == "failed"
        assert run.error is not None
        assert "\0" not in run.error
        assert len(run.error) < 20_000


@pytest.mark.spec("11.2")
@pytest.mark.spec("11.4")
async def test_a_turn_with_any_characters_is_stored_and_the_run_continues(database: Database, tmp_path: Path) -> None:
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
    async with run_agents(database, agent("ada", model), tools=[stumble], session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        run = await harness.wait_for_run()
        assert (run.status, run.error) == ("completed", None)
        assert run.steps == 5
        await harness.send_message("And again?")
        assert (await harness.wait_for_run(2)).status == "completed"


@pytest.mark.spec("11.4")
async def test_a_summary_with_any_characters_is_stored(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel(lambda request: VILE)
    ada = agent("ada", model, consciousness=ConsciousnessSettings(max_tokens=1, min_recent_cycles=1))
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        for count in range(1, 4):
            await harness.send_message("Hello?")
            assert (await harness.wait_for_run(count)).status == "completed"
        session = await harness.ledger.read(sessions.find, harness.agent)
        assert session is not None
        assert (session.summary or "").startswith("a\ufffdb?c")


@pytest.mark.spec("11.2")
async def test_a_turn_of_any_size_is_truncated(sqlite: Database, tmp_path: Path) -> None:
    many = tuple(call("get_goals", {}, id=str(number)) for number in range(5_000))
    model = ScriptedModel(
        [
            ModelTurn(text="x" * 3_000_000, calls=many),
            ModelTurn(calls=(call("set_goals", '{"goals": [' + " " * 3_000_000, id="a"),)),
            "Done.",
        ]
    )
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("completed", 3)
        last_turn = model.requests[1].turns[-1]
        assert last_turn == UserTurn("REVIEW: 4000 calls of your turn were not executed; make fewer calls at once.")
        turns = [row.stored_turn.turn for row in await harness.history()]
        assert sum(len(turn.calls) for turn in turns if isinstance(turn, ModelTurn)) == 1_001
        assert len(json_text.encode(turns)) < 2_000_000
        events = await harness.events(f"run:{run.id}")
        assert max(len(json_text.encode(event.data)) for event in events) < 1_100_000


@pytest.mark.spec("3.41")
async def test_a_handoff_adds_nobody_to_a_space_of_which_the_agent_is_not_a_member(
    sqlite: Database, tmp_path: Path
) -> None:
    router = agent(
        "router",
        ScriptedModel([call("router__handoff-to", {"agent": "bob"})]),
        router=RouterSettings(destinations=("bob",)),
    )
    bob = agent("bob", ScriptedModel(["Well."]))
    async with run_agents(sqlite, router, bob, session_dir=tmp_path) as harness:
        await harness.ledger.write(entities_and_spaces.create_space, "spc_vault", "Vault", {})
        await harness.push_event({"spaceId": "spc_vault", "order": 1})
        await harness.wait_for_run(agent=entity_id_for("bob"))
        assert await harness.ledger.read(entities_and_spaces.list_members, "spc_vault") == []
        (handoff_event,) = await harness.inbox(entity_id_for("bob"))
        assert handoff_event.data["spaceId"] is None

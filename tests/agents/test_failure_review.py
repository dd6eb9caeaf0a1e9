"""After a failed call a run continues, plans again or ends: by rules, or by the decision of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, run_agents
from tests.agents.agent_harness import private_agent as agent
from tests.agents.scripted_sessions import wait_until_done
from toolspace import tool
from toolspace.config.agent_settings import AgentLoopSettings
from toolspace.core.language_model import ModelRequest, Turn, Usage, UserTurn
from toolspace.core.stored_records import RunRecord
from toolspace.errors import ModelError, ToolExecutionError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database


@tool(visible=False)
def climb(mountain: str) -> str:
    """Climbs, unless it is too high."""
    if mountain.startswith("Rigi"):
        return "on top"
    raise ToolExecutionError(f"{mountain} is too high")


def up(mountain: str = "Eiger") -> Any:
    return call("climb", {"mountain": mountain})


class ScriptedClimber:
    """A model that makes scripted calls, and returns scripted reviews of failures."""

    def __init__(self, calls: list[Any], reviews: list[Any] | None = None) -> None:
        self._calls = calls
        self._reviews = reviews or []
        self.model = ScriptedModel(self._respond, usage=Usage(requests=1, input_tokens=10))

    def _respond(self, request: ModelRequest) -> Any:
        if is_review(request):
            review_step = self._reviews.pop(0)
            if isinstance(review_step, BaseException):
                raise review_step
            return review_step
        return self._calls.pop(0) if self._calls else "I stop here."

    @property
    def requests(self) -> list[ModelRequest]:
        return [request for request in self.model.requests if not is_review(request)]

    @property
    def review_requests(self) -> list[ModelRequest]:
        return [request for request in self.model.requests if is_review(request)]


def is_review(request: ModelRequest) -> bool:
    return request.system.startswith("A step of an agent's work failed")


def review_notes(turns: list[Turn] | Any) -> list[str]:
    """The notes of the reviewer in a conversation."""
    return [turn.text for turn in turns if isinstance(turn, UserTurn) and turn.text.startswith("REVIEW:")]


async def run_climber(
    database: Database, directory: Path, climber: ScriptedClimber, *, review: Any = "rules"
) -> RunRecord:
    ada = agent("ada", climber.model, loop=AgentLoopSettings(review=review))
    async with run_agents(database, ada, tools=[climb], session_dir=directory) as harness:
        await _run(harness)
        return (await harness.runs())[0]


async def _run(harness: AgentHarness) -> None:
    await harness.push_event("climb!")
    await wait_until_done(harness)


# By rules


@pytest.mark.spec("11.5")
async def test_the_model_continues_after_a_single_failure(sqlite: Database, tmp_path: Path) -> None:
    climber = ScriptedClimber([up("Eiger"), up("Rigi")])
    run = await run_climber(sqlite, tmp_path, climber)
    assert (run.status, run.steps) == ("completed", 3)
    assert review_notes(climber.requests[-1].turns) == []


@pytest.mark.spec("11.5")
async def test_a_call_that_keeps_failing_makes_the_model_plan_again(database: Database, tmp_path: Path) -> None:
    climber = ScriptedClimber([up()] * 3)
    run = await run_climber(database, tmp_path, climber)
    assert run.status == "completed"
    (note,) = review_notes(climber.requests[-1].turns)
    assert "The same call of climb keeps failing" in note
    assert "Eiger is too high" in note
    assert "Do not repeat a call that failed as it was." in note


@pytest.mark.spec("11.5")
async def test_a_model_that_repeats_failing_calls_is_stopped(database: Database, tmp_path: Path) -> None:
    climber = ScriptedClimber([up()] * 50)
    run = await run_climber(database, tmp_path, climber)
    assert run.status == "failed"
    assert (run.error or "").startswith(
        "tools kept failing: climb: (tool failed: this run has called climb with exactly"
    )
    assert run.steps < 20
    assert len(review_notes(climber.requests[-1].turns)) == 3


@pytest.mark.spec("11.5")
async def test_a_success_resets_the_count_of_failures(sqlite: Database, tmp_path: Path) -> None:
    climber = ScriptedClimber([up(f"{n}") if n % 2 else up(f"Rigi {n}") for n in range(18)])
    run = await run_climber(sqlite, tmp_path, climber)
    assert run.status == "completed"
    assert review_notes(climber.requests[-1].turns) == []


# As the model judges


@pytest.mark.spec("11.5")
async def test_a_reviewing_model_can_decide_to_continue(sqlite: Database, tmp_path: Path) -> None:
    climber = ScriptedClimber([up(), up()], ['{"verdict": "continue"}'] * 2)
    run = await run_climber(sqlite, tmp_path, climber, review="model")
    assert (run.status, run.steps) == ("completed", 3)
    assert review_notes(climber.requests[-1].turns) == []
    assert len(climber.review_requests) == 2
    prompt = climber.review_requests[0].turns[-1]
    assert isinstance(prompt, UserTurn)
    assert 'climb {"mountain":"Eiger"} → (tool failed: Eiger is too high)' in prompt.text
    assert '"climb!"' in prompt.text


@pytest.mark.spec("11.5")
async def test_a_reviewing_model_can_ask_for_a_new_plan(sqlite: Database, tmp_path: Path) -> None:
    review_step = """I think: {"verdict": "replan", "assessment": "It is too high.", "lessons": ["Try hills."],
        "nextFocus": "the Rigi"} That is all."""
    climber = ScriptedClimber([up(), up("Rigi")], [review_step])
    run = await run_climber(sqlite, tmp_path, climber, review="model")
    assert run.status == "completed"
    assert review_notes(climber.requests[1].turns) == ["REVIEW: It is too high.\n- Try hills.\nNext: the Rigi"]


@pytest.mark.spec("11.5")
async def test_a_reviewing_model_can_end_the_run(database: Database, tmp_path: Path) -> None:
    climber = ScriptedClimber([up()], ['{"verdict": "complete", "assessment": "The Rigi has to do."}'])
    run = await run_climber(database, tmp_path, climber, review="model")
    assert (run.status, run.error, run.steps) == ("failed", "The Rigi has to do.", 1)
    assert run.usage["requests"] == 2  # What judging cost is a part of it.


@pytest.mark.spec("11.5")
@pytest.mark.parametrize(
    "review_step",
    [
        "I cannot say.",
        "{",
        "[]",
        '{"verdict": "perhaps"}',
        '{"verdict": 7, "assessment": null}',
        "}{",
        ModelError("overloaded", "the model is busy"),
    ],
)
async def test_a_malformed_review_falls_back_to_the_rules(sqlite: Database, tmp_path: Path, review_step: Any) -> None:
    climber = ScriptedClimber([up()] * 3, [review_step] * 3)
    run = await run_climber(sqlite, tmp_path, climber, review="model")
    assert run.status == "completed"
    (note,) = review_notes(climber.requests[-1].turns)
    assert "The same call of climb keeps failing" in note


@pytest.mark.spec("11.5")
async def test_the_rules_end_a_run_that_the_reviewing_model_always_continues(sqlite: Database, tmp_path: Path) -> None:
    climber = ScriptedClimber([up()] * 50, ['{"verdict": "continue"}'] * 50)
    run = await run_climber(sqlite, tmp_path, climber, review="model")
    assert run.status == "failed"
    assert run.error is not None
    assert run.error.startswith("tools kept failing")

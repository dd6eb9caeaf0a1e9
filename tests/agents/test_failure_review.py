"""After a failed tool: go on, plan anew, or be content with what there is; by rules, or as the model judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import Village, agent, village
from tests.agents.scripted_sessions import at_rest
from toolspace import tool
from toolspace.config.agent_settings import AgentLoopSettings
from toolspace.core.model import ModelRequest, Turn, Usage, UserTurn
from toolspace.core.records import RunRecord
from toolspace.errors import ModelError, ToolExecutionError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database


@tool(visible=False)
def climb(mountain: str) -> str:
    """Climbs, unless it is too high."""
    if mountain == "Rigi":
        return "on top"
    raise ToolExecutionError(f"{mountain} is too high")


def up(mountain: str = "Eiger") -> Any:
    return call("climb", {"mountain": mountain})


class Climber:
    """Makes its calls one after the other; where it is asked to judge, it says what it has been given."""

    def __init__(self, calls: list[Any], judgements: list[Any] | None = None) -> None:
        self._calls = calls
        self._judgements = judgements or []
        self.model = ScriptedModel(self._say, usage=Usage(requests=1, input_tokens=10))

    def _say(self, request: ModelRequest) -> Any:
        if is_judging(request):
            said = self._judgements.pop(0)
            if isinstance(said, BaseException):
                raise said
            return said
        return self._calls.pop(0) if self._calls else "I stop here."

    @property
    def asked(self) -> list[ModelRequest]:
        return [one for one in self.model.requests if not is_judging(one)]

    @property
    def judged(self) -> list[ModelRequest]:
        return [one for one in self.model.requests if is_judging(one)]


def is_judging(request: ModelRequest) -> bool:
    return request.system.startswith("A step of an agent's work failed")


def advice(turns: list[Turn] | Any) -> list[str]:
    """What the model was told to think of."""
    return [turn.text for turn in turns if isinstance(turn, UserTurn) and turn.text.startswith("REVIEW:")]


async def climbing(database: Database, folder: Path, climber: Climber, *, review: Any = "rules") -> RunRecord:
    ada = agent("ada", climber.model, loop=AgentLoopSettings(review=review))
    async with village(database, ada, tools=[climb], folder=folder, owns=False) as town:
        await _begin(town)
        return (await town.runs())[0]


async def _begin(town: Village) -> None:
    await town.push("climb!")
    await at_rest(town)


# By rules


@pytest.mark.spec("11.5")
async def test_a_failure_is_the_models_to_see_to_at_first(sqlite: Database, tmp_path: Path) -> None:
    climber = Climber([up("Eiger"), up("Rigi")])
    run = await climbing(sqlite, tmp_path, climber)
    assert (run.status, run.steps) == ("completed", 3)
    assert advice(climber.asked[-1].turns) == []


@pytest.mark.spec("11.5")
async def test_a_call_that_fails_again_and_again_has_the_model_plan_anew(database: Database, tmp_path: Path) -> None:
    climber = Climber([up()] * 3)
    run = await climbing(database, tmp_path, climber)
    assert run.status == "completed"
    (said,) = advice(climber.asked[-1].turns)
    assert "The same call of climb keeps failing" in said
    assert "Eiger is too high" in said
    assert "Do not repeat a call that failed as it was." in said


@pytest.mark.spec("11.5")
async def test_a_model_that_goes_round_in_circles_is_stopped(database: Database, tmp_path: Path) -> None:
    climber = Climber([up()] * 50)
    run = await climbing(database, tmp_path, climber)
    assert run.status == "failed"
    assert run.error == "tools kept failing: climb: (tool failed: Eiger is too high)"
    assert run.steps < 20
    assert len(advice(climber.asked[-1].turns)) == 3


@pytest.mark.spec("11.5")
async def test_a_success_in_between_counts(sqlite: Database, tmp_path: Path) -> None:
    climber = Climber([up(f"{n}") if n % 2 else up("Rigi") for n in range(18)])
    run = await climbing(sqlite, tmp_path, climber)
    assert run.status == "completed"
    assert advice(climber.asked[-1].turns) == []


# As the model judges


@pytest.mark.spec("11.5")
async def test_a_model_may_judge_that_a_failure_does_not_matter(sqlite: Database, tmp_path: Path) -> None:
    climber = Climber([up(), up()], ['{"verdict": "continue"}'] * 2)
    run = await climbing(sqlite, tmp_path, climber, review="model")
    assert (run.status, run.steps) == ("completed", 3)
    assert advice(climber.asked[-1].turns) == []
    assert len(climber.judged) == 2
    asked = climber.judged[0].turns[-1]
    assert isinstance(asked, UserTurn)
    assert 'climb {"mountain":"Eiger"} → (tool failed: Eiger is too high)' in asked.text
    assert '"climb!"' in asked.text


@pytest.mark.spec("11.5")
async def test_a_model_may_judge_that_the_plan_is_wrong(sqlite: Database, tmp_path: Path) -> None:
    judgement = """I think: {"verdict": "replan", "assessment": "It is too high.", "lessons": ["Try hills."],
        "nextFocus": "the Rigi"} That is all."""
    climber = Climber([up(), up("Rigi")], [judgement])
    run = await climbing(sqlite, tmp_path, climber, review="model")
    assert run.status == "completed"
    assert advice(climber.asked[1].turns) == ["REVIEW: It is too high.\n- Try hills.\nNext: the Rigi"]


@pytest.mark.spec("11.5")
async def test_a_model_may_judge_that_it_is_as_good_as_it_gets(database: Database, tmp_path: Path) -> None:
    climber = Climber([up()], ['{"verdict": "complete", "assessment": "The Rigi has to do."}'])
    run = await climbing(database, tmp_path, climber, review="model")
    assert (run.status, run.error, run.steps) == ("failed", "The Rigi has to do.", 1)
    assert run.usage["requests"] == 2  # What judging cost is a part of it.


@pytest.mark.spec("11.5")
@pytest.mark.parametrize(
    "judgement",
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
async def test_a_judgement_that_cannot_be_read_leaves_it_to_the_rules(
    sqlite: Database, tmp_path: Path, judgement: Any
) -> None:
    climber = Climber([up()] * 3, [judgement] * 3)
    run = await climbing(sqlite, tmp_path, climber, review="model")
    assert run.status == "completed"
    (said,) = advice(climber.asked[-1].turns)
    assert "The same call of climb keeps failing" in said


@pytest.mark.spec("11.5")
async def test_however_often_a_model_says_to_go_on_there_is_an_end(sqlite: Database, tmp_path: Path) -> None:
    climber = Climber([up()] * 50, ['{"verdict": "continue"}'] * 50)
    run = await climbing(sqlite, tmp_path, climber, review="model")
    assert run.status == "failed"
    assert run.error is not None
    assert run.error.startswith("tools kept failing")

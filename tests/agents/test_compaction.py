"""What an agent has in mind survives restarts and stays within bounds; what is left out of it can be read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import Village, agent, village
from tests.agents.chaos.job_agent import elsewhere
from tests.agents.crashing_database import Mortal
from tests.agents.scripted_sessions import at_rest
from toolspace import tool
from toolspace.agents import compaction, cycle_transactions
from toolspace.agents.agent import Agent
from toolspace.agents.cycle_transactions import SessionLease
from toolspace.config.agent_settings import ConsciousnessSettings
from toolspace.core.model import ModelRequest, ModelTurn, ResultsTurn, UserTurn
from toolspace.errors import ModelError, StorageError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import runs

LONG = "lorem ipsum " * 200
"""More than 400 tokens."""


@tool(visible=False)
def look(n: int) -> str:
    """Gives much."""
    return f"result {n}: {LONG}"


class Thoughtful:
    """Makes a call in each cycle and says something; summarises when it is asked to."""

    def __init__(self, *, summary: Any = "the gist of it") -> None:
        self.model = ScriptedModel(self._say)
        self._summary = summary
        self.next: list[Any] = []

    @property
    def requests(self) -> list[ModelRequest]:
        return [one for one in self.model.requests if not is_summary(one)]

    @property
    def summarised(self) -> list[str]:
        """What it was given to summarise."""
        return [text_of(one.turns[0]) for one in self.model.requests if is_summary(one)]

    def _say(self, request: ModelRequest) -> Any:
        if is_summary(request):
            if isinstance(self._summary, ModelError):
                raise self._summary
            return self._summary
        if isinstance(request.turns[-1], ResultsTurn):
            return "Seen."
        return self.next.pop(0) if self.next else call("look", {"n": len(self.model.requests)})


def is_summary(request: ModelRequest) -> bool:
    return request.system.startswith("You keep the memory of an agent")


def text_of(turn: Any) -> str:
    assert isinstance(turn, UserTurn)
    return turn.text


def mindful(thoughtful: Thoughtful, *, max_tokens: int = 1_200, recent: int = 2) -> Agent:
    return agent(
        "ada", thoughtful.model, consciousness=ConsciousnessSettings(max_tokens=max_tokens, min_recent_cycles=recent)
    )


async def cycles(town: Village, *numbers: int) -> None:
    for number in numbers:
        await town.push(f"event {number}")
        await at_rest(town)


@pytest.mark.spec("11.4")
async def test_older_cycles_are_summarised_and_archived(database: Database, tmp_path: Path) -> None:
    ada = Thoughtful()
    async with village(database, mindful(ada), tools=[look], folder=tmp_path, owns=False) as town:
        await cycles(town, 1, 2)
        assert ada.summarised == []
        await cycles(town, 3)
        assert len(ada.summarised) == 1
        assert {row.cycle for row in await town.history()} == {2, 3}
        await cycles(town, 4)
    first, *rest = ada.requests[-2].turns
    assert text_of(first) == (
        "SUMMARY OF EARLIER CYCLES:\nthe gist of it\n\n"
        "ARCHIVES of those cycles, for session_archive_read: cycles-000001-000001.md"
    )
    assert "event 2" in text_of(rest[0])
    archived = (tmp_path / "ada" / "cycles-000001-000001.md").read_text()
    assert "event 1" in archived
    assert "→ look" in archived
    assert LONG in archived
    assert (tmp_path / "ada" / "cycles-000001-000001.md").stat().st_mode & 0o077 == 0
    assert "event 1" in ada.summarised[0]


@pytest.mark.spec("11.4")
async def test_the_latest_cycles_stay_whole_however_long_they_are(sqlite: Database, tmp_path: Path) -> None:
    ada = Thoughtful()
    async with village(sqlite, mindful(ada, max_tokens=1, recent=3), tools=[look], folder=tmp_path, owns=False) as town:
        await cycles(town, 1, 2, 3, 4, 5)
        assert [row.cycle for row in await town.history()] == [3] * 4 + [4] * 4 + [5] * 4


@pytest.mark.spec("11.4")
async def test_a_summary_is_made_of_the_one_before_and_what_came_since(sqlite: Database, tmp_path: Path) -> None:
    ada = Thoughtful()
    async with village(sqlite, mindful(ada, recent=1), tools=[look], folder=tmp_path, owns=False) as town:
        await cycles(town, 1, 2, 3, 4, 5, 6)
        session = text_of(ada.requests[-2].turns[0])
    assert len(ada.summarised) > 1
    assert ada.summarised[-1].startswith("SUMMARY SO FAR:\nthe gist of it\n\n## Cycle")
    assert "session_archive_read" not in ada.summarised[-1]
    archives = sorted(one.name for one in (tmp_path / "ada").iterdir())
    named = session.rpartition("session_archive_read: ")[2].split(", ")
    assert set(named) <= set(archives)
    assert len(named) > 1


@pytest.mark.spec("11.4")
async def test_without_a_model_a_summary_says_how_each_cycle_began(database: Database, tmp_path: Path) -> None:
    ada = Thoughtful(summary=ModelError("unavailable", "no model"))
    async with village(database, mindful(ada, recent=1), tools=[look], folder=tmp_path, owns=False) as town:
        await cycles(town, 1, 2, 3, 4, 5, 6)
        summary = text_of(ada.requests[-2].turns[0])
    assert "- cycle 1: INBOX: [service evt_" in summary
    assert '"event 1"' in summary
    assert '"event 3"' in summary
    assert summary.count("ARCHIVES") == 1


@pytest.mark.spec("11.4")
async def test_calls_and_their_results_are_never_torn_apart(sqlite: Database, tmp_path: Path) -> None:
    ada = Thoughtful()
    async with village(
        sqlite, mindful(ada, max_tokens=500, recent=1), tools=[look], folder=tmp_path, owns=False
    ) as town:
        await cycles(town, *range(1, 9))
    for request in ada.requests:
        for before, turn in zip([None, *request.turns], [*request.turns, None], strict=True):
            asked = before.calls if isinstance(before, ModelTurn) else ()
            answered = turn.results if isinstance(turn, ResultsTurn) else ()
            assert [one.id for one in asked] == [one.id for one in answered]


@pytest.mark.spec("11.4")
@pytest.mark.spec("10.6")
async def test_an_archive_can_be_read_from_inside_a_cycle(database: Database, tmp_path: Path) -> None:
    ada = Thoughtful()
    async with village(database, mindful(ada), tools=[look], folder=tmp_path, owns=False) as town:
        await cycles(town, 1, 2, 3)
        ada.next.append(call("session_archive_read", {"file": "cycles-000001-000001.md"}))
        await cycles(town, 4)
    read = ada.requests[-1].turns[-1]
    assert isinstance(read, ResultsTurn)
    assert read.results[0].text == (tmp_path / "ada" / "cycles-000001-000001.md").read_text()


@pytest.mark.spec("11.4")
async def test_who_is_killed_while_condensing_condenses_again(database: Database, tmp_path: Path) -> None:
    ada = Thoughtful()
    async with village(database, mindful(ada, max_tokens=100_000), tools=[look], folder=tmp_path, owns=False) as town:
        await cycles(town, 1, 2, 3)
        before = await town.history()

    async def settle(ledger: Ledger) -> bool:
        session = await Ledger(database).commit(cycle_transactions.acquire, town.agent, ledger.node_id)
        assert session is not None
        lease = SessionLease(town.agent, town.agent, session.token)
        try:
            limits = ConsciousnessSettings(max_tokens=1, min_recent_cycles=2)
            return await compaction.compact(ledger, lease, ada.model, limits, archive_dir=tmp_path / "ada")
        finally:
            await Ledger(database).commit(cycle_transactions.release, lease)

    mortal = Mortal(database)
    mortal.die_at(1, lost=True)
    with pytest.raises(StorageError):
        await settle(Ledger(mortal))
    (archive,) = (tmp_path / "ada").iterdir()
    written = archive.read_text()
    assert len(await town.ledger.read(_history_of(town))) == len(before)
    assert await settle(Ledger(database))
    assert [one.read_text() for one in (tmp_path / "ada").iterdir()] == [written]
    assert not await settle(Ledger(database))


def _history_of(town: Village) -> Any:
    from toolspace.storage.queries import sessions

    return lambda: sessions.list_turns(town.agent)


@pytest.mark.spec("11.4")
async def test_what_cannot_be_archived_stays_in_mind(sqlite: Database, tmp_path: Path) -> None:
    (tmp_path / "ada").write_text("in the way")
    ada = Thoughtful()
    async with village(sqlite, mindful(ada), tools=[look], folder=tmp_path, owns=False) as town:
        await cycles(town, 1, 2, 3, 4)
        assert {row.cycle for row in await town.history()} == {1, 2, 3, 4}
        assert [run.status for run in await town.runs()] == ["completed"] * 4


@pytest.mark.spec("11.4")
@pytest.mark.spec("6.8")
async def test_a_run_that_waits_is_not_condensed_and_goes_on(database: Database, tmp_path: Path) -> None:
    ask = elsewhere("askBoss", "external", pauses_run=True, visible=False)
    ada = Thoughtful()
    async with village(database, mindful(ada, recent=1), tools=[look, ask], folder=tmp_path, owns=False) as town:
        ada.next.append(call("askBoss", {"n": "1"}))
        await cycles(town, 1, 2, 3, 4, 5)
        assert 1 in {row.cycle for row in await town.history()}
        assert 2 not in {row.cycle for row in await town.history()}
        (asked,) = await town.open_calls()
        await town.submit(asked.call_id, {"boss": "yes"})
        await at_rest(town)
        assert '"boss":"yes"' in str(ada.requests[-1].turns).replace(" ", "")
        run = await town.ledger.read(runs.find, asked.run_id)
        assert run is not None
        assert run.status == "completed"


@pytest.mark.spec("11.4")
async def test_what_an_agent_has_in_mind_survives_a_restart(database: Database, tmp_path: Path) -> None:
    ada = Thoughtful()
    for numbers in ((1, 2, 3), (4,)):
        async with village(database, mindful(ada), tools=[look], folder=tmp_path, owns=False) as town:
            await cycles(town, *numbers)
    told = "\n".join(turn.text for turn in ada.requests[-1].turns if isinstance(turn, UserTurn))
    assert told.startswith("SUMMARY OF EARLIER CYCLES:\nthe gist of it")
    assert [f"event {n}" in told for n in (1, 2, 3, 4)] == [False, True, True, True]

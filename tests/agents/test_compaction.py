"""The stored conversation survives restarts and stays below its limit; removed parts can be read from archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, agent, run_agents
from tests.agents.chaos.job_agent import external_tool
from tests.agents.crashing_database import CrashingDatabase
from tests.agents.scripted_sessions import wait_until_done
from toolspace import tool
from toolspace.agents import compaction, session_transactions
from toolspace.agents.agent import Agent
from toolspace.agents.session_transactions import SessionLease
from toolspace.config.agent_settings import ConsciousnessSettings
from toolspace.core.language_model import ModelRequest, ModelTurn, ResultsTurn, UserTurn
from toolspace.errors import ModelError, StorageError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import runs, sessions

LONG = "lorem ipsum " * 200
"""More than 400 tokens."""


@tool(visible=False)
def look(n: int) -> str:
    """Returns a long text."""
    return f"result {n}: {LONG}"


class CompactedAgentModel:
    """Makes one call in each cycle, and summarizes on request."""

    def __init__(self, *, summary: Any = "the gist of it") -> None:
        self.model = ScriptedModel(self._respond)
        self._summary = summary
        self.next: list[Any] = []

    @property
    def requests(self) -> list[ModelRequest]:
        return [request for request in self.model.requests if not is_summary(request)]

    @property
    def transcripts(self) -> list[str]:
        """The transcripts that it was asked to summarize."""
        return [text_of(request.turns[0]) for request in self.model.requests if is_summary(request)]

    def _respond(self, request: ModelRequest) -> Any:
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


def compacted_agent(model: CompactedAgentModel, *, max_tokens: int = 1_200, recent: int = 2) -> Agent:
    return agent(
        "ada", model.model, consciousness=ConsciousnessSettings(max_tokens=max_tokens, min_recent_cycles=recent)
    )


async def run_cycles(harness: AgentHarness, *numbers: int) -> None:
    for number in numbers:
        await harness.push_event(f"event {number}")
        await wait_until_done(harness)


@pytest.mark.spec("11.4")
async def test_older_cycles_are_summarized_and_archived(database: Database, tmp_path: Path) -> None:
    ada = CompactedAgentModel()
    async with run_agents(database, compacted_agent(ada), tools=[look], session_dir=tmp_path) as harness:
        await run_cycles(harness, 1, 2)
        assert ada.transcripts == []
        await run_cycles(harness, 3)
        assert len(ada.transcripts) == 1
        assert {row.cycle for row in await harness.history()} == {2, 3}
        await run_cycles(harness, 4)
    first, *rest = ada.requests[-2].turns
    assert text_of(first) == (
        "SUMMARY OF EARLIER CYCLES:\nthe gist of it\n\n"
        "ARCHIVES of those cycles, for session_archive_read: cycles-000001-000001.md"
    )
    assert "event 2" in text_of(rest[0])
    archive_text = (tmp_path / "ada" / "cycles-000001-000001.md").read_text()
    assert "event 1" in archive_text
    assert "→ look" in archive_text
    assert LONG in archive_text
    assert (tmp_path / "ada" / "cycles-000001-000001.md").stat().st_mode & 0o077 == 0
    assert "event 1" in ada.transcripts[0]


@pytest.mark.spec("11.4")
async def test_recent_cycles_are_never_compacted(sqlite: Database, tmp_path: Path) -> None:
    ada = CompactedAgentModel()
    async with run_agents(
        sqlite, compacted_agent(ada, max_tokens=1, recent=3), tools=[look], session_dir=tmp_path
    ) as harness:
        await run_cycles(harness, 1, 2, 3, 4, 5)
        assert [row.cycle for row in await harness.history()] == [3] * 4 + [4] * 4 + [5] * 4


@pytest.mark.spec("11.4")
async def test_a_new_summary_replaces_the_previous_one_and_the_cycles_since(sqlite: Database, tmp_path: Path) -> None:
    ada = CompactedAgentModel()
    async with run_agents(sqlite, compacted_agent(ada, recent=1), tools=[look], session_dir=tmp_path) as harness:
        await run_cycles(harness, 1, 2, 3, 4, 5, 6)
        session = text_of(ada.requests[-2].turns[0])
    assert len(ada.transcripts) > 1
    assert ada.transcripts[-1].startswith("SUMMARY SO FAR:\nthe gist of it\n\n## Cycle")
    assert "session_archive_read" not in ada.transcripts[-1]
    archives = sorted(path.name for path in (tmp_path / "ada").iterdir())
    archive_names = session.rpartition("session_archive_read: ")[2].split(", ")
    assert set(archive_names) <= set(archives)
    assert len(archive_names) > 1


@pytest.mark.spec("11.4")
async def test_if_the_model_fails_the_summary_has_the_first_line_of_each_cycle(
    database: Database, tmp_path: Path
) -> None:
    ada = CompactedAgentModel(summary=ModelError("unavailable", "no model"))
    async with run_agents(database, compacted_agent(ada, recent=1), tools=[look], session_dir=tmp_path) as harness:
        await run_cycles(harness, 1, 2, 3, 4, 5, 6)
        summary = text_of(ada.requests[-2].turns[0])
    assert "- cycle 1: INBOX: [service evt_" in summary
    assert '"event 1"' in summary
    assert '"event 3"' in summary
    assert summary.count("ARCHIVES") == 1


@pytest.mark.spec("11.4")
async def test_compaction_never_separates_a_call_from_its_result(sqlite: Database, tmp_path: Path) -> None:
    ada = CompactedAgentModel()
    async with run_agents(
        sqlite, compacted_agent(ada, max_tokens=500, recent=1), tools=[look], session_dir=tmp_path
    ) as harness:
        await run_cycles(harness, *range(1, 9))
    for request in ada.requests:
        for before, turn in zip([None, *request.turns], [*request.turns, None], strict=True):
            previous_calls = before.calls if isinstance(before, ModelTurn) else ()
            results = turn.results if isinstance(turn, ResultsTurn) else ()
            assert [model_call.id for model_call in previous_calls] == [result.id for result in results]


@pytest.mark.spec("11.4")
@pytest.mark.spec("10.6")
async def test_a_cycle_can_read_an_archive(database: Database, tmp_path: Path) -> None:
    ada = CompactedAgentModel()
    async with run_agents(database, compacted_agent(ada), tools=[look], session_dir=tmp_path) as harness:
        await run_cycles(harness, 1, 2, 3)
        ada.next.append(call("session_archive_read", {"file": "cycles-000001-000001.md"}))
        await run_cycles(harness, 4)
    read = ada.requests[-1].turns[-1]
    assert isinstance(read, ResultsTurn)
    assert read.results[0].text == (tmp_path / "ada" / "cycles-000001-000001.md").read_text()


@pytest.mark.spec("11.4")
async def test_compaction_that_was_killed_runs_again(database: Database, tmp_path: Path) -> None:
    ada = CompactedAgentModel()
    async with run_agents(
        database, compacted_agent(ada, max_tokens=100_000), tools=[look], session_dir=tmp_path
    ) as harness:
        await run_cycles(harness, 1, 2, 3)
        before = await harness.history()

    async def settle(ledger: Ledger) -> bool:
        session = await Ledger(database).write(
            sessions.acquire_lease, harness.agent, ledger.node_id, lease_ms=session_transactions.LEASE_MS
        )
        assert session is not None
        lease = SessionLease(harness.agent, harness.agent, session.token)
        try:
            limits = ConsciousnessSettings(max_tokens=1, min_recent_cycles=2)
            return await compaction.compact(ledger, lease, ada.model, limits, archive_dir=tmp_path / "ada")
        finally:
            await Ledger(database).commit(session_transactions.release, lease)

    crashing_database = CrashingDatabase(database)
    crashing_database.crash_at_write(1, loses_write=True)
    with pytest.raises(StorageError):
        await settle(Ledger(crashing_database))
    (archive,) = (tmp_path / "ada").iterdir()
    archive_text = archive.read_text()
    assert len(await harness.ledger.read(_history_of(harness))) == len(before)
    assert await settle(Ledger(database))
    assert [path.read_text() for path in (tmp_path / "ada").iterdir()] == [archive_text]
    assert not await settle(Ledger(database))


def _history_of(harness: AgentHarness) -> Any:
    from toolspace.storage.queries import sessions

    return lambda: sessions.list_turns(harness.agent)


@pytest.mark.spec("11.4")
async def test_cycles_that_cannot_be_archived_are_not_removed(sqlite: Database, tmp_path: Path) -> None:
    (tmp_path / "ada").write_text("in the way")
    ada = CompactedAgentModel()
    async with run_agents(sqlite, compacted_agent(ada), tools=[look], session_dir=tmp_path) as harness:
        await run_cycles(harness, 1, 2, 3, 4)
        assert {row.cycle for row in await harness.history()} == {1, 2, 3, 4}
        assert [run.status for run in await harness.runs()] == ["completed"] * 4


@pytest.mark.spec("11.4")
@pytest.mark.spec("6.8")
async def test_a_paused_run_is_not_compacted_and_continues(database: Database, tmp_path: Path) -> None:
    ask = external_tool("askBoss", "external", pauses_run=True, visible=False)
    ada = CompactedAgentModel()
    async with run_agents(database, compacted_agent(ada, recent=1), tools=[look, ask], session_dir=tmp_path) as harness:
        ada.next.append(call("askBoss", {"n": "1"}))
        await run_cycles(harness, 1, 2, 3, 4, 5)
        assert 1 in {row.cycle for row in await harness.history()}
        assert 2 not in {row.cycle for row in await harness.history()}
        (open_call,) = await harness.open_calls()
        await harness.submit(open_call.call_id, {"boss": "yes"})
        await wait_until_done(harness)
        assert '"boss":"yes"' in str(ada.requests[-1].turns).replace(" ", "")
        run = await harness.ledger.read(runs.find, open_call.run_id)
        assert run is not None
        assert run.status == "completed"


@pytest.mark.spec("11.4")
async def test_the_conversation_survives_a_restart(database: Database, tmp_path: Path) -> None:
    ada = CompactedAgentModel()
    for numbers in ((1, 2, 3), (4,)):
        async with run_agents(database, compacted_agent(ada), tools=[look], session_dir=tmp_path) as harness:
            await run_cycles(harness, *numbers)
    text = "\n".join(turn.text for turn in ada.requests[-1].turns if isinstance(turn, UserTurn))
    assert text.startswith("SUMMARY OF EARLIER CYCLES:\nthe gist of it")
    assert [f"event {n}" in text for n in (1, 2, 3, 4)] == [False, True, True, True]

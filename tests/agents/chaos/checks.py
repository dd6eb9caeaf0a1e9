"""What must be true once every job is done, however often processes were killed meanwhile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.agents.chaos.job_agent import effects_in
from toolspace.core import inbox_text
from toolspace.core.model import ModelTurn, ResultsTurn, UserTurn
from toolspace.storage.database import Database, Program, Row
from toolspace.storage.queries import sessions


def _rows(statement: str, *values: Any) -> Program[list[Row]]:
    return (yield statement, values)


async def _ask(database: Database, statement: str, *values: Any) -> list[Row]:
    return await database.read(lambda: _rows(statement, *values))


async def said(database: Database) -> list[str]:
    """What clerks have said, in order."""
    rows = await _ask(
        database,
        "SELECT content FROM messages WHERE kind = 'message' AND status = 'complete' AND content NOT LIKE ? "
        "ORDER BY space_id, seq",
        '"job %',
    )
    return [row[0].strip('"') for row in rows]


def wanted(jobs: Mapping[str, str]) -> list[str]:
    """What the clerk has to say, by the jobs: kinds by their numbers."""
    answers = [f"answer to {number}" for number in jobs]
    return answers + [f"planned {number}" for number, kind in jobs.items() if kind == "plan"]


async def settled(database: Database, jobs: Mapping[str, str], *, plans: bool = True) -> bool:
    """Whether everything was said, and nobody thinks any more; `plans`: also what was planned for later."""
    if set(wanted(jobs) if plans else wanted(jobs)[: len(jobs)]) - set(await said(database)):
        return False
    thinking = await _ask(database, "SELECT 1 FROM sessions WHERE run_id IS NOT NULL OR node_id IS NOT NULL")
    waiting = await _ask(database, "SELECT 1 FROM inbox WHERE status <> 'processed'")
    return not thinking and not waiting


async def check(database: Database, jobs: Mapping[str, str], book: Path, *agents: str, stalled: bool = False) -> None:
    """Raises where something was lost, done twice, or left open.

    `stalled`: a process may have been in the middle of an effect, and have it after another was told that nobody knows.
    Then the job has two; no call has.
    """
    assert Counter(await said(database)) == Counter(wanted(jobs))
    effects = Counter(effects_in(book).values())
    asked = {number for number, kind in jobs.items() if kind == "plain"}
    assert set(effects) == asked
    assert stalled or effects.total() == len(asked), effects.most_common(3)
    await _nothing_open(database)
    for agent in agents:
        await _history(database, agent)


async def _nothing_open(database: Database) -> None:
    for table, good in (
        ("runs", ("completed",)),
        ("inbox", ("processed",)),
        ("plans", ("completed",)),
        ("messages", ("complete", "error")),
        ("calls", ("completed", "failed", "resolved", "canceled")),
    ):
        rows = await _ask(database, f"SELECT status, COUNT(*) FROM {table} GROUP BY status")
        assert {row[0] for row in rows} <= set(good), f"{table}: {rows}"
    rows = await _ask(database, "SELECT id, node_id, run_id FROM sessions WHERE run_id IS NOT NULL")
    assert not rows, rows


async def _history(database: Database, agent: str) -> None:
    rows = await database.read(lambda: sessions.list_turns(agent))
    told: Counter[str] = Counter()
    inline: set[str] = set()
    for place, row in enumerate(rows):
        turn = row.stored.turn
        if isinstance(turn, UserTurn) and turn.text.startswith("INBOX:"):
            told.update(line.event_id for line in inbox_text.parse(turn.text))
        if isinstance(turn, ModelTurn):
            assert len(turn.calls) == len(row.stored.call_ids)
            if turn.calls:
                following = rows[place + 1].stored.turn if place + 1 < len(rows) else None
                assert isinstance(following, ResultsTurn), f"no results behind turn {row.seq}"
                assert [one.id for one in following.results] == [one.id for one in turn.calls]
                assert not any(re.match(r"\(no result", one.text) for one in following.results), following
                given = zip(row.stored.call_ids, following.results, strict=True)
                inline |= {f"tool_result:{call_id}" for call_id, answer in given if '"boss"' in answer.text}
        if place and rows[place - 1].run_id == row.run_id:
            assert row.seq == rows[place - 1].seq + 1, f"a turn is missing before {row.seq}"
    twice = [event for event, count in told.items() if count > 1 or event in inline]
    assert not twice, f"told twice: {twice}"
    events = {row[0] for row in await _ask(database, "SELECT event_id FROM inbox WHERE agent_entity_id = ?", agent)}
    lost = {event for event in events - set(told) if not event.startswith("tool_result:")}
    assert not lost, f"never told: {sorted(lost)[:5]}"

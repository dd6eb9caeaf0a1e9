"""Checks what must be true when every job is done, however often processes were killed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.agents.chaos.job_agent import read_effects
from toolspace.core import inbox_text
from toolspace.core.language_model import ModelTurn, ResultsTurn, UserTurn
from toolspace.storage.database import Database, Program, Row
from toolspace.storage.queries import sessions


def _rows(statement: str, *values: Any) -> Program[list[Row]]:
    return (yield statement, values)


async def _query(database: Database, statement: str, *values: Any) -> list[Row]:
    return await database.read(lambda: _rows(statement, *values))


async def list_sent_texts(database: Database) -> list[str]:
    """The messages of the agents, in order."""
    rows = await _query(
        database,
        "SELECT content FROM messages WHERE kind = 'message' AND status = 'complete' AND content NOT LIKE ? "
        "ORDER BY space_id, seq",
        '"job %',
    )
    return [row[0].strip('"') for row in rows]


def expected_texts(jobs: Mapping[str, str]) -> list[str]:
    """The messages that the agents must send for these jobs: kinds by number."""
    answers = [f"answer to {number}" for number in jobs]
    return answers + [f"planned {number}" for number, kind in jobs.items() if kind == "plan"]


async def is_done(database: Database, jobs: Mapping[str, str], *, plans: bool = True) -> bool:
    """Whether every message was sent and no session is active. `plans`: also the messages of plans."""
    expected = expected_texts(jobs) if plans else expected_texts(jobs)[: len(jobs)]
    if set(expected) - set(await list_sent_texts(database)):
        return False
    active = await _query(database, "SELECT 1 FROM sessions WHERE run_id IS NOT NULL OR node_id IS NOT NULL")
    waiting_rows = await _query(database, "SELECT 1 FROM inbox WHERE status <> 'processed'")
    return not active and not waiting_rows


async def check(
    database: Database, jobs: Mapping[str, str], effects_file: Path, *agents: str, has_stalled: bool = False
) -> None:
    """Raises if something was lost, done twice, or left open.

    `has_stalled`: a process may have stalled during an effect, and have it after another one was told "interrupted".
    Then the job has two effects, but no call has.
    """
    assert Counter(await list_sent_texts(database)) == Counter(expected_texts(jobs))
    effects = Counter(read_effects(effects_file).values())
    plain_jobs = {number for number, kind in jobs.items() if kind == "plain"}
    assert set(effects) == plain_jobs
    assert has_stalled or effects.total() == len(plain_jobs), effects.most_common(3)
    await _check_nothing_open(database)
    await _check_call_events(database)
    for agent in agents:
        for (session_id,) in await _query(
            database, "SELECT id FROM sessions WHERE agent_entity_id = ? AND kind = 'agent'", agent
        ):
            await _check_history(database, session_id)


async def _check_nothing_open(database: Database) -> None:
    for table, allowed in (
        ("runs", ("completed",)),
        ("inbox", ("processed",)),
        ("plans", ("completed",)),
        ("messages", ("complete", "error")),
        ("calls", ("completed", "failed", "resolved", "canceled")),
    ):
        rows = await _query(database, f"SELECT status, COUNT(*) FROM {table} GROUP BY status")
        assert {row[0] for row in rows} <= set(allowed), f"{table}: {rows}"
    rows = await _query(database, "SELECT id, node_id, run_id FROM sessions WHERE run_id IS NOT NULL")
    assert not rows, rows


async def _check_call_events(database: Database) -> None:
    """Every call starts once on each stream, is ready once unless the model did not finish it, and ends once."""
    rows = await _query(database, "SELECT stream, type, data FROM events WHERE type LIKE 'tool.%' ORDER BY stream, id")
    types: dict[tuple[str, str], list[str]] = {}
    for stream, type, data in rows:
        types.setdefault((stream, json.loads(data)["toolCallId"]), []).append(type.removeprefix("tool."))
    for key, names in types.items():
        order = r"started( streaming)*( ready( streaming| progress)*( done| error)| error)"
        assert re.fullmatch(order, " ".join(names)), (key, names)


async def _check_history(database: Database, session_id: str) -> None:
    rows = await database.read(lambda: sessions.list_turns(session_id))
    event_counts: Counter[str] = Counter()
    inline_results: set[str] = set()
    for index, row in enumerate(rows):
        turn = row.stored_turn.turn
        if isinstance(turn, UserTurn) and turn.text.startswith("INBOX:"):
            event_counts.update(line.event_id for line in inbox_text.parse(turn.text))
        if isinstance(turn, ModelTurn):
            assert len(turn.calls) == len(row.stored_turn.call_ids)
            if turn.calls:
                next_turn = rows[index + 1].stored_turn.turn if index + 1 < len(rows) else None
                assert isinstance(next_turn, ResultsTurn), f"no results behind turn {row.seq}"
                assert [result.id for result in next_turn.results] == [model_call.id for model_call in turn.calls]
                assert not any(re.match(r"\(no result", result.text) for result in next_turn.results), next_turn
                pairs = zip(row.stored_turn.call_ids, next_turn.results, strict=True)
                inline_results |= {f"tool_result:{call_id}" for call_id, result in pairs if '"boss"' in result.text}
        if index and rows[index - 1].run_id == row.run_id:
            assert row.seq == rows[index - 1].seq + 1, f"a turn is missing before {row.seq}"
    repeated_events = [event for event, count in event_counts.items() if count > 1 or event in inline_results]
    assert not repeated_events, f"in the conversation twice: {repeated_events}"
    event_rows = await _query(database, "SELECT event_id FROM inbox WHERE session_id = ?", session_id)
    events = {row[0] for row in event_rows}
    foreign_events = set(event_counts) - events
    assert not foreign_events, f"in the conversation of another session: {sorted(foreign_events)[:5]}"
    lost_events = {event for event in events - set(event_counts) if not event.startswith("tool_result:")}
    assert not lost_events, f"never in the conversation: {sorted(lost_events)[:5]}"

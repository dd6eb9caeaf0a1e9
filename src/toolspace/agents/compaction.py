"""Keeps what an agent has in mind within bounds: older cycles are summarised, and archived to a file that it reads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from toolspace.agents import cycle_transactions
from toolspace.agents.cycle_transactions import LeaseLost, SessionLease
from toolspace.core import json_text
from toolspace.core.model import (
    DEFAULT_SETTINGS,
    Model,
    ModelRequest,
    ModelSettings,
    ModelTurn,
    ResultsTurn,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import sessions
from toolspace.storage.queries.sessions import HistoryTurn

_log = logging.getLogger("toolspace.agents")
_LONGEST_TRANSCRIPT = 200_000
"""Characters that a model is given to summarise at once."""
_LONGEST_SUMMARY = 12_000
_MOST_ARCHIVES = 50
_ARCHIVES = "\n\nARCHIVES of those cycles, for session_archive_read: "
_LONGEST_RESULT = 2_000
"""Characters of one result in a transcript that is to be summarised; the archive has all of it."""

_SUMMARISE = """\
You keep the memory of an agent. Below is what it went through, in cycles, and the summary of what was before. Write \
the summary that replaces both: facts, decisions, promises, open questions, names and ids that it will need again, \
results that matter. Leave out what is settled and will not come up again. Plain text, at most 800 words."""


async def compact(
    ledger: Ledger,
    hold: SessionLease,
    model: Model,
    *,
    max_tokens: int,
    min_recent_cycles: int,
    folder: Path,
    settings: ModelSettings = DEFAULT_SETTINGS,
) -> bool:
    """Condenses what a session remembers, if it is too much. Whether it did."""
    if await ledger.read(sessions.count_tokens, hold.session_id) <= max_tokens:
        return False
    rows = await ledger.read(sessions.list_turns, hold.session_id)
    # What a run that waits for a result was told and has said, it will need again, and not in other words.
    open_runs = await ledger.read(run_rows.list_open_of_agent, hold.agent_entity_id)
    old = _older([row for row in rows if row.run_id not in open_runs], min_recent_cycles)
    if not old:
        return False
    session = await ledger.read(sessions.find, hold.session_id)
    before, archives = _parts(session.summary if session is not None else None)
    name = f"cycles-{old[0].cycle:06d}-{old[-1].cycle:06d}.md"
    try:
        # The file first: whoever is cut off here writes the same file again.
        await asyncio.to_thread(_write, folder, name, render_transcript(old))
    except OSError as error:
        _log.warning("what an agent went through could not be archived, and stays as it is: %s", error)
        return False
    names = [*(one for one in archives if one != name), name][-_MOST_ARCHIVES:]
    summary = f"{await _summary(model, settings, before, old)}{_ARCHIVES}{', '.join(names)}"
    await ledger.commit(_condense, hold, old[-1].seq + 1, summary, open_runs)
    _log.info("session %s: cycles up to %d were condensed", hold.session_id, old[-1].cycle)
    return True


def render_transcript(rows: Sequence[HistoryTurn], *, longest_result: int | None = None) -> str:
    """What happened, for people and models to read."""
    parts: list[str] = []
    for cycle, turns in itertools.groupby(rows, key=lambda row: row.cycle):
        parts.append(f"## Cycle {cycle}")
        for row in turns:
            turn = row.stored.turn
            if isinstance(turn, UserTurn):
                parts.append(turn.text)
            elif isinstance(turn, ModelTurn):
                said = [turn.text] if turn.text else []
                parts.append("\n".join([*said, *(f"→ {one.name} {one.arguments}" for one in turn.calls)]))
            else:
                parts.append("\n".join(f"← {one.name}: {_cut(one.text, longest_result)}" for one in turn.results))
    return "\n\n".join(filter(None, parts)) + "\n"


def _older(rows: Sequence[HistoryTurn], min_recent_cycles: int) -> list[HistoryTurn]:
    cycles = list(dict.fromkeys(row.cycle for row in rows))
    recent = set(cycles[-min_recent_cycles:]) if min_recent_cycles else set[int]()
    # What one run is about stays together, also where it went on in a later cycle.
    runs = {row.run_id for row in rows if row.cycle in recent and row.run_id is not None}
    old: list[HistoryTurn] = []
    for row in rows:
        if row.cycle in recent or row.run_id in runs:
            break
        old.append(row)
    # Calls and their answers are not torn apart.
    while old and isinstance(old[-1].stored.turn, ModelTurn) and len(old) < len(rows):
        following = rows[len(old)].stored.turn
        if not isinstance(following, ResultsTurn):
            break
        old.pop()
    return old


def _parts(summary: str | None) -> tuple[str, list[str]]:
    """A summary without its last line, and the archives that are named there."""
    if summary is None or _ARCHIVES not in summary:
        return summary or "", []
    text, _, names = summary.rpartition(_ARCHIVES)
    return text, names.split(", ")


async def _summary(model: Model, settings: ModelSettings, before: str, rows: Sequence[HistoryTurn]) -> str:
    text = render_transcript(rows, longest_result=_LONGEST_RESULT)
    if len(text) > _LONGEST_TRANSCRIPT:
        text = f"{text[: _LONGEST_TRANSCRIPT // 2]}\n…\n{text[-_LONGEST_TRANSCRIPT // 2 :]}"
    told = f"SUMMARY SO FAR:\n{before}\n\n{text}" if before else text
    try:
        turn = await model.respond(ModelRequest(system=_SUMMARISE, turns=[UserTurn(told)], settings=settings))
        said = turn.text.strip()
    except ModelError as error:
        _log.warning("no model could summarise what an agent went through: %s", error)
        said = ""
    if not said:
        # Without a model: how each cycle began is better than nothing.
        firsts = [rows_[0] for rows_ in _by_cycle(rows)]
        lines = [f"- cycle {row.cycle}: {_cut(_text(row), 200)}" for row in firsts]
        said = "\n".join([*([before] if before else []), *lines])
    return json_text.storable_text(said[-_LONGEST_SUMMARY:])


def _by_cycle(rows: Sequence[HistoryTurn]) -> list[list[HistoryTurn]]:
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.cycle)]


def _text(row: HistoryTurn) -> str:
    turn = row.stored.turn
    return " ".join((turn.text if isinstance(turn, UserTurn | ModelTurn) else "").split())


def _cut(text: str, longest: int | None) -> str:
    return text if longest is None or len(text) <= longest else f"{text[:longest]}…"


def _condense(effects: Effects, hold: SessionLease, before: int, summary: str, besides: Sequence[str]) -> Program[None]:
    if not (yield from sessions.renew_lease(hold.session_id, hold.token, lease_ms=cycle_transactions.LEASE_MS)):
        raise LeaseLost(f'the session "{hold.session_id}" is held by another process')
    yield from sessions.replace_by_summary(hold.session_id, before=before, summary=summary, except_runs=besides)


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = folder / f".{name}.{os.getpid()}"
    # Private: it has all that was said.
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(file, "w", encoding="utf-8", errors="replace") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    beside.replace(folder / name)

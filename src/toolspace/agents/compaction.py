"""Limits the stored conversation of an agent: archives its older cycles to a file and replaces them by a summary.

The cycle runner calls it after each cycle, while it has the session's lease. `session_archive_read` reads the files.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from toolspace.agents import session_transactions
from toolspace.agents.history import render_transcript, shorten_middle, shorten_text
from toolspace.agents.model_quotas import ModelQuotas
from toolspace.agents.session_transactions import SessionLease
from toolspace.config.agent_settings import ConsciousnessSettings
from toolspace.core import json_text
from toolspace.core.language_model import (
    DEFAULT_SETTINGS,
    NO_USAGE,
    Model,
    ModelRequest,
    ModelSettings,
    ModelTurn,
    ResultsTurn,
    Usage,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import sessions
from toolspace.storage.queries.sessions import HistoryTurn

_log = logging.getLogger("toolspace.agents")
_MAX_TRANSCRIPT = 200_000
"""Characters that a model gets to summarize at once."""
_MAX_SUMMARY = 12_000
_MAX_ARCHIVES = 50
_ARCHIVES = "\n\nARCHIVES of those cycles, for session_archive_read: "
_MAX_RESULT = 2_000
"""Characters of one result in the transcript that is summarized; the archive has all of it."""

_SUMMARIZE = """\
You keep the memory of an agent. Below are its older cycles, and the summary of the cycles before them. Write the \
summary that replaces both: facts, decisions, promises, open questions, names and ids that it will need again, and \
important results. Leave out what is settled and will not come up again. Plain text, at most 800 words."""


async def compact(
    ledger: Ledger,
    lease: SessionLease,
    model: Model,
    limits: ConsciousnessSettings,
    *,
    archive_dir: Path,
    settings: ModelSettings = DEFAULT_SETTINGS,
    run_id: str | None = None,
    quotas: ModelQuotas | None = None,
) -> bool:
    """Compacts the conversation of a session if it is longer than `limits.max_tokens`. Returns whether it did.

    The summary is charged to `run_id`, the run of the last cycle, and to its `quotas`. If a daily budget is used up,
    the conversation stays as it is until a later cycle.
    """
    if await ledger.read(sessions.count_tokens, lease.session_id) <= limits.max_tokens:
        return False
    rows = await ledger.read(sessions.list_turns, lease.session_id)
    # A run that waits for a result needs its turns unchanged.
    open_runs = await ledger.read(run_rows.list_open_of_agent, lease.agent_entity_id)
    old_rows = _select_old([row for row in rows if row.run_id not in open_runs], limits.min_recent_cycles)
    if not old_rows:
        return False
    if quotas is not None and (charge := await quotas.find_exhausted()) is not None:
        _log.info("session %s: its older cycles are compacted later: %s", lease.session_id, charge.refusal)
        return False
    session = await ledger.read(sessions.find, lease.session_id)
    previous_summary, archives = _split_summary(session.summary if session is not None else None)
    name = f"cycles-{old_rows[0].cycle:06d}-{old_rows[-1].cycle:06d}.md"
    try:
        # The file comes first: after an interruption here, the same file is written again.
        await asyncio.to_thread(_write_archive, archive_dir, name, render_transcript(old_rows))
    except OSError as error:
        _log.warning("session %s: its older cycles could not be archived and stay: %s", lease.session_id, error)
        return False
    names = [*(archive for archive in archives if archive != name), name][-_MAX_ARCHIVES:]
    text, usage = await _summarize(model, settings, previous_summary, old_rows)
    if quotas is not None and run_id is not None and usage != NO_USAGE:
        await quotas.add(usage)
        await ledger.write(run_rows.set_usage, run_id, msgspec.to_builtins(quotas.budget.usage))
    summary = f"{text}{_ARCHIVES}{', '.join(names)}"
    await ledger.commit(_replace_by_summary, lease, old_rows[-1].seq + 1, summary, open_runs)
    _log.info("session %s: cycles up to %d were compacted", lease.session_id, old_rows[-1].cycle)
    return True


def _select_old(rows: Sequence[HistoryTurn], min_recent_cycles: int) -> list[HistoryTurn]:
    """The turns before the recent cycles."""
    cycles = list(dict.fromkeys(row.cycle for row in rows))
    recent_cycles = set(cycles[-min_recent_cycles:]) if min_recent_cycles else set[int]()
    # The turns of one run stay together, even if it continued in a later cycle.
    recent_runs = {row.run_id for row in rows if row.cycle in recent_cycles and row.run_id is not None}
    old_rows: list[HistoryTurn] = []
    for row in rows:
        if row.cycle in recent_cycles or row.run_id in recent_runs:
            break
        old_rows.append(row)
    # Calls and their results stay together.
    while old_rows and isinstance(old_rows[-1].stored_turn.turn, ModelTurn) and len(old_rows) < len(rows):
        next_turn = rows[len(old_rows)].stored_turn.turn
        if not isinstance(next_turn, ResultsTurn):
            break
        old_rows.pop()
    return old_rows


def _split_summary(summary: str | None) -> tuple[str, list[str]]:
    """The text of a stored summary, and the names of the archives after it."""
    if summary is None or _ARCHIVES not in summary:
        return summary or "", []
    text, _, names = summary.rpartition(_ARCHIVES)
    return text, names.split(", ")


async def _summarize(
    model: Model, settings: ModelSettings, previous_summary: str, rows: Sequence[HistoryTurn]
) -> tuple[str, Usage]:
    usage = NO_USAGE
    transcript = shorten_middle(render_transcript(rows, max_result=_MAX_RESULT), _MAX_TRANSCRIPT)
    prompt = f"SUMMARY SO FAR:\n{previous_summary}\n\n{transcript}" if previous_summary else transcript
    try:
        turn = await model.respond(ModelRequest(system=_SUMMARIZE, turns=[UserTurn(prompt)], settings=settings))
        summary, usage = turn.text.strip(), turn.usage
    except ModelError as error:
        _log.warning("%s could not summarize older cycles; keeping their first lines: %s", model.name, error)
        summary = ""
    if not summary:
        first_rows = [next(group) for _, group in itertools.groupby(rows, key=lambda row: row.cycle)]
        lines = [f"- cycle {row.cycle}: {shorten_text(_one_line(row), 200)}" for row in first_rows]
        summary = "\n".join([*([previous_summary] if previous_summary else []), *lines])
    return json_text.storable_text(summary[-_MAX_SUMMARY:]), usage


def _one_line(row: HistoryTurn) -> str:
    turn = row.stored_turn.turn
    return " ".join((turn.text if isinstance(turn, UserTurn | ModelTurn) else "").split())


def _replace_by_summary(
    effects: Effects, lease: SessionLease, before: int, summary: str, open_runs: Sequence[str]
) -> Program[None]:
    yield from session_transactions.renew(lease)
    yield from sessions.replace_by_summary(lease.session_id, before_seq=before, summary=summary, except_runs=open_runs)


def _write_archive(archive_dir: Path, name: str, text: str) -> None:
    archive_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = archive_dir / f".{name}.{os.getpid()}"
    # Readable by the owner only: it contains the whole conversation.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(archive_dir / name)

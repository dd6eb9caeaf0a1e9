"""Programs for sessions: what an agent, or one of its tasks, has in mind, and which process thinks for it now.

A session is held by one process at a time, under a lease. Whoever takes it gets the next token, and every write of a
cycle names the token: a process that was taken for dead, and is not, writes nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.model import Turn
from toolspace.storage.database import Program, Row

SessionKind = Literal["agent", "task", "reflection"]
_COLUMNS = (
    "id, agent_entity_id, kind, run_id, node_id, token, lease_until, cycle, last_seq, summary, agent_turns, attempts"
)


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One mind: its place in its history, and who thinks for it."""

    id: str
    agent_entity_id: str
    kind: SessionKind
    run_id: str | None
    """The run that is under way; one that is here and not held by anyone was cut off."""
    node_id: str | None
    token: int
    lease_until: int
    """Until when it is held; where nobody holds it, when it may be taken."""
    cycle: int
    last_seq: int
    summary: str | None
    """What is left of the cycles before the history begins."""
    agent_turns: int
    """How many cycles in a row only other agents gave rise to."""
    attempts: int
    """How often its run could not go on since the last turn that it remembers."""


class StoredTurn(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A turn as it is kept: with the ids under which its calls are made."""

    turn: Turn
    call_ids: tuple[str, ...] = ()


class HistoryTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the history."""

    seq: int
    cycle: int
    run_id: str | None
    stored: StoredTurn
    tokens: int
    at: int


class NewTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that is to be remembered."""

    stored: StoredTurn
    tokens: int
    run_id: str | None


def create(session_id: str, agent_entity_id: str, kind: SessionKind) -> Program[bool]:
    """Makes a session where there is none. Whether it is new."""
    rows = yield (
        f"INSERT INTO sessions ({_COLUMNS}, created_at) VALUES (?, ?, ?, NULL, NULL, 0, 0, 0, 0, NULL, 0, 0, ?) "
        "ON CONFLICT (id) DO NOTHING RETURNING id",
        (session_id, agent_entity_id, kind, now_ms()),
    )
    return bool(rows)


def find(session_id: str) -> Program[SessionRecord | None]:
    rows = yield f"SELECT {_COLUMNS} FROM sessions WHERE id = ?", (session_id,)
    return _session(rows[0]) if rows else None


def acquire_lease(session_id: str, node_id: str, *, lease_ms: int) -> Program[SessionRecord | None]:
    """Takes a session that nobody holds, or whose holder was not heard of in time. None where someone has it, or where
    it was put off."""
    now = now_ms()
    rows = yield (
        "UPDATE sessions SET node_id = ?, token = token + 1, lease_until = ? "
        f"WHERE id = ? AND (node_id = ? OR lease_until <= ?) RETURNING {_COLUMNS}",
        (node_id, now + lease_ms, session_id, node_id, now),
    )
    return _session(rows[0]) if rows else None


def renew_lease(session_id: str, token: int, *, lease_ms: int) -> Program[bool]:
    """Goes on holding a session. False where it was taken by another."""
    rows = yield (
        "UPDATE sessions SET lease_until = ? WHERE id = ? AND token = ? AND node_id IS NOT NULL RETURNING id",
        (now_ms() + lease_ms, session_id, token),
    )
    return bool(rows)


def renew_leases(held: Sequence[tuple[str, int]], *, lease_ms: int) -> Program[set[str]]:
    """Goes on holding sessions, each under its token; says which are held still."""
    kept: set[str] = set()
    for session_id, token in held:
        if (yield from renew_lease(session_id, token, lease_ms=lease_ms)):
            kept.add(session_id)
    return kept


def release_lease(session_id: str, token: int) -> Program[bool]:
    """Lets go of a session. Says whether it has an open run, which stays with it for whoever takes it next."""
    rows = yield (
        "UPDATE sessions SET node_id = NULL, lease_until = 0 WHERE id = ? AND token = ? RETURNING run_id",
        (session_id, token),
    )
    return bool(rows) and rows[0][0] is not None


def postpone(session_id: str, token: int, until: int) -> Program[bool]:
    """Lets go of a session whose run could not go on: nobody takes it before a time."""
    rows = yield (
        "UPDATE sessions SET node_id = NULL, lease_until = ?, attempts = attempts + 1 WHERE id = ? AND token = ? "
        "RETURNING id",
        (until, session_id, token),
    )
    return bool(rows)


def start_cycle(session_id: str, run_id: str, *, agent_turns: int) -> Program[int]:
    """A cycle begins, in this run; says which it is."""
    rows = yield (
        "UPDATE sessions SET run_id = ?, cycle = cycle + 1, agent_turns = ? WHERE id = ? RETURNING cycle",
        (run_id, agent_turns, session_id),
    )
    return rows[0][0]


def set_run(session_id: str, run_id: str) -> Program[None]:
    """A run that waited goes on."""
    yield "UPDATE sessions SET run_id = ? WHERE id = ?", (run_id, session_id)


def clear_run(session_id: str) -> Program[None]:
    """No run is under way any more."""
    yield "UPDATE sessions SET run_id = NULL WHERE id = ?", (session_id,)


def append_turns(session_id: str, cycle: int, turns: Sequence[NewTurn]) -> Program[int]:
    """Appends turns to the history; says the number of the last."""
    rows = yield (
        "UPDATE sessions SET last_seq = last_seq + ?, attempts = 0 WHERE id = ? RETURNING last_seq",
        (len(turns), session_id),
    )
    last: int = rows[0][0]
    now = now_ms()
    for seq, turn in enumerate(turns, last - len(turns) + 1):
        yield (
            "INSERT INTO history (session_id, seq, cycle, run_id, turn, tokens, at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (session_id, seq, cycle, turn.run_id, json_text.encode(turn.stored), turn.tokens, now),
        )
    return last


def list_turns(session_id: str, *, before: int | None = None, limit: int | None = None) -> Program[list[HistoryTurn]]:
    """What a session remembers, oldest first; `limit` takes the latest ones."""
    only, values = ("AND seq < ? ", (before,)) if before is not None else ("", ())
    if limit is None:
        rows = yield f"SELECT {_TURN} FROM history WHERE session_id = ? {only}ORDER BY seq", (session_id, *values)
        return [_remembered(row) for row in rows]
    rows = yield (
        f"SELECT {_TURN} FROM history WHERE session_id = ? {only}ORDER BY seq DESC LIMIT ?",
        (session_id, *values, limit),
    )
    return [_remembered(row) for row in reversed(rows)]


def list_turns_of_run(session_id: str, run_id: str) -> Program[list[HistoryTurn]]:
    """The turns of one run."""
    rows = yield (
        f"SELECT {_TURN} FROM history WHERE run_id = ? AND session_id = ? ORDER BY seq",
        (run_id, session_id),
    )
    return [_remembered(row) for row in rows]


def find_id_by_run(run_id: str) -> Program[str | None]:
    """The session that remembers a run."""
    rows = yield "SELECT session_id FROM history WHERE run_id = ? LIMIT 1", (run_id,)
    return rows[0][0] if rows else None


def replace_turn(session_id: str, seq: int, kept: StoredTurn) -> Program[None]:
    """Puts another turn in the place of one: what was awaited has come."""
    yield (
        "UPDATE history SET turn = ? WHERE session_id = ? AND seq = ?",
        (json_text.encode(kept), session_id, seq),
    )


def delete_turns_of_run(session_id: str, run_id: str) -> Program[None]:
    """Removes the turns of a run that came to nothing."""
    yield "DELETE FROM history WHERE run_id = ? AND session_id = ?", (run_id, session_id)


def replace_by_summary(session_id: str, *, before: int, summary: str, except_runs: Sequence[str] = ()) -> Program[None]:
    """Leaves only a summary of what was before a turn, and the turns of some runs."""
    marks = ", ".join("?" * len(except_runs))
    but = f" AND COALESCE(run_id, '') NOT IN ({marks})" if except_runs else ""
    yield f"DELETE FROM history WHERE session_id = ? AND seq < ?{but}", (session_id, before, *except_runs)
    yield "UPDATE sessions SET summary = ? WHERE id = ?", (summary, session_id)


def count_tokens(session_id: str) -> Program[int]:
    """How many tokens it takes to read all that a session remembers, about."""
    rows = yield "SELECT COALESCE(SUM(tokens), 0) FROM history WHERE session_id = ?", (session_id,)
    return int(rows[0][0])


def list_interrupted(*, limit: int) -> Program[list[str]]:
    """Sessions with a run that nobody goes on with: their process let go of them, or was not heard of in time."""
    rows = yield (
        "SELECT id FROM sessions WHERE run_id IS NOT NULL AND lease_until <= ? LIMIT ?",
        (now_ms(), limit),
    )
    return [row[0] for row in rows]


def list_with_waiting_inbox(*, limit: int) -> Program[list[tuple[str, int]]]:
    """Agents whose inbox has something that can be taken now and for whom nobody thinks, with how important it is."""
    now = now_ms()
    rows = yield (
        "SELECT s.id, (SELECT MIN(i.priority) FROM inbox i WHERE i.agent_entity_id = s.agent_entity_id "
        "AND i.status = 'pending' AND i.available_at <= ?) AS first FROM sessions s "
        "WHERE s.kind = 'agent' AND (s.node_id IS NULL OR s.lease_until < ?) AND EXISTS (SELECT 1 FROM inbox i "
        "WHERE i.agent_entity_id = s.agent_entity_id AND i.status = 'pending' AND i.available_at <= ?) LIMIT ?",
        (now, now, now, limit),
    )
    return [(row[0], row[1]) for row in rows]


def get_inbox_priorities(session_ids: Sequence[str]) -> Program[dict[str, int]]:
    """How important what can be taken now from the inboxes of agents is, by their sessions; the lowest comes first."""
    marks = ", ".join("?" * len(session_ids))
    rows = yield (
        "SELECT s.id, MIN(i.priority) FROM sessions s JOIN inbox i ON i.agent_entity_id = s.agent_entity_id "
        f"AND i.status = 'pending' AND i.available_at <= ? WHERE s.id IN ({marks}) GROUP BY s.id",
        (now_ms(), *session_ids),
    )
    return {row[0]: row[1] for row in rows}


def list_cycle_starts(session: SessionRecord, *, since: int, limit: int) -> Program[list[int]]:
    """When the latest cycles of a session began, after a time; oldest first."""
    rows = yield (
        "SELECT created_at FROM runs WHERE agent_entity_id = ? AND created_at > ? "
        "AND EXISTS (SELECT 1 FROM history WHERE history.run_id = runs.id AND history.session_id = ?) "
        "ORDER BY created_at DESC LIMIT ?",
        (session.agent_entity_id, since, session.id, limit),
    )
    return [row[0] for row in reversed(rows)]


def release_all_leases(except_node: str) -> Program[None]:
    """No other process lives: what they held is free."""
    yield "UPDATE sessions SET node_id = NULL, lease_until = 0 WHERE node_id <> ?", (except_node,)


_TURN = "seq, cycle, run_id, turn, tokens, at"
_decoder = msgspec.json.Decoder(StoredTurn)


def _remembered(row: Row) -> HistoryTurn:
    return HistoryTurn(
        seq=row[0], cycle=row[1], run_id=row[2], stored=_decoder.decode(row[3]), tokens=row[4], at=row[5]
    )


def _session(row: Row) -> SessionRecord:
    return SessionRecord(
        id=row[0],
        agent_entity_id=row[1],
        kind=row[2],
        run_id=row[3],
        node_id=row[4],
        token=row[5],
        lease_until=row[6],
        cycle=row[7],
        last_seq=row[8],
        summary=row[9],
        agent_turns=row[10],
        attempts=row[11],
    )

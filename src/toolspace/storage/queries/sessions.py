"""SQL programs for sessions: the conversation of an agent or of a background task, and which process runs it.

One process at a time holds the lease of a session. Each new lease has a higher token, and every write of a cycle names
its token: a process that was declared dead, but is not, can write nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import agent_of_session, scope_key_of, session_id_for
from toolspace.core.language_model import Turn
from toolspace.core.stored_records import AgentScope
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries import inbox
from toolspace.storage.queries.statement_builder import (
    Table,
    first_column,
    first_value,
    has_changed,
    insert_into,
    placeholders,
    where_clause,
)

SessionKind = Literal["agent", "task", "reflection"]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session: its position in its history, and its lease."""

    id: str
    agent_entity_id: str
    kind: SessionKind
    run_id: str | None
    """The run in progress. If nobody holds the lease, it was interrupted."""
    node_id: str | None
    token: int
    lease_until: int
    """The end of the lease; if nobody holds it, when the session may be leased again."""
    cycle: int
    last_seq: int
    summary: str | None
    """The summary of what compaction removed from the history."""
    agent_turns: int
    """How many cycles in a row were triggered by other agents only."""
    attempts: int
    """How often its run failed to continue since the last stored turn."""
    scope_key: str
    """`space:ID` or `user:ID`; empty for the main session of an agent. That of a task is that of its owner."""

    @property
    def owner_id(self) -> str:
        """The session of the agent that owns a task; of the agent's own sessions, the same session."""
        return session_id_for(self.agent_entity_id, self.scope_key)


class StoredTurn(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A turn with the ids of its calls."""

    turn: Turn
    call_ids: tuple[str, ...] = ()


class HistoryTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the history, with its position."""

    seq: int
    cycle: int
    run_id: str | None
    stored_turn: StoredTurn
    tokens: int
    at: int


class NewTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn to append to the history."""

    stored_turn: StoredTurn
    tokens: int
    run_id: str | None


_SESSION = Table("sessions", SessionRecord)
_decode_turn = msgspec.json.Decoder(StoredTurn).decode
_TURN = Table("history", HistoryTurn, columns={"stored_turn": "turn"}, decoders={"stored_turn": _decode_turn})
_APPEND_TURN = insert_into("history", ("session_id", *_TURN.columns))


def create(session_id: str, agent_entity_id: str, kind: SessionKind, *, scope_key: str = "") -> Program[bool]:
    """Creates a session. False if it exists."""
    counters = dict.fromkeys(("token", "lease_until", "cycle", "last_seq", "agent_turns", "attempts"), 0)
    now = yield from current_time()
    session = yield from _SESSION.insert(
        id=session_id,
        agent_entity_id=agent_entity_id,
        kind=kind,
        scope_key=scope_key,
        created_at=now,
        **counters,
    )
    return session is not None


def create_scoped(session_id: str) -> Program[None]:
    """Creates a session of an agent for a space or a person, unless it exists."""
    yield from create(session_id, agent_of_session(session_id), "agent", scope_key=scope_key_of(session_id))


def set_scope(agent_entity_id: str, agent_scope: AgentScope) -> Program[None]:
    """Stores with the main session how the sessions of the agent are separated."""
    update = "UPDATE sessions SET scope = ?, shares_memories = ? WHERE id = ?"
    yield update, (agent_scope.scope, int(agent_scope.shares_memories), agent_entity_id)


def find_scope(agent_entity_id: str) -> Program[AgentScope]:
    """How the sessions of an agent are separated. An agent that no process has ever run has one session."""
    rows = yield "SELECT scope, shares_memories FROM sessions WHERE id = ?", (agent_entity_id,)
    return AgentScope(rows[0][0], bool(rows[0][1])) if rows else AgentScope()


def delete_scope(scope_key: str) -> Program[None]:
    """Deletes the sessions of a space or a person, and everything that belongs to them."""
    select = "SELECT id FROM sessions WHERE scope_key = ? AND scope_key <> ''"
    for session_id in (yield from first_column(select, scope_key)):
        for table in ("goals", "memories", "plans", "tasks"):
            yield f"DELETE FROM {table} WHERE session_id = ?", (session_id,)
        yield from inbox.delete_all(agent_of_session(session_id), session_id=session_id)
        yield "DELETE FROM sessions WHERE id = ?", (session_id,)


def find(session_id: str) -> Program[SessionRecord | None]:
    return _SESSION.find("WHERE id = ?", session_id)


# The lease


def acquire_lease(session_id: str, node_id: str, *, lease_ms: int) -> Program[SessionRecord | None]:
    """Leases a session that nobody holds, or whose lease has ended. None if it is leased or postponed."""
    now = yield from current_time()
    assignments = "node_id = ?, token = token + 1, lease_until = ? WHERE id = ? AND (node_id = ? OR lease_until <= ?)"
    return (yield from _SESSION.update(assignments, node_id, now + lease_ms, session_id, node_id, now))


def renew_lease(session_id: str, token: int, *, lease_ms: int) -> Program[bool]:
    """Renews a lease. False if another process has the session now."""
    update = "UPDATE sessions SET lease_until = ? WHERE id = ? AND token = ? AND node_id IS NOT NULL"
    now = yield from current_time()
    return (yield from has_changed(update, now + lease_ms, session_id, token))


def renew_leases(leases: Sequence[tuple[str, int]], *, lease_ms: int) -> Program[set[str]]:
    """Renews leases, each a session id and its token; returns the ids of those that are still held."""
    renewed_ids: set[str] = set()
    for session_id, token in leases:
        if (yield from renew_lease(session_id, token, lease_ms=lease_ms)):
            renewed_ids.add(session_id)
    return renewed_ids


def release_lease(session_id: str, token: int) -> Program[bool]:
    """Ends a lease. Returns whether the session has a run in progress, for the process that leases it next."""
    update = "UPDATE sessions SET node_id = NULL, lease_until = 0 WHERE id = ? AND token = ? RETURNING run_id"
    return (yield from first_value(update, session_id, token)) is not None


def release_all_leases(except_node: str) -> Program[None]:
    """Ends the leases of all other processes: none of them is alive."""
    yield "UPDATE sessions SET node_id = NULL, lease_until = 0 WHERE node_id <> ?", (except_node,)


def postpone(session_id: str, token: int, until: int) -> Program[bool]:
    """Ends the lease of a session whose run failed to continue: nobody may lease it before a time."""
    assignments = "node_id = NULL, lease_until = ?, attempts = attempts + 1"
    return has_changed(f"UPDATE sessions SET {assignments} WHERE id = ? AND token = ?", until, session_id, token)


# The run in progress


def start_cycle(session_id: str, run_id: str, *, agent_turns: int) -> Program[int]:
    """Starts a cycle with this run; returns the number of the cycle."""
    update = "UPDATE sessions SET run_id = ?, cycle = cycle + 1, agent_turns = ? WHERE id = ? RETURNING cycle"
    return first_value(update, run_id, agent_turns, session_id)


def set_run(session_id: str, run_id: str) -> Program[None]:
    """A run that waited continues."""
    yield "UPDATE sessions SET run_id = ? WHERE id = ?", (run_id, session_id)


def clear_run(session_id: str) -> Program[None]:
    """No run is in progress any more."""
    yield "UPDATE sessions SET run_id = NULL WHERE id = ?", (session_id,)


def list_interrupted(*, limit: int) -> Program[list[str]]:
    """The ids of sessions with a run in progress and without a valid lease."""
    select = "SELECT id FROM sessions WHERE run_id IS NOT NULL AND lease_until <= ? LIMIT ?"
    now = yield from current_time()
    return (yield from first_column(select, now, limit))


def list_with_waiting_inbox(*, limit: int) -> Program[list[tuple[str, int]]]:
    """The sessions of agents that nobody runs and whose inbox has events to claim, with their highest priority."""
    main_sessions = yield from _list_waiting("agent_entity_id", "session_id = agent_entity_id", limit)
    return main_sessions + (yield from _list_waiting("session_id", "session_id <> agent_entity_id", limit))


def _list_waiting(column: str, condition: str, limit: int) -> Program[list[tuple[str, int]]]:
    """As `list_with_waiting_inbox`, for events that meet a condition and whose session is in `column`.

    There may be many more sessions than pending events: the recursion goes through the index of those events and visits
    each session with events once.
    """
    now = yield from current_time()
    # The index of the main sessions has the events of the others, too.
    pending = "FROM inbox WHERE status = 'pending'" + (f" AND {condition}" if column == "session_id" else "")
    rows = yield (
        f"WITH RECURSIVE waiting (id) AS (SELECT MIN({column}) {pending} UNION ALL "
        f"SELECT (SELECT MIN({column}) {pending} AND {column} > waiting.id) FROM waiting WHERE id IS NOT NULL) "
        f"SELECT * FROM (SELECT s.id, (SELECT MIN(priority) FROM inbox WHERE status = 'pending' AND {condition} "
        f"AND {column} = s.id AND available_at <= ?) AS first FROM waiting JOIN sessions s ON s.id = waiting.id "
        "WHERE s.kind = 'agent' AND (s.node_id IS NULL OR s.lease_until < ?)) AS ready "
        "WHERE first IS NOT NULL LIMIT ?",
        (now, now, limit),
    )
    return [(row[0], row[1]) for row in rows]


def get_inbox_priorities(session_ids: Sequence[str]) -> Program[dict[str, int]]:
    """The highest priority (the lowest number) among the events to claim, by session."""
    main_ids = [session_id for session_id in session_ids if not scope_key_of(session_id)]
    scoped_ids = [session_id for session_id in session_ids if scope_key_of(session_id)]
    priorities: dict[str, int] = {}
    for column, operator, ids in (("agent_entity_id", "=", main_ids), ("session_id", "<>", scoped_ids)):
        if ids:
            now = yield from current_time()
            rows = yield (
                f"SELECT {column}, MIN(priority) FROM inbox WHERE {column} IN ({placeholders(ids)}) AND session_id "
                f"{operator} agent_entity_id AND status = 'pending' AND available_at <= ? GROUP BY {column}",
                (*ids, now),
            )
            priorities |= {row[0]: row[1] for row in rows}
    return priorities


def list_cycle_starts(session: SessionRecord, *, since: int, limit: int) -> Program[list[int]]:
    """The times at which the latest cycles of a session started, after a time; oldest first."""
    rows = yield (
        "SELECT created_at FROM runs WHERE agent_entity_id = ? AND created_at > ? "
        "AND EXISTS (SELECT 1 FROM history WHERE history.run_id = runs.id AND history.session_id = ?) "
        "ORDER BY created_at DESC LIMIT ?",
        (session.agent_entity_id, since, session.id, limit),
    )
    return [row[0] for row in reversed(rows)]


# The history


def append_turns(session_id: str, cycle: int, turns: Sequence[NewTurn]) -> Program[int]:
    """Appends turns to the history; returns the number of the last."""
    update = "UPDATE sessions SET last_seq = last_seq + ?, attempts = 0 WHERE id = ? RETURNING last_seq"
    last_seq: int = yield from first_value(update, len(turns), session_id)
    now = yield from current_time()
    for seq, turn in enumerate(turns, last_seq - len(turns) + 1):
        text = json_text.encode(turn.stored_turn)
        yield _APPEND_TURN, (session_id, seq, cycle, turn.run_id, text, turn.tokens, now)
    return last_seq


def list_turns(session_id: str, *, before: int | None = None, limit: int | None = None) -> Program[list[HistoryTurn]]:
    """The turns of a session, oldest first; with `limit`, only the latest ones."""
    conditions, values = where_clause(("session_id = ?", session_id), ("seq < ?", before))
    if limit is None:
        return (yield from _TURN.select(f"{conditions}ORDER BY seq", *values))
    return (yield from _TURN.select(f"{conditions}ORDER BY seq DESC LIMIT ?", *values, limit))[::-1]


def list_turns_of_run(session_id: str, run_id: str) -> Program[list[HistoryTurn]]:
    return _TURN.select("WHERE run_id = ? AND session_id = ? ORDER BY seq", run_id, session_id)


def find_id_by_run(run_id: str) -> Program[str | None]:
    """The id of the session whose history has a run."""
    return first_value("SELECT session_id FROM history WHERE run_id = ? LIMIT 1", run_id)


def replace_turn(session_id: str, seq: int, stored_turn: StoredTurn) -> Program[None]:
    """Replaces a turn: a result that it lacked has arrived."""
    update = "UPDATE history SET turn = ? WHERE session_id = ? AND seq = ?"
    yield update, (json_text.encode(stored_turn), session_id, seq)


def delete_turns_of_run(session_id: str, run_id: str) -> Program[None]:
    yield "DELETE FROM history WHERE run_id = ? AND session_id = ?", (run_id, session_id)


def replace_by_summary(
    session_id: str, *, before_seq: int, summary: str, except_runs: Sequence[str] = ()
) -> Program[None]:
    """Deletes the turns before one, except those of some runs, and stores a summary of them."""
    condition = f" AND COALESCE(run_id, '') NOT IN ({placeholders(except_runs)})" if except_runs else ""
    yield f"DELETE FROM history WHERE session_id = ? AND seq < ?{condition}", (session_id, before_seq, *except_runs)
    yield "UPDATE sessions SET summary = ? WHERE id = ?", (summary, session_id)


def count_tokens(session_id: str) -> Program[int]:
    """The tokens of the whole history, about."""
    return int(
        (yield from first_value("SELECT COALESCE(SUM(tokens), 0) FROM history WHERE session_id = ?", session_id))
    )

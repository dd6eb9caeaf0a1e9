"""The tables, as migrations: opening a database applies each once, in order. A released migration never changes."""

from __future__ import annotations

from toolspace.errors import StorageError
from toolspace.storage.database import Program, current_time

_FIRST = (
    "CREATE TABLE nodes (id TEXT PRIMARY KEY, started_at BIGINT NOT NULL, seen_at BIGINT NOT NULL)",
    """CREATE TABLE entities (
        id TEXT PRIMARY KEY, type TEXT NOT NULL, name TEXT NOT NULL, metadata TEXT NOT NULL, created_at BIGINT NOT NULL
    )""",
    "CREATE INDEX entities_type ON entities (type, created_at)",
    """CREATE TABLE spaces (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, metadata TEXT NOT NULL, created_at BIGINT NOT NULL,
        last_seq BIGINT NOT NULL
    )""",
    """CREATE TABLE members (
        space_id TEXT NOT NULL REFERENCES spaces (id) ON DELETE CASCADE,
        entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE,
        joined_at BIGINT NOT NULL,
        PRIMARY KEY (space_id, entity_id)
    )""",
    "CREATE INDEX members_entity ON members (entity_id)",
    """CREATE TABLE messages (
        id TEXT PRIMARY KEY, space_id TEXT NOT NULL REFERENCES spaces (id) ON DELETE CASCADE, seq BIGINT NOT NULL,
        sender_id TEXT NOT NULL, kind TEXT NOT NULL, content TEXT NOT NULL, metadata TEXT NOT NULL,
        status TEXT NOT NULL, run_id TEXT, call_id TEXT, created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL,
        UNIQUE (space_id, seq)
    )""",
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, agent_entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, space_id TEXT,
        status TEXT NOT NULL, trigger_data TEXT NOT NULL, steps BIGINT NOT NULL, usage TEXT NOT NULL, error TEXT,
        created_at BIGINT NOT NULL, completed_at BIGINT, last_call_seq BIGINT NOT NULL
    )""",
    "CREATE INDEX runs_agent ON runs (agent_entity_id, created_at)",
    "CREATE INDEX runs_space ON runs (space_id)",
    "CREATE INDEX runs_ended ON runs (completed_at) WHERE completed_at IS NOT NULL",
    """CREATE TABLE calls (
        call_id TEXT PRIMARY KEY, run_id TEXT, seq BIGINT NOT NULL, agent_entity_id TEXT, space_id TEXT,
        tool_name TEXT NOT NULL, args TEXT NOT NULL, execution_type TEXT NOT NULL, execution_target TEXT NOT NULL,
        visible BIGINT NOT NULL, is_async BIGINT NOT NULL, exposure TEXT NOT NULL,
        status TEXT NOT NULL, result TEXT, is_error BIGINT NOT NULL, error_kind TEXT, source TEXT, message_id TEXT,
        created_at BIGINT NOT NULL, resolved_at BIGINT, expires_at BIGINT, wait_until BIGINT, due_at BIGINT,
        node_id TEXT, worker_id TEXT, delivery TEXT, delivered_at BIGINT, pauses BIGINT NOT NULL,
        submission TEXT, submitted_by TEXT
    )""",
    "CREATE INDEX calls_run ON calls (run_id, seq)",
    "CREATE INDEX calls_agent ON calls (agent_entity_id, created_at)",
    "CREATE INDEX calls_created ON calls (created_at)",
    # Partial indexes: a call that ends leaves each index that has it, and most calls are in few.
    """CREATE INDEX calls_offered ON calls (tool_name, created_at)
        WHERE status IN ('waiting', 'pending') AND worker_id IS NULL AND execution_type = 'external'""",
    """CREATE INDEX calls_asked ON calls (space_id, created_at)
        WHERE status IN ('waiting', 'pending') AND space_id IS NOT NULL""",
    "CREATE INDEX calls_expiring ON calls (expires_at) WHERE status IN ('waiting', 'pending')",
    "CREATE INDEX calls_due ON calls (due_at) WHERE status IN ('waiting', 'pending') AND due_at IS NOT NULL",
    """CREATE INDEX calls_claimed ON calls (worker_id)
        WHERE status IN ('waiting', 'pending') AND worker_id IS NOT NULL""",
    """CREATE INDEX calls_of_node ON calls (node_id)
        WHERE status IN ('running', 'waiting') OR (delivery = 'inline' AND delivered_at IS NULL)""",
    """CREATE TABLE inbox (
        agent_entity_id TEXT NOT NULL, event_id TEXT NOT NULL, type TEXT NOT NULL, priority BIGINT NOT NULL,
        at BIGINT NOT NULL, seq BIGINT NOT NULL, data TEXT NOT NULL, status TEXT NOT NULL, attempts BIGINT NOT NULL,
        available_at BIGINT NOT NULL, lease_until BIGINT, claim TEXT, error TEXT,
        PRIMARY KEY (agent_entity_id, event_id)
    )""",
    "CREATE INDEX inbox_next ON inbox (agent_entity_id, priority, at, seq) WHERE status = 'pending'",
    "CREATE INDEX inbox_done ON inbox (at) WHERE status = 'processed'",
    "CREATE INDEX inbox_leased ON inbox (lease_until) WHERE status = 'processing'",
    "CREATE TABLE streams (stream TEXT PRIMARY KEY, last_id BIGINT NOT NULL)",
    """CREATE TABLE events (
        stream TEXT NOT NULL, id BIGINT NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL, exposure TEXT NOT NULL,
        at BIGINT NOT NULL, PRIMARY KEY (stream, id)
    )""",
    "CREATE INDEX events_at ON events (at)",
    """CREATE TABLE keys (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL, hint TEXT NOT NULL,
        scope TEXT NOT NULL, created_at BIGINT NOT NULL, revoked_at BIGINT, last_used_at BIGINT,
        calls BIGINT NOT NULL, failed BIGINT NOT NULL
    )""",
    "CREATE TABLE secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL, created_at BIGINT NOT NULL)",
    """CREATE TABLE presence (
        topic TEXT NOT NULL, holder TEXT NOT NULL, node_id TEXT NOT NULL, left_at BIGINT,
        PRIMARY KEY (topic, holder)
    )""",
    "CREATE INDEX presence_holder ON presence (holder)",
    """CREATE TABLE answers (
        key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, node_id TEXT NOT NULL, status BIGINT, body TEXT,
        created_at BIGINT NOT NULL
    )""",
    "CREATE INDEX answers_created ON answers (created_at)",
    """CREATE TABLE goals (
        id TEXT PRIMARY KEY, entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE,
        description TEXT NOT NULL, status TEXT NOT NULL, priority DOUBLE PRECISION NOT NULL,
        is_long_term BIGINT NOT NULL, is_completed BIGINT NOT NULL, created_at BIGINT NOT NULL,
        updated_at BIGINT NOT NULL
    )""",
    "CREATE INDEX goals_entity ON goals (entity_id)",
    """CREATE TABLE memories (
        entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, key TEXT NOT NULL, value TEXT NOT NULL,
        created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL, PRIMARY KEY (entity_id, key)
    )""",
    """CREATE TABLE plans (
        id TEXT PRIMARY KEY, entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, name TEXT NOT NULL,
        instruction TEXT NOT NULL, run_after TEXT, scheduled_at BIGINT, cron TEXT, timezone TEXT, status TEXT NOT NULL,
        next_run_at BIGINT, last_run_at BIGINT, created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL
    )""",
    "CREATE INDEX plans_entity ON plans (entity_id)",
    "CREATE INDEX plans_due ON plans (next_run_at) WHERE status = 'active'",
)

_SECOND = (
    "CREATE INDEX inbox_claimed ON inbox (claim) WHERE status = 'processing'",
    """CREATE TABLE sessions (
        id TEXT PRIMARY KEY, agent_entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE,
        kind TEXT NOT NULL, run_id TEXT, node_id TEXT, token BIGINT NOT NULL, lease_until BIGINT NOT NULL,
        cycle BIGINT NOT NULL, last_seq BIGINT NOT NULL, summary TEXT, agent_turns BIGINT NOT NULL,
        attempts BIGINT NOT NULL, created_at BIGINT NOT NULL
    )""",
    "CREATE INDEX sessions_agent ON sessions (agent_entity_id)",
    "CREATE INDEX sessions_run ON sessions (run_id) WHERE run_id IS NOT NULL",
    """CREATE TABLE history (
        session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE, seq BIGINT NOT NULL, cycle BIGINT NOT NULL,
        run_id TEXT, turn TEXT NOT NULL, tokens BIGINT NOT NULL, at BIGINT NOT NULL, PRIMARY KEY (session_id, seq)
    )""",
    "CREATE INDEX history_run ON history (run_id) WHERE run_id IS NOT NULL",
    """CREATE TABLE tasks (
        id TEXT PRIMARY KEY, agent_entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE,
        description TEXT NOT NULL, input TEXT NOT NULL, status TEXT NOT NULL, run_id TEXT NOT NULL, result TEXT,
        reflection TEXT, created_at BIGINT NOT NULL, completed_at BIGINT
    )""",
    "CREATE INDEX tasks_agent ON tasks (agent_entity_id, created_at)",
    "CREATE INDEX tasks_running ON tasks (agent_entity_id) WHERE status = 'running'",
    "CREATE INDEX tasks_ended ON tasks (completed_at) WHERE completed_at IS NOT NULL",
    # Few messages are incomplete.
    "CREATE INDEX messages_begun ON messages (run_id) WHERE kind = 'message' AND status = 'running'",
    "CREATE INDEX messages_unsaid ON messages (space_id) WHERE kind = 'message' AND status <> 'complete'",
    """CREATE TABLE receipts (
        entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, call_id TEXT NOT NULL, answer TEXT,
        at BIGINT NOT NULL, PRIMARY KEY (entity_id, call_id)
    )""",
    "CREATE INDEX receipts_at ON receipts (at)",
    """CREATE TABLE documents (
        entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, id TEXT NOT NULL, title TEXT NOT NULL,
        source TEXT, origin TEXT NOT NULL, stamp TEXT, size BIGINT NOT NULL, passages BIGINT NOT NULL,
        words BIGINT NOT NULL, created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL, digest TEXT NOT NULL,
        metadata TEXT NOT NULL, PRIMARY KEY (entity_id, id)
    )""",
    "CREATE INDEX documents_figures ON documents (entity_id, size, passages, words)",
    """CREATE TABLE document_passages (
        entity_id TEXT NOT NULL, document_id TEXT NOT NULL, number BIGINT NOT NULL, start BIGINT NOT NULL,
        text TEXT NOT NULL, PRIMARY KEY (entity_id, document_id, number),
        FOREIGN KEY (entity_id, document_id) REFERENCES documents (entity_id, id) ON DELETE CASCADE
    )""",
    """CREATE TABLE document_words (
        entity_id TEXT NOT NULL, word TEXT NOT NULL, document_id TEXT NOT NULL, passages BIGINT NOT NULL,
        postings TEXT NOT NULL, PRIMARY KEY (entity_id, word, document_id),
        FOREIGN KEY (entity_id, document_id) REFERENCES documents (entity_id, id) ON DELETE CASCADE
    )""",
    "CREATE INDEX document_words_of ON document_words (entity_id, document_id)",
)

_THIRD = (
    # By event first: one event for many agents then fills one page of the index, not a page for each agent.
    """CREATE TABLE inbox_by_event (
        agent_entity_id TEXT NOT NULL, event_id TEXT NOT NULL, type TEXT NOT NULL, priority BIGINT NOT NULL,
        at BIGINT NOT NULL, seq BIGINT NOT NULL, data TEXT NOT NULL, status TEXT NOT NULL, attempts BIGINT NOT NULL,
        available_at BIGINT NOT NULL, lease_until BIGINT, claim TEXT, error TEXT,
        PRIMARY KEY (event_id, agent_entity_id)
    )""",
    """INSERT INTO inbox_by_event (agent_entity_id, event_id, type, priority, at, seq, data, status, attempts,
            available_at, lease_until, claim, error)
        SELECT agent_entity_id, event_id, type, priority, at, seq, data, status, attempts, available_at, lease_until,
            claim, error FROM inbox ORDER BY at, seq""",
    "DROP TABLE inbox",
    "ALTER TABLE inbox_by_event RENAME TO inbox",
    "CREATE INDEX inbox_next ON inbox (agent_entity_id, priority, at, seq) WHERE status = 'pending'",
    "CREATE INDEX inbox_taken ON inbox (agent_entity_id) WHERE status <> 'pending'",
    "CREATE INDEX inbox_done ON inbox (at) WHERE status = 'processed'",
    "CREATE INDEX inbox_leased ON inbox (lease_until) WHERE status = 'processing'",
    "CREATE INDEX inbox_claimed ON inbox (claim) WHERE status = 'processing'",
)

_GOALS_PER_AGENT = (
    # By agent first: agents choose ids such as `goal-1`, each for itself. Goals also have metadata.
    """CREATE TABLE goals_per_agent (
        entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, id TEXT NOT NULL,
        description TEXT NOT NULL, status TEXT NOT NULL, priority DOUBLE PRECISION NOT NULL,
        is_long_term BIGINT NOT NULL, is_completed BIGINT NOT NULL, metadata TEXT NOT NULL, created_at BIGINT NOT NULL,
        updated_at BIGINT NOT NULL, PRIMARY KEY (entity_id, id)
    )""",
    """INSERT INTO goals_per_agent (entity_id, id, description, status, priority, is_long_term, is_completed, metadata,
            created_at, updated_at)
        SELECT entity_id, id, description, status, priority, is_long_term, is_completed, '{}', created_at, updated_at
        FROM goals""",
    "DROP TABLE goals",
    "ALTER TABLE goals_per_agent RENAME TO goals",
)

_PRINCIPALS = (
    "ALTER TABLE runs ADD COLUMN principal TEXT",
    "ALTER TABLE plans ADD COLUMN principal TEXT",
)

_QUOTAS = (
    """CREATE TABLE quota_counters (
        key TEXT NOT NULL, window_start BIGINT NOT NULL, reset_at BIGINT NOT NULL, amount BIGINT NOT NULL,
        PRIMARY KEY (key, window_start)
    )""",
    "CREATE INDEX quota_counters_reset ON quota_counters (reset_at)",
)

_CHECKED_RESULTS = (
    # Who submitted a result, and what it must match.
    "ALTER TABLE calls ADD COLUMN client_id TEXT",
    "ALTER TABLE calls ADD COLUMN output_schema TEXT",
)

_APPROVALS = (
    """CREATE TABLE approvals (
        id TEXT PRIMARY KEY REFERENCES calls (call_id) ON DELETE CASCADE, tool_name TEXT NOT NULL,
        tool_version TEXT NOT NULL, digest TEXT NOT NULL, principal TEXT NOT NULL, requested_by TEXT NOT NULL,
        policy_version TEXT NOT NULL, rule TEXT NOT NULL, reason TEXT NOT NULL, approvers TEXT NOT NULL,
        context TEXT NOT NULL, execution TEXT NOT NULL, status TEXT NOT NULL, decided_by TEXT, decision_reason TEXT,
        remember TEXT, node_id TEXT, created_at BIGINT NOT NULL, expires_at BIGINT NOT NULL, decided_at BIGINT
    )""",
    "CREATE INDEX approvals_requested ON approvals (created_at) WHERE status = 'requested'",
    "CREATE INDEX approvals_executing ON approvals (node_id) WHERE node_id IS NOT NULL",
    """CREATE TABLE approval_rules (
        id TEXT PRIMARY KEY, tool_name TEXT NOT NULL, principal TEXT NOT NULL, scope TEXT NOT NULL,
        decision TEXT NOT NULL, reason TEXT, created_by TEXT NOT NULL, created_at BIGINT NOT NULL,
        UNIQUE (tool_name, principal, scope)
    )""",
)

_MESSAGES_OF_RUNS = (
    "CREATE INDEX messages_of_run ON messages (run_id) WHERE kind = 'message' AND run_id IS NOT NULL",
    "DROP INDEX messages_begun",
)

_CALL_PRINCIPALS = ("ALTER TABLE calls ADD COLUMN principal TEXT",)

_TOOL_BUDGETS = ("ALTER TABLE runs ADD COLUMN tool_budget_exceeded BIGINT NOT NULL DEFAULT 0",)

SESSION_SCOPE = (
    "ALTER TABLE sessions ADD COLUMN scope_key TEXT NOT NULL DEFAULT ''",
    # Of the main session of an agent: which session its events go to, and whether all sessions share its memories.
    "ALTER TABLE sessions ADD COLUMN scope TEXT NOT NULL DEFAULT 'agent'",
    "ALTER TABLE sessions ADD COLUMN shares_memories BIGINT NOT NULL DEFAULT 0",
    "CREATE INDEX sessions_scope ON sessions (scope_key) WHERE scope_key <> ''",
    "ALTER TABLE runs ADD COLUMN session_id TEXT",
    "ALTER TABLE calls ADD COLUMN session_id TEXT",
    "ALTER TABLE inbox ADD COLUMN session_id TEXT NOT NULL DEFAULT ''",
    "UPDATE inbox SET session_id = agent_entity_id",
    # Partial: the events of main sessions are in the index by agent already.
    """CREATE INDEX inbox_of_session ON inbox (session_id, priority, at, seq)
        WHERE status = 'pending' AND session_id <> agent_entity_id""",
    """CREATE TABLE goals_per_session (
        session_id TEXT NOT NULL, entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, id TEXT NOT NULL,
        description TEXT NOT NULL, status TEXT NOT NULL, priority DOUBLE PRECISION NOT NULL,
        is_long_term BIGINT NOT NULL, is_completed BIGINT NOT NULL, metadata TEXT NOT NULL, created_at BIGINT NOT NULL,
        updated_at BIGINT NOT NULL, PRIMARY KEY (session_id, id)
    )""",
    """INSERT INTO goals_per_session (session_id, entity_id, id, description, status, priority, is_long_term,
            is_completed, metadata, created_at, updated_at)
        SELECT entity_id, entity_id, id, description, status, priority, is_long_term, is_completed, metadata,
            created_at, updated_at FROM goals""",
    "DROP TABLE goals",
    "ALTER TABLE goals_per_session RENAME TO goals",
    "CREATE INDEX goals_entity ON goals (entity_id)",
    """CREATE TABLE memories_per_session (
        session_id TEXT NOT NULL, entity_id TEXT NOT NULL REFERENCES entities (id) ON DELETE CASCADE, key TEXT NOT NULL,
        value TEXT NOT NULL, created_at BIGINT NOT NULL, updated_at BIGINT NOT NULL, PRIMARY KEY (session_id, key)
    )""",
    """INSERT INTO memories_per_session (session_id, entity_id, key, value, created_at, updated_at)
        SELECT entity_id, entity_id, key, value, created_at, updated_at FROM memories""",
    "DROP TABLE memories",
    "ALTER TABLE memories_per_session RENAME TO memories",
    "CREATE INDEX memories_entity ON memories (entity_id)",
    "ALTER TABLE plans ADD COLUMN session_id TEXT NOT NULL DEFAULT ''",
    "UPDATE plans SET session_id = entity_id",
    "CREATE INDEX plans_session ON plans (session_id)",
    "ALTER TABLE tasks ADD COLUMN session_id TEXT NOT NULL DEFAULT ''",
    "UPDATE tasks SET session_id = agent_entity_id",
    "CREATE INDEX tasks_session ON tasks (session_id, created_at)",
)

_INDEXES_OF_LISTS = (
    # Of calls. The first is for every list and count by status; those of spaces and principals leave out most calls.
    "CREATE INDEX calls_status ON calls (status, created_at)",
    "CREATE INDEX calls_tool ON calls (tool_name, created_at)",
    "CREATE INDEX calls_space ON calls (space_id, created_at, exposure) WHERE space_id IS NOT NULL",
    "CREATE INDEX calls_principal ON calls (principal, created_at) WHERE principal IS NOT NULL",
    """CREATE INDEX calls_open_of_principal ON calls (principal)
        WHERE status IN ('waiting', 'pending') AND principal IS NOT NULL""",
    "CREATE INDEX calls_awaited ON calls (wait_until) WHERE status = 'waiting' AND wait_until IS NOT NULL",
    "CREATE INDEX runs_status ON runs (status, created_at)",
    "CREATE INDEX runs_created ON runs (created_at)",
    "DROP INDEX runs_space",
    "CREATE INDEX runs_space ON runs (space_id, created_at) WHERE space_id IS NOT NULL",
    # Of inboxes: one index for each status, in the order in which events are listed.
    "DROP INDEX inbox_taken",
    "CREATE INDEX inbox_processed ON inbox (agent_entity_id, priority, at, seq) WHERE status = 'processed'",
    "CREATE INDEX inbox_failed ON inbox (agent_entity_id, priority, at, seq) WHERE status = 'failed'",
    "DROP INDEX inbox_claimed",
    "CREATE INDEX inbox_claimed ON inbox (agent_entity_id, claim) WHERE status = 'processing'",
    "DROP INDEX approvals_requested",
    "CREATE INDEX approvals_status ON approvals (status, created_at)",
    "CREATE INDEX approval_rules_created ON approval_rules (created_at)",
    "DROP INDEX entities_type",
    "CREATE INDEX entities_type ON entities (type, id)",
    "CREATE INDEX presence_left ON presence (left_at) WHERE left_at IS NOT NULL",
    "CREATE INDEX keys_secret ON keys (id) WHERE kind = 'secret' AND revoked_at IS NULL",
)

_SPACE_DELETION = (
    "ALTER TABLE spaces ADD COLUMN deleted_at BIGINT",
    "CREATE INDEX spaces_deleted ON spaces (id) WHERE deleted_at IS NOT NULL",
    """CREATE INDEX runs_open ON runs (space_id)
        WHERE status IN ('queued', 'running', 'waiting_tool') AND space_id IS NOT NULL""",
)

_MESSAGE_TIMES = ("ALTER TABLE spaces ADD COLUMN last_at BIGINT NOT NULL DEFAULT 0",)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    _FIRST,
    _SECOND,
    _THIRD,
    _GOALS_PER_AGENT,
    _PRINCIPALS,
    _QUOTAS,
    _CHECKED_RESULTS,
    _APPROVALS,
    _MESSAGES_OF_RUNS,
    _CALL_PRINCIPALS,
    _TOOL_BUDGETS,
    SESSION_SCOPE,
    _INDEXES_OF_LISTS,
    _SPACE_DELETION,
    _MESSAGE_TIMES,
)


def migrate(newest: int | None = None) -> Program[int]:
    """Applies the missing migrations; returns how many. Only one process at a time may run it.

    `newest` stops after the migration of that number, to load the rows of an older backup.
    """
    newest = len(MIGRATIONS) if newest is None else newest
    yield "CREATE TABLE IF NOT EXISTS migrations (version BIGINT PRIMARY KEY, applied_at BIGINT NOT NULL)", ()
    rows = yield "SELECT COALESCE(MAX(version), 0) FROM migrations", ()
    version: int = rows[0][0]
    if version > len(MIGRATIONS):
        raise StorageError(
            f"the database is at version {version}, this program knows versions up to {len(MIGRATIONS)}; "
            "start the version that wrote it, or a newer one"
        )
    for number in range(version + 1, newest + 1):
        for statement in MIGRATIONS[number - 1]:
            yield statement, ()
        now = yield from current_time()
        yield "INSERT INTO migrations (version, applied_at) VALUES (?, ?)", (number, now)
    return newest - version

"""Programs for who is there: the processes that share the database, the workers and readers connected to them."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.core.ids import now_ms
from toolspace.storage.database import Program


def record_heartbeat(node_id: str, *, started_at: int) -> Program[bool]:
    """This process is alive. Whether the others did not know that, or not any more."""
    rows = yield "UPDATE nodes SET seen_at = ? WHERE id = ? RETURNING id", (now_ms(), node_id)
    if rows:
        return False
    rows = yield (
        # Two signs of life may come in one moment; one of them is news.
        "INSERT INTO nodes (id, started_at, seen_at) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING id",
        (node_id, started_at, now_ms()),
    )
    return bool(rows)


def list_heartbeats(*, besides: str) -> Program[dict[str, int]]:
    """The other processes, and when each was heard of last, by its own clock."""
    rows = yield "SELECT id, seen_at FROM nodes WHERE id <> ?", (besides,)
    return {row[0]: row[1] for row in rows}


def list_dead_nodes(*, before: int, besides: str) -> Program[list[str]]:
    """Processes that have not been heard of since a time."""
    rows = yield "SELECT id FROM nodes WHERE seen_at < ? AND id <> ?", (before, besides)
    return [row[0] for row in rows]


def delete_node(node_id: str) -> Program[list[str]]:
    """Forgets a process and who was connected to it. Says who that was."""
    yield "DELETE FROM nodes WHERE id = ?", (node_id,)
    rows = yield "DELETE FROM presence WHERE node_id = ? RETURNING holder", (node_id,)
    return sorted({row[0] for row in rows})


def register(holder: str, topics: Sequence[str], *, node_id: str) -> Program[None]:
    """Someone is connected here, and takes care of these topics: `tool:NAME`, `space:ID`, `run:ID`."""
    for topic in topics:
        yield (
            "INSERT INTO presence (topic, holder, node_id, left_at) VALUES (?, ?, ?, NULL) "
            "ON CONFLICT (topic, holder) DO UPDATE SET node_id = excluded.node_id, left_at = NULL",
            (topic, holder, node_id),
        )


def mark_left(holder: str, *, node_id: str) -> Program[bool]:
    """The connection ended: it may come back. False where it is connected elsewhere already."""
    rows = yield (
        "UPDATE presence SET left_at = ? WHERE holder = ? AND node_id = ? AND left_at IS NULL RETURNING holder",
        (now_ms(), holder, node_id),
    )
    return bool(rows)


def delete_departed(*, before: int) -> Program[list[str]]:
    """Those who left before a time and did not come back: forgotten, and named."""
    # In one statement: whoever comes back just now is not named.
    rows = yield "DELETE FROM presence WHERE left_at < ? RETURNING holder", (before,)
    return sorted({row[0] for row in rows})


def is_any_served(topics: Sequence[str]) -> Program[bool]:
    """Whether anyone takes care of one of these."""
    if not topics:
        return False
    marks = ", ".join("?" * len(topics))
    rows = yield f"SELECT 1 FROM presence WHERE topic IN ({marks}) LIMIT 1", tuple(topics)
    return bool(rows)


def list_topics() -> Program[list[tuple[str, str]]]:
    """Every topic and who takes care of it."""
    rows = yield "SELECT topic, holder FROM presence ORDER BY topic, holder", ()
    return [(row[0], row[1]) for row in rows]

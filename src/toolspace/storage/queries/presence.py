"""SQL programs for presence: the processes that share the database, and workers and subscribers connected to them."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.core.ids import now_ms
from toolspace.storage.database import Program
from toolspace.storage.queries.columns import placeholders


def record_heartbeat(node_id: str, *, started_at: int) -> Program[bool]:
    """This process is alive. Whether it has to register anew: it is new, or others declared it dead."""
    rows = yield "UPDATE nodes SET seen_at = ? WHERE id = ? RETURNING id", (now_ms(), node_id)
    if rows:
        return False
    rows = yield (
        # Two heartbeats may come at once; only one of them inserts the row.
        "INSERT INTO nodes (id, started_at, seen_at) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING id",
        (node_id, started_at, now_ms()),
    )
    return bool(rows)


def list_heartbeats(*, except_node: str) -> Program[dict[str, int]]:
    """The time of the last heartbeat of each other process, by its own clock."""
    rows = yield "SELECT id, seen_at FROM nodes WHERE id <> ?", (except_node,)
    return {row[0]: row[1] for row in rows}


def list_dead_nodes(*, before: int, except_node: str) -> Program[list[str]]:
    """The processes that sent no heartbeat since a time."""
    rows = yield "SELECT id FROM nodes WHERE seen_at < ? AND id <> ?", (before, except_node)
    return [row[0] for row in rows]


def delete_node(node_id: str) -> Program[list[str]]:
    """Deletes a process and everyone connected to it; returns their ids."""
    yield "DELETE FROM nodes WHERE id = ?", (node_id,)
    rows = yield "DELETE FROM presence WHERE node_id = ? RETURNING holder", (node_id,)
    return sorted({row[0] for row in rows})


def register(holder: str, topics: Sequence[str], *, node_id: str) -> Program[None]:
    """Someone is connected here, and serves these topics: `tool:NAME`, `space:ID`, `run:ID`."""
    for topic in topics:
        yield (
            "INSERT INTO presence (topic, holder, node_id, left_at) VALUES (?, ?, ?, NULL) "
            "ON CONFLICT (topic, holder) DO UPDATE SET node_id = excluded.node_id, left_at = NULL",
            (topic, holder, node_id),
        )


def mark_left(holder: str, *, node_id: str) -> Program[bool]:
    """The connection ended; the holder may come back. False if it is connected through another process."""
    rows = yield (
        "UPDATE presence SET left_at = ? WHERE holder = ? AND node_id = ? AND left_at IS NULL RETURNING holder",
        (now_ms(), holder, node_id),
    )
    return bool(rows)


def delete_departed(*, before: int) -> Program[list[str]]:
    """Deletes the holders that left before a time and did not come back; returns their ids.

    One statement: a holder that comes back in this moment is not among them.
    """
    rows = yield "DELETE FROM presence WHERE left_at < ? RETURNING holder", (before,)
    return sorted({row[0] for row in rows})


def is_any_served(topics: Sequence[str]) -> Program[bool]:
    """Whether anyone serves one of these topics."""
    if not topics:
        return False
    rows = yield f"SELECT 1 FROM presence WHERE topic IN ({placeholders(topics)}) LIMIT 1", tuple(topics)
    return bool(rows)


def list_topics() -> Program[list[tuple[str, str]]]:
    """Every topic with each of its holders."""
    rows = yield "SELECT topic, holder FROM presence ORDER BY topic, holder", ()
    return [(row[0], row[1]) for row in rows]

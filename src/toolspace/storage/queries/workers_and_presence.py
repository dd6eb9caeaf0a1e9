"""SQL programs for presence: the processes that share the database, and who is connected through them.

Workers and subscribers are holders in the table `presence`. A worker has one topic for itself and one for each tool
that it serves. The transaction that gives it a call reads those rows, so a worker that left or moved to another process
gets none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toolspace.core.stored_records import CallRecord
from toolspace.storage.database import FOR_UPDATE, Program, current_time
from toolspace.storage.queries import calls
from toolspace.storage.queries.statement_builder import first_column, first_value, has_changed, placeholders

_WORKER, _TOOL = "worker:", "tool:"


# Processes


def record_heartbeat(node_id: str, *, started_at: int) -> Program[bool]:
    """Stores a heartbeat. Returns whether the process has to register again: it is new, or was declared dead."""
    now = yield from current_time()
    if (yield from has_changed("UPDATE nodes SET seen_at = ? WHERE id = ?", now, node_id)):
        return False
    # Two heartbeats may come at once; only one of them inserts the row.
    insert = "INSERT INTO nodes (id, started_at, seen_at) VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING"
    return (yield from has_changed(insert, node_id, started_at, now))


def list_heartbeats(*, except_node: str) -> Program[dict[str, int]]:
    """The time of the last heartbeat of each other process, by its own clock."""
    rows = yield "SELECT id, seen_at FROM nodes WHERE id <> ?", (except_node,)
    return {row[0]: row[1] for row in rows}


def delete_node(node_id: str) -> Program[list[str]]:
    """Deletes a process and everyone connected to it; returns their ids."""
    yield "DELETE FROM nodes WHERE id = ?", (node_id,)
    holders = yield from first_column("DELETE FROM presence WHERE node_id = ? RETURNING holder", node_id)
    return sorted(set(holders))


# Holders


def register_holder(holder: str, topics: Sequence[str], *, node_id: str) -> Program[None]:
    """Stores that a holder is connected to this process, and its topics: `tool:NAME`, `space:ID`, `run:ID`."""
    for topic in topics:
        yield (
            "INSERT INTO presence (topic, holder, node_id, left_at) VALUES (?, ?, ?, NULL) "
            "ON CONFLICT (topic, holder) DO UPDATE SET node_id = excluded.node_id, left_at = NULL",
            (topic, holder, node_id),
        )


def mark_left(holder: str, *, node_id: str) -> Program[bool]:
    """Stores that a holder lost its connection; it may come back. Returns False if another process has it."""
    update = "UPDATE presence SET left_at = ? WHERE holder = ? AND node_id = ? AND left_at IS NULL"
    now = yield from current_time()
    return (yield from has_changed(update, now, holder, node_id))


def delete_departed(*, before: int) -> Program[list[str]]:
    """Deletes the holders that left before a time and did not come back; returns their ids.

    One statement: a holder that comes back in this moment is not among them.
    """
    holders = yield from first_column("DELETE FROM presence WHERE left_at < ? RETURNING holder", before)
    return sorted(set(holders))


def release_departed(*, before: int) -> Program[set[str]]:
    """Deletes departed holders, and releases the calls that they claimed. Returns the tools of those calls."""
    tools: set[str] = set()
    for holder in (yield from delete_departed(before=before)):
        tools.update((yield from calls.release_claims(holder)))
    return tools


def is_any_served(topics: Sequence[str]) -> Program[bool]:
    """Whether anyone serves one of these topics."""
    if not topics:
        return False
    return bool((yield f"SELECT 1 FROM presence WHERE topic IN ({placeholders(topics)}) LIMIT 1", tuple(topics)))


# Workers


class WorkerCapacity(msgspec.Struct, frozen=True):
    """A worker that can execute more calls."""

    worker_id: str
    tools: tuple[str, ...]
    free_slots: int


class CallAssignments(msgspec.Struct):
    """Which calls each worker got."""

    calls_by_worker: dict[str, list[CallRecord]]
    disconnected_workers: list[str]
    """Workers that are no longer connected through this process."""
    has_more: bool
    """Whether there may be more calls for workers with free slots."""


class ClaimedCallState(msgspec.Struct, frozen=True):
    """The status of a call, and the worker that has claimed it."""

    call_id: str
    status: str
    worker_id: str | None


def tool_topic(tool_name: str) -> str:
    """The presence topic of those who serve a tool."""
    return _TOOL + tool_name


def register_worker(worker_id: str, tools: Sequence[str], *, node_id: str) -> Program[list[CallRecord]]:
    """Stores that a worker is connected here, and serves exactly these tools. Returns the calls that it has claimed."""
    topics = sorted((_WORKER + worker_id, *map(tool_topic, tools)))  # Sorted, so that two writers cannot deadlock.
    yield f"DELETE FROM presence WHERE holder = ? AND topic NOT IN ({placeholders(topics)})", (worker_id, *topics)
    yield from register_holder(worker_id, topics, node_id=node_id)
    return (yield from calls.list_claimed(worker_id))


def assign_calls(workers: Sequence[WorkerCapacity], *, node_id: str) -> Program[CallAssignments]:
    """Gives unclaimed calls to workers with free slots, in the order of `workers`.

    None gets more than its share: other workers have free slots too, here and in other processes.
    """
    # Locked: a worker that leaves in this moment waits, and its new calls are released with the others.
    select_topics = (
        f"SELECT topic FROM presence WHERE holder = ? AND node_id = ? AND left_at IS NULL ORDER BY topic {FOR_UPDATE}"
    )
    result = CallAssignments({}, [], False)
    exhausted_tools: set[str] = set()
    for worker in workers:
        if exhausted_tools.issuperset(worker.tools):
            continue
        topics = yield from first_column(select_topics, worker.worker_id, node_id)
        if _WORKER + worker.worker_id not in topics:
            result.disconnected_workers.append(worker.worker_id)
            continue
        tools = [tool for tool in worker.tools if tool_topic(tool) in topics and tool not in exhausted_tools]
        if not tools:
            continue
        slots = worker.free_slots
        limit = 1 if slots == 1 else min(slots, (yield from _fair_share(tools, slots)))
        claimed_calls = yield from calls.claim(worker.worker_id, tools, limit=limit)
        if claimed_calls:
            result.calls_by_worker[worker.worker_id] = claimed_calls
        if len(claimed_calls) < limit:
            exhausted_tools.update(tools)
        else:
            result.has_more = True
    return result


def list_call_states(call_ids: Sequence[str]) -> Program[list[ClaimedCallState]]:
    if not call_ids:
        return []
    select = f"SELECT call_id, status, worker_id FROM calls WHERE call_id IN ({placeholders(call_ids)})"
    rows = yield select, tuple(call_ids)
    return [ClaimedCallState(*row) for row in rows]


def find_claimed_calls(worker_id: str, *, node_id: str) -> Program[list[CallRecord] | None]:
    """The calls that a worker has claimed; None if it is no longer connected through this process."""
    select = "SELECT 1 FROM presence WHERE topic = ? AND holder = ? AND node_id = ? AND left_at IS NULL"
    rows = yield select, (_WORKER + worker_id, worker_id, node_id)
    return (yield from calls.list_claimed(worker_id)) if rows else None


def is_connected_elsewhere(worker_id: str, *, node_id: str) -> Program[bool]:
    """Whether a worker is connected through another process now."""
    select = "SELECT 1 FROM presence WHERE topic = ? AND holder = ? AND node_id <> ? AND left_at IS NULL"
    return bool((yield select, (_WORKER + worker_id, worker_id, node_id)))


def list_connected(*, node_id: str) -> Program[list[str]]:
    """The ids of the workers that are connected through a process."""
    condition = f"topic LIKE '{_WORKER}%' AND node_id = ? AND left_at IS NULL"
    return first_column(f"SELECT holder FROM presence WHERE {condition}", node_id)


def retire(worker_id: str, calls_to_finish: Sequence[str]) -> Program[list[str] | None]:
    """Gives a worker no more calls. It finishes `calls_to_finish`; its other calls may be claimed again.

    Returns the tools of the released calls; None if there is no such worker.
    """
    if not (yield "SELECT 1 FROM presence WHERE topic = ?", (_WORKER + worker_id,)):
        return None
    # The worker's own row stays: it shows whether the worker dies before it has finished.
    yield "DELETE FROM presence WHERE holder = ? AND topic <> ?", (worker_id, _WORKER + worker_id)
    return (yield from calls.release_claims(worker_id, except_calls=calls_to_finish))


def disconnect_workers_of_node(node_id: str, *, seconds_ago: float = 0.0) -> Program[None]:
    """Marks the workers of a dead process as disconnected. They may come back through another process.

    `seconds_ago`: how long they have been disconnected.
    """
    now = yield from current_time()
    yield (
        "UPDATE presence SET node_id = '', left_at = COALESCE(left_at, ?) WHERE node_id = ? AND holder IN "
        f"(SELECT holder FROM presence WHERE topic LIKE '{_WORKER}%')",
        (now - round(seconds_ago * 1000), node_id),
    )


def list_workers() -> Program[list[tuple[str, list[str], bool]]]:
    """Every worker, the tools that it serves, and whether it is connected now."""
    rows = yield f"SELECT holder, left_at FROM presence WHERE topic LIKE '{_WORKER}%' ORDER BY holder", ()
    is_connected = {row[0]: row[1] is None for row in rows}
    tools_of: dict[str, list[str]] = {worker_id: [] for worker_id in is_connected}
    rows = yield f"SELECT holder, topic FROM presence WHERE topic LIKE '{_TOOL}%' ORDER BY topic", ()
    for holder, topic in rows:
        if holder in tools_of:
            tools_of[holder].append(topic.removeprefix(_TOOL))
    return [(worker_id, tools, is_connected[worker_id]) for worker_id, tools in tools_of.items()]


def _fair_share(tools: Sequence[str], max_share: int) -> Program[int]:
    """How many of the waiting calls of these tools one of their workers should get."""
    marks = placeholders(tools)
    count_workers = f"SELECT COUNT(DISTINCT holder) FROM presence WHERE topic IN ({marks}) AND left_at IS NULL"
    workers = yield from first_value(count_workers, *map(tool_topic, tools))
    if workers <= 1:
        return max_share
    count_calls = (
        f"SELECT COUNT(*) FROM (SELECT 1 FROM calls WHERE status IN {calls.OPEN} AND tool_name IN ({marks}) "
        "AND worker_id IS NULL AND execution_type = 'external' LIMIT ?) AS waiting"
    )
    return max(1, (yield from first_value(count_calls, *tools, max_share * workers)) // workers)

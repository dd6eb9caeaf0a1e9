"""Programs for workers: who serves which tools through which process, and which calls are in whose hands.

A worker is a holder in `presence` with a topic for itself and one for each tool that it serves. Those rows are asked in
the same transaction that gives it a call, so that a worker who left, or moved to another process, is given none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toolspace.core.ids import now_ms
from toolspace.core.records import CallRecord
from toolspace.storage.database import FOR_UPDATE, Program
from toolspace.storage.queries import calls, presence

_OPEN = "('waiting', 'pending')"
_WORKER, _TOOL = "worker:", "tool:"


class WorkerCapacity(msgspec.Struct, frozen=True):
    """A worker that can take more."""

    worker_id: str
    tools: tuple[str, ...]
    free_slots: int


class CallAssignments(msgspec.Struct):
    """Who was given what."""

    calls_by_worker: dict[str, list[CallRecord]]
    disconnected_workers: list[str]
    """Workers that are not connected through this process any more."""
    has_more: bool
    """Whether some calls may be left for those who have room."""


class ClaimedCallState(msgspec.Struct, frozen=True):
    """How it is with a call that a worker took."""

    call_id: str
    status: str
    worker_id: str | None


def tool_topic(tool_name: str) -> str:
    """What someone who serves a tool takes care of."""
    return _TOOL + tool_name


def register(worker_id: str, tools: Sequence[str], *, node_id: str) -> Program[list[CallRecord]]:
    """A worker is connected here, and serves just these tools. Says what it took before and has not answered."""
    topics = sorted((_WORKER + worker_id, *map(tool_topic, tools)))  # In order: nobody waits for each other's rows.
    marks = ", ".join("?" * len(topics))
    yield f"DELETE FROM presence WHERE holder = ? AND topic NOT IN ({marks})", (worker_id, *topics)
    yield from presence.register(worker_id, topics, node_id=node_id)
    return (yield from calls.list_claimed(worker_id))


def assign_calls(hands: Sequence[WorkerCapacity], *, node_id: str) -> Program[CallAssignments]:
    """Gives calls that nobody has to workers that have room, the first of them first, and to none more than its share
    of what there is: others have room as well, here and in other processes."""
    result = CallAssignments({}, [], False)
    exhausted: set[str] = set()
    for hand in hands:
        if exhausted.issuperset(hand.tools):
            continue
        rows = yield (
            # Should it leave in this moment, it waits until it has what it is given: then that is found with it.
            "SELECT topic FROM presence WHERE holder = ? AND node_id = ? AND left_at IS NULL"
            f" ORDER BY topic {FOR_UPDATE}",
            (hand.worker_id, node_id),
        )
        topics = {row[0] for row in rows}
        if _WORKER + hand.worker_id not in topics:
            result.disconnected_workers.append(hand.worker_id)
            continue
        tools = [tool for tool in hand.tools if tool_topic(tool) in topics and tool not in exhausted]
        if not tools:
            continue
        limit = 1 if hand.free_slots == 1 else min(hand.free_slots, (yield from _share(tools, hand.free_slots)))
        given = yield from calls.claim(hand.worker_id, tools, limit=limit)
        if given:
            result.calls_by_worker[hand.worker_id] = given
        if len(given) < limit:
            exhausted.update(tools)
        else:
            result.has_more = True
    return result


def list_call_states(call_ids: Sequence[str]) -> Program[list[ClaimedCallState]]:
    if not call_ids:
        return []
    marks = ", ".join("?" * len(call_ids))
    rows = yield f"SELECT call_id, status, worker_id FROM calls WHERE call_id IN ({marks})", tuple(call_ids)
    return [ClaimedCallState(*row) for row in rows]


def find_claimed_calls(worker_id: str, *, node_id: str) -> Program[list[CallRecord] | None]:
    """What a worker has in its hands; None where it is not connected through this process any more."""
    rows = yield (
        "SELECT 1 FROM presence WHERE topic = ? AND holder = ? AND node_id = ? AND left_at IS NULL",
        (_WORKER + worker_id, worker_id, node_id),
    )
    return (yield from calls.list_claimed(worker_id)) if rows else None


def is_connected_elsewhere(worker_id: str, *, node_id: str) -> Program[bool]:
    """Whether a worker is connected through another process now."""
    rows = yield (
        "SELECT 1 FROM presence WHERE topic = ? AND holder = ? AND node_id <> ? AND left_at IS NULL",
        (_WORKER + worker_id, worker_id, node_id),
    )
    return bool(rows)


def list_connected(*, node_id: str) -> Program[list[str]]:
    """The workers that are connected through a process."""
    rows = yield (
        f"SELECT holder FROM presence WHERE topic LIKE '{_WORKER}%' AND node_id = ? AND left_at IS NULL",
        (node_id,),
    )
    return [row[0] for row in rows]


def retire(worker_id: str, finishing: Sequence[str]) -> Program[list[str] | None]:
    """A worker takes no more, and finishes what it names; the rest is for others. Says which tools that concerns; None
    where there is no such worker."""
    rows = yield "SELECT 1 FROM presence WHERE topic = ?", (_WORKER + worker_id,)
    if not rows:
        return None
    # Its own row stays: should it die while it finishes, that is how it is missed.
    yield "DELETE FROM presence WHERE holder = ? AND topic <> ?", (worker_id, _WORKER + worker_id)
    besides = f" AND call_id NOT IN ({', '.join('?' * len(finishing))})" if finishing else ""
    rows = yield (
        f"UPDATE calls SET worker_id = NULL WHERE status IN {_OPEN} AND worker_id = ?{besides} RETURNING tool_name",
        (worker_id, *finishing),
    )
    return sorted({row[0] for row in rows})


def disconnect_workers_of_node(node_id: str) -> Program[None]:
    """A process died: its workers count as gone from now on, and may come back through another one."""
    yield (
        "UPDATE presence SET node_id = '', left_at = COALESCE(left_at, ?) WHERE node_id = ? AND holder IN "
        f"(SELECT holder FROM presence WHERE topic LIKE '{_WORKER}%')",
        (now_ms(), node_id),
    )


def release_departed(*, before: int) -> Program[set[str]]:
    """Those who left before a time and did not come back are forgotten, and what workers among them took is for others.
    Says which tools that concerns."""
    tools: set[str] = set()
    for holder in (yield from presence.delete_departed(before=before)):
        tools.update((yield from calls.release_claims(holder)))
    return tools


def list_workers() -> Program[list[tuple[str, list[str], bool]]]:
    """Every worker, the tools that it serves, and whether it is connected now."""
    rows = yield f"SELECT holder, left_at FROM presence WHERE topic LIKE '{_WORKER}%' ORDER BY holder", ()
    connected = {row[0]: row[1] is None for row in rows}
    served: dict[str, list[str]] = {worker_id: [] for worker_id in connected}
    rows = yield f"SELECT holder, topic FROM presence WHERE topic LIKE '{_TOOL}%' ORDER BY topic", ()
    for holder, name in rows:
        if holder in served:
            served[holder].append(name.removeprefix(_TOOL))
    return [(worker_id, tools, connected[worker_id]) for worker_id, tools in served.items()]


def _share(tools: Sequence[str], most: int) -> Program[int]:
    """What one of all who serve these tools should take at once."""
    marks = ", ".join("?" * len(tools))
    rows = yield (
        f"SELECT COUNT(DISTINCT holder) FROM presence WHERE topic IN ({marks}) AND left_at IS NULL",
        tuple(map(tool_topic, tools)),
    )
    workers = max(1, rows[0][0])
    if workers == 1:
        return most
    rows = yield (
        f"SELECT COUNT(*) FROM (SELECT 1 FROM calls WHERE status IN {_OPEN} AND tool_name IN ({marks}) "
        "AND worker_id IS NULL AND execution_type = 'external' LIMIT ?) AS waiting",
        (*tools, most * workers),
    )
    return max(1, rows[0][0] // workers)

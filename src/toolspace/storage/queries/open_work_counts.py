"""SQL programs that count open work, for metrics and operators. They change nothing."""

from __future__ import annotations

import msgspec

from toolspace.storage.database import Program


class OpenWorkCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What is open in the database now, in all processes that share it."""

    calls: dict[str, int]
    """Calls without a result, by status."""
    inbox: dict[str, int]
    """Events of all agents that are not processed, by status."""
    runs: dict[str, int]
    """Runs that have not ended, by status."""
    nodes: int
    """Processes that share the database."""


def count_open_work() -> Program[OpenWorkCounts]:
    calls = yield from _count_by_status("calls", ("running", "waiting", "pending"))
    inbox = yield from _count_by_status("inbox", ("pending", "processing", "failed"))
    runs = yield from _count_by_status("runs", ("queued", "running", "waiting_tool"))
    nodes = yield "SELECT COUNT(*) FROM nodes", ()
    return OpenWorkCounts(calls=calls, inbox=inbox, runs=runs, nodes=nodes[0][0])


def _count_by_status(table: str, statuses: tuple[str, ...]) -> Program[dict[str, int]]:
    listed = ", ".join(f"'{status}'" for status in statuses)  # As literals: only then a partial index can be used.
    rows = yield f"SELECT status, COUNT(*) FROM {table} WHERE status IN ({listed}) GROUP BY status", ()
    return {**dict.fromkeys(statuses, 0), **{row[0]: row[1] for row in rows}}

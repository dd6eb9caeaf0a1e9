"""Counts for operators: how much waits, for whom. Changes nothing."""

from __future__ import annotations

import msgspec

from toolspace.storage.database import Program


class OpenWorkCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What is open in the database now, in all processes that share it."""

    calls: dict[str, int]
    """Calls that have no result yet, by status."""
    inbox: dict[str, int]
    """Events of all agents that are not processed, by status."""
    runs: dict[str, int]
    """Runs that have not ended, by status."""
    nodes: int
    """Processes that share the database."""


_OPEN_CALLS = ("running", "waiting", "pending")
_UNPROCESSED = ("pending", "processing", "failed")
_OPEN_RUNS = ("queued", "running", "waiting_tool")


def count_open_work() -> Program[OpenWorkCounts]:
    calls = yield from _by_status("calls", _OPEN_CALLS)
    inbox = yield from _by_status("inbox", _UNPROCESSED)
    runs = yield from _by_status("runs", _OPEN_RUNS)
    nodes = yield "SELECT COUNT(*) FROM nodes", ()
    return OpenWorkCounts(calls=calls, inbox=inbox, runs=runs, nodes=nodes[0][0])


def _by_status(table: str, wanted: tuple[str, ...]) -> Program[dict[str, int]]:
    listed = ", ".join(f"'{status}'" for status in wanted)  # Written out: an index over them is used only then.
    rows = yield f"SELECT status, COUNT(*) FROM {table} WHERE status IN ({listed}) GROUP BY status", ()
    return {**dict.fromkeys(wanted, 0), **{row[0]: row[1] for row in rows}}

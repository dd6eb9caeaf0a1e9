"""Finds and ends all processes that a stdio server started, wherever they moved to.

A process group misses children that created their own session, and the tree of parents misses children whose parent has
ended. Each server therefore gets a mark in its environment, which everything that it starts inherits. Without /proc
only the process group is found. `process` uses it. This module starts nothing.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

MARK_VARIABLE = "_TOOLSPACE_SERVER"
KILL_SIGNAL = signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL
_PROC = "/proc"


class ProcessIdentity(NamedTuple):
    """Identifies one process, and no later one with the same pid."""

    pid: int
    started: int
    """Clock ticks since the machine started; 0 if unknown."""


class _ProcessRow(NamedTuple):
    identity: ProcessIdentity
    parent: int
    group: int
    is_ended: bool


def create_mark() -> str:
    return secrets.token_hex(12)


def build_mark_value(mark: str) -> str:
    """Returns the environment variable's value. A Toolspace that is itself a server keeps the mark that it has."""
    outer_mark = os.environ.get(MARK_VARIABLE, "")
    return f"{outer_mark}.{mark}" if outer_mark else mark


def identify_process(pid: int) -> ProcessIdentity:
    row = _read_row(pid)
    return row.identity if row is not None else ProcessIdentity(pid, 0)


def find_descendants(
    root: ProcessIdentity, mark: str, earlier: frozenset[ProcessIdentity] = frozenset()
) -> frozenset[ProcessIdentity]:
    """Returns every living process that came from `root`, which leads its group, or from one of `earlier`."""
    rows = {row.identity.pid: row for row in _list_rows()}
    if not rows:
        return frozenset((root,)) if _is_group_alive(root.pid) else frozenset()
    encoded_mark, earlier_or_root = mark.encode(), earlier | {root}
    pids = {
        pid
        for pid, row in rows.items()
        if row.identity in earlier_or_root
        # A descendant is younger than the root.
        or (row.identity.started >= root.started and (row.group == root.pid or _has_mark(pid, encoded_mark)))
    }
    children = pids
    while children:
        children = {pid for pid, row in rows.items() if row.parent in children} - pids
        pids |= children
    return frozenset(rows[pid].identity for pid in pids if not rows[pid].is_ended)


def is_any_alive(processes: frozenset[ProcessIdentity]) -> bool:
    """Whether one of the processes still lives. Cheaper than `find_descendants`."""
    for process in processes:
        row = _read_row(process.pid)
        if row is None:
            if process.started == 0 and _is_group_alive(process.pid):
                return True
        elif row.identity == process and not row.is_ended:
            return True
    return False


def send_signal(kind: signal.Signals, group: int, processes: frozenset[ProcessIdentity]) -> None:
    """Signals the group and each of the processes. Ignores those that are gone or belong to another user."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, kind)
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, kind)


def kill_marked(mark: str) -> None:
    """Kills every process with this mark, if the first process is not known."""
    encoded_mark = mark.encode()
    for row in _list_rows():
        if _has_mark(row.identity.pid, encoded_mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(row.identity.pid, KILL_SIGNAL)


def _is_group_alive(group: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It belongs to another user.
    return True


def _list_rows() -> Iterator[_ProcessRow]:
    try:
        names = os.listdir(_PROC)
    except OSError:
        return
    for name in names:
        if name.isdigit() and (row := _read_row(int(name))) is not None:
            yield row


def _read_row(pid: int) -> _ProcessRow | None:
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            # After the last bracket: a program may call itself "x) S 1 (".
            fields = file.read().rpartition(b") ")[2].split()
        identity = ProcessIdentity(pid, int(fields[19]))
        return _ProcessRow(identity, int(fields[1]), int(fields[2]), fields[0] in (b"Z", b"X"))
    except (OSError, IndexError, ValueError):
        return None  # It has just ended, or there is no /proc.


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        with open(f"{_PROC}/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False

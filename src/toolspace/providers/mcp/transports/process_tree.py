"""Finds and signals the processes that came from one server, wherever they moved to. Starts nothing.

A process group misses children that made a session of their own, the tree of parents misses those whose parent is
gone. So each server's environment holds a mark that everything it starts inherits. Without a /proc there is the
group only.
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
    """One process and no later one of the same number."""

    pid: int
    started: int
    """In ticks since the machine started; 0 where that cannot be known."""


class _Row(NamedTuple):
    found: ProcessIdentity
    parent: int
    group: int
    ended: bool


def create_mark() -> str:
    return secrets.token_hex(12)


def build_mark_value(mark: str) -> str:
    """What the environment holds: a Toolspace that is a server itself keeps the mark that it was given."""
    above = os.environ.get(MARK_VARIABLE, "")
    return f"{above}.{mark}" if above else mark


def identify_process(pid: int) -> ProcessIdentity:
    row = _row(pid)
    return row.found if row is not None else ProcessIdentity(pid, 0)


def find_descendants(
    first: ProcessIdentity, mark: str, known: frozenset[ProcessIdentity] = frozenset()
) -> frozenset[ProcessIdentity]:
    """Every living process that came from the first one, which leads its group. `known`: what was found before."""
    rows = {row.found.pid: row for row in _rows()}
    if not rows:
        return frozenset((first,)) if _group_lives(first.pid) else frozenset()
    needle = mark.encode()
    pids = {
        row.found.pid
        for row in rows.values()
        if row.found == first
        or row.found in known
        # Only what is younger: a descendant is.
        or (row.found.started >= first.started and (row.group == first.pid or _has_mark(row.found.pid, needle)))
    }
    more = pids
    while more:
        more = {row.found.pid for row in rows.values() if row.parent in more} - pids
        pids |= more
    return frozenset(rows[pid].found for pid in pids if not rows[pid].ended)


def is_any_alive(found: frozenset[ProcessIdentity]) -> bool:
    """Whether any of them is still there. Cheaper than finding all anew."""
    for one in found:
        row = _row(one.pid)
        if (row is None and one.started == 0 and _group_lives(one.pid)) or (
            row is not None and row.found == one and not row.ended
        ):
            return True
    return False


def send_signal(kind: signal.Signals, group: int, found: frozenset[ProcessIdentity]) -> None:
    """Signals the group, and each one by itself. What is gone, or not ours to signal, is left alone."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, kind)
    for one in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one.pid, kind)


def kill_marked(mark: str) -> None:
    """Kills what has this mark, where it is not known which process was the first."""
    needle = mark.encode()
    for row in _rows():
        if _has_mark(row.found.pid, needle):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(row.found.pid, KILL_SIGNAL)


def _group_lives(pid: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _rows() -> Iterator[_Row]:
    try:
        names = os.listdir(_PROC)
    except OSError:
        return
    for name in names:
        if name.isdigit() and (row := _row(int(name))) is not None:
            yield row


def _row(pid: int) -> _Row | None:
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            # After the last bracket: a program may call itself "x) S 1 (".
            fields = file.read().rpartition(b") ")[2].split()
        return _Row(ProcessIdentity(pid, int(fields[19])), int(fields[1]), int(fields[2]), fields[0] in (b"Z", b"X"))
    except (OSError, IndexError, ValueError):
        return None  # It ended while we looked, or there is no /proc.


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        with open(f"{_PROC}/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False

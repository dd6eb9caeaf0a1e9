"""Finds and ends all processes that a stdio server started, wherever they moved to, also after Toolspace was killed.

A process group misses children that created their own session, and the tree of parents misses children whose parent has
ended. Each server therefore gets a mark in its environment, which everything that it starts inherits. Without /proc
only the process group is found.

After `kill -9` a program cannot clean up. A small shell process therefore waits for the end of a pipe that only this
process holds. When the pipe ends, for whatever reason, the shell ends the listed processes and removes the listed
files. It runs while anything is listed. Windows has no such process. `process` lists servers, the control socket its
file. This module starts no server.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

MARK_VARIABLE = "_TOOLSPACE_SERVER"
KILL_SIGNAL = signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL
_PROC = "/proc"
# A line names one entry: `g` a process group, `m` a mark in the environment of processes, `f` a file. `+` adds it, `-`
# removes it. Marks find processes that left their group, and those that started while Toolspace was being killed.
_SCRIPT = r"""
trap '' HUP INT QUIT TERM
mark_lines() { for entry in "$@"; do case $entry in m*) printf '%s\n' "${entry#m}";; esac; done; }
end() {
    signal=$1; shift; any=
    for entry in "$@"; do
        case $entry in g*) kill -s "$signal" -- "-${entry#g}" 2>/dev/null && any=yes;; esac
    done
    marks=$(mark_lines "$@")
    if [ -n "$marks" ]; then
        for file in $(grep -lsF -e "$marks" /proc/[0-9]*/environ 2>/dev/null); do
            pid=${file#/proc/}; kill -s "$signal" "${pid%/environ}" 2>/dev/null && any=yes
        done
    fi
    [ -n "$any" ]
}
rest() { sleep 0.25 2>/dev/null || sleep 1; }  # Not every sleep knows fractions.
while IFS= read -r line; do
    case $line in
    +*) set -- "$@" "${line#+}";;
    -*) count=$#
        while [ "$count" -gt 0 ]; do
            entry=$1; shift; count=$((count - 1))
            [ "$entry" = "${line#-}" ] || set -- "$@" "$entry"
        done;;
    esac
done
for entry in "$@"; do case $entry in f*) rm -f -- "${entry#f}";; esac; done
end TERM "$@" || exit 0
for round in 1 2 3 4 5 6 7 8; do rest; end 0 "$@" || exit 0; done
for round in 1 2 3 4 5 6 7 8; do end KILL "$@" || exit 0; rest; done
"""


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


# After Toolspace was killed

Orphan = int | str | Path
"""A process group, a mark in the environment of processes, or a file."""


class OrphanCleanup:
    """The list of what must not outlive this process. All methods are quick, thread-safe and never raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, None] = {}
        self._shell: subprocess.Popen[bytes] | None = None

    def add(self, orphan: Orphan) -> None:
        entry = _format_entry(orphan)
        if sys.platform == "win32" or "\n" in entry:
            return
        with self._lock:
            if entry not in self._entries:
                self._entries[entry] = None
                self._send(f"+{entry}")

    def remove(self, orphan: Orphan) -> None:
        """Removes it from the list. Ends no process and deletes no file."""
        entry = _format_entry(orphan)
        with self._lock:
            if entry not in self._entries:
                return
            del self._entries[entry]
            if self._entries:
                self._send(f"-{entry}")
            else:
                self._end()

    @property
    def pid(self) -> int | None:
        """The pid of the shell process; None if nothing is listed."""
        return self._shell.pid if self._shell is not None else None

    def close(self) -> None:
        """Called when this process exits. The shell ends whatever is still listed, and then itself."""
        with self._lock:
            if self._entries:
                self._abandon_shell()
            else:
                self._end()

    def _send(self, line: str) -> None:
        if self._shell is not None and _write(self._shell, line):
            return
        self._end()  # The shell does not run yet, or somebody killed or stopped it.
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "toolspace-cleanup"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath},  # Without the marks of other servers, which would find it.
                start_new_session=True,
            )
        except OSError:  # No shell, or no process left: servers are still stopped when Toolspace exits in order.
            return
        assert shell.stdin is not None
        self._shell = shell
        for entry in self._entries:
            _write(shell, f"+{entry}")
        # A shell that somebody stopped must not block this process when its pipe is full.
        os.set_blocking(shell.stdin.fileno(), False)

    def _end(self) -> None:
        shell, self._shell = self._shell, None
        if shell is None:
            return
        # Killed before its pipe closes: it must not act on an incomplete list.
        shell.kill()
        _close_pipe(shell)
        shell.wait()

    def forget(self) -> None:
        """Called in a forked child. The entries belong to the parent, and the child must not hold its pipe open."""
        self._lock = threading.Lock()
        self._entries = {}
        self._abandon_shell()

    def _abandon_shell(self) -> None:
        """Closes the pipe to a shell that outlives this process, or belongs to the parent."""
        shell, self._shell = self._shell, None
        if shell is not None:
            _close_pipe(shell)
            shell.returncode = 0  # Otherwise Popen would warn about it.


def _format_entry(orphan: Orphan) -> str:
    if isinstance(orphan, Path):
        return f"f{orphan.absolute()}"
    return f"g{orphan}" if isinstance(orphan, int) else f"m{orphan}"


def _write(shell: subprocess.Popen[bytes], line: str) -> bool:
    assert shell.stdin is not None
    data = os.fsencode(line) + b"\n"
    try:
        return os.write(shell.stdin.fileno(), data) == len(data)
    except OSError:
        return False


def _close_pipe(shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin is not None
    with suppress(OSError):
        shell.stdin.close()


@cache
def get_orphan_cleanup() -> OrphanCleanup:
    """Returns the one of this process."""
    cleanup = OrphanCleanup()
    atexit.register(cleanup.close)
    if hasattr(os, "register_at_fork"):  # Not on Windows, which has no forks.
        os.register_at_fork(after_in_child=cleanup.forget)
    return cleanup

"""Ends processes and removes files that must not outlive Toolspace, also after `kill -9`.

A killed program cannot clean up. A small shell process therefore waits for the end of a pipe that only this process
holds. When the pipe ends, for whatever reason, the shell ends the listed processes and removes the listed files. It
runs while anything is listed. Windows has no such process. `process` lists servers, the control socket its file.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

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

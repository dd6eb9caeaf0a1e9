"""Helpers for tests of server processes: specs of the small server, and waiting for processes to end."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable
from pathlib import Path

from toolspace.providers.mcp.server_spec import ServerSpec

PLAIN = Path(__file__).parent / "servers" / "plain.py"


def plain(mode: str = "", **env: str) -> ServerSpec:
    return ServerSpec(command=sys.executable, args=("-S", str(PLAIN), mode), env=env)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([handle], [], [], 60)[0], f"process {pid} is still there"
        finally:
            os.close(handle)


def open_files() -> set[str]:
    """Returns the open pipes, sockets and files of this process."""
    names: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue
    return names

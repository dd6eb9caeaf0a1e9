from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from tests.providers.mcp.processes import lives, wait_until_gone
from toolspace.providers.mcp.transports.orphan_cleanup import OrphanCleanup, get_orphan_cleanup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches processes through Linux's pidfd")

PRELUDE = """
import os, signal, subprocess, sys
from pathlib import Path
from toolspace.providers.mcp.transports.orphan_cleanup import get_orphan_cleanup
nap = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
deaf = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, 1); print(); time.sleep(1000)"]
"""


def run(program: str, *args: str) -> list[str]:
    """Runs a program to its end and returns its output."""
    completed_process = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(program), *args],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert not completed_process.stderr
    return completed_process.stdout.decode().split()


@pytest.mark.spec("3.12")
def test_killed_program_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    *pids, watcher = run(
        """
        group = subprocess.Popen(deaf, start_new_session=True, stdout=subprocess.PIPE)
        group.stdout.readline()  # It ignores the polite signal from now on.
        marked = subprocess.Popen(nap, start_new_session=True, env={**os.environ, "MARK": "from.me"})
        get_orphan_cleanup().add(group.pid)
        get_orphan_cleanup().add("from.me")
        get_orphan_cleanup().add(Path(sys.argv[1]))
        print(group.pid, marked.pid, get_orphan_cleanup().pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(file),
    )
    wait_until_gone(map(int, [*pids, watcher]))
    assert not file.exists()


@pytest.mark.spec("3.12")
def test_removed_entries_survive(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.touch()
    ended_pid, survivor = map(
        int,
        run(
            """
            ended, survivor = (subprocess.Popen(nap, start_new_session=True, stdout=-3, stderr=-3) for _ in "ab")
            for one in ended, survivor:
                get_orphan_cleanup().add(one.pid)
            get_orphan_cleanup().add(Path(sys.argv[1]))
            get_orphan_cleanup().remove(Path(sys.argv[1]))
            get_orphan_cleanup().remove(survivor.pid)
            print(ended.pid, survivor.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """,
            str(file),
        ),
    )
    wait_until_gone((ended_pid,))
    assert lives(survivor)
    assert file.exists()
    os.kill(survivor, signal.SIGKILL)


@pytest.mark.spec("3.12")
def test_fork_does_not_delay_the_cleanup_of_its_parent() -> None:
    group, child = map(
        int,
        run(
            """
            group = subprocess.Popen(nap, start_new_session=True, stdout=-3, stderr=-3)
            get_orphan_cleanup().add(group.pid)
            read, write = os.pipe()
            if not (child := os.fork()):
                for number in 1, 2:
                    os.close(number)
                os.write(write, b"ready")
                signal.pause()
            os.read(read, 5)
            print(group.pid, child, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        ),
    )
    wait_until_gone((group,))
    assert lives(child)
    os.kill(child, signal.SIGKILL)


@pytest.mark.spec("3.12")
def test_program_that_exits_without_stopping_servers_leaves_none() -> None:
    pids = run(
        """
        group = subprocess.Popen(nap, start_new_session=True, stdout=-3, stderr=-3)
        group.returncode = 0
        get_orphan_cleanup().add(group.pid)
        print(group.pid)
        """
    )
    wait_until_gone(map(int, pids))


@pytest.mark.spec("3.12")
def test_killed_cleanup_process_is_replaced_with_all_entries() -> None:
    first, second = map(
        int,
        run(
            """
            first, second = (subprocess.Popen(nap, start_new_session=True, stdout=-3, stderr=-3) for _ in "ab")
            get_orphan_cleanup().add(first.pid)
            os.kill(get_orphan_cleanup().pid, signal.SIGKILL)
            os.waitid(os.P_PID, get_orphan_cleanup().pid, os.WEXITED | os.WNOWAIT)
            get_orphan_cleanup().add(second.pid)
            print(first.pid, second.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        ),
    )
    wait_until_gone((first, second))


def test_cleanup_process_runs_only_while_entries_exist(tmp_path: Path) -> None:
    cleanup = OrphanCleanup()
    assert cleanup.pid is None
    cleanup.add(tmp_path / "one")
    cleanup.add(tmp_path / "two")
    pid = cleanup.pid
    assert pid is not None
    assert lives(pid)
    cleanup.remove(tmp_path / "one")
    assert cleanup.pid == pid
    cleanup.remove(tmp_path / "two")
    assert cleanup.pid is None
    assert not Path(f"/proc/{pid}").exists()  # Ended and reaped.
    cleanup.remove(tmp_path / "two")
    cleanup.close()


def test_cleanup_process_has_its_own_session_and_inherits_no_files(tmp_path: Path) -> None:
    cleanup = OrphanCleanup()
    with open(tmp_path / "ours", "w") as own_file:
        os.set_inheritable(own_file.fileno(), True)
        cleanup.add(tmp_path / "x")
        assert cleanup.pid is not None
        assert os.getsid(cleanup.pid) == cleanup.pid
        open_files: set[str] = set()
        for file in Path(f"/proc/{cleanup.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # The shell is still starting; it closes these files itself.
                open_files.add(str(file.readlink()))
        assert str(tmp_path / "ours") not in open_files
    cleanup.remove(tmp_path / "x")


def test_stopped_cleanup_process_blocks_nothing(tmp_path: Path) -> None:
    cleanup = OrphanCleanup()
    cleanup.add(tmp_path / "x")
    assert cleanup.pid is not None
    os.kill(cleanup.pid, signal.SIGSTOP)
    for number in range(300):  # More than its pipe can hold.
        cleanup.add(tmp_path / f"{number:0230}")
    for number in range(300):
        cleanup.remove(tmp_path / f"{number:0230}")
    cleanup.remove(tmp_path / "x")
    assert cleanup.pid is None


def test_one_cleanup_process_per_process() -> None:
    assert get_orphan_cleanup() is get_orphan_cleanup()

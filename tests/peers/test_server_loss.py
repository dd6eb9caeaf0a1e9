"""Third-party servers that die, freeze and come back, between calls and during them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.peers.servers import clock, editor_file, everything_server, sqlite, with_tap
from tests.peers.tap import tap
from tests.providers.mcp.conftest import until
from toolspace import Toolspace
from toolspace.core.events import CallProgress
from toolspace.providers.mcp import connection
from toolspace.testing import EventRecorder

# Starts with SELECT, because the server refuses everything else.
ENDLESS = "SELECT max(i) FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n)"


def kill(ts: Toolspace, name: str) -> int:
    """Kills a server and all processes that it started."""
    pid = _pid(ts, name)
    os.killpg(pid, signal.SIGKILL)
    return pid


def _pid(ts: Toolspace, name: str) -> int:
    pid = next(server.pid for server in ts.list_servers() if server.name == name)
    assert pid is not None
    return pid


@pytest.mark.spec("3.13")
@pytest.mark.parametrize("era", ["handshake", "stateless"])
async def test_server_killed_between_calls_answers_the_next_call(tmp_path: Path, era: str) -> None:
    name, arguments = ("echo", {"message": "hi"}) if era == "handshake" else ("get_current_time", {"timezone": "UTC"})
    file = editor_file(tmp_path, peer=everything_server() if era == "handshake" else clock(), other=clock())
    async with Toolspace.open(file) as ts:
        assert (await ts.call(f"peer__{name}", arguments)).ok
        killed_pid, other_pid = kill(ts, "peer"), _pid(ts, "other")
        result = await ts.call(f"peer__{name}", arguments)
        assert (result.ok, result.error) == (True, None)
        status = {server.name: server for server in ts.list_servers()}
        assert (status["peer"].state, status["peer"].era, status["peer"].restarts) == ("ready", era, 1)
        assert status["peer"].pid != killed_pid
        assert "SIGKILL" in (status["peer"].last_error or "")
        assert (status["other"].pid, status["other"].restarts) == (other_pid, 0)


@pytest.mark.spec("3.13")
async def test_server_killed_repeatedly_comes_back(tmp_path: Path) -> None:
    async with Toolspace.open(editor_file(tmp_path, clock=clock())) as ts:
        for _ in range(3):
            kill(ts, "clock")
            # The first attempt is immediate, and a call does not wait for the next one.
            result = await ts.call("clock__get_current_time", {"timezone": "UTC"})
            assert (result.ok, result.error) == (True, None)
        assert ts.list_servers()[0].restarts == 3


@pytest.mark.spec("3.13")
async def test_call_is_not_sent_again_if_its_server_dies(tmp_path: Path) -> None:
    async with tap(tmp_path / "door") as wire:
        file = editor_file(tmp_path, sqlite=with_tap(sqlite(tmp_path / "data.db"), tmp_path / "door"), clock=clock())
        async with Toolspace.open(file) as ts:
            # This tool is not annotated as read-only.
            call = asyncio.create_task(ts.call("sqlite__read_query", {"query": ENDLESS}))
            await wire.saw("tools/call")
            kill(ts, "sqlite")
            result = await call
            assert (result.error_kind, result.executed) == ("transport_error", True)
            assert (await ts.call("sqlite__list_tables")).ok
            assert [message["params"]["name"] for message in wire.of("tools/call")] == ["read_query", "list_tables"]


@pytest.mark.spec("3.13")
async def test_read_only_call_is_sent_again_to_the_new_process(tmp_path: Path) -> None:
    async with tap(tmp_path / "door") as wire:
        file = editor_file(tmp_path, everything=with_tap(everything_server(), tmp_path / "door"))
        async with Toolspace.open(file) as ts:
            recorder = EventRecorder(ts)
            call = asyncio.create_task(
                ts.call("everything__trigger_long_running_operation", {"duration": 0.4, "steps": 4})
            )
            await recorder.wait_for(lambda event: isinstance(event, CallProgress))
            kill(ts, "everything")
            result = await call
            assert (result.ok, result.error) == (True, None)
            assert len(wire.of("tools/call")) == 2
            assert ts.list_servers()[0].restarts == 1


@pytest.mark.spec("3.13")
async def test_timeout_does_not_restart_a_live_server(tmp_path: Path) -> None:
    async with tap(tmp_path / "door") as wire:
        entry = {**with_tap(everything_server(), tmp_path / "door"), "requestTimeoutMs": 1000}
        async with Toolspace.open(editor_file(tmp_path, everything=entry)) as ts:
            pid = _pid(ts, "everything")
            slow = await ts.call("everything__trigger_long_running_operation", {"duration": 20, "steps": 1})
            assert slow.error_kind == "timeout"
            await wire.saw("ping")
            assert (await ts.call("everything__echo", {"message": "hi"})).ok
            assert _pid(ts, "everything") == pid


@pytest.mark.spec("3.13")
async def test_frozen_server_is_probed_and_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", 1.0)
    entry = {**everything_server(), "requestTimeoutMs": 500}
    async with Toolspace.open(editor_file(tmp_path, everything=entry)) as ts:
        frozen = _pid(ts, "everything")
        os.kill(frozen, signal.SIGSTOP)
        assert (await ts.call("everything__echo", {"message": "hi"})).error_kind == "timeout"
        async with asyncio.timeout(60):
            while (result := await ts.call("everything__echo", {"message": "hi"})).error_kind == "timeout":
                pass  # Each call waits for its time-out; meanwhile the probe decides.
        assert result.ok
        assert _pid(ts, "everything") != frozen
        assert not _exists(frozen)


@pytest.mark.spec("3.12")
async def test_seven_servers_leave_no_process(tmp_path: Path) -> None:
    servers = {f"clock{number}": clock() for number in range(3)} | {
        f"all{number}": everything_server() for number in range(4)
    }
    async with Toolspace.open(editor_file(tmp_path, **servers)) as ts:
        # The start waits for six of the seven servers; the last may be ready later.
        await until(lambda: all(server.state == "ready" for server in ts.list_servers()))
        pids = [server.pid for server in ts.list_servers()]
        assert all(pid is not None and _exists(pid) for pid in pids)
    assert not any(_exists(pid) for pid in pids if pid is not None)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

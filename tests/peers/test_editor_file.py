"""An unchanged editor's configuration with third-party servers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.peers.servers import clock, editor_file, everything_server, filesystem, git, memory, sqlite, thinking_server
from tests.providers.mcp.conftest import until
from toolspace import Toolspace

SERVERS = {"everything", "filesystem", "memory", "thinking", "clock", "git", "sqlite"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", "-b", "main", str(folder)], check=True)
    (folder / "new.txt").write_text("new")
    return folder


@pytest.fixture
def file(tmp_path: Path, repository: Path) -> Path:
    return editor_file(
        tmp_path,
        everything=everything_server(),
        filesystem=filesystem(tmp_path),
        memory=memory(tmp_path / "memory.json"),
        thinking=thinking_server(),
        clock=clock(),
        git=git(repository),
        sqlite=sqlite(tmp_path / "data.db"),
    )


@pytest.mark.spec("3.10")
@pytest.mark.spec("3.11")
@pytest.mark.spec("3.12")
async def test_seven_servers_of_both_eras_start_and_answer(file: Path, repository: Path) -> None:
    async with Toolspace.open(file) as ts:
        # The start waits for six of the seven servers; the last may be ready later.
        await until(lambda: all(server.state == "ready" for server in ts.list_servers()))
        status = {server.name: server for server in ts.list_servers()}
        assert set(status) == SERVERS
        assert {name: (server.state, server.last_error) for name, server in status.items()} == dict.fromkeys(
            SERVERS, ("ready", None)
        )
        assert {name for name, server in status.items() if server.era == "stateless"} == {"clock", "git"}
        assert {server.transport for server in status.values()} == {"stdio"}
        assert all(server.tools and server.pid and server.server for server in status.values())

        arguments = {"thought": "one", "thoughtNumber": 1, "totalThoughts": 1, "nextThoughtNeeded": False}
        calls = {
            "everything__echo": {"message": "hello"},
            "filesystem__list_allowed_directories": {},
            "memory__read_graph": {},
            "thinking__sequentialthinking": arguments,
            "clock__get_current_time": {"timezone": "Europe/Berlin"},
            "git__git_status": {"repo_path": str(repository)},
            "sqlite__list_tables": {},
        }
        results = {name: await ts.call(name, arguments) for name, arguments in calls.items()}
    assert {name: result.error for name, result in results.items()} == dict.fromkeys(calls)
    assert results["everything__echo"].text == "Echo: hello"
    assert "new.txt" in results["git__git_status"].text
    assert results["thinking__sequentialthinking"].result["thoughtNumber"] == 1


@pytest.mark.spec("3.11")
async def test_editor_specific_keys_do_no_harm(tmp_path: Path) -> None:
    entry = {**clock(), "type": "stdio", "autoApprove": ["get_current_time"], "alwaysAllow": [], "disabled": False}
    async with Toolspace.open(editor_file(tmp_path, clock=entry)) as ts:
        assert (await ts.call("clock__get_current_time", {"timezone": "UTC"})).ok


@pytest.mark.spec("3.11")
async def test_file_of_another_editor_works(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"inputs": [], "servers": {"clock": {"type": "stdio", **clock()}}}))
    async with Toolspace.open(file) as ts:
        assert [server.state for server in ts.list_servers()] == ["ready"]


@pytest.mark.spec("3.12")
async def test_failed_server_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    file = editor_file(
        tmp_path,
        missing={"command": "no-such-program-anywhere", "args": []},
        dying={
            "command": everything_server()["command"],
            "args": ["-e", "console.error('no licence'); process.exit(3)"],
        },
        clock=clock(),
    )
    async with Toolspace.open(file) as ts:
        status = {server.name: server for server in ts.list_servers()}
        assert (await ts.call("clock__get_current_time", {"timezone": "UTC"})).ok
        result = await ts.call("missing__anything")
    assert status["clock"].state == "ready"
    assert {status["missing"].state, status["dying"].state} == {"failed"}
    assert "no-such-program-anywhere" in (status["missing"].last_error or "")
    assert "no licence" in (status["dying"].last_error or "")
    assert not result.ok
    assert not result.executed

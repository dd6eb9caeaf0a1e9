from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from toolspace import Toolspace
from toolspace.server import control_socket
from toolspace.server.control_socket import ControlRequest

pytestmark = [
    pytest.mark.spec("17.1"),
    pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets"),
]

PROGRAM = Path(__file__).parents[1] / "cli" / "programs" / "long_running.py"
SERVER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    result = {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
    if request["method"] == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                  "serverInfo": {"name": "quick", "version": "1"}}
    if request["method"] == "server/discover":
        answer = {"error": {"code": -32601, "message": "no"}}
    else:
        answer = {"result": result}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    path = tmp_path / "toolspace.yaml"
    path.write_text(f"mcpServers:\n  quick: {{command: {sys.executable}, args: [{tmp_path}/server.py]}}\n")
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / ("a long name " * 12) / "state"


@asynccontextmanager
async def open_toolspace(config: Path, state: Path) -> AsyncGenerator[Toolspace]:
    environ = {**os.environ, "TOOLSPACE_STORAGE_DIR": str(state)}
    async with Toolspace.open(config, environ=environ) as ts, control_socket.serve_control_socket(ts):
        yield ts


def sockets(state: Path) -> list[Path]:
    return sorted((state / "run").iterdir()) if (state / "run").exists() else []


async def test_a_running_process_reports_and_restarts_its_servers(config: Path, state: Path) -> None:
    async with open_toolspace(config, state) as ts:
        [first] = await control_socket.ask_processes(state, config, ControlRequest("status"))
        [second] = await control_socket.ask_processes(state, config, ControlRequest("restart", "quick"))
        [wrong] = await control_socket.ask_processes(state, config, ControlRequest("restart", "quik"))
        [socket_file] = sockets(state)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (socket_file, socket_file.parent)]
        own_reports = control_socket.report_servers(ts)

    [before], [after] = first.servers, second.servers
    assert first.pid == os.getpid()
    assert (before.name, before.state, before.tools, before.restarts) == ("quick", "ready", 1, 0)
    assert before.tokens > 0
    assert (after.state, after.restarts) == ("ready", 1)
    assert after.pid not in (None, before.pid)
    assert own_reports == second.servers
    assert wrong.error == 'there is no MCP server "quik"; did you mean "quick"?'
    assert modes == [0o600, 0o700]
    assert sockets(state) == []
    assert await control_socket.ask_processes(state, config, ControlRequest("status")) == []


async def test_only_processes_of_the_same_configuration_are_asked(config: Path, state: Path, tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(config)
    (tmp_path / "other.yaml").write_text("")

    async with open_toolspace(config, state), open_toolspace(config, state):
        answers = [
            await control_socket.ask_processes(state, path, ControlRequest("status"))
            for path in (config, tmp_path / "link.yaml", tmp_path / "other.yaml", None)
        ]

    assert [len(answer) for answer in answers] == [2, 2, 0, 0]


async def test_a_gateway_gives_its_own_user_its_url_and_a_key(config: Path, state: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "TOOLSPACE_STORAGE_DIR": str(state)}
    local_gateway = control_socket.LocalGateway("http://127.0.0.1:8787", "sk_only_in_memory")
    (tmp_path / "other.yaml").write_text("")

    async with open_toolspace(config, state):
        assert await control_socket.find_gateway(state, config) is None
        async with (
            Toolspace.open(config, environ=environ) as ts,
            control_socket.serve_control_socket(ts, local_gateway),
        ):
            gateway = await control_socket.find_gateway(state, config)
            elsewhere = await control_socket.find_gateway(state, tmp_path / "other.yaml")
            files = [path for path in state.rglob("*") if path.is_file() and b"only_in_memory" in path.read_bytes()]

    assert gateway == local_gateway
    assert elsewhere is None  # Another configuration with the same state directory.
    assert files == []
    assert "only_in_memory" not in repr(gateway)
    assert await control_socket.find_gateway(state, config) is None


async def test_the_socket_of_a_dead_process_is_removed(config: Path, state: Path) -> None:
    async with open_toolspace(config, state):
        name = sockets(state)[0].name
    stale = state / "run" / name
    with socket.socket(socket.AF_UNIX) as dead:
        descriptor = os.open(stale.parent, os.O_RDONLY)
        dead.bind(f"/proc/self/fd/{descriptor}/{name}")
        os.close(descriptor)
    (stale.parent / f"{name[:13]}1-0.sock").write_text("no socket at all")

    assert await control_socket.ask_processes(state, config, ControlRequest("status")) == []
    assert stale not in sockets(state)


@pytest.mark.parametrize(
    "request_line",
    [b"", b"{}\n", b"[1]\n", b'{"do": "call"}\n', b'{"do": "status"', b"\xff\n", b"x" * 200_000, b"[" * 50_000 + b"\n"],
    ids=["nothing", "empty", "list", "other", "half", "bytes", "long", "deep"],
)
async def test_an_invalid_request_gets_a_short_response_and_has_no_effect(
    config: Path, state: Path, request_line: bytes
) -> None:
    async with open_toolspace(config, state):
        descriptor = os.open(state / "run", os.O_RDONLY)
        name = sockets(state)[0].name
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{descriptor}/{name}")
        os.close(descriptor)
        writer.write(request_line)
        writer.write_eof()
        try:
            answer = await reader.read()
        except ConnectionResetError:  # The server does not read all of a request that is too long.
            answer = b""
        writer.close()
        [status] = await control_socket.ask_processes(state, config, ControlRequest("status"))

    assert answer == b"" or json.loads(answer) == {"pid": os.getpid(), "error": "invalid request"}
    assert status.servers[0].state == "ready"


async def test_a_silent_client_does_not_delay_the_stop(config: Path, state: Path) -> None:
    async with open_toolspace(config, state):
        descriptor = os.open(state / "run", os.O_RDONLY)
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{descriptor}/{sockets(state)[0].name}")
        os.close(descriptor)
        await control_socket.ask_processes(state, config, ControlRequest("status"))

    assert await reader.read() == b""
    writer.close()


async def test_an_unusable_socket_folder_does_not_stop_the_program(config: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "run").symlink_to(tmp_path)

    async with (
        open_toolspace(config, tmp_path / "state") as first,
        open_toolspace(config, tmp_path / "planted") as second,
    ):
        assert first.list_servers()[0].state == second.list_servers()[0].state == "ready"
        assert await control_socket.ask_processes(tmp_path / "planted", config, ControlRequest("status")) == []
    assert not list(tmp_path.glob("*.sock"))


async def test_a_killed_process_leaves_no_socket_and_no_server(config: Path, tmp_path: Path) -> None:
    state = config.parent / ".toolspace"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(config), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    [answer] = await control_socket.ask_processes(state, config, ControlRequest("status"))
    server = answer.servers[0].pid
    assert server is not None
    assert answer.pid == process.pid

    process.send_signal(signal.SIGKILL)
    await process.wait()

    for _ in range(600):
        if not sockets(state) and not _is_alive(server):
            break
        await asyncio.sleep(0.05)
    assert (sockets(state), _is_alive(server)) == ([], False)


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False

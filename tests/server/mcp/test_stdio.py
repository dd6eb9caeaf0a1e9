"""`toolspace mcp` as a process with pipes, as editors start it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

pytestmark = pytest.mark.spec("12.3")
TOOLS = '''
import asyncio
import os
import sys
from pathlib import Path

from toolspace import ToolContext, tool


@tool
async def noisy() -> int:
    """Prints, and starts a program that prints."""
    print("from the tool", flush=True)
    sys.__stdout__.write("past the guard") if sys.__stdout__ else None
    os.system("echo from its child; cat")
    return 7


@tool
async def waits(context: ToolContext) -> None:
    """Waits until it is stopped, and cleans up."""
    Path("started").write_text(str(os.getpid()))
    context.report_progress(1, 2, "started")
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        Path("cleaned").touch()
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tools.py").write_text(TOOLS)
    (folder / "toolspace.yaml").write_text("functions: [./tools.py]\n")
    return folder


class Process:
    """A client that reads and writes single lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def send(self, *messages: Any) -> None:
        assert self.process.stdin is not None
        lines = [message if isinstance(message, bytes) else json.dumps(message).encode() for message in messages]
        self.process.stdin.write(b"".join(line + b"\n" for line in lines))
        await self.process.stdin.drain()

    async def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await self.process.stdout.readline())

    async def handshake(self) -> None:
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        await self.send({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
        assert (await self.read())["result"]["serverInfo"]["name"] == "toolspace"
        await self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
async def server(project: Path) -> AsyncGenerator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "toolspace", "mcp"),
        cwd=project,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    yield Process(process)
    if process.returncode is None:
        process.kill()
    await process.communicate()


def _call(name: str, id: int = 1, **meta: Any) -> dict[str, Any]:
    params: dict[str, Any] = {"name": name, "arguments": {}}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {**params, "_meta": meta} if meta else params}


@pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
async def test_both_eras_are_served_while_tools_print(project: Path, mode: str) -> None:
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "toolspace", "mcp"], cwd=project, env=dict(os.environ)
    )
    async with Client(parameters, mode=mode) as client:
        names = [entry.name for entry in (await client.list_tools()).tools]
        result = await client.call_tool("noisy", {})
    assert "noisy" in names
    assert "read_file" in names
    assert "agent__batch" in names
    assert result.content[0].text == "7"


async def test_invalid_lines_are_answered_with_errors(server: Process) -> None:
    await server.handshake()
    for line, code in [(b"nonsense", -32700), (b"[]", -32600), (b'{"jsonrpc":"1.0"}', -32600), (b"[" * 9999, -32700)]:
        await server.send(line)
        assert (await server.read())["error"]["code"] == code
    await server.send(b"", _call("noisy"))
    assert (await server.read())["result"]["content"][0]["text"] == "7"


async def test_end_of_input_ends_the_server_after_its_last_responses(server: Process) -> None:
    await server.handshake()
    await server.send(_call("noisy", 5))
    await server.close()
    assert (await server.read())["id"] == 5
    assert await server.process.wait() == 0


@pytest.mark.spec("4.5")
async def test_end_of_input_stops_calls(server: Process, project: Path) -> None:
    await server.handshake()
    await server.send(_call("waits", progressToken=1))
    assert (await server.read())["params"]["message"] == "started"
    await server.close()
    assert await server.process.wait() == 0
    assert (project / "cleaned").exists()


@pytest.mark.spec("4.5")
async def test_cancelled_call_is_stopped_and_not_answered(server: Process, project: Path) -> None:
    await server.handshake()
    await server.send(_call("waits", progressToken=1))
    await server.read()
    await server.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
    await server.send(_call("noisy", 2))
    assert (await server.read())["id"] == 2
    assert (project / "cleaned").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
async def test_signal_ends_the_server_and_its_calls(server: Process, project: Path, number: signal.Signals) -> None:
    await server.handshake()
    await server.send(_call("waits", progressToken=1))
    await server.read()
    server.process.send_signal(number)
    assert await server.process.wait() == 128 + number
    assert (project / "cleaned").exists()


async def test_killed_client_leaves_nothing(project: Path) -> None:
    client = f"""
import subprocess, sys, time
server = subprocess.Popen([{sys.executable!r}, "-m", "toolspace", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in sys.stdin.buffer:
    server.stdin.write(line)
    server.stdin.flush()
    while True:
        answer = server.stdout.readline()
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", client),
        cwd=project,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    dead_process = Process(process)
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    await dead_process.send(_call("waits", progressToken=1, **meta))
    await dead_process.read()
    server = int((project / "started").read_text())
    process.kill()
    await process.communicate()
    await asyncio.to_thread(_wait_for_end, server)
    assert (project / "cleaned").exists()


@pytest.mark.parametrize("is_client_gone", [True, False], ids=["is_client_gone", "still there"])
async def test_blocked_event_loop_does_not_outlive_the_client(is_client_gone: bool) -> None:
    program = """
import os, sys, time
from toolspace.server.mcp.stdio_pipes import exit_after_disconnect
with exit_after_disconnect(0, 0.1):
    print("begun", flush=True)
    time.sleep(float(sys.argv[1]))
print("ended by itself", flush=True)
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "600" if is_client_gone else "0.3"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    if is_client_gone:
        process.stdin.close()
    assert await process.stdout.read() == (b"" if is_client_gone else b"ended by itself\n")
    assert await process.wait() == (1 if is_client_gone else 0)


def _wait_for_end(pid: int) -> None:
    """Waits for a process that is not a child of this one."""
    descriptor = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([descriptor], [], [], 30)
        assert ready, "it still runs"
    finally:
        os.close(descriptor)

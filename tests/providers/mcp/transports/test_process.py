from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from tests.providers.mcp.processes import lives, open_files, plain, wait_until_gone
from toolspace.errors import ProviderError
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports.orphan_cleanup import get_orphan_cleanup
from toolspace.providers.mcp.transports.process import ServerProcess, start_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}


class Running:
    """A started server and its output."""

    def __init__(self) -> None:
        self.output = b""
        self.end_event = asyncio.Event()
        self._more = asyncio.Event()
        self.process: ServerProcess

    def hear(self, data: bytes) -> None:
        self.output += data
        self._more.set()

    async def line(self) -> bytes:
        while b"\n" not in self.output:
            self._more.clear()
            await self._more.wait()
        line, _, self.output = self.output.partition(b"\n")
        return line

    async def call(self, tool: str, **arguments: object) -> str:
        message = {**CALL, "params": {"name": tool, "arguments": arguments}}
        await self.process.write(json.dumps(message).encode() + b"\n")
        return json.loads(await self.line())["result"]["content"][0]["text"]


async def start(spec: ServerSpec) -> Running:
    server = Running()
    server.process = await start_process("plain", spec, receive=server.hear, on_end=server.end_event.set)
    return server


@pytest.mark.spec("3.12")
async def test_server_has_its_own_session_and_ends_with_its_input() -> None:
    server = await start(plain())
    process = server.process
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
    assert await server.call("echo", text="hello") == "hello"
    await process.stop()
    assert process.exit_code == 0
    assert not lives(process.pid)
    assert not server.end_event.is_set()  # `on_end` is not called for a stop.


@pytest.mark.spec("3.12")
async def test_server_inherits_no_open_files(tmp_path: Path) -> None:
    with open(tmp_path / "ours", "w") as own_file:
        os.set_inheritable(own_file.fileno(), True)
        first, second = await start(plain()), await start(plain())
        for server in first, second:
            await server.call("echo")
            assert sorted(os.listdir(f"/proc/{server.process.pid}/fd")) == ["0", "1", "2"]
        await asyncio.gather(first.process.stop(), second.process.stop())


@pytest.mark.spec("3.12")
@pytest.mark.parametrize("mode", ["children", "daemons"])
async def test_all_descendants_end_with_the_server(mode: str) -> None:
    server = await start(plain(mode))
    pids: list[int] = json.loads(await server.line())["params"]["pids"]
    assert all(map(lives, pids))
    await server.process.stop()
    assert not any(map(lives, [server.process.pid, *pids]))


@pytest.mark.spec("3.12")
async def test_descendants_of_a_dead_server_are_ended() -> None:
    server = await start(plain("daemons"))
    pids: list[int] = json.loads(await server.line())["params"]["pids"]
    os.kill(server.process.pid, 9)
    await server.end_event.wait()
    assert server.process.exit_description == "the server was ended by SIGKILL"
    await server.process.stop(0)
    assert not any(map(lives, pids))


@pytest.mark.spec("3.12")
async def test_server_that_ignores_signals_is_killed() -> None:
    server = await start(plain("deaf"))
    await server.call("echo")
    await server.process.stop(0.01)
    assert server.process.exit_code == -9


@pytest.mark.spec("3.12")
@pytest.mark.parametrize("how", ["task", "scope"])
async def test_cancelled_stop_still_ends_the_server(how: str) -> None:
    server = await start(plain("deaf"))
    await server.call("echo")
    if how == "task":
        stop_task = asyncio.create_task(server.process.stop(0.01))
        await asyncio.sleep(0)
        stop_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stop_task
    else:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await server.process.stop(0.01)
    assert not lives(server.process.pid)


@pytest.mark.spec("3.12")
async def test_cancelled_start_leaves_no_process() -> None:
    before = open_files()
    for turns in range(6):  # At any point of the start.
        start_task = asyncio.create_task(start(plain("deaf")))
        for _ in range(turns):
            await asyncio.sleep(0)
        start_task.cancel()
        try:
            server = await start_task
        except asyncio.CancelledError:
            continue
        await server.process.stop(0)
    gc.collect()
    assert get_orphan_cleanup().pid is None
    assert open_files() == before


@pytest.mark.spec("3.12")
async def test_300_starts_and_stops_leave_no_process() -> None:
    await (await start(plain())).process.stop()  # The event loop's own files are open now.
    before, threads = open_files(), threading.active_count()
    pids: list[int] = []

    async def start_and_stop() -> None:
        server = await start(ServerSpec(command="cat"))
        pids.append(server.process.pid)
        await server.process.stop()

    for _ in range(30):
        await asyncio.gather(*(start_and_stop() for _ in range(10)))
    assert len(pids) == 300
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert get_orphan_cleanup().pid is None
    assert open_files() == before
    assert threading.active_count() <= threads


@pytest.mark.spec("3.12")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_kill_9_of_the_program_leaves_no_server(loop: str) -> None:
    program = f"""
import asyncio, json, os, sys, {loop}
from tests.providers.mcp.processes import plain
from toolspace.providers.mcp.transports.process import start_process

async def main():
    heard = asyncio.Queue()
    pids = []
    for mode in "deaf", "daemons":
        process = await start_process(mode, plain(mode), receive=heard.put_nowait, on_end=print)
        pids.append(process.pid)
    pids += json.loads(await heard.get())["params"]["pids"]
    print(*pids, flush=True)
    os.kill(os.getpid(), 9)

{loop}.run(main())
"""
    completed_process = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False, timeout=60)
    pids = [int(pid) for pid in completed_process.stdout.split()]
    assert len(pids) == 5
    wait_until_gone(pids)


@pytest.mark.spec("3.12")
def test_it_works_the_same_under_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        server = await start(plain("children"))
        pids: list[int] = json.loads(await server.line())["params"]["pids"]
        assert await server.call("echo", text="hello") == "hello"
        with contextlib.suppress(EOFError, asyncio.IncompleteReadError, json.JSONDecodeError):
            await server.process.write(json.dumps({**CALL, "params": {"name": "die", "arguments": {}}}).encode())
            await server.process.write(b"\n")
        await server.end_event.wait()
        assert server.process.exit_description.startswith(
            "the server ended with exit code 3: OSError: the disk is full"
        )
        await server.process.stop(0)
        assert not any(map(lives, pids))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_last_error_line_is_reported_without_noise_colours_or_secrets() -> None:
    server = await start(plain("dies"))
    await server.end_event.wait()
    assert server.process.exit_description == "the server ended with exit code 1: Error: no such file: /nowhere"
    assert server.process.last_error_lines[-1] == "Node.js v22.1.0"
    await server.process.stop(0)


async def test_any_amount_of_standard_error_is_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolspace.mcp")
    server = await start(plain("stderr"))
    assert await server.call("echo", text="still there") == "still there"
    await server.process.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "toolspace.mcp.plain"]
    assert lines[-1] == "the last line"
    assert max(map(len, lines)) <= 500
    assert len(server.process.last_error_lines) <= 21


async def test_writing_waits_while_the_server_does_not_read_and_fails_when_it_is_gone() -> None:
    server = await start(plain("hangs"))
    process = server.process
    writes = 0
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.2):
                await process.write(b"x" * 65536)
                writes += 1
    assert writes < 10
    os.kill(process.pid, 9)
    with pytest.raises(BrokenPipeError):
        await process.write(b"x")
    await process.stop(0)


@pytest.mark.spec("3.12")
async def test_server_inherits_needed_variables_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {
        "OPENAI_API_KEY": "sk-ours",
        "DATABASE_URL": "postgres://ours",
        "UV_PUBLISH_TOKEN": "ours",
        "npm_config_//registry.example/:_auth": "ours",
        "HTTPS_PROXY": "http://proxy.example:3128",
        "LC_ALL": "C.UTF-8",
        "XDG_CACHE_HOME": "/cache",
        "TERM": "() { :; }",
    }.items():
        monkeypatch.setenv(key, value)
    server = await start(plain(OWN="given", LC_ALL="C"))
    environment = json.loads(await server.call("environment"))
    await server.process.stop()
    assert environment["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert environment["XDG_CACHE_HOME"] == "/cache"
    assert environment["PATH"] == os.environ["PATH"]
    assert (environment["OWN"], environment["LC_ALL"]) == ("given", "C")
    assert "ours" not in json.dumps(environment)
    assert "TERM" not in environment


def _missing(folder: Path) -> ServerSpec:
    return ServerSpec(command="npx-that-nobody-has")


def _no_path(folder: Path) -> ServerSpec:
    return ServerSpec(command="npx", env={"PATH": str(folder)})


def _missing_file(folder: Path) -> ServerSpec:
    return ServerSpec(command="./server", cwd=folder)


def _not_executable(folder: Path) -> ServerSpec:
    (folder / "server").write_text("#!/bin/sh\n")
    return ServerSpec(command=str(folder / "server"))


def _no_folder(folder: Path) -> ServerSpec:
    return ServerSpec(command="sh", cwd=folder / "nowhere")


def _no_interpreter(folder: Path) -> ServerSpec:
    (folder / "server").write_text("echo hello\n")
    (folder / "server").chmod(0o755)
    return ServerSpec(command=str(folder / "server"))


def _nul(folder: Path) -> ServerSpec:
    return ServerSpec(command="sh", args=("-c", "a\0b"))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_missing, "'npx-that-nobody-has' of server 'plain' is not on the PATH; install it"),
        (_no_path, "install Node.js, or give its full path"),
        (_missing_file, "/server' of server 'plain' does not exist"),
        (_not_executable, "is not executable; run chmod +x on it"),
        (_no_folder, "/nowhere' that server 'plain' is to run in (cwd) does not exist"),
        (_no_interpreter, "does its first line name a program (#!)?"),
        (_nul, "has a NUL character"),
        (lambda _: ServerSpec(command=""), "has no command"),
    ],
    ids=["unknown", "unknown-npx", "no-file", "not-executable", "no-folder", "no-interpreter", "nul", "no-command"],
)
async def test_failed_start_is_reported_with_what_to_do(
    tmp_path: Path, make: Callable[[Path], ServerSpec], expected: str
) -> None:
    with pytest.raises(ProviderError) as error_info:
        await start(make(tmp_path))
    assert expected in str(error_info.value)
    assert get_orphan_cleanup().pid is None


async def test_command_is_found_in_its_folder_and_on_its_own_path(tmp_path: Path) -> None:
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\nread line\npwd\n")
    script.chmod(0o755)
    by_path = ServerSpec(command="server", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, cwd=tmp_path)
    for spec in (ServerSpec(command="./server", cwd=tmp_path), by_path):
        server = await start(spec)
        await server.process.write(b"\n")
        assert (await server.line()).decode() == str(tmp_path)
        await server.process.stop()


async def test_nested_server_keeps_both_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TOOLSPACE_SERVER", "outer")
    server = await start(plain())
    environment = json.loads(await server.call("environment"))
    await server.process.stop()
    assert environment["_TOOLSPACE_SERVER"] == f"outer.{server.process.mark}"

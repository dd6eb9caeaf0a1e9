"""`toolspace serve` as a real process: its start and its end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cli.conftest import Toolspace
from tests.server.gateway_api import SECRET, ApiClient, write_config
from tests.server.gateway_process import GatewayProcess, open_process_api, start_gateway_process
from toolspace.server import control_socket

pytestmark = pytest.mark.spec("17.1")

TOOLS = """
import asyncio
from pathlib import Path
from toolspace import tool

@tool
async def waits_for_file(path: str) -> str:
    \"\"\"Runs until a file is there.\"\"\"
    Path(path + ".began").touch()
    while not Path(path).exists():
        await asyncio.sleep(0.01)
    return Path(path).read_text()
"""
ASK_PERSON = {"name": "askPerson", "executionType": "space", "timeout": "60s", "inputSchema": {"type": "object"}}


def write_project(folder: Path, **server: Any) -> Path:
    (folder / "tools.py").write_text(TOOLS)
    return write_config(folder, functions="./tools.py", server=server, tools=[ASK_PERSON])


async def create_run(api: ApiClient) -> None:
    """Creates an agent, a space and an open run."""
    await api.create("/api/entities", id="robot", type="agent", name="Robot")
    await api.create("/api/spaces", id="workshop", name="Workshop", members=["robot"])
    await api.create("/api/runs", id="run-1", agentEntityId="robot", spaceId="workshop")


def assert_no_errors(gateway: GatewayProcess) -> None:
    """Asserts that the log has no error."""
    text = "\n".join(gateway.stderr_lines)
    assert "Traceback" not in text, text
    assert "[ERR]" not in text, text


@pytest.mark.spec("8.3")
async def test_the_first_start_shows_keys_once_and_a_command_that_works(tmp_path: Path) -> None:
    async with start_gateway_process(tmp_path) as first:
        keys = first.keys
        hint = await first.wait_for_line("curl ")
        example = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", hint], capture_output=True, text=True, check=True, timeout=30
        )
        first.process.send_signal(signal.SIGTERM)
        assert await first.wait_for_exit() == 0
        assert_no_errors(first)
    stored_bytes = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    async with start_gateway_process(tmp_path) as second, open_process_api(second, keys["secret"]) as api:
        second_keys = second.keys
        me = await api.get("/api/me")
        line = await second.wait_for_line("toolspace keys new")
        second.process.send_signal(signal.SIGINT)
        assert await second.wait_for_exit() == 0
        assert_no_errors(second)

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", first.url)
    assert set(keys) == {"secret", "public", "JWT"}
    assert json.loads(example.stdout)["result"]["timezone"] == "Europe/Berlin"
    assert keys["secret"].encode() not in stored_bytes
    assert keys["public"].encode() not in stored_bytes
    assert second_keys == {}
    assert me.status == 200
    assert "shown at the first start" in line
    assert str(tmp_path / "state" / "toolspace" / "toolspace.db") in "\n".join(first.stderr_lines)


async def test_json_prints_one_document(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "toolspace", "serve", "--port", "0", "--json", "--quiet"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    text = await process.stdout.readuntil(b"\n}\n")
    process.send_signal(signal.SIGTERM)
    rest, errors = await process.communicate()

    document = json.loads(text)
    assert document["mcp"] == document["url"] + "/mcp"
    assert document["keys"]["secretKey"].startswith("sk_")
    assert (rest, errors, process.returncode) == (b"", b"", 0)


def test_a_used_port_is_reported_before_anything_is_created(toolspace: Toolspace, tmp_path: Path) -> None:
    with socket.socket() as used_socket:
        used_socket.bind(("127.0.0.1", 0))
        used_socket.listen()
        port = used_socket.getsockname()[1]
        result = toolspace("serve", "--port", str(port))

    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in result.stderr
    assert "set server.port (or --port)" in result.stderr
    assert not list((tmp_path / "state").rglob("*.db"))


def test_an_address_of_another_machine_is_refused(toolspace: Toolspace) -> None:
    result = toolspace("serve", "--host", "192.0.2.1", "--port", "0")

    assert result.returncode == 2
    assert "set server.host (or --host)" in result.stderr


async def test_a_second_gateway_on_the_same_database_file_is_refused(tmp_path: Path, toolspace: Toolspace) -> None:
    async with start_gateway_process(tmp_path) as first:
        environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
        result = await asyncio.to_thread(toolspace, "serve", "--port", "0", cwd=tmp_path, **environ)

    assert result.returncode == 2
    assert f"in use by process {first.process.pid}" in result.stderr
    assert "storage.url" in result.stderr


@pytest.mark.spec("8.3")
async def test_a_public_address_is_warned_of_and_local_commands_still_connect(tmp_path: Path) -> None:
    async with start_gateway_process(tmp_path, None, "--host", "0.0.0.0") as gateway:
        warning = await gateway.wait_for_line("warning:")
        door = await control_socket.find_gateway(tmp_path / "state" / "toolspace", None)
        assert door is not None
        async with aiohttp.ClientSession() as session:
            me = await ApiClient(door.url, session, {"x-secret-key": door.key}).get("/api/me")

    assert "without encryption" in warning
    assert door.url.startswith("http://127.0.0.1:")
    assert me.status == 200
    assert door.key not in "\n".join((*gateway.stdout_lines, *gateway.stderr_lines))


@pytest.mark.spec("5.4")
async def test_changes_of_the_configuration_apply_while_it_runs(tmp_path: Path) -> None:
    config = write_project(tmp_path)
    async with start_gateway_process(tmp_path, config) as gateway, open_process_api(gateway) as api:
        before = await api.get("/api/tools/waits_for_file")
        document = json.loads(config.read_text())
        config.write_text(json.dumps({**document, "tools": [ASK_PERSON, {**ASK_PERSON, "name": "askAgain"}]}))
        for _ in range(500):
            if (after := await api.get("/api/tools/askAgain")).status == 200:
                break
            await asyncio.sleep(0.02)

    assert (before.status, after.status) == (200, 200)


@pytest.mark.spec("6.3")
@pytest.mark.spec("7.4")
async def test_stopping_stores_pending_calls_ends_streams_and_lets_running_calls_finish(tmp_path: Path) -> None:
    config = write_project(tmp_path, stopTimeout="30s")
    file = tmp_path / "result"
    async with start_gateway_process(tmp_path, config) as gateway, open_process_api(gateway) as api:
        await create_run(api)
        stream = await api.session.get(f"{gateway.url}/api/spaces/workshop/stream", headers=api.headers)
        pending_call = asyncio.create_task(
            api.post("/api/runs/run-1/calls", {"name": "askPerson", "args": {}, "callId": "call-1"})
        )
        runs = asyncio.create_task(api.post("/api/tools/waits_for_file/call", {"args": {"path": str(file)}}))
        await wait_until(lambda: Path(f"{file}.began").exists())
        async for line in stream.content:
            if b"tool.started" in line:
                break

        gateway.process.send_signal(signal.SIGTERM)
        await gateway.wait_for_line("Stopping")
        pending_result = await pending_call
        rest = await stream.content.read()
        with pytest.raises(aiohttp.ClientConnectionError):
            await wait_until_refused(gateway.url)
        still_runs = not runs.done()
        file.write_text("the result")
        finished = await runs
        code = await gateway.wait_for_exit()
        assert_no_errors(gateway)

    async with start_gateway_process(tmp_path, config) as gateway, open_process_api(gateway) as api:
        stored_call = await api.get("/api/calls/call-1")
        response = await api.post("/api/runs/run-1/tool-results", {"callId": "call-1", "result": True})
        inbox = await api.get("/api/agents/robot/inbox")

    assert (pending_result.status, pending_result.data["pendingToolCallId"]) == (202, "call-1")
    assert isinstance(rest, bytes)
    assert still_runs
    assert (finished.status, finished.data["result"]) == (200, "the result")
    assert code == 0
    assert stored_call.data["status"] == "pending"
    assert response.status == 200
    assert [event["type"] for event in inbox.data["items"]] == ["tool_result"]


async def test_calls_that_do_not_finish_in_time_are_stopped_and_recorded(tmp_path: Path) -> None:
    config = write_project(tmp_path, stopTimeout=100)
    never = str(tmp_path / "never")
    async with start_gateway_process(tmp_path, config) as gateway, open_process_api(gateway) as api:
        await create_run(api)
        body = {"name": "waits_for_file", "args": {"path": never}, "callId": "call-2"}
        runs = asyncio.create_task(api.post("/api/runs/run-1/calls", body))
        await wait_until(lambda: Path(f"{never}.began").exists())
        gateway.process.send_signal(signal.SIGTERM)
        stopped = await runs
        assert await gateway.wait_for_exit() == 0
        assert_no_errors(gateway)

    async with start_gateway_process(tmp_path, config) as gateway, open_process_api(gateway) as api:
        stored_call = await api.get("/api/calls/call-2")

    assert stopped.data["errorKind"] == "canceled"
    assert stored_call.data["status"] not in ("running", "waiting", "pending")
    assert stored_call.data["isError"] is True


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    config = write_project(tmp_path, stopTimeout="1h")
    never = str(tmp_path / "never")
    async with start_gateway_process(tmp_path, config) as gateway, open_process_api(gateway) as api:
        runs = asyncio.create_task(api.post("/api/tools/waits_for_file/call", {"args": {"path": never}}))
        await wait_until(lambda: Path(f"{never}.began").exists())
        gateway.process.send_signal(signal.SIGINT)
        await gateway.wait_for_line("Stopping")
        gateway.process.send_signal(signal.SIGINT)
        code = await gateway.wait_for_exit()
        with pytest.raises(aiohttp.ClientError):
            await runs

    assert code == 128 + signal.SIGINT
    assert_no_errors(gateway)


async def test_keys_are_not_lost_if_the_first_start_fails(tmp_path: Path, toolspace: Toolspace) -> None:
    config = {"mcpServers": {"needed": {"command": "false", "required": True}}}
    (tmp_path / "needed.json").write_text(json.dumps(config))
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}

    failed = await asyncio.to_thread(
        toolspace, "--config", str(tmp_path / "needed.json"), "serve", "--port", "0", **environ
    )
    async with start_gateway_process(tmp_path) as gateway:
        keys = gateway.keys

    assert failed.returncode == 1, failed.stderr
    assert "Traceback" not in failed.stderr
    assert set(keys) == {"secret", "public", "JWT"}


async def wait_until(condition: Any) -> None:
    for _ in range(3_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def wait_until_refused(url: str) -> None:
    """Connects anew until nobody answers."""
    for _ in range(500):
        async with aiohttp.ClientSession() as session:
            await ApiClient(url, session, {"x-secret-key": SECRET}).get("/health")
        await asyncio.sleep(0.01)

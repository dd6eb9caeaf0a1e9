"""`toolspace mcp` answers its first requests at once, whatever the servers behind it do. As a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from tests.providers.mcp.conftest import SERVERS, until
from toolspace import Toolspace, tool
from toolspace.server.mcp.elicitation import STDIO_CLIENT, SuspendedCalls
from toolspace.server.mcp.first_answers import HANDSHAKE_VERSIONS, STATELESS_VERSIONS, FirstAnswers
from toolspace.server.mcp.request_handlers import ToolspaceMcpServer
from toolspace.server.mcp.tool_service import McpService

pytestmark = [pytest.mark.spec("12.3"), pytest.mark.spec("3.19")]
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
PID_FILE = "import os,sys,time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(3600)"


class Pipe:
    """A client that writes and reads single messages."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.notifications: list[str] = []

    def send(self, method: str, id: int | None = None, **params: Any) -> None:
        assert self.process.stdin is not None
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        self.process.stdin.write(json.dumps(message if id is None else {**message, "id": id}).encode() + b"\n")

    async def read(self) -> Any:
        """Returns the next response. Keeps the methods of the notifications before it."""
        assert self.process.stdout is not None
        while True:
            message = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
            if "method" not in message:
                return message
            self.notifications.append(message["method"])

    async def request(self, method: str, id: int, **params: Any) -> Any:
        self.send(method, id, **params)
        response = await self.read()
        assert response["id"] == id
        return response

    async def read_notification(self) -> str:
        assert self.process.stdout is not None
        message = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
        return message["method"]

    async def handshake(self) -> None:
        assert "result" in await self.request("initialize", 0, **INITIALIZE)
        self.send("notifications/initialized")

    async def list_names(self, id: int) -> set[str]:
        return {entry["name"] for entry in (await self.request("tools/list", id))["result"]["tools"]}


StartServer = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncGenerator[StartServer]:
    """Starts `toolspace mcp` with these servers behind it."""
    pipes: list[Pipe] = []

    async def run(servers: dict[str, Any], **sections: Any) -> Pipe:
        config = {"mcpServers": servers, "storage": {"dir": str(tmp_path / "state")}, **sections}
        (tmp_path / "toolspace.json").write_text(json.dumps(config))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "toolspace", "mcp"),
            cwd=tmp_path,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        pipes.append(Pipe(process))
        return pipes[-1]

    yield run
    for pipe in pipes:
        if pipe.process.returncode is None:
            pipe.process.kill()
        await pipe.process.communicate()


def gated_server(gate: Path | str, *tools: str, **settings: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVERS / "gated.py"), str(gate), *tools], **settings}


def hanging_server(pid_file: Path, **settings: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-c", PID_FILE, str(pid_file)], **settings}


async def test_a_server_that_never_starts_delays_neither_answer_nor_list(start: StartServer, tmp_path: Path) -> None:
    pipe = await start({"slow": hanging_server(tmp_path / "pid"), "quick": gated_server("-", "add")})
    await pipe.handshake()
    names = await pipe.list_names(1)
    assert "quick__add" in names
    assert not any(name.startswith("slow__") for name in names)
    result = await pipe.request("tools/call", 2, name="quick__add", arguments={})
    assert result["result"]["content"][0]["text"] == "add"


async def test_tools_of_a_slow_server_arrive_with_a_notification(start: StartServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pipe = await start({"slow": gated_server(gate, "late")}, defaults={"startPatience": "0s"})
    await pipe.handshake()
    assert "slow__late" not in await pipe.list_names(1)
    gate.touch()
    assert await pipe.read_notification() == "notifications/tools/list_changed"
    assert "slow__late" in await pipe.list_names(2)


async def test_a_list_waits_for_a_server_within_its_patience(start: StartServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pipe = await start({"slow": gated_server(gate, "late", startPatience="60s")}, defaults={"startPatience": "0s"})
    await pipe.handshake()
    pipe.send("tools/list", 1)
    assert (await pipe.request("ping", 2))["result"] == {}  # The list waits, and everything else goes on.
    gate.touch()
    assert "slow__late" in {entry["name"] for entry in (await pipe.read())["result"]["tools"]}


async def test_a_call_waits_for_its_server_to_start(start: StartServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pipe = await start({"slow": gated_server(gate, "late")}, defaults={"startPatience": "0s"})
    await pipe.handshake()
    pipe.send("tools/call", 1, name="slow__late", arguments={})
    assert "slow__late" not in await pipe.list_names(2)
    gate.touch()
    assert (await pipe.read())["result"]["content"][0]["text"] == "late"


async def test_a_call_of_a_failed_server_fails_with_the_reason(start: StartServer) -> None:
    pipe = await start({"bad": {"command": sys.executable, "args": ["-c", "raise SystemExit('no database')"]}})
    await pipe.handshake()
    await pipe.list_names(1)
    result = (await pipe.request("tools/call", 2, name="bad__work", arguments={}))["result"]
    assert result["isError"]
    assert "no database" in result["content"][0]["text"]


@pytest.mark.parametrize("is_answered", [True, False])
async def test_initialize_works_after_discovery_on_the_same_pipe(
    start: StartServer, tmp_path: Path, is_answered: bool
) -> None:
    pipe = await start({"slow": hanging_server(tmp_path / "pid")}, defaults={"startPatience": "0s"})
    pipe.send("server/discover", 1, _meta=META)
    if is_answered:
        assert (await pipe.read())["result"]["supportedVersions"] == ["2026-07-28"]
    pipe.send("initialize", 2, **INITIALIZE)
    if not is_answered:
        assert (await pipe.read())["id"] == 1
    assert (await pipe.read())["result"]["protocolVersion"] == "2025-11-25"
    pipe.send("notifications/initialized")
    assert "read_file" in await pipe.list_names(3)


async def test_a_client_that_gives_up_discovery_after_a_second_gets_its_handshake(start: StartServer) -> None:
    """As the AI SDK 7 does: it cancels the probe after a second, and goes on with `initialize`."""
    pipe = await start({})
    pipe.send("server/discover", 1, _meta=META)
    await asyncio.wait((asyncio.ensure_future(asyncio.sleep(1)),))  # The time-out of that client.
    pipe.send("notifications/cancelled", requestId=1, reason="timed out")
    pipe.send("initialize", 2, **INITIALIZE)
    assert [(await pipe.read())["id"], (await pipe.read())["id"]] == [1, 2]
    pipe.send("notifications/initialized")
    assert "read_file" in await pipe.list_names(3)


async def test_stateless_requests_work_after_discovery(start: StartServer) -> None:
    pipe = await start({})
    await pipe.request("server/discover", 1, _meta=META)
    response = await pipe.request("tools/list", 2, _meta=META)
    assert "read_file" in {entry["name"] for entry in response["result"]["tools"]}


@pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
async def test_the_sdk_client_connects_while_a_server_hangs(tmp_path: Path, mode: str) -> None:
    config = {"mcpServers": {"slow": hanging_server(tmp_path / "pid")}, "defaults": {"startPatience": "0s"}}
    (tmp_path / "toolspace.json").write_text(json.dumps({**config, "storage": {"dir": str(tmp_path / "state")}}))
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "toolspace", "mcp"], cwd=tmp_path, env=dict(os.environ)
    )
    async with Client(parameters, mode=mode) as client:
        assert "read_file" in {entry.name for entry in (await client.list_tools()).tools}


@pytest.mark.spec("3.2")
async def test_a_required_server_that_fails_ends_the_process_with_its_reason(start: StartServer) -> None:
    command = {"command": sys.executable, "args": ["-c", "raise SystemExit('no database')"], "required": True}
    pipe = await start({"bad": command})
    assert await asyncio.wait_for(pipe.process.wait(), 60) == 1
    assert b"no database" in await pipe.process.stderr.read()


@pytest.mark.spec("3.12")
@pytest.mark.parametrize("end", ["close", "term", "int", "kill"])
async def test_no_process_is_left_when_the_client_leaves_during_the_start(
    start: StartServer, tmp_path: Path, end: str
) -> None:
    pid_file = tmp_path / "pid"
    pipe = await start({"slow": hanging_server(pid_file)})
    await pipe.handshake()
    pid = int(await until(lambda: pid_file.exists() and pid_file.read_text(), seconds=60))
    if end == "close":
        pipe.process.stdin.close()
    else:
        pipe.process.send_signal({"term": signal.SIGTERM, "int": signal.SIGINT, "kill": signal.SIGKILL}[end])
    await asyncio.wait_for(pipe.process.wait(), 60)
    await until(lambda: not _is_alive(pid), seconds=30)


async def test_a_client_that_closes_at_once_ends_the_process(start: StartServer, tmp_path: Path) -> None:
    pipe = await start({"slow": hanging_server(tmp_path / "pid")})
    pipe.process.stdin.close()
    assert await asyncio.wait_for(pipe.process.wait(), 60) == 0


async def test_an_invalid_configuration_is_reported_before_any_answer(start: StartServer) -> None:
    pipe = await start({}, defaults={"startPatience": "soon"})
    output, errors = await asyncio.wait_for(pipe.process.communicate(b""), 60)
    assert pipe.process.returncode == 2
    assert output == b""
    assert b"startPatience" in errors


# The answers are those of the SDK


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.parametrize("version", [*HANDSHAKE_VERSIONS, "1999-01-01"])
async def test_the_answer_to_initialize_is_that_of_the_sdk(version: str) -> None:
    params = {**INITIALIZE, "protocolVersion": version}
    assert _answer("initialize", params) == await _ask_sdk("initialize", params)


@pytest.mark.parametrize(
    "meta",
    [META, {**META, "io.modelcontextprotocol/protocolVersion": "2031-01-01"}],
    ids=["supported", "unsupported"],
)
async def test_the_answer_to_discovery_is_that_of_the_sdk(meta: dict[str, Any]) -> None:
    assert _answer("server/discover", {"_meta": meta}) == await _ask_sdk("server/discover", {"_meta": meta})


async def test_discovery_without_capabilities_is_refused_with_the_code_of_the_sdk() -> None:
    meta = {key: value for key, value in META.items() if "Capabilities" not in key}
    expected = await _ask_sdk("server/discover", {"_meta": meta})
    assert _answer("server/discover", {"_meta": meta})["error"]["code"] == expected["error"]["code"]


def test_the_protocol_versions_are_those_of_the_sdk() -> None:
    assert tuple(HANDSHAKE_PROTOCOL_VERSIONS) == HANDSHAKE_VERSIONS
    assert tuple(MODERN_PROTOCOL_VERSIONS) == STATELESS_VERSIONS


@pytest.mark.parametrize(
    "line",
    [b"", b"nonsense", b"[]", b"[" * 9999, b'{"jsonrpc":"2.0","id":true,"method":"initialize"}', b'{"method":"ping"}'],
)
def test_lines_that_are_no_requests_are_left_to_the_sdk(line: bytes) -> None:
    received_line = FirstAnswers().receive(line)
    assert received_line.response is None
    assert received_line.is_for_sdk


def _answer(method: str, params: dict[str, Any]) -> Any:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    response = FirstAnswers().receive(json.dumps(request).encode()).response
    assert response is not None
    return json.loads(response)


async def _ask_sdk(method: str, params: dict[str, Any]) -> Any:
    """Returns the answer of the SDK's server for the same toolspace."""
    import anyio
    import mcp_types as types
    from mcp.shared.message import SessionMessage

    async with (
        Toolspace([add]) as ts,
        McpService(ts) as service,
        SuspendedCalls(service, client=STDIO_CLIENT) as suspended_calls,
        anyio.create_task_group() as tasks,
    ):
        server = ToolspaceMcpServer(service, suspended_calls)
        requests, reader = anyio.create_memory_object_stream[SessionMessage | Exception](1)
        writer, responses = anyio.create_memory_object_stream[SessionMessage](1)
        tasks.start_soon(server.run, reader, writer, server.create_initialization_options())
        async with requests, responses:
            await requests.send(SessionMessage(types.JSONRPCRequest(jsonrpc="2.0", id=1, method=method, params=params)))
            message = (await responses.receive()).message
        await server.changes.aclose()
        tasks.cancel_scope.cancel()
    return json.loads(message.model_dump_json(by_alias=True, exclude_unset=True))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

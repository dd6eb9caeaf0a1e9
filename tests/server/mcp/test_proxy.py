"""Clients of both eras reach MCP servers through a served toolspace."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.shared.subscriptions import ToolsListChanged

from tests.providers.mcp.conftest import SERVERS, ServerLog, until
from tests.providers.mcp.processes import wait_until_gone
from tests.server.mcp.conftest import Serve, Served
from tests.server.mcp.test_sdk_clients import ProgressRecorder, both_eras, wait_for_notification
from toolspace import Toolspace

pytestmark = pytest.mark.spec("12.3")


@pytest.fixture
def server_log(tmp_path: Path) -> ServerLog:
    return ServerLog(tmp_path / "server.log")


@pytest.fixture
def configuration(tmp_path: Path, server_log: ServerLog) -> Path:
    server = {"command": sys.executable, "args": [str(SERVERS / "scripted.py"), str(server_log.path)]}
    dead = {"command": sys.executable, "args": [str(SERVERS / "scripted.py"), str(tmp_path / "dead"), "die-at-start"]}
    path = tmp_path / "toolspace.yaml"
    path.write_text(json.dumps({"mcpServers": {"up": server, "dead": dead}}))
    return path


@pytest.fixture
async def proxy(serve: Serve, configuration: Path) -> Served:
    toolspace = Toolspace.open(configuration)
    mcp_server = await serve(toolspace)
    await until(lambda: toolspace.find_tool("up__echo"))
    return mcp_server


@pytest.mark.spec("3.14")
async def test_tool_change_of_a_server_behind_reaches_a_session(proxy: Served) -> None:
    notifications: asyncio.Queue[str] = asyncio.Queue()

    async def hear(message: Any) -> None:
        notifications.put_nowait(getattr(message, "method", ""))

    async with Client(proxy.url, mode="legacy", message_handler=hear) as client:
        await wait_for_notification(proxy, notifications)  # The stream for notifications is open now.
        assert (await client.call_tool("up__grow", {})).content[0].text == "grown"
        while await notifications.get() != "notifications/tools/list_changed":
            pass
        names = [entry.name for entry in (await client.list_tools(cache_mode="bypass")).tools]
    assert "up__grown" in names


@pytest.mark.spec("3.14")
@pytest.mark.parametrize("mode", ["auto", "2026-07-28"])
async def test_tool_change_of_a_server_behind_reaches_a_subscriber(proxy: Served, mode: str) -> None:
    async with Client(proxy.url, mode=mode) as client, client.listen(tools_list_changed=True) as changes:
        await client.call_tool("up__grow", {})
        async for event in changes:
            assert isinstance(event, ToolsListChanged)
            break
        names = [entry.name for entry in (await client.list_tools(cache_mode="bypass")).tools]
    assert "up__grown" in names


@both_eras
@pytest.mark.parametrize("follow", [False, True], ids=["plain", "with progress"])
@pytest.mark.spec("3.14")
@pytest.mark.spec("4.5")
async def test_cancellation_reaches_the_server_behind(
    proxy: Served, server_log: ServerLog, mode: str, follow: bool
) -> None:
    async def hear(*_: Any) -> None: ...

    async with Client(proxy.url, mode=mode) as client:
        call = asyncio.create_task(client.call_tool("up__wait", {}, progress_callback=hear if follow else None))
        await server_log.until("waiting")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await server_log.until("cancelled")
        # The SDK's client fails if it closes while the response of the cancelled call arrives.
        await proxy.toolspace.orchestrator.wait_until_idle()
        await client.list_tools()


@both_eras
async def test_failure_of_a_server_behind_keeps_its_text(proxy: Served, mode: str) -> None:
    async with Client(proxy.url, mode=mode) as client:
        failed = await client.call_tool("up__fail", {})
        died = await client.call_tool("up__die", {})
    assert failed.is_error
    assert "it is broken" in failed.content[0].text
    assert died.is_error
    assert died.content[0].text.startswith("(tool failed: the server went away")


@both_eras
@pytest.mark.spec("3.2")
async def test_tool_of_a_failed_server_says_why(proxy: Served, mode: str) -> None:
    async with Client(proxy.url, mode=mode) as client:
        result = await client.call_tool("dead__echo", {})
    assert result.is_error
    assert "cannot find the database" in result.content[0].text


@both_eras
async def test_parts_and_progress_of_a_server_behind_are_forwarded(proxy: Served, mode: str) -> None:
    async with Client(proxy.url, mode=mode) as client:
        recorder = ProgressRecorder(3)
        await client.call_tool("up__progress", {}, progress_callback=recorder)
        await recorder.all.wait()
        parts = await client.call_tool("up__parts", {})
        structured_result = await client.call_tool("up__structured", {})
    assert [report[2] for report in recorder.reports] == ["step 0", "step 1", "step 2"]
    assert [part.type for part in parts.content][:5] == ["text", "image", "audio", "resource", "resource_link"]
    assert structured_result.structured_content == {"n": 5}


async def test_killed_stdio_client_leaves_no_server(configuration: Path, server_log: ServerLog) -> None:
    client = f"""
import subprocess, sys
server = subprocess.Popen([{sys.executable!r}, "-m", "toolspace", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in sys.stdin.buffer:
    server.stdin.write(line)
    server.stdin.flush()
    print(server.pid, flush=True)
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", client),
        cwd=configuration.parent,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": "up__wait", "arguments": {}, "_meta": meta}
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    server = int(await process.stdout.readline())
    await server_log.until("waiting")
    process.kill()
    await process.communicate()
    await asyncio.to_thread(wait_until_gone, [server, *server_log.starts])

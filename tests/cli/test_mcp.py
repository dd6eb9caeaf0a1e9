"""`toolspace mcp --http` as a real process."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from tests.cli.conftest import Toolspace, environment

pytestmark = pytest.mark.spec("12.3")
Start = Callable[..., Awaitable[tuple[asyncio.subprocess.Process, str]]]


@pytest.fixture
async def start(project: Path) -> AsyncGenerator[Start]:
    """Starts `toolspace mcp --http 0 …`; the process and the URL that it printed."""
    started: list[asyncio.subprocess.Process] = []

    async def run(*words: str, **changes: str) -> tuple[asyncio.subprocess.Process, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "toolspace", "mcp", "--http", "0", *words),
            cwd=project,
            env=environment(**changes),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        started.append(process)
        assert process.stdout is not None
        return process, (await process.stdout.readline()).decode().strip()

    yield run
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_mcp_over_http_prints_its_url_and_ends_on_a_signal(start: Start) -> None:
    process, url = await start()
    assert url.startswith("http://127.0.0.1:")
    assert url.endswith("/mcp")
    async with Client(url, mode="legacy") as client:
        assert (await client.call_tool("noisy", {})).content[0].text == "7"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM


@pytest.mark.spec("4.5")
async def test_running_calls_are_cancelled_at_the_end(start: Start, project: Path) -> None:
    process, url = await start()
    started = asyncio.Event()

    async def hear(*_: object) -> None:
        started.set()

    async with Client(url, mode="2026-07-28") as client:
        call = asyncio.create_task(client.call_tool("waits", {}, progress_callback=hear))
        await started.wait()
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 128 + signal.SIGINT
        with pytest.raises(MCPError):
            await call
    assert (project / "cleaned").exists()


@pytest.mark.spec("5.4")
async def test_clients_are_notified_of_changes_of_the_configuration(start: Start, project: Path) -> None:
    _, url = await start()
    async with Client(url, mode="2026-07-28") as client, client.listen(tools_list_changed=True) as changes:
        text = (project / "toolspace.yaml").read_text()
        (project / "toolspace.yaml").write_text(text.replace("[delete_file]", "[delete_file, move_file]"))
        async for _event in changes:
            break
        names = [tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools]
    assert "move_file" not in names


async def test_requests_need_the_token(start: Start) -> None:
    _, url = await start(TOOLSPACE_MCP_TOKEN="s3cret")
    import aiohttp

    async with aiohttp.ClientSession() as http:
        async with http.post(url, json={}) as response:
            assert response.status == 401
        async with http.post(url, json={}, headers={"authorization": "Bearer s3cret"}) as response:
            assert response.status in (400, 406)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--http", "0", "--host", "0.0.0.0"), "anyone who can connect could call the tools"),
        (("--http", "0", "--path", "mcp"), "must begin with /"),
        (("--http", "0", "--token", " "), "it is empty"),
        (("--http", "70000"), "70000"),
        (("--allow-host", "example.com"), "--allow-host is for HTTP only; add the port: --http 8000"),
    ],
    ids=["host", "path", "token", "port", "no port"],
)
def test_invalid_addresses_are_refused(toolspace: Toolspace, words: tuple[str, ...], reason: str) -> None:
    result = toolspace("mcp", *words)
    assert result.returncode == 2
    assert reason in result.stderr
    assert result.stdout == ""


def test_a_used_port_is_reported(toolspace: Toolspace) -> None:
    with socket.socket() as used_socket:
        used_socket.bind(("127.0.0.1", 0))
        used_socket.listen()
        result = toolspace("mcp", "--http", str(used_socket.getsockname()[1]))
    assert result.returncode == 2
    assert "cannot listen on 127.0.0.1 port" in result.stderr

"""The same third-party server over each of its transports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.peers.servers import Entry, editor_file, everything_server
from toolspace import Toolspace
from toolspace.core.events import CallProgress
from toolspace.testing import EventRecorder


@asynccontextmanager
async def _listen(entry: Entry) -> AsyncIterator[str]:
    """Runs the server in its own process, on a free port, for the duration of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        entry["command"],
        *entry["args"],
        env={"PORT": str(port)},
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert process.stderr is not None
    try:
        while f"{port}".encode() not in await process.stderr.readline():
            assert process.returncode is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


@pytest.mark.spec("3.10")
@pytest.mark.parametrize("transport", ["streamableHttp", "sse"])
async def test_same_server_works_over_http_and_sse(tmp_path: Path, transport: str) -> None:
    async with _listen(everything_server(transport)) as base:
        # Both are configured as `http`: the fallback to SSE is automatic.
        path = "/mcp" if transport == "streamableHttp" else "/sse"
        file = editor_file(tmp_path, everything={"type": "http", "url": base + path})
        async with Toolspace.open(file) as ts:
            (status,) = ts.list_servers()
            assert (status.state, status.era) == ("ready", "handshake")
            assert status.transport == ("http" if transport == "streamableHttp" else "sse")
            recorder = EventRecorder(ts)
            result = await ts.call("everything__trigger_long_running_operation", {"duration": 0.1, "steps": 2})
            assert result.ok
            assert len([event for event in recorder.events if isinstance(event, CallProgress)]) == 2

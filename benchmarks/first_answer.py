"""Measure: how long an MCP client on stdio waits for its first answer, from the start of the process."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Contestant, Report, race, repeat

ROUNDS = 9
TOOLSPACE = "toolspace mcp"
FASTMCP = "FastMCP"
_HANGING = ("-c", "import time; time.sleep(3600)")
_FASTMCP_SERVER = """
from fastmcp import FastMCP

server = FastMCP("bench")

@server.tool
def add(a: int, b: int) -> int:
    return a + b

server.run(transport="stdio", show_banner=False)
"""
_INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}},
}


async def measure() -> Report:
    report = Report("The first answer on stdio, from the start of the process")
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder))
        contestants = [
            Contestant(TOOLSPACE, repeat(_start_and_initialize, ("-m", "toolspace", "mcp"), folder), _once_per_round),
            Contestant(FASTMCP, repeat(_start_and_initialize, ("-c", _FASTMCP_SERVER), folder), _once_per_round),
        ]
        timings = await race(contestants, rounds=ROUNDS)
    report.ratio(f"{TOOLSPACE} with a server behind it that hangs", timings.ratio(TOOLSPACE, FASTMCP), must=0.5)
    for name in (TOOLSPACE, FASTMCP):
        report.figure(name, timings.best(name) * 1e3, "ms")
    report.notes.append("against a FastMCP server with one function, in the same run")
    return report


def _write_config(folder: Path) -> None:
    """A server that never answers is behind Toolspace, and none behind FastMCP."""
    servers = {"hangs": {"command": sys.executable, "args": list(_HANGING)}}
    config = {"mcpServers": servers, "storage": {"dir": str(folder / "state")}}
    (folder / "toolspace.json").write_text(json.dumps(config))


def _once_per_round() -> None:
    """A contestant with something to prepare runs once per round."""


async def _start_and_initialize(arguments: Sequence[str], folder: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(_INITIALIZE).encode() + b"\n")
    answer = json.loads(await process.stdout.readline())
    process.kill()  # Also part of the time, and as short for both.
    await process.communicate()
    if "serverInfo" not in answer["result"]:
        raise RuntimeError(f"no answer to initialize: {answer}")

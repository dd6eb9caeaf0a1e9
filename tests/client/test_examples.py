"""The examples of the pages, run against a real gateway."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.server.gateway_api import SECRET, open_api, write_config
from toolspace.client.client import ToolspaceClient
from toolspace.server.gateway import Gateway

EXAMPLES = Path(__file__).parents[2] / "examples"
ROBOT = {"name": "executeRobotAction", "description": "Moves.", "executionType": "external", "visible": False}


@asynccontextmanager
async def running_example(name: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        EXAMPLES / name,
        env={**os.environ, "TOOLSPACE_URL": url, "TOOLSPACE_SECRET_KEY": SECRET},
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with Gateway.open(write_config(tmp_path, tools=[ROBOT])) as gateway, open_api(gateway) as api:
        yield api.url


@pytest.mark.spec("13.1")
async def test_the_client_example_runs(url: str) -> None:
    async with asyncio.timeout(60), running_example("client.py", url) as process:
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    lines = out.decode().splitlines()
    assert lines[0] == "the robot is asked: What time is it?"
    assert lines[-1].endswith("run.done")


@pytest.mark.spec("6.7")
async def test_the_worker_example_executes_calls(url: str) -> None:
    async with (
        asyncio.timeout(60),
        running_example("worker.py", url),
        ToolspaceClient(url, secret_key=SECRET) as client,
    ):
        while not (await client.request("GET", "/api/workers"))["items"]:
            pass
        result = await client.tools.call("executeRobotAction", {"action": "left", "steps": 2})
    assert result.result == {"moved": "left", "steps": 2}

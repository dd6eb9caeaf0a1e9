"""A real gateway with tools for workers and people, and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import SECRET, open_api, write_config
from toolspace.client.client import ToolspaceClient
from toolspace.server.gateway import Gateway

TOOLS: list[dict[str, Any]] = [
    {
        "name": "move",
        "description": "Moves.",
        "executionType": "external",
        "visible": False,
        "timeout": "20s",
        "whenUnserved": "fail",
    },
    {"name": "later", "description": "Moves later.", "executionType": "external", "visible": False, "isAsync": True},
    {"name": "confirm", "description": "Asks.", "executionType": "space", "isAsync": True},
    {"name": "hello", "description": "Greets.", "executionType": "static", "execution": {"output": "hello"}},
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tools=TOOLS, server={"workerGrace": "300ms"})


@pytest.fixture
async def gateway(config: Path) -> AsyncIterator[Gateway]:
    async with Gateway.open(config) as gateway:
        yield gateway


@pytest.fixture
async def url(gateway: Gateway) -> AsyncIterator[str]:
    async with open_api(gateway) as api:
        yield api.url


@pytest.fixture
async def client(url: str) -> AsyncIterator[ToolspaceClient]:
    async with ToolspaceClient(url, secret_key=SECRET) as client, asyncio.timeout(30):
        yield client

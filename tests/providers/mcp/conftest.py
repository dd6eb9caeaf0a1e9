"""Fixtures: MCP servers as processes, and the log of what they received."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from toolspace import Toolspace
from toolspace.orchestrator.effective_settings import ProviderRules
from toolspace.providers.mcp.open_connection import ConnectionOptions
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import ServerSpec

SERVERS = Path(__file__).parent / "servers"


class ServerLog:
    """The log file of the scripted server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    @property
    def starts(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("start ")]

    @property
    def calls(self) -> list[str]:
        return [line.split()[1] for line in self.lines if line.startswith("call ")]

    async def until(self, line: str) -> None:
        await until(lambda: line in self.lines)


async def until(condition: Callable[[], Any], *, seconds: float = 20) -> Any:
    """Polls until a condition holds that another process causes."""
    async with asyncio.timeout(seconds):
        while not (result := condition()):  # noqa: ASYNC110 - of another process, which has no events here
            await asyncio.sleep(0.01)
    return result


@pytest.fixture
def server_log(tmp_path: Path) -> ServerLog:
    return ServerLog(tmp_path / "server.log")


@pytest.fixture
def create_scripted(server_log: ServerLog) -> Callable[..., McpProvider]:
    """Creates providers of the scripted server. The words say how it misbehaves."""

    def make(*words: str, options: ConnectionOptions | None = None, name: str = "s", **fields: Any) -> McpProvider:
        args = (str(SERVERS / "scripted.py"), str(server_log.path), *words)
        return McpProvider(name, ServerSpec(command=sys.executable, args=args, **fields), options)

    return make


@asynccontextmanager
async def open_toolspace(
    *providers: McpProvider, rules: ProviderRules | None = None, **options: Any
) -> AsyncIterator[Toolspace]:
    ts = Toolspace(**options)
    for provider in providers:
        ts.orchestrator.register(provider, rules)
    async with ts:
        yield ts

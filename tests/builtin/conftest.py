"""Calls the built-in tools through a real toolspace in a temporary folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from toolspace import Settings, Toolspace
from toolspace.builtin.data import data_tools
from toolspace.builtin.files import file_tools
from toolspace.builtin.memory import memory_tools
from toolspace.builtin.system import system_tools
from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ToolContext


class ToolCaller:
    """Calls tools as users do."""

    def __init__(self, toolspace: Toolspace) -> None:
        self.toolspace = toolspace

    async def call(self, tool: str, arguments: dict[str, Any], context: ToolContext | None = None) -> ToolResult:
        return await self.toolspace.call(tool, arguments, context=context)

    async def ok(self, tool: str, arguments: dict[str, Any], context: ToolContext | None = None) -> Any:
        """The result of a call that succeeds."""
        result = await self.call(tool, arguments, context)
        assert result.ok, result.error
        return result.result

    async def call_fails(
        self, tool: str, arguments: dict[str, Any], kind: str, *words: str, context: ToolContext | None = None
    ) -> str:
        """The error message of a call that fails with this kind and contains these words."""
        result = await self.call(tool, arguments, context)
        assert not result.ok, result.result
        assert result.error is not None
        assert result.error_kind == kind, result.error
        for word in words:
            assert word in result.error
        return result.error


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The allowed folder, which is also the current one."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """The memory folder, which does not exist yet."""
    return tmp_path / "memory"


@pytest.fixture
async def tools(work: Path, memory: Path, tmp_path: Path) -> AsyncIterator[ToolCaller]:
    context = ToolContext(allowed_paths=[work], memory_dir=memory)
    settings = Settings(tool_response_max_bytes=50_000_000, state_dir=tmp_path / "state")
    every = (*system_tools, *data_tools, *memory_tools, *file_tools)
    async with Toolspace(tools=every, context=context, settings=settings) as toolspace:
        yield ToolCaller(toolspace)

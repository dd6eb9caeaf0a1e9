"""The provider of the tools with which an agent has work done in the background, looks back on it, and speaks.

What they do is for whoever runs the agent: see `taskdesk`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolspace.agents.run_budget import frame_of
from toolspace.builtin.tasks import agent_tools, session_tools, task_tools
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ToolNotFoundError
from toolspace.providers.functions import run_tool


class TaskToolProvider(ToolProvider):
    """`task_list`, `task_replay`, `session_archive_read`, `spawn_task`, `reply`: for agents that live here."""

    kind = "task"
    namespace = ""

    def __init__(self) -> None:
        super().__init__()
        self._tools: dict[str, Tool] = {made.name: made for made in (*task_tools, *session_tools, *agent_tools)}

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def offers(self, tool: Tool, context: ToolContext) -> bool:
        """To an agent that has tasks; not to those that it calls, who would have its tasks for their own."""
        frame = frame_of(context)
        return context.tasks is not None and (frame is None or frame.parent is None)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await run_tool(self._tools[name], parameters, context)

"""The provider of the `agent` namespace. Each of its tools is a module; this one decides when they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import OutputStore, ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ToolNotFoundError
from toolspace.providers.functions import run_tool
from toolspace.providers.internal.batch import batch_tool
from toolspace.providers.internal.final_report import final_report_tool
from toolspace.providers.internal.find_tools import Search, find_tools_tool
from toolspace.providers.internal.read_output import read_output_tool
from toolspace.providers.internal.task_status import task_status_tool


class InternalProvider(ToolProvider):
    """`agent__final_report`, `agent__task_status`, `agent__batch`, `agent__read_output`, `agent__find_tools`."""

    kind = "agent"
    namespace = "agent"

    def __init__(
        self,
        *,
        search: Search,
        outputs: OutputStore | None,
        has_stored: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self._tools: dict[str, Tool] = {
            made.name: made for made in (final_report_tool(), task_status_tool(), batch_tool(), find_tools_tool(search))
        }
        if outputs is not None:
            self._tools["read_output"] = read_output_tool(outputs)
        for made in self._tools.values():
            made.visible = False  # An agent's own doings are never shown in a space.
        self._has_stored = has_stored
        self.always = False
        """Whether to show the tools outside runs too, because whoever looks may be an agent."""

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def offers(self, tool: Tool, context: ToolContext) -> bool:
        """Reading back only once something is stored; the rest in runs, and wherever agents are expected."""
        if tool.name == "agent__read_output":
            return context.session_id is not None and self._has_stored(context.session_id)
        return self.always or context.run_id is not None

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "agent__{name}" not found')
        return await run_tool(self._tools[name], parameters, context)

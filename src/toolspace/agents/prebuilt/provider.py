"""The prebuilt actions as tools with bare names, there for every agent. What each does is in its own module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolspace.agents.prebuilt.action import Action
from toolspace.agents.prebuilt.registry import ACTIONS, handler_of
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ToolNotFoundError
from toolspace.providers.functions import run_tool


class PrebuiltProvider(ToolProvider):
    """`enter_space`, `send_message`, `set_goals` and the others."""

    kind = "prebuilt"
    namespace = ""

    def __init__(self) -> None:
        super().__init__()
        self._tools = {name: tool_of(action) for name, action in ACTIONS.items()}

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def offers(self, tool: Tool, context: ToolContext) -> bool:
        """To agents only: others could not call them."""
        return context.agent_entity_id is not None

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await run_tool(self._tools[name], parameters, context)


def tool_of(action: Action) -> Tool:
    """An action as a tool. Never visible: what an agent keeps in mind is shown to nobody."""
    return Tool(
        action.name,
        action.description,
        action.input_schema,
        handler=handler_of(action),
        category=action.category,
        execution_type="prebuilt",
        visible=False,
        annotations=action.annotations,
    )

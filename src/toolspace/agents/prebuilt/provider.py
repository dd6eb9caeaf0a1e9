"""The prebuilt actions as tools with bare names, there for every agent. What each does is in its own module."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolspace.agents.prebuilt import goals_and_memories, notifications, plans, spaces_and_inbox
from toolspace.agents.prebuilt.action import Action, get_caller, to_tool_error
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.validation import InvalidArguments, SchemaValidator
from toolspace.errors import RefusedError, StorageError, ToolDefinitionError, ToolNotFoundError, ToolValidationError
from toolspace.providers.configured_tools import ToolHandler
from toolspace.providers.registry import run_tool

# MERGED from registry: Every prebuilt action by its name, and how configuration finds one.

ALL_ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        *spaces_and_inbox.SPACE_ACTIONS,
        *spaces_and_inbox.INBOX_ACTIONS,
        *goals_and_memories.MEMORY_ACTIONS,
        *goals_and_memories.GOAL_ACTIONS,
        *plans.PLAN_ACTIONS,
        *goals_and_memories.KNOWLEDGE_ACTIONS,
        *notifications.NOTIFICATION_ACTIONS,
    )
}
"""What every agent has as a tool."""
_SINGULAR_ACTIONS: Mapping[str, Action] = {
    action.name: action for action in (*goals_and_memories.SINGULAR_MEMORY_ACTIONS, *plans.SINGULAR_PLAN_ACTIONS)
}
"""Names of older configurations that mean one thing at a time."""
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


def get_action(name: str) -> Action:
    """An action by its name, in snake_case or camelCase. Raises `ToolDefinitionError` where there is none."""
    found = ALL_ACTIONS.get(name) or _SINGULAR_ACTIONS.get(name) or ALL_ACTIONS.get(_HUMP.sub("_", name).lower())
    if found is None:
        near = did_you_mean(name, (*ALL_ACTIONS, *_SINGULAR_ACTIONS)) or f"; there are {', '.join(ALL_ACTIONS)}"
        raise ToolDefinitionError(f'action: there is no prebuilt action "{name}"{near}')
    return found


def build_handler(action: Action) -> ToolHandler:
    """What carries an action out, whatever the tool is called and says that it takes."""
    validator: SchemaValidator | None = None

    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        nonlocal validator
        actor = get_caller(action.name, context)
        if validator is None:  # Most actions of most agents are never used.
            validator = SchemaValidator(action.input_schema, tool=action.name)
        try:
            # Configuration may have given the tool another schema; what is kept has to fit this one.
            given = validator.from_mapping(parameters)
            return await action.run(actor, given)
        except InvalidArguments as error:
            raise ToolValidationError(str(error)) from None
        except (RefusedError, StorageError) as error:
            raise to_tool_error(error) from error

    return handle


class PrebuiltProvider(ToolProvider):
    """`enter_space`, `send_message`, `set_goals` and the others."""

    kind = "prebuilt"
    namespace = ""

    def __init__(self) -> None:
        super().__init__()
        self._tools = {name: build_tool(action) for name, action in ALL_ACTIONS.items()}

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """To agents only: others could not call them."""
        return context.agent_entity_id is not None

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await run_tool(self._tools[name], parameters, context)


def build_tool(action: Action) -> Tool:
    """An action as a tool. Never visible: what an agent keeps in mind is shown to nobody."""
    return Tool(
        action.name,
        action.description,
        action.input_schema,
        handler=build_handler(action),
        category=action.category,
        execution_type="prebuilt",
        visible=False,
        annotations=action.annotations,
    )

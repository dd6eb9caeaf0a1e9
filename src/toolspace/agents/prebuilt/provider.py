"""Offers the prebuilt actions as tools without a namespace, and finds actions by name for configured tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolspace.agents.prebuilt import goals_memories_plans, notifications, spaces_and_inbox
from toolspace.agents.prebuilt.action import Action, get_caller, to_tool_error
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.validation import InvalidArguments, SchemaValidator
from toolspace.errors import RefusedError, StorageError, ToolDefinitionError, ToolNotFoundError, ToolValidationError
from toolspace.providers.configured_tools import ToolHandler
from toolspace.providers.functions import run_tool

ALL_ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        *spaces_and_inbox.SPACE_ACTIONS,
        *spaces_and_inbox.INBOX_ACTIONS,
        *goals_memories_plans.MEMORY_ACTIONS,
        *goals_memories_plans.GOAL_ACTIONS,
        *goals_memories_plans.PLAN_ACTIONS,
        *goals_memories_plans.KNOWLEDGE_ACTIONS,
        *notifications.NOTIFICATION_ACTIONS,
    )
}
"""The actions that every agent has as tools."""
_SINGULAR_ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (*goals_memories_plans.SINGULAR_MEMORY_ACTIONS, *goals_memories_plans.SINGULAR_PLAN_ACTIONS)
}
"""Actions of older configurations, for one item at a time."""
_WORD_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])")


def get_action(name: str) -> Action:
    """Returns an action by its name, in snake_case or camelCase. Raises `ToolDefinitionError`."""
    snake_case = _WORD_BOUNDARY.sub("_", name).lower()
    action = ALL_ACTIONS.get(name) or _SINGULAR_ACTIONS.get(name) or ALL_ACTIONS.get(snake_case)
    if action is None:
        hint = did_you_mean(name, (*ALL_ACTIONS, *_SINGULAR_ACTIONS)) or f"; there are {', '.join(ALL_ACTIONS)}"
        raise ToolDefinitionError(f'action: there is no prebuilt action "{name}"{hint}')
    return action


def build_handler(action: Action) -> ToolHandler:
    """Builds the handler of an action, for tools of any name and input schema."""
    validator: SchemaValidator | None = None

    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        nonlocal validator
        caller = get_caller(action.name, context)
        if validator is None:  # Built late: most actions are never used.
            validator = SchemaValidator(action.input_schema, tool=action.name)
        try:
            # A configured tool may have another schema; what is stored must fit the schema of the action.
            arguments = validator.from_mapping(parameters)
            return await action.run(caller, arguments)
        except InvalidArguments as error:
            raise ToolValidationError(str(error)) from None
        except (RefusedError, StorageError) as error:
            raise to_tool_error(error) from error

    return handle


class PrebuiltProvider(ToolProvider):
    """Provides `enter_space`, `send_message`, `set_goals` and the other actions."""

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
        """Only agents are offered them: other callers have no inbox, goals or space."""
        return context.agent_entity_id is not None

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await run_tool(self._tools[name], parameters, context)


def build_tool(action: Action) -> Tool:
    """Builds the tool of an action. It is never visible: members of a space do not see what an agent stores."""
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

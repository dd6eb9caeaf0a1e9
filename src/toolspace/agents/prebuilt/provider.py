"""Offers Toolspace's own actions as tools without a namespace, and finds actions by name for configured tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.agents.prebuilt.action import Action, get_caller, tool_errors
from toolspace.agents.prebuilt.goals_memories_plans import SINGULAR_ACTIONS, STORED_ITEM_ACTIONS
from toolspace.agents.prebuilt.notifications import NOTIFICATION_ACTIONS
from toolspace.agents.prebuilt.spaces_and_inbox import INBOX_ACTIONS, SPACE_ACTIONS
from toolspace.core.argument_validation import InvalidArguments, SchemaValidator
from toolspace.core.names import did_you_mean
from toolspace.core.prebuilt_actions import (
    PrebuiltAction,
    find_registered_action,
    list_registered_names,
    to_snake_case,
)
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolDefinitionError, ToolValidationError
from toolspace.providers.configured_tools import ToolExecution, ToolHandler
from toolspace.providers.functions import ToolRegistry, run_tool
from toolspace.providers.plugins import load_installed_action

ALL_ACTIONS: Mapping[str, Action] = {
    action.name: action for action in (*SPACE_ACTIONS, *INBOX_ACTIONS, *STORED_ITEM_ACTIONS, *NOTIFICATION_ACTIONS)
}
"""The actions that every agent has as tools."""
_SINGULAR_ACTIONS: Mapping[str, Action] = {action.name: action for action in SINGULAR_ACTIONS}


def get_action(name: str) -> Action | PrebuiltAction:
    """Returns an action by its name; Toolspace's own also by the camelCase name. Raises `ToolDefinitionError`."""
    action = ALL_ACTIONS.get(name) or _SINGULAR_ACTIONS.get(name) or ALL_ACTIONS.get(to_snake_case(name))
    if action is not None:
        return action
    registered_action = find_registered_action(name) or load_installed_action(name)
    if registered_action is None:
        names = (*ALL_ACTIONS, *_SINGULAR_ACTIONS, *list_registered_names())
        hint = did_you_mean(name, names) or f"; there are {', '.join((*ALL_ACTIONS, *list_registered_names()))}"
        raise ToolDefinitionError(
            f'action: there is no prebuilt action "{name}"{hint}. For one of your own: @prebuilt("{name}")'
        )
    return registered_action


def build_execution(action: Action | PrebuiltAction, input_schema: Mapping[str, Any] | None) -> ToolExecution:
    """Builds the handler of a tool that offers an action, with the schema of the action unless one is given."""
    if isinstance(action, PrebuiltAction):
        handler = _build_function_handler(action)
        return ToolExecution(handler=handler, input_schema=input_schema or action.tool.input_schema)
    return ToolExecution(handler=build_handler(action), input_schema=input_schema or action.input_schema)


def _build_function_handler(action: PrebuiltAction) -> ToolHandler:
    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        try:
            # A configured tool may have another schema than the function.
            return await run_tool(action.tool, parameters, context)
        except InvalidArguments as error:
            raise ToolValidationError(str(error)) from None

    return handle


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
        except InvalidArguments as error:
            raise ToolValidationError(str(error)) from None
        with tool_errors():
            return await action.run(caller, arguments)

    return handle


class PrebuiltProvider(ToolRegistry):
    """Provides `enter_space`, `send_message`, `set_goals` and the other actions."""

    def __init__(self) -> None:
        super().__init__(map(build_tool, ALL_ACTIONS.values()), kind="prebuilt")

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """Only agents are offered them: other callers have no inbox, goals or space."""
        return context.agent_entity_id is not None


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

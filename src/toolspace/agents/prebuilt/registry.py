"""Every prebuilt action by its name, and how configuration finds one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolspace.agents.prebuilt import goals, inbox, knowledge, memories, notifications, plans, spaces
from toolspace.agents.prebuilt.action import Action, actor_of, as_failure
from toolspace.core.context import ToolContext
from toolspace.core.names import did_you_mean
from toolspace.core.schema import InvalidArguments, SchemaValidator
from toolspace.errors import RefusedError, StorageError, ToolDefinitionError, ToolValidationError
from toolspace.providers.configured import Handler

ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        *spaces.ACTIONS,
        *inbox.ACTIONS,
        *memories.ACTIONS,
        *goals.ACTIONS,
        *plans.ACTIONS,
        *knowledge.ACTIONS,
        *notifications.ACTIONS,
    )
}
"""What every agent has as a tool."""
_SINGULAR: Mapping[str, Action] = {action.name: action for action in (*memories.SINGULAR, *plans.SINGULAR)}
"""Names of older configurations that mean one thing at a time."""
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


def find_action(name: str) -> Action:
    """An action by its name, in snake_case or camelCase. Raises `ToolDefinitionError` where there is none."""
    found = ACTIONS.get(name) or _SINGULAR.get(name) or ACTIONS.get(_HUMP.sub("_", name).lower())
    if found is None:
        near = did_you_mean(name, (*ACTIONS, *_SINGULAR)) or f"; there are {', '.join(ACTIONS)}"
        raise ToolDefinitionError(f'action: there is no prebuilt action "{name}"{near}')
    return found


def handler_of(action: Action) -> Handler:
    """What carries an action out, whatever the tool is called and says that it takes."""
    validator: SchemaValidator | None = None

    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        nonlocal validator
        actor = actor_of(action.name, context)
        if validator is None:  # Most actions of most agents are never used.
            validator = SchemaValidator(action.input_schema, tool=action.name)
        try:
            # Configuration may have given the tool another schema; what is kept has to fit this one.
            given = validator.from_mapping(parameters)
            return await action.run(actor, given)
        except InvalidArguments as error:
            raise ToolValidationError(str(error)) from None
        except (RefusedError, StorageError) as error:
            raise as_failure(error) from error

    return handle

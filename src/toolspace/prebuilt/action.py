"""One prebuilt action as data, and the agent that carries it out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, ToolCategory
from toolspace.errors import (
    RefusedError,
    StorageError,
    ToolError,
    ToolExecutionError,
    ToolPermissionError,
    ToolValidationError,
)
from toolspace.spaces.host import CallRoom, as_tool_error
from toolspace.spaces.ledger import Ledger

NO_NUL: Final = "^[^\\u0000]*$"
"""What a database can keep as text."""
READ_ONLY: Final = Annotations(read_only=True)


class Actor:
    """The agent whose call it is, and where it is."""

    __slots__ = ("agent_id", "room")

    def __init__(self, room: CallRoom, agent_id: str) -> None:
        self.room = room
        self.agent_id = agent_id

    @property
    def ledger(self) -> Ledger:
        return self.room.ledger

    def space(self, named: str | None = None) -> str:
        """The space that is meant: the one that is named, else the active one."""
        found = named if named is not None else self.room.space_id
        if found is None:
            raise ToolExecutionError("you are not in a space; call enter_space first", executed=False)
        return found


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something that agents can do. Its tool has the same name."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    run: Callable[[Actor, dict[str, Any]], Awaitable[Any]]
    category: ToolCategory
    annotations: Annotations = NO_ANNOTATIONS


def actor_of(action: str, context: ToolContext) -> Actor:
    """Whose call it is. Raises where it is no agent's."""
    room = context.host
    if not isinstance(room, CallRoom) or room.agent_entity_id is None:
        raise ToolExecutionError(
            f'"{action}" is for agents, in their runs: open one on the gateway (toolspace serve; POST /api/runs) '
            "and call it there",
            executed=False,
        )
    return Actor(room, room.agent_entity_id)


def as_failure(error: RefusedError | StorageError) -> ToolError:
    """A refusal as the failure of a call: who acts next is the agent."""
    if isinstance(error, RefusedError) and error.reason == "forbidden":
        return ToolPermissionError(str(error))
    if isinstance(error, RefusedError) and error.reason == "invalid":
        return ToolValidationError(str(error))
    return as_tool_error(error)


def takes(properties: Mapping[str, Any] | None = None, *required: str) -> dict[str, Any]:
    """The schema of an action's input: these properties and no others."""
    schema: dict[str, Any] = {"type": "object", "properties": properties or {}, "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    return schema

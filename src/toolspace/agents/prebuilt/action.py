"""One prebuilt action as data, and the agent that carries it out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, Final, ParamSpec

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
from toolspace.spaces.call_host import GatewayCallHost, as_tool_error
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import idempotency

P = ParamSpec("P")

NO_NUL: Final = "^[^\\u0000]*$"
"""What a database can keep as text."""
READ_ONLY: Final = Annotations(read_only=True)
ADDS: Final = Annotations(idempotent=True, destructive=False)
CHANGES: Final = Annotations(idempotent=True)
DELETES: Final = Annotations(idempotent=True, destructive=True)
"""What actions do to what is kept. Idempotent: a call that is made again under its id does nothing more, and is
answered as before."""


class ActionCaller:
    """The agent whose call it is, and where it is."""

    __slots__ = ("agent_id", "call_id", "room")

    def __init__(self, room: GatewayCallHost, agent_id: str, call_id: str | None = None) -> None:
        self.room = room
        self.agent_id = agent_id
        self.call_id = call_id
        """What is done again under it has been done already."""

    @property
    def ledger(self) -> Ledger:
        return self.room.ledger

    def get_run_id(self) -> str:
        """The run that it is in."""
        if self.room.run_id is None:
            raise ToolExecutionError("there is no run that could enter a space", executed=False)
        return self.room.run_id

    async def write_once(self, program: Callable[P, Program[Any]], /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Runs a program that nobody needs to hear of: once for this call, whose answer it gives as JSON has it."""
        return await self.ledger.write(
            lambda: idempotency.run_once(self.agent_id, self.call_id, program(*args, **kwargs))
        )

    async def commit_once(
        self, program: Callable[Concatenate[Effects, P], Program[Any]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """As `once`, and tells of its effects."""

        def attempt(effects: Effects) -> Program[Any]:
            return idempotency.run_once(self.agent_id, self.call_id, program(effects, *args, **kwargs))

        return await self.ledger.commit(attempt)

    def get_space_id(self, named: str | None = None) -> str:
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
    run: Callable[[ActionCaller, dict[str, Any]], Awaitable[Any]]
    category: ToolCategory
    annotations: Annotations = NO_ANNOTATIONS


def get_caller(action: str, context: ToolContext) -> ActionCaller:
    """Whose call it is. Raises where it is no agent's."""
    room = context.host
    if not isinstance(room, GatewayCallHost) or room.agent_entity_id is None:
        raise ToolExecutionError(
            f'"{action}" is for agents, in their runs: open one on the gateway (toolspace serve; POST /api/runs) '
            "and call it there",
            executed=False,
        )
    return ActionCaller(room, room.agent_entity_id, context.call_id or None)


def to_tool_error(error: RefusedError | StorageError) -> ToolError:
    """A refusal as the failure of a call: who acts next is the agent."""
    if isinstance(error, RefusedError) and error.reason == "forbidden":
        return ToolPermissionError(str(error))
    if isinstance(error, RefusedError) and error.reason == "invalid":
        return ToolValidationError(str(error))
    return as_tool_error(error)


def object_schema(properties: Mapping[str, Any] | None = None, *required: str) -> dict[str, Any]:
    """The schema of an action's input: these properties and no others."""
    schema: dict[str, Any] = {"type": "object", "properties": properties or {}, "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    return schema

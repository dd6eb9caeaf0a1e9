"""Defines what a prebuilt action is (`@action`), the agent that calls it, and schemas that several actions share.

`ActionCaller` makes sure that a call has its effect once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Concatenate, Final, ParamSpec

import msgspec

from toolspace.core.ids import ID_PATTERN
from toolspace.core.tool import Annotations, ToolCategory
from toolspace.core.tool_context import ToolContext
from toolspace.errors import RefusedError, StorageError, ToolExecutionError, ToolPermissionError, ToolValidationError
from toolspace.spaces.call_context import GatewayCallHost, as_tool_error
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import idempotency

P = ParamSpec("P")

NO_NUL: Final = "^[^\\u0000]*$"
"""The pattern of text that databases can store."""
ID_SCHEMA: Final = {"type": "string", "pattern": ID_PATTERN}
READ_ONLY: Final = Annotations(read_only=True)
ADDS: Final = Annotations(idempotent=True, destructive=False)
CHANGES: Final = Annotations(idempotent=True)
DELETES: Final = Annotations(idempotent=True, destructive=True)
"""Annotations of actions that write. Idempotent: a call that is executed again under its id changes nothing more and
returns the same result."""


class ActionCaller(msgspec.Struct, frozen=True):
    """The agent that calls an action, and the run and space of the call."""

    call_host: GatewayCallHost
    agent_id: str
    call_id: str | None = None
    """Effects are stored under it, so that the same call has them once."""
    principal: str | None = None
    """For whom the run of the call works; None: for the agent itself."""

    @property
    def session_id(self) -> str:
        """The session of the agent that the call belongs to."""
        return self.call_host.session_id or self.agent_id

    @property
    def ledger(self) -> Ledger:
        return self.call_host.ledger

    async def write_once(self, program: Callable[P, Program[Any]], /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Runs a program without effects for subscribers, once per call. Returns its result as JSON data."""
        return await self.ledger.write(
            lambda: idempotency.run_once(self.agent_id, self.call_id, program(*args, **kwargs))
        )

    async def commit_once(
        self, program: Callable[Concatenate[Effects, P], Program[Any]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Runs a program once per call, and publishes its effects. Returns its result as JSON data."""

        def attempt(effects: Effects) -> Program[Any]:
            return idempotency.run_once(self.agent_id, self.call_id, program(effects, *args, **kwargs))

        return await self.ledger.commit(attempt)

    def get_space_id(self, space_id: str | None = None) -> str:
        """Returns `space_id`, or the active space if it is None. Raises `ToolExecutionError` if there is none."""
        space_id = space_id if space_id is not None else self.call_host.space_id
        if space_id is None:
            raise ToolExecutionError("you are not in a space; call enter_space first", executed=False)
        return space_id


ActionFunction = Callable[[ActionCaller, dict[str, Any]], Awaitable[Any]]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """A prebuilt action. Its tool has the same name."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    run: ActionFunction
    category: ToolCategory
    annotations: Annotations


def action(
    description: str,
    properties: Mapping[str, Any] | None = None,
    *required: str,
    annotations: Annotations,
    category: ToolCategory = ToolCategory.AGENT,
    name: str | None = None,
) -> Callable[[ActionFunction], Action]:
    """Makes a function an action with these input properties. The action has the function's name, or `name`."""

    def decorate(function: ActionFunction) -> Action:
        return Action(
            name=name or function.__name__,
            description=description,
            input_schema=object_schema(properties, *required),
            run=function,
            category=category,
            annotations=annotations,
        )

    return decorate


def get_caller(action: str, context: ToolContext) -> ActionCaller:
    """Returns the agent that makes a call. Raises `ToolExecutionError` if no agent makes it."""
    call_host = context.host
    if not isinstance(call_host, GatewayCallHost) or call_host.agent_entity_id is None:
        raise ToolExecutionError(
            f'"{action}" is for agents, in their runs: open one on the gateway (toolspace serve; POST /api/runs) '
            "and call it there",
            executed=False,
        )
    return ActionCaller(call_host, call_host.agent_entity_id, context.call_id or None, context.user_id)


@contextmanager
def tool_errors() -> Generator[None]:
    """Converts errors of the spaces or of storage to errors of a call, for the agent."""
    try:
        yield
    except (RefusedError, StorageError) as error:
        if isinstance(error, RefusedError) and error.reason == "forbidden":
            raise ToolPermissionError(str(error)) from error
        if isinstance(error, RefusedError) and error.reason == "invalid":
            raise ToolValidationError(str(error)) from error
        raise as_tool_error(error) from error


def object_schema(properties: Mapping[str, Any] | None = None, *required: str) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    schema: dict[str, Any] = {"type": "object", "properties": properties or {}, "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    return schema


def text_schema(max_length: int, description: str | None = None) -> dict[str, Any]:
    """The schema of a text that is not empty and that databases can store."""
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": max_length, "pattern": NO_NUL}
    return schema if description is None else {**schema, "description": description}


def list_schema(items: Mapping[str, Any], max_items: int, *, min_items: int = 1) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": items, "maxItems": max_items}
    return {**schema, "minItems": min_items} if min_items else schema

"""The gateway as one call sees it: which run it is of, which space it shows in, and who is asked for its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import (
    RefusedError,
    StorageError,
    StorageUnavailable,
    ToolError,
    ToolExecutionError,
    ToolPermissionError,
)
from toolspace.spaces.call_transactions import StartedCall
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.services import AgentServices


class GatewayCallHost:
    """What the calls of one request share. The `host` of their contexts.

    Where nobody `confirms` that answers arrived, because the way back is not seen, handing them over has to do.
    """

    __slots__ = (
        "_confirms",
        "_opened",
        "agent_entity_id",
        "duplicate_call_id",
        "inline_call_ids",
        "pending_calls",
        "run_id",
        "run_moves_on",
        "space_id",
        "storage_errors",
        "stored_calls",
    )

    def __init__(
        self,
        pending_calls: PendingCalls,
        *,
        run_id: str | None = None,
        agent_entity_id: str | None = None,
        space_id: str | None = None,
        confirms_delivery: bool = True,
    ) -> None:
        self._confirms = confirms_delivery
        self.pending_calls = pending_calls
        self.run_id = run_id
        self.agent_entity_id = agent_entity_id
        self.space_id = space_id
        """Where visible calls show. Entering another changes it, for the calls that follow."""
        self.inline_call_ids: list[str] = []
        """Calls whose answers go back with this request: whoever sends it says whether they arrived."""
        self.storage_errors: dict[str, StorageUnavailable] = {}
        """Calls of which nothing is known, because the database did not answer."""
        self.stored_calls: dict[str, StartedCall] = {}
        """Calls that were written down before they are made, by their ids."""
        self.duplicate_call_id: str | None = None
        """A call that was there already under its id, though it was to be begun."""
        self.run_moves_on = False
        """Whether another process goes on with its run: a call that is cut off here is for that one to see to."""
        self._opened: set[str] | None = None

    @property
    def ledger(self) -> Ledger:
        return self.pending_calls.ledger

    @property
    def services(self) -> AgentServices:
        return self.pending_calls.services

    def note_opened(self, call_id: str) -> None:
        """A call is written down while someone else answers it."""
        if self.run_id is not None:
            self._opened = self._opened or set()
            self._opened.add(call_id)

    def has_opened(self, call_id: str) -> bool:
        return self._opened is not None and call_id in self._opened

    def deliver_inline(self, call_id: str) -> None:
        """The answer of a call goes to whoever made this request."""
        if self._confirms:
            self.inline_call_ids.append(call_id)
        else:
            self.pending_calls.mark_delivered((call_id,))

    async def wait_for_result(self, tool: Tool, parameters: Mapping[str, Any], context: ToolContext) -> ToolResult:
        if tool.execution_type == "space" and self.space_id is None:
            where = not_in_a_space if self.run_id is not None else _not_in_a_run
            raise ToolPermissionError(where(tool.name))
        try:
            return await self.pending_calls.execute(self, tool, parameters, context)
        except (RefusedError, StorageError) as error:
            if isinstance(error, StorageUnavailable):
                self.storage_errors[context.call_id or ""] = error
            raise as_tool_error(error) from error

    async def ask_space(self, name: str, args: Mapping[str, Any], context: ToolContext, *, timeout: float) -> Any:
        try:
            return await self.pending_calls.ask_members(self, name, args, context, timeout=timeout)
        except (RefusedError, StorageError) as error:
            raise as_tool_error(error) from error


def not_in_a_space(tool_name: str) -> str:
    return f'Tool "{tool_name}" is visible but you are not in a space. Call enter_space first.'


def _not_in_a_run(tool_name: str) -> str:
    return (
        f'Tool "{tool_name}" asks the people in a space, and this call is in none: '
        "open a run there (POST /api/runs) and call it in that (POST /api/runs/{runId}/calls)"
    )


def as_tool_error(error: RefusedError | StorageError) -> ToolError:
    """A refusal as the failure of a call that was not executed."""
    if isinstance(error, StorageUnavailable):  # Where the database is, is not for everyone who may call a tool.
        return ToolExecutionError("the database does not answer now; try again", executed=False)
    return ToolExecutionError(str(error), executed=False)

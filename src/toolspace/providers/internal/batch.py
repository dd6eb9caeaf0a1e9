"""`agent__batch`: several calls side by side, each under the same rules as a single one."""

from __future__ import annotations

import asyncio
import contextvars
import math
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.function import FunctionTool, tool
from toolspace.core.result import PENDING, ToolResult
from toolspace.core.tool import ToolCategory
from toolspace.errors import ToolValidationError

_MOST_CALLS = 256
_inside: contextvars.ContextVar[str | None] = contextvars.ContextVar("toolspace_batch", default=None)
"""The run whose batch the code around is part of. A sub-agent has a run of its own, and may batch."""


_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "calls": {
            "type": "array",
            "description": "The calls, each with an id of your choice, the tool's name and its parameters.",
            "minItems": 1,
            "maxItems": _MOST_CALLS,
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": ["string", "integer"]},
                    "tool": {"type": "string"},
                    "parameters": {"type": ["object", "string", "null"]},
                },
                "required": ["id", "tool"],
            },
        }
    },
    "required": ["calls"],
    "additionalProperties": False,
}


def batch_tool() -> FunctionTool:
    # Each call has its own time; the batch ends when the last one does.
    return tool(name="batch", category=ToolCategory.AGENT, timeout=math.inf, input_schema=_SCHEMA)(_batch)


async def _batch(calls: list[dict[str, Any]], *, context: ToolContext) -> dict[str, Any]:
    """Runs several tool calls in parallel and returns their results in order. One failure fails only itself."""
    here = context.run_id or ""
    if _inside.get() == here:
        raise ToolValidationError("calls: a batch inside a batch is refused; put all calls into one batch")
    ids = [call["id"] for call in calls]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ToolValidationError(f'calls: the id "{twice}" is used twice; results are told apart by id')
    token = _inside.set(here)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(context.call(call["tool"], call.get("parameters"))) for call in calls]
    finally:
        _inside.reset(token)
    return {"results": [_entry(call, task.result()) for call, task in zip(calls, tasks, strict=True)]}


def _entry(call: dict[str, Any], result: ToolResult) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": call["id"], "tool": call["tool"], "ok": result.ok}
    if result.ok:
        return {**entry, "output": result.result}
    entry |= {"error": result.error, "errorKind": result.error_kind, "executed": result.executed}
    if (pending := result.extras.get(PENDING)) is not None:
        entry[PENDING] = pending  # It is answered later: under which id.
    return entry

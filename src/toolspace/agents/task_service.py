"""Provides the tools for background tasks: `spawn_task`, `task_list`, `task_replay`, `reply`, `session_archive_read`.

The gateway registers the provider. `TaskService` does the work for the agent of a context; a cycle puts it there.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolspace.agents import history, tasks
from toolspace.agents.agent_run import find_agent_run
from toolspace.agents.prebuilt.action import to_tool_error
from toolspace.agents.tasks import NewTask
from toolspace.builtin.task_tools import agent_tools, session_tools, task_tools
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.ids import new_id
from toolspace.core.interfaces import ToolProvider
from toolspace.core.records import TaskRecord
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import RefusedError, StorageError, ToolNotFoundError, ToolPermissionError, ToolValidationError
from toolspace.providers.local_tools import run_tool
from toolspace.spaces import messaging
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import idempotency, sessions
from toolspace.storage.queries import tasks as rows

MAX_DESCRIPTION, MAX_INPUT = 1_000, 100_000
_MAX_LISTED = 200
_MAX_LISTED_RESULT = 500


class TaskToolProvider(ToolProvider):
    """Provides the task tools to resident agents."""

    kind = "task"
    namespace = ""

    def __init__(self) -> None:
        super().__init__()
        self._tools: dict[str, Tool] = {tool.name: tool for tool in (*task_tools, *session_tools, *agent_tools)}

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """An agent with a task service is offered them; not the agents that it calls, which inherit its context."""
        if context.tasks is None:
            return False
        run = find_agent_run(context)
        return run is None or run.parent is None

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await run_tool(self._tools[name], parameters, context)


class TaskService:
    """Starts, lists and replays the tasks of one agent, and sends its replies. The `tasks` of its contexts."""

    def __init__(self, ledger: Ledger, agent_entity_id: str, *, is_task: bool = False) -> None:
        self._ledger = ledger
        self._agent_id = agent_entity_id
        self._is_task = is_task

    async def list_tasks(self, date: str | None, context: ToolContext) -> Sequence[Mapping[str, Any]]:
        _check_not_called(context, "task_list")
        since, until = tasks.day_range(date) if date is not None else (None, None)
        records = await self._read(rows.list_tasks, self._agent_id, since=since, until=until, limit=_MAX_LISTED)
        return [_describe_task(task) for task in records]

    async def replay_task(self, task_id: str, context: ToolContext) -> Sequence[Mapping[str, Any]]:
        _check_not_called(context, "task_replay")
        if "\0" in task_id:
            raise ToolValidationError("taskId: it has a NUL character, which no id has")
        return history.to_messages(await self._read(_load_conversation, self._agent_id, task_id))

    async def spawn_task(self, description: str, input: str, context: ToolContext) -> str:
        self._check_main_session(context, "spawn_task")
        new = NewTask(
            agent_entity_id=self._agent_id,
            # One line: in the agent's inbox it must not look like another event.
            description=" ".join(_validate_text("description", description, MAX_DESCRIPTION).split()),
            input=_validate_text("input", input, MAX_INPUT),
            call_id=context.call_id or new_id("call"),
            run_id=context.run_id,
            space_id=context.space_id,
        )
        return await self._commit(tasks.spawn, new)

    async def reply(self, text: str, channel_id: str, reply_to: str | None, context: ToolContext) -> Mapping[str, Any]:
        self._check_main_session(context, "reply")
        text = _validate_text("text", text, messaging.MAX_TEXT_LENGTH)
        for name, value in (("channelId", channel_id), ("replyTo", reply_to)):
            if value is not None and "\0" in value:
                raise ToolValidationError(f"{name}: it has a NUL character, which no id has")

        def send(effects: Effects) -> Program[Any]:
            return idempotency.run_once(
                self._agent_id,
                context.call_id,
                _send_reply(effects, self._agent_id, text, channel_id, reply_to, context),
            )

        return await self._commit(send)

    def _check_main_session(self, context: ToolContext, tool: str) -> None:
        if self._is_task:
            raise ToolPermissionError(f'"{tool}" is for the agent itself, not for its tasks')
        _check_not_called(context, tool)

    async def _read(self, program: Callable[..., Program[Any]], *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._ledger.read(program, *args, **kwargs)
        except (RefusedError, StorageError) as error:
            raise to_tool_error(error) from error

    async def _commit(self, program: Callable[..., Program[Any]], *args: Any) -> Any:
        try:
            return await self._ledger.commit(program, *args)
        except (RefusedError, StorageError) as error:
            raise to_tool_error(error) from error


def _load_conversation(agent_entity_id: str, task_id: str) -> Program[list[sessions.HistoryTurn]]:
    yield from tasks.get_task(agent_entity_id, task_id)  # Raises if the task is another agent's.
    return (yield from sessions.list_turns(task_id))


def _send_reply(
    effects: Effects, agent_id: str, text: str, space_id: str, reply_to: str | None, context: ToolContext
) -> Program[dict[str, Any]]:
    message_id = messaging.message_id_for_call(context.call_id) if context.call_id else None
    message = yield from messaging.send_message(
        effects, space_id, agent_id, text, message_id=message_id, reply_to=reply_to, run_id=context.run_id
    )
    return {"success": True, "messageId": message.id}


def _check_not_called(context: ToolContext, tool: str) -> None:
    """Raises in a run that another agent has called: it inherits that agent's context, but must not use its tasks."""
    run = find_agent_run(context)
    if run is not None and run.parent is not None:
        raise ToolPermissionError(f'"{tool}" is not for agents that others call')


def _validate_text(name: str, text: str, max_length: int) -> str:
    if not text.strip():
        raise ToolValidationError(f"{name}: it is empty")
    if len(text) > max_length:
        raise ToolValidationError(f"{name}: it has {len(text)} characters, and may have {max_length}")
    if "\0" in text:
        raise ToolValidationError(f"{name}: it has a NUL character; leave it out")
    return json_text.valid_text(text)


def _describe_task(task: TaskRecord) -> dict[str, Any]:
    """A task as `task_list` returns it."""
    entry: dict[str, Any] = {
        "taskId": task.id,
        "description": task.description,
        "status": task.status,
        "createdAt": _format_time(task.created_at),
    }
    if task.completed_at is not None:
        text = task.result if isinstance(task.result, str) else json_text.encode(task.result)
        entry["completedAt"] = _format_time(task.completed_at)
        entry["result"] = history.shorten_text(text, _MAX_LISTED_RESULT)
    if task.reflection is not None:
        entry["reflection"] = task.reflection
    return entry


def _format_time(milliseconds: int) -> str:
    return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC).isoformat(timespec="seconds")

"""The provider of the tools with which an agent has work done in the background, looks back on it, and speaks.

What they do is for whoever runs the agent: see `taskdesk`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolspace.agents import history, tasks
from toolspace.agents.prebuilt.action import to_tool_error
from toolspace.agents.run_budget import find_agent_run
from toolspace.agents.tasks import NewTask
from toolspace.builtin.tasks import agent_tools, session_tools, task_tools
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.ids import new_id
from toolspace.core.interfaces import ToolProvider
from toolspace.core.records import TaskRecord
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import RefusedError, StorageError, ToolNotFoundError, ToolPermissionError, ToolValidationError
from toolspace.providers.registry import run_tool
from toolspace.spaces import messaging
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import idempotency, sessions
from toolspace.storage.queries import tasks as rows


class TaskToolProvider(ToolProvider):
    """`task_list`, `task_replay`, `session_archive_read`, `spawn_task`, `reply`: for agents that live here."""

    kind = "task"
    namespace = ""

    def __init__(self) -> None:
        super().__init__()
        self._tools: dict[str, Tool] = {made.name: made for made in (*task_tools, *session_tools, *agent_tools)}

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """To an agent that has tasks; not to those that it calls, who would have its tasks for their own."""
        frame = find_agent_run(context)
        return context.tasks is not None and (frame is None or frame.parent is None)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "{name}" not found')
        return await run_tool(self._tools[name], parameters, context)


# MERGED from task_service: What the task tools of an agent do: begin, list and replay its own tasks, and speak whe…

MAX_DESCRIPTION, MAX_INPUT = 1_000, 100_000
_MOST_LISTED = 200
_SHOWN_IN_LIST = 500


class TaskService:
    """The `tasks` of the contexts of one agent: its own tasks, and the spaces that it is in."""

    def __init__(self, ledger: Ledger, agent_entity_id: str, *, is_task: bool = False) -> None:
        self._ledger = ledger
        self._agent_id = agent_entity_id
        self._is_task = is_task

    async def list_tasks(self, date: str | None, context: ToolContext) -> Sequence[Mapping[str, Any]]:
        _check_own(context, "task_list")
        since, until = tasks.day_range(date) if date is not None else (None, None)
        found = await self._read(rows.list_tasks, self._agent_id, since=since, until=until, limit=_MOST_LISTED)
        return [_entry(task) for task in found]

    async def replay_task(self, task_id: str, context: ToolContext) -> Sequence[Mapping[str, Any]]:
        _check_own(context, "task_replay")
        if "\0" in task_id:
            raise ToolValidationError("taskId: it has a NUL character, which no id has")
        return history.to_messages(await self._read(load_conversation, self._agent_id, task_id))

    async def spawn_task(self, description: str, input: str, context: ToolContext) -> str:
        self._check_main(context, "spawn_task")
        new = NewTask(
            agent_entity_id=self._agent_id,
            # One line: it stands beside other events in the agent's inbox, and must not look like another.
            description=" ".join(_text("description", description, MAX_DESCRIPTION).split()),
            input=_text("input", input, MAX_INPUT),
            call_id=context.call_id or new_id("call"),
            run_id=context.run_id,
            space_id=context.space_id,
        )
        return await self._commit(tasks.spawn, new)

    async def reply(self, text: str, channel_id: str, reply_to: str | None, context: ToolContext) -> Mapping[str, Any]:
        self._check_main(context, "reply")
        text = _text("text", text, messaging.MAX_TEXT_LENGTH)
        for name, value in (("channelId", channel_id), ("replyTo", reply_to)):
            if value is not None and "\0" in value:
                raise ToolValidationError(f"{name}: it has a NUL character, which no id has")

        def say(effects: Effects) -> Program[Any]:
            return idempotency.run_once(
                self._agent_id,
                context.call_id,
                _say(effects, self._agent_id, text, channel_id, reply_to, context),
            )

        return await self._commit(say)

    def _check_main(self, context: ToolContext, tool: str) -> None:
        if self._is_task:
            raise ToolPermissionError(f'"{tool}" is for the agent itself, not for its tasks')
        _check_own(context, tool)

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


def load_conversation(agent_entity_id: str, task_id: str) -> Program[list[sessions.HistoryTurn]]:
    """All that was said in a task of an agent. Raises `RefusedError` where it has none of this id."""
    yield from tasks.get_task(agent_entity_id, task_id)
    return (yield from sessions.list_turns(task_id))


def _say(
    effects: Effects, agent_id: str, text: str, space_id: str, reply_to: str | None, context: ToolContext
) -> Program[dict[str, Any]]:
    message_id = messaging.message_id_for_call(context.call_id) if context.call_id else None
    message = yield from messaging.send_message(
        effects, space_id, agent_id, text, message_id=message_id, reply_to=reply_to, run_id=context.run_id
    )
    return {"success": True, "messageId": message.id}


def _check_own(context: ToolContext, tool: str) -> None:
    """An agent that another one called has the contexts of that one, but not its tasks."""
    frame = find_agent_run(context)
    if frame is not None and frame.parent is not None:
        raise ToolPermissionError(f'"{tool}" is not for agents that others call')


def _text(name: str, text: str, most: int) -> str:
    if not text.strip():
        raise ToolValidationError(f"{name}: it is empty")
    if len(text) > most:
        raise ToolValidationError(f"{name}: it has {len(text)} characters, and may have {most}")
    if "\0" in text:
        raise ToolValidationError(f"{name}: it has a NUL character; leave it out")
    return json_text.valid_text(text)


def _entry(task: TaskRecord) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "taskId": task.id,
        "description": task.description,
        "status": task.status,
        "createdAt": _iso(task.created_at),
    }
    if task.completed_at is not None:
        text = task.result if isinstance(task.result, str) else json_text.encode(task.result)
        shown["completedAt"] = _iso(task.completed_at)
        shown["result"] = text if len(text) <= _SHOWN_IN_LIST else f"{text[:_SHOWN_IN_LIST]}…"
    if task.reflection is not None:
        shown["reflection"] = task.reflection
    return shown


def _iso(at: int) -> str:
    return datetime.datetime.fromtimestamp(at / 1000, datetime.UTC).isoformat(timespec="seconds")

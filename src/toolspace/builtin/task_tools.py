"""The task and session tools. They work only in calls of a running agent, which implements `TaskHost`."""

from __future__ import annotations

import datetime
import os
from typing import Any

from toolspace.builtin import file_io
from toolspace.builtin.allowed_paths import AllowedPaths, FileMissingError
from toolspace.core.names import sanitise
from toolspace.core.tool import Annotations, tool
from toolspace.core.tool_context import TaskHost, ToolContext
from toolspace.errors import ToolExecutionError, ToolPermissionError, ToolValidationError

_READS = Annotations(read_only=True, idempotent=True, open_world=False)
_ADDS = Annotations(read_only=False, destructive=False, idempotent=True)
"""Idempotent: a repeated call with the same id has no further effect and returns the same result."""


@tool(category="data", visible=False, annotations=_READS)
async def task_list(date: str | None = None, *, context: ToolContext) -> list[dict[str, Any]]:
    """Lists earlier tasks.

    Args:
        date: The day as YYYY-MM-DD; without it, all days.
    """
    if date is not None:
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            raise ToolValidationError(f"date: expected YYYY-MM-DD, got {date!r}") from None
    return [dict(task) for task in await _host(context, "task_list").list_tasks(date, context)]


@tool(category="data", visible=False, annotations=_READS)
async def task_replay(taskId: str, *, context: ToolContext) -> list[dict[str, Any]]:
    """Returns the conversation of an earlier task.

    Args:
        taskId: The task's id, from task_list.
    """
    return [dict(message) for message in await _host(context, "task_replay").replay_task(taskId, context)]


@tool(category="system", visible=False, annotations=_READS)
def session_archive_read(file: str, *, context: ToolContext) -> str:
    """Reads an archived part of this session.

    Args:
        file: The file name of the archive.
    """
    if context.session_dir is None:
        raise ToolExecutionError("there is no archive: tools.sessionDir is not set")
    if context.run is None or not context.agent_id:
        raise ToolPermissionError('"session_archive_read" works only in a run of an agent; this call has none')
    # Below `sessionDir` every agent has a directory of its own.
    root = os.path.join(os.path.realpath(context.session_dir), sanitise(context.agent_id))
    try:
        with AllowedPaths([root], base=root, setting="sessionDir").locate(file) as location:
            return file_io.read_text(location)
    except FileMissingError:
        raise FileMissingError(
            f"there is no archive {file!r}; the summary of earlier cycles lists the existing ones"
        ) from None


@tool(category="system", visible=False, annotations=_ADDS)
async def spawn_task(description: str, input: str, *, context: ToolContext) -> dict[str, Any]:
    """Starts a background task. Its result is reported to you later.

    Args:
        description: A short description of the task.
        input: All information that the task needs.
    """
    return {"taskId": await _host(context, "spawn_task").spawn_task(description, input, context)}


@tool(category="system", visible=False, annotations=_ADDS)
async def reply(text: str, channelId: str, replyTo: str | None = None, *, context: ToolContext) -> dict[str, Any]:
    """Sends a message to the user. The user sees nothing else that you write.

    Args:
        text: The message.
        channelId: The channel to send it to.
        replyTo: The id of the message that it answers.
    """
    return dict(await _host(context, "reply").reply(text, channelId, replyTo, context))


def _host(context: ToolContext, name: str) -> TaskHost:
    if context.tasks is None:
        raise ToolExecutionError(f'"{name}" works only in calls of a running agent; this call has none')
    return context.tasks


task_tools = (task_list, task_replay)
session_tools = (session_archive_read,)
agent_tools = (spawn_task, reply)

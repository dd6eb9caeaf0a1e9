"""Routes of the background tasks and of the conversation history of an agent."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from toolspace.agents import background_tasks
from toolspace.agents.history import to_turn_records
from toolspace.core.ids import agent_of_session
from toolspace.core.stored_records import AgentHistory, TaskRecord, TaskStatus, TaskWithMessages
from toolspace.server.api_types import (
    MAX_PAGE_SIZE,
    Cursor,
    PageQuery,
    QueryParameters,
    ResultPage,
    build_page,
    check_cursor,
    full_match_pattern,
)
from toolspace.server.requests import Request
from toolspace.server.routes.agents import SessionId, get_agent_id, get_session_id
from toolspace.server.routing import RouteTable
from toolspace.storage.database import Program
from toolspace.storage.queries import sessions
from toolspace.storage.queries import tasks as task_queries
from toolspace.storage.queries.sessions import HistoryTurn, SessionRecord

_AGENT = "/api/agents/{agentId}"
_TASK = f"{_AGENT}/tasks/{{taskId}}"
_MAX_TASK_TURNS = 1_000
"""Turns of a task that are returned; only an agent with hundreds of allowed steps has more."""

routes = RouteTable("tasks")


class TaskListQuery(PageQuery, frozen=True, kw_only=True):
    session: SessionId | None = None
    """Only tasks that this session of the agent started (`sessionId`)."""
    date: Annotated[str, Meta(pattern=full_match_pattern("^\\d{4}-\\d{2}-\\d{2}$"))] | None = None
    """Only tasks that started on this day (UTC)."""
    status: TaskStatus | None = None
    """Only tasks with this status."""

    def __post_init__(self) -> None:
        if self.date is not None:
            datetime.date.fromisoformat(self.date)


class HistoryQuery(QueryParameters, frozen=True, kw_only=True):
    session: SessionId | None = None
    """The session of the agent; its main one if it is missing."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = 100
    """Maximum number of turns."""
    cursor: Cursor | None = None

    def __post_init__(self) -> None:
        check_cursor(self.cursor, "[0-9]{1,15}")


@routes.add("GET", f"{_AGENT}/tasks", "List the background tasks of an agent, newest first", query=TaskListQuery)
async def list_tasks(request: Request) -> ResultPage[TaskRecord]:
    query = request.query(TaskListQuery)
    agent_id = agent_of_session(await get_session_id(request, query.session))
    since, until = background_tasks.day_range(query.date) if query.date is not None else (None, None)
    records = await request.read(
        task_queries.list_tasks,
        agent_id,
        since=since,
        until=until,
        status=query.status,
        session_id=query.session,
        before=query.cursor,
        limit=query.limit + 1,
    )
    return build_page(records, query.limit)


@routes.add("GET", _TASK, "Get a background task with its conversation")
async def get_task(request: Request) -> TaskWithMessages:
    agent_id = await get_agent_id(request)
    task, turns = await request.read(_read_task, agent_id, request.params["taskId"])
    return TaskWithMessages(**msgspec.structs.asdict(task), messages=to_turn_records(turns))


@routes.add(
    "POST",
    f"{_TASK}/cancel",
    "Cancel a background task",
    description="The agent is notified. A task that has ended is not changed: 409.",
    error_statuses=(409,),
)
async def cancel_task(request: Request) -> TaskRecord:
    agent_id = await get_agent_id(request)
    return await request.ledger.commit(background_tasks.cancel, agent_id, request.params["taskId"])


@routes.add(
    "GET",
    f"{_AGENT}/history",
    "Get the conversation history of an agent: a summary and the latest turns",
    description="The latest turns, oldest first; `next` continues with older turns.",
    query=HistoryQuery,
)
async def get_history(request: Request) -> AgentHistory:
    query = request.query(HistoryQuery)
    session_id = await get_session_id(request, query.session)
    before = int(query.cursor) if query.cursor is not None else None
    session, turns = await request.read(_read_history, session_id, before, query.limit + 1)
    page_turns = turns[-query.limit :]
    return AgentHistory(
        summary=session.summary if session is not None else None,
        items=to_turn_records(page_turns),
        next=str(page_turns[0].seq) if len(turns) > query.limit else None,
    )


def _read_task(agent_id: str, task_id: str) -> Program[tuple[TaskRecord, Sequence[HistoryTurn]]]:
    task = yield from background_tasks.get_task(agent_id, task_id)
    return task, (yield from sessions.list_turns(task_id, limit=_MAX_TASK_TURNS))


def _read_history(
    session_id: str, before: int | None, limit: int
) -> Program[tuple[SessionRecord | None, Sequence[HistoryTurn]]]:
    session = yield from sessions.find(session_id)
    return session, (yield from sessions.list_turns(session_id, before=before, limit=limit))

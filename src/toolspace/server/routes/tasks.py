"""Routes for what agents have done in the background, and for what they have in mind, for whoever operates them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from toolspace.agents import tasks
from toolspace.agents.transcript import replay
from toolspace.core.records import History, TaskRecord, TaskStatus, WholeTask
from toolspace.server.authorization import sees_agent
from toolspace.server.body_types import MAX_PAGE, Page, Paging, Query, exactly, page
from toolspace.server.callers import Access
from toolspace.server.requests import Request
from toolspace.server.routing import Route
from toolspace.storage.database import Program
from toolspace.storage.queries import sessions
from toolspace.storage.queries import tasks as rows
from toolspace.storage.queries.sessions import Remembered, Session

_AGENT = "/api/agents/{agentId}"
_TASKS = f"{_AGENT}/tasks"
_TASK = _TASKS + "/{taskId}"
_TAG = "tasks"
_MOST_TURNS = 1_000
"""Turns of a task that are shown; there are more only where an agent is allowed hundreds of steps."""


class TaskList(Paging, frozen=True, kw_only=True):
    date: (
        Annotated[str, Meta(pattern=exactly("^\\d{4}-\\d{2}-\\d{2}$"), description="The day, in UTC, that it began.")]
        | None
    ) = None
    status: TaskStatus | None = None

    def __post_init__(self) -> None:
        if self.date is not None:
            datetime.date.fromisoformat(self.date)


class HistoryPart(Query, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE, description="How many turns at most.")] = 100
    cursor: (
        Annotated[str, Meta(pattern=exactly("^\\d{1,15}$"), description="Where to go on: `next` of the page before.")]
        | None
    ) = None


async def list_tasks(request: Request) -> Page[TaskRecord]:
    query = request.query(TaskList)
    agent_id = await _agent(request)
    since, until = tasks.day(query.date) if query.date is not None else (None, None)
    found = await request.gateway.ledger.read(
        rows.listing,
        agent_id,
        since=since,
        until=until,
        status=query.status,
        before=query.cursor,
        limit=query.limit + 1,
    )
    return page(found, query.limit, lambda task: task.id)


async def get_task(request: Request) -> WholeTask:
    agent_id = await _agent(request)
    task, turns = await request.gateway.ledger.read(_whole, agent_id, request.params["taskId"])
    return WholeTask(**msgspec.structs.asdict(task), messages=replay(turns))


async def cancel_task(request: Request) -> TaskRecord:
    agent_id = await _agent(request)
    return await request.gateway.ledger.commit(tasks.cancel, agent_id, request.params["taskId"])


async def get_history(request: Request) -> History:
    query = request.query(HistoryPart)
    agent_id = await _agent(request)
    before = int(query.cursor) if query.cursor is not None else None
    session, turns = await request.gateway.ledger.read(_history, agent_id, before, query.limit + 1)
    shown = turns[-query.limit :]
    return History(
        summary=session.summary if session is not None else None,
        items=replay(shown),
        next=str(shown[0].seq) if len(turns) > query.limit else None,
    )


def _whole(agent_id: str, task_id: str) -> Program[tuple[TaskRecord, Sequence[Remembered]]]:
    task = yield from tasks.the_task(agent_id, task_id)
    return task, (yield from sessions.history(task_id, limit=_MOST_TURNS))


def _history(agent_id: str, before: int | None, limit: int) -> Program[tuple[Session | None, Sequence[Remembered]]]:
    session = yield from sessions.one(agent_id)
    return session, (yield from sessions.history(agent_id, before=before, limit=limit))


async def _agent(request: Request) -> str:
    agent = await sees_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return agent.id


ROUTES = [
    Route(
        method="GET",
        path=_TASKS,
        handler=list_tasks,
        access=Access.SECRET,
        tag=_TAG,
        summary="What an agent has done in the background, newest first",
        query=TaskList,
        answer=Page[TaskRecord],
    ),
    Route(
        method="GET",
        path=_TASK,
        handler=get_task,
        access=Access.SECRET,
        tag=_TAG,
        summary="One task of an agent, with its conversation",
        answer=WholeTask,
    ),
    Route(
        method="POST",
        path=f"{_TASK}/cancel",
        handler=cancel_task,
        access=Access.SECRET,
        tag=_TAG,
        summary="Stop a task of an agent",
        description="The agent is told. A task that has ended otherwise stays as it is: 409.",
        answer=TaskRecord,
        problems=(409,),
    ),
    Route(
        method="GET",
        path=f"{_AGENT}/history",
        handler=get_history,
        access=Access.SECRET,
        tag=_TAG,
        summary="What an agent has in mind: a summary of what was, and its latest turns",
        description="The latest turns, oldest first; `next` leads to older ones.",
        query=HistoryPart,
        answer=History,
    ),
]

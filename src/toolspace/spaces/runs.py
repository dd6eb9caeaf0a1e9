"""The transactions of runs: open, enter a space, close, cancel; and `OpenRuns`, the runs with calls in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from toolspace.core.ids import derived_id, new_id
from toolspace.core.stored_records import (
    ENDED_RUN,
    CallRecord,
    NewEvent,
    RunRecord,
    RunStatus,
    run_stream,
    space_stream,
)
from toolspace.errors import RefusedError, StorageError
from toolspace.orchestrator.run import Run
from toolspace.spaces import announced_calls, call_transactions, session_scope
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import calls, entities_and_spaces, messages, sessions, tasks
from toolspace.storage.queries import runs as run_queries

_OPEN: tuple[RunStatus, ...] = ("queued", "running", "waiting_tool")


def open_run(
    effects: Effects,
    agent_entity_id: str,
    *,
    run_id: str | None = None,
    space_id: str | None = None,
    trigger: Any = None,
    principal: str | None = None,
    session_id: str | None = None,
) -> Program[RunRecord]:
    """Opens a run of an agent, in a space if one is given. If the agent has a run of this id, returns that.

    `principal`: for whom the agent works; None: for itself. `session_id`: the session of the agent that the run belongs
    to; None: that of the space or of the principal, if the agent has one for each.
    """
    agent = yield from entities_and_spaces.find_entity(agent_entity_id)
    if agent is None:
        raise RefusedError("not_found", f'there is no entity "{agent_entity_id}"')
    if agent.type != "agent":
        raise RefusedError("invalid", f'"{agent_entity_id}" is a {agent.type}; only agents have runs')
    if space_id is not None:
        yield from _check_member(space_id, agent_entity_id)
    if session_id is None:
        scope = (yield from sessions.find_scope(agent_entity_id)).scope
        session_id = yield from session_scope.open_session(
            agent_entity_id, scope, space_id=space_id, person_id=principal
        )
    run_id = run_id or new_id("run")
    run = yield from run_queries.create(
        run_id, agent_entity_id, space_id=space_id, trigger=trigger, principal=principal, session_id=session_id
    )
    if run is None:
        run = yield from run_queries.find(run_id)
        if run is None or run.agent_entity_id != agent_entity_id:
            raise RefusedError("conflict", f'there is a run "{run_id}" of another agent')
        return run
    _emit(effects, run, "run.started", {"runId": run.id, "agentEntityId": agent_entity_id, "spaceId": space_id})
    return run


def enter_space(effects: Effects, run_id: str, space_id: str | None) -> Program[RunRecord]:
    """Makes a space the active one of a run, where its visible calls are shown; None leaves the active space.

    Both spaces get an event, so that nobody waits in one space for what now happens in the other.
    """
    run = yield from get_run(run_id)
    if run.status in ENDED_RUN:
        raise RefusedError("conflict", f'the run "{run_id}" has ended')
    if space_id is not None:
        yield from _check_member(space_id, run.agent_entity_id)
        yield from session_scope.check_space(run.session_id or run.agent_entity_id, space_id)
    if space_id == run.space_id:
        return run
    updated_run = yield from run_queries.set_space(run_id, space_id)
    ids = {"runId": run.id, "agentEntityId": run.agent_entity_id}
    if run.space_id is not None:
        data = {**ids, "spaceId": run.space_id, "status": run.status}
        effects.emit(space_stream(run.space_id), NewEvent("run.done", data))
    if space_id is not None:
        effects.emit(space_stream(space_id), NewEvent("run.started", {**ids, "spaceId": space_id}))
    return updated_run or run


def close_run(
    effects: Effects,
    run_id: str,
    status: Literal["completed", "failed", "canceled"] = "completed",
    *,
    error: str | None = None,
    usage: Mapping[str, Any] | None = None,
) -> Program[RunRecord]:
    """Ends a run. Its pending calls stay open, unless it is cancelled: their results go to the agent's inbox."""
    run = yield from get_run(run_id)
    ended_run = yield from run_queries.update_status(
        run_id, status, from_statuses=_OPEN, error=error, usage=usage, ends=True
    )
    if ended_run is None:
        if run.status == status:
            return run  # A repeated request.
        message = f'the run "{run.id}" has ended already: it is {run.status}'
        raise RefusedError("conflict", message, runStatus=run.status)
    effects.wake_keys.append(f"run:{run_id}")  # Processes drop what they keep for the run, or stop its calls.
    if status == "canceled":
        for call_id in (yield from calls.list_open_of_run(run_id)):
            reason = "the run was canceled"
            cancelled_call = yield from call_transactions.end_call(
                effects, call_id, "canceled", reason, notify_agent=False
            )
            if cancelled_call is None:
                effects.calls_to_stop.append(call_id)  # It runs in some process.
    session_id = tasks.find_session_id(run_id)
    if session_id is not None:
        # The run of a background task may have ended while no process ran it: the scheduler then ends the task.
        yield from sessions.set_run(session_id, run_id)
        effects.wake_keys.append("sessions")
    emit_run_done(effects, ended_run, has_spoken=(yield from messages.is_sent_by_run(run_id)))
    return ended_run


def cancel_run(effects: Effects, run_id: str) -> Program[RunRecord]:
    """Ends a run and its open calls. Its running calls are stopped in their process."""
    return close_run(effects, run_id, "canceled")


def subagent_run_id(call_id: str, leg: int = 0) -> str:
    """The id of the run of a call to a sub-agent. `leg`: counts the agents that the request was handed off to."""
    return derived_id("run", "below", call_id, str(leg))


def interrupt_call(effects: Effects, call_id: str) -> Program[CallRecord | None]:
    """Fails a running call of a dead process, and the runs of the sub-agents that it called."""
    call = yield from call_transactions.interrupt(effects, call_id)
    for leg in itertools.count():
        run = yield from run_queries.find(subagent_run_id(call_id, leg))
        if run is None:
            break
        yield from announced_calls.end_interrupted(effects, run.id)
        error = "interrupted: the process that ran it ended before it did"
        failed_run = yield from run_queries.update_status(run.id, "failed", from_statuses=_OPEN, error=error, ends=True)
        if failed_run is not None:
            emit_run_done(effects, failed_run)
    return call


def emit_run_done(effects: Effects, run: RunRecord, *, has_spoken: bool = False) -> None:
    """Emits `run.done` to the streams of the run and of its space. `has_spoken`: the run has sent a message."""
    data = {
        "runId": run.id,
        "agentEntityId": run.agent_entity_id,
        "spaceId": run.space_id,
        "status": run.status,
        "spoke": has_spoken,
        "usage": run.usage,
        "error": run.error,
    }
    _emit(effects, run, "run.done", data)


def get_run(run_id: str) -> Program[RunRecord]:
    """Raises `RefusedError` if there is no such run."""
    run = yield from run_queries.find(run_id)
    if run is None:
        raise RefusedError("not_found", f'there is no run "{run_id}"')
    return run


def _check_member(space_id: str, entity_id: str) -> Program[None]:
    if (yield from entities_and_spaces.find_space(space_id)) is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities_and_spaces.is_member(space_id, entity_id)):
        raise RefusedError("forbidden", f'the agent "{entity_id}" is not a member of the space "{space_id}"')


def _emit(effects: Effects, run: RunRecord, type: str, data: Mapping[str, Any]) -> None:
    effects.emit(run_stream(run.id), NewEvent(type, data))
    if run.space_id is not None:
        # Members see that an agent works and how it ended. Only operators see what it cost and why it failed.
        visible_data = {key: value for key, value in data.items() if key not in ("usage", "error")}
        effects.emit(space_stream(run.space_id), NewEvent(type, visible_data))


_MAX_OPEN_RUNS = 10_000
_RETRY_SECONDS = 1.0


class OpenRuns:
    """The runs that this process calls tools in, with their limits, budgets and traces.

    It drops a run that was not used for long; when it is used again, its limits start anew.
    """

    def __init__(self, ledger: Ledger, make: Callable[..., Run]) -> None:
        self._ledger = ledger
        self._make = make
        self._runs: OrderedDict[str, _OpenRun] = OrderedDict()
        self._checks: set[asyncio.Task[None]] = set()

    async def enter(self, run_id: str) -> tuple[RunRecord, Run]:
        """A run to call a tool in. Raises `RefusedError` if there is no such run, or it has ended."""
        record = await self._ledger.read(get_run, run_id)
        if record.status in ENDED_RUN:
            message = f'the run "{run_id}" has ended: it is {record.status}'
            raise RefusedError("conflict", message, runStatus=record.status)
        open_run = self._runs.get(run_id)
        if open_run is None:
            stop_listening = self._ledger.waiters.listen(f"run:{run_id}", lambda _: self._start_check(run_id))
            open_run = self._runs[run_id] = _OpenRun(self._make(id=run_id), stop_listening)
            while len(self._runs) > _MAX_OPEN_RUNS:
                self.remove(next(iter(self._runs)))
        self._runs.move_to_end(run_id)
        return record, open_run.run

    def find(self, run_id: str) -> Run | None:
        """The run, if this process called tools in it lately."""
        open_run = self._runs.get(run_id)
        return open_run.run if open_run is not None else None

    def remove(self, run_id: str) -> None:
        """Closes the run in this process."""
        open_run = self._runs.pop(run_id, None)
        if open_run is not None:
            open_run.stop_listening()
            open_run.run.close()

    async def aclose(self) -> None:
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    def _start_check(self, run_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._check(run_id))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, run_id: str) -> None:
        """Reads a run that changed, here or in another process, and stops its calls if it was cancelled."""
        while (open_run := self._runs.get(run_id)) is not None:
            try:
                record = await self._ledger.read(run_queries.find, run_id)
            except StorageError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if record is None or record.status == "canceled":
                open_run.run.cancel()
            if record is None or record.status in ENDED_RUN:
                self.remove(run_id)
            return


class _OpenRun(NamedTuple):
    run: Run
    stop_listening: Callable[[], None]

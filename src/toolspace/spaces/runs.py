"""What happens to runs: opened, moved into a space, paused for a result, closed, canceled."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal

from toolspace.core.ids import derived_id, new_id
from toolspace.core.records import ENDED_RUN, CallRecord, NewEvent, RunRecord, RunStatus, run_stream, space_stream
from toolspace.errors import RefusedError, StorageError
from toolspace.orchestrator.run import Run
from toolspace.spaces import call_transactions
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import entities, sessions, tasks
from toolspace.storage.queries import runs as run_rows

_OPEN: tuple[RunStatus, ...] = ("queued", "running", "waiting_tool")


def open_run(
    effects: Effects,
    agent_entity_id: str,
    *,
    run_id: str | None = None,
    space_id: str | None = None,
    trigger: Any = None,
) -> Program[RunRecord]:
    """Begins a run of an agent, in a space if one is named. The id of a run that is there already gives that run."""
    agent = yield from entities.find_entity(agent_entity_id)
    if agent is None:
        raise RefusedError("not_found", f'there is no entity "{agent_entity_id}"')
    if agent.type != "agent":
        raise RefusedError("invalid", f'"{agent_entity_id}" is a {agent.type}; only agents have runs')
    if space_id is not None:
        yield from _check_member(space_id, agent_entity_id)
    run_id = run_id or new_id("run")
    run = yield from run_rows.create(run_id, agent_entity_id, space_id=space_id, trigger=trigger)
    if run is None:
        run = yield from run_rows.find(run_id)
        if run is None or run.agent_entity_id != agent_entity_id:
            raise RefusedError("conflict", f'there is a run "{run_id}" of another agent')
        return run
    _tell(effects, run, "run.started", {"runId": run.id, "agentEntityId": agent_entity_id, "spaceId": space_id})
    return run


def enter_space(effects: Effects, run_id: str, space_id: str | None) -> Program[RunRecord]:
    """Makes a space the active one of a run, where its visible calls show; None leaves it.

    Each of the two spaces is told: nobody in the one should wait for what goes on in the other.
    """
    run = yield from get_run(run_id)
    if run.status in ENDED_RUN:
        raise RefusedError("conflict", f'the run "{run_id}" has ended')
    if space_id is not None:
        yield from _check_member(space_id, run.agent_entity_id)
    if space_id == run.space_id:
        return run
    moved = yield from run_rows.set_space(run_id, space_id)
    told = {"runId": run.id, "agentEntityId": run.agent_entity_id}
    if run.space_id is not None:
        left = {**told, "spaceId": run.space_id, "status": run.status}
        effects.emit(space_stream(run.space_id), NewEvent("run.done", left))
    if space_id is not None:
        effects.emit(space_stream(space_id), NewEvent("run.started", {**told, "spaceId": space_id}))
    return moved or run


def close_run(
    effects: Effects,
    run_id: str,
    status: Literal["completed", "failed"] = "completed",
    *,
    error: str | None = None,
    usage: Mapping[str, Any] | None = None,
) -> Program[RunRecord]:
    """Ends a run. Calls that wait for others stay open: their results go to the agent's inbox."""
    run = yield from get_run(run_id)
    moved = yield from run_rows.update_status(run_id, status, only_from=_OPEN, error=error, usage=usage, ends=True)
    if moved is None:
        if run.status == status:
            return run  # Said twice.
        raise _ended(run)
    effects.wake_keys.append(f"run:{run_id}")  # Whoever keeps something for it need not any more.
    yield from _see_to_task(effects, run_id)
    emit_run_done(effects, moved)
    return moved


def cancel_run(effects: Effects, run_id: str) -> Program[RunRecord]:
    """Ends a run and the calls of it that wait for others. What runs in a process is stopped there."""
    run = yield from get_run(run_id)
    moved = yield from run_rows.update_status(run_id, "canceled", only_from=_OPEN, ends=True)
    if moved is None:
        if run.status == "canceled":
            return run
        raise _ended(run)
    effects.wake_keys.append(f"run:{run_id}")  # Whoever runs calls of it stops them.
    for call_id in (yield from call_rows.list_open_of_run(run_id)):
        reason = "the run was canceled"
        if (yield from call_transactions.end_call(effects, call_id, "canceled", reason, notify_agent=False)) is None:
            effects.calls_to_stop.append(call_id)  # It runs, wherever that is.
    yield from _see_to_task(effects, run_id)
    emit_run_done(effects, moved)
    return moved


def subagent_run_id(call_id: str, leg: int = 0) -> str:
    """The id of the run that a call of an agent is; of another one for each agent that the request is handed to."""
    return derived_id("run", "below", call_id, str(leg))


def interrupt_call(effects: Effects, call_id: str) -> Program[CallRecord | None]:
    """The process that ran a call is gone, and with it the runs that the call was."""
    call = yield from call_transactions.interrupt(effects, call_id)
    for leg in itertools.count():
        run = yield from run_rows.find(subagent_run_id(call_id, leg))
        if run is None:
            break
        error = "interrupted: the process that ran it ended before it did"
        moved = yield from run_rows.update_status(run.id, "failed", only_from=_OPEN, error=error, ends=True)
        if moved is not None:
            emit_run_done(effects, moved)
    return call


def emit_run_done(effects: Effects, run: RunRecord) -> None:
    """Streams that a run has ended."""
    data = {
        "runId": run.id,
        "agentEntityId": run.agent_entity_id,
        "spaceId": run.space_id,
        "status": run.status,
        "usage": run.usage,
        "error": run.error,
    }
    _tell(effects, run, "run.done", data)


def get_run(run_id: str) -> Program[RunRecord]:
    run = yield from run_rows.find(run_id)
    if run is None:
        raise RefusedError("not_found", f'there is no run "{run_id}"')
    return run


def _see_to_task(effects: Effects, run_id: str) -> Program[None]:
    """The run of a task has ended, perhaps while nobody was at it: whoever lets agents think ends the task, too."""
    session_id = tasks.find_session_id(run_id)
    if session_id is not None:
        yield from sessions.set_run(session_id, run_id)
        effects.wake_keys.append("sessions")


def _ended(run: RunRecord) -> RefusedError:
    return RefusedError("conflict", f'the run "{run.id}" has ended already: it is {run.status}', runStatus=run.status)


def _check_member(space_id: str, entity_id: str) -> Program[None]:
    if (yield from entities.find_space(space_id)) is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities.is_member(space_id, entity_id)):
        raise RefusedError("forbidden", f'the agent "{entity_id}" is not a member of the space "{space_id}"')


def _tell(effects: Effects, run: RunRecord, type: str, data: Mapping[str, Any]) -> None:
    effects.emit(run_stream(run.id), NewEvent(type, data))
    if run.space_id is not None:
        # Members see that an agent works and how it ended; what it cost and why it failed is the operator's.
        shown = {key: value for key, value in data.items() if key not in ("usage", "error")}
        effects.emit(space_stream(run.space_id), NewEvent(type, shown))


# MERGED from open_runs: The runs that this process makes calls in: their limits, budgets and traces, kept while th…

_MOST_KEPT = 10_000
_LOOK_AGAIN_SECONDS = 1.0


class OpenRuns:
    """Runs by id. One that was not used for long may be forgotten, and begins anew with its limits when it is used."""

    def __init__(self, ledger: Ledger, make: Callable[..., Run]) -> None:
        self._ledger = ledger
        self._make = make
        self._runs: OrderedDict[str, _Kept] = OrderedDict()
        self._looking: set[asyncio.Task[None]] = set()

    async def enter(self, run_id: str) -> tuple[RunRecord, Run]:
        """A run to make a call in. Raises where there is none, or it has ended."""
        record = await self._ledger.read(get_run, run_id)
        if record.status in ENDED_RUN:
            message = f'the run "{run_id}" has ended: it is {record.status}'
            raise RefusedError("conflict", message, runStatus=record.status)
        kept = self._runs.get(run_id)
        if kept is None:
            kept = self._runs[run_id] = _Kept(self._make(id=run_id), self._forget_when_over(run_id))
            while len(self._runs) > _MOST_KEPT:
                self._drop(next(iter(self._runs)))
        self._runs.move_to_end(run_id)
        return record, kept.run

    def find(self, run_id: str) -> Run | None:
        """The run, if this process made calls in it lately."""
        kept = self._runs.get(run_id)
        return kept.run if kept is not None else None

    def remove(self, run_id: str) -> None:
        """A run was closed here."""
        self._drop(run_id)

    async def aclose(self) -> None:
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    def _forget_when_over(self, run_id: str) -> Callable[[], None]:
        def look(_: Any) -> None:
            task = asyncio.get_running_loop().create_task(self._look(run_id))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

        return self._ledger.waiters.listen(f"run:{run_id}", look)

    async def _look(self, run_id: str) -> None:
        """Something happened to a run, here or elsewhere: where it was canceled, its calls stop."""
        while (kept := self._runs.get(run_id)) is not None:
            try:
                record = await self._ledger.read(run_rows.find, run_id)
            except StorageError:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                continue
            if record is None or record.status == "canceled":
                kept.run.cancel()
            if record is None or record.status in ENDED_RUN:
                self._drop(run_id)
            return

    def _drop(self, run_id: str) -> None:
        kept = self._runs.pop(run_id, None)
        if kept is not None:
            kept.forget()
            kept.run.close()


class _Kept:
    __slots__ = ("forget", "run")

    def __init__(self, run: Run, forget: Callable[[], None]) -> None:
        self.run = run
        self.forget = forget

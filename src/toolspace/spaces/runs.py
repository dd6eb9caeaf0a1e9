"""What happens to runs: opened, moved into a space, paused for a result, closed, canceled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

from toolspace.core.ids import derived_id, new_id
from toolspace.core.records import ENDED_RUN, CallRecord, NewEvent, RunRecord, RunStatus, run_stream, space_stream
from toolspace.errors import RefusedError
from toolspace.spaces import call_transactions
from toolspace.spaces.ledger import Effects
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
    agent = yield from entities.entity(agent_entity_id)
    if agent is None:
        raise RefusedError("not_found", f'there is no entity "{agent_entity_id}"')
    if agent.type != "agent":
        raise RefusedError("invalid", f'"{agent_entity_id}" is a {agent.type}; only agents have runs')
    if space_id is not None:
        yield from _check_member(space_id, agent_entity_id)
    run_id = run_id or new_id("run")
    run = yield from run_rows.add(run_id, agent_entity_id, space_id=space_id, trigger=trigger)
    if run is None:
        run = yield from run_rows.one(run_id)
        if run is None or run.agent_entity_id != agent_entity_id:
            raise RefusedError("conflict", f'there is a run "{run_id}" of another agent')
        return run
    _tell(effects, run, "run.started", {"runId": run.id, "agentEntityId": agent_entity_id, "spaceId": space_id})
    return run


def enter_space(effects: Effects, run_id: str, space_id: str | None) -> Program[RunRecord]:
    """Makes a space the active one of a run, where its visible calls show; None leaves it.

    Each of the two spaces is told: nobody in the one should wait for what goes on in the other.
    """
    run = yield from the_run(run_id)
    if run.status in ENDED_RUN:
        raise RefusedError("conflict", f'the run "{run_id}" has ended')
    if space_id is not None:
        yield from _check_member(space_id, run.agent_entity_id)
    if space_id == run.space_id:
        return run
    moved = yield from run_rows.enter(run_id, space_id)
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
    run = yield from the_run(run_id)
    moved = yield from run_rows.move(run_id, status, only_from=_OPEN, error=error, usage=usage, ends=True)
    if moved is None:
        if run.status == status:
            return run  # Said twice.
        raise _ended(run)
    effects.keys.append(f"run:{run_id}")  # Whoever keeps something for it need not any more.
    yield from _see_to_task(effects, run_id)
    done(effects, moved)
    return moved


def cancel_run(effects: Effects, run_id: str) -> Program[RunRecord]:
    """Ends a run and the calls of it that wait for others. What runs in a process is stopped there."""
    run = yield from the_run(run_id)
    moved = yield from run_rows.move(run_id, "canceled", only_from=_OPEN, ends=True)
    if moved is None:
        if run.status == "canceled":
            return run
        raise _ended(run)
    effects.keys.append(f"run:{run_id}")  # Whoever runs calls of it stops them.
    for call_id in (yield from call_rows.open_in(run_id)):
        reason = "the run was canceled"
        if (yield from call_transactions.end_call(effects, call_id, "canceled", reason, tells_agent=False)) is None:
            effects.stops.append(call_id)  # It runs, wherever that is.
    yield from _see_to_task(effects, run_id)
    done(effects, moved)
    return moved


def run_below(call_id: str, leg: int = 0) -> str:
    """The id of the run that a call of an agent is; of another one for each agent that the request is handed to."""
    return derived_id("run", "below", call_id, str(leg))


def interrupt_call(effects: Effects, call_id: str) -> Program[CallRecord | None]:
    """The process that ran a call is gone, and with it the runs that the call was."""
    call = yield from call_transactions.interrupt(effects, call_id)
    for leg in itertools.count():
        run = yield from run_rows.one(run_below(call_id, leg))
        if run is None:
            break
        error = "interrupted: the process that ran it ended before it did"
        moved = yield from run_rows.move(run.id, "failed", only_from=_OPEN, error=error, ends=True)
        if moved is not None:
            done(effects, moved)
    return call


def done(effects: Effects, run: RunRecord) -> None:
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


def the_run(run_id: str) -> Program[RunRecord]:
    run = yield from run_rows.one(run_id)
    if run is None:
        raise RefusedError("not_found", f'there is no run "{run_id}"')
    return run


def _see_to_task(effects: Effects, run_id: str) -> Program[None]:
    """The run of a task has ended, perhaps while nobody was at it: whoever lets agents think ends the task, too."""
    session_id = tasks.session_of(run_id)
    if session_id is not None:
        yield from sessions.resume(session_id, run_id)
        effects.keys.append("sessions")


def _ended(run: RunRecord) -> RefusedError:
    return RefusedError("conflict", f'the run "{run.id}" has ended already: it is {run.status}', runStatus=run.status)


def _check_member(space_id: str, entity_id: str) -> Program[None]:
    if (yield from entities.space(space_id)) is None:
        raise RefusedError("not_found", f'there is no space "{space_id}"')
    if not (yield from entities.is_member(space_id, entity_id)):
        raise RefusedError("forbidden", f'the agent "{entity_id}" is not a member of the space "{space_id}"')


def _tell(effects: Effects, run: RunRecord, type: str, data: Mapping[str, Any]) -> None:
    effects.emit(run_stream(run.id), NewEvent(type, data))
    if run.space_id is not None:
        # Members see that an agent works and how it ended; what it cost and why it failed is the operator's.
        shown = {key: value for key, value in data.items() if key not in ("usage", "error")}
        effects.emit(space_stream(run.space_id), NewEvent(type, shown))

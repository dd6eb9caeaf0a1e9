"""What happens to calls, each as one transaction: the row moves, the message that shows it moves with it, the agent's
inbox gets what its caller did not wait for, and the streams hear of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.core.records import (
    ENDED_RUN,
    OPEN_CALL,
    CallRecord,
    CallStatus,
    NewEvent,
    ResultSource,
    Visibility,
    run_stream,
    space_stream,
)
from toolspace.errors import RefusedError
from toolspace.spaces import messaging
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import calls as rows
from toolspace.storage.queries import entities, inbox, messages, presence, sessions, tasks
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries.calls import CallTransition, NewCall

_SMALL = 512
"""Bytes of arguments that may be kept in memory while their call is open."""


class StartedCall(msgspec.Struct, frozen=True):
    """A call that was begun, or the one that was there already under its id."""

    call: CallRecord
    is_new: bool


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A result that someone brings."""

    call_id: str
    result: Any
    is_error: bool = False
    source: ResultSource = "client"
    run_id: str | None = None
    """The run that it is brought to, if it is."""
    space_id: str | None = None
    """The space that it is brought to, if it is."""
    entity_id: str | None = None
    """Who brings it, where that decides whether they may."""
    key: str | None = None
    """What makes a repetition of this submission known as one."""


class _ResultTold(msgspec.Struct, frozen=True, rename="camel"):
    """What an inbox is told of a result."""

    call_id: str
    tool_call_id: str
    tool_name: str
    run_id: str | None
    space_id: str | None
    status: CallStatus
    result: Any
    is_error: bool
    task_id: str | msgspec.UnsetType


def start(effects: Effects, new: NewCall, *, needs_worker: bool = False) -> Program[StartedCall]:
    """Writes down that a call begins, before anything is done for it."""
    seq = 0
    if new.run_id is not None:
        numbered = yield from rows.allocate_sequence_number(new.run_id)
        if numbered is None:
            raise RefusedError("not_found", f'there is no run "{new.run_id}"')
        seq, status, _ = numbered
        if status in ENDED_RUN:
            raise RefusedError("conflict", f'the run "{new.run_id}" has ended: it is {status}', runStatus=status)
    if needs_worker and not (yield from presence.is_any_served(_who_could_answer(new))):
        raise RefusedError(
            "unavailable",
            f'no worker serves the tool "{new.tool_name}"; start one (GET /api/tools/stream, or ToolWorker), '
            "or make the tool async",
        )
    shown = new.visible and new.space_id is not None
    message_id = new_id("msg") if shown else None
    call = yield from rows.create(new, seq=seq, message_id=message_id)
    if call is None:
        call = yield from rows.find(new.call_id)
        if call is None:
            raise RefusedError("conflict", f'the call "{new.call_id}" was removed just now; try again')
        return StartedCall(call, is_new=False)
    if message_id is not None and new.space_id is not None:
        state = "requires_action" if new.status in OPEN_CALL else "running"
        added = yield from messages.create(
            message_id,
            new.space_id,
            new.agent_entity_id or "",
            _content(call),
            kind="tool",
            status=state,
            run_id=new.run_id,
            call_id=new.call_id,
        )
        if added is None:
            raise RefusedError("not_found", f'there is no space "{new.space_id}"')
    if new.pauses_run and new.run_id is not None:
        yield from run_rows.update_status(new.run_id, "waiting_tool", only_from=("running", "queued"))
    if new.execution_type == "external":
        effects.notify_workers(new.tool_name)
    started = {
        "toolCallId": call.call_id,
        "toolName": call.tool_name,
        "runId": call.run_id,
        "agentEntityId": call.agent_entity_id,
        "spaceId": call.space_id,
        "messageId": message_id,
        "input": call.args,
        "executionType": call.execution_type,
        "executionTarget": call.execution_target,
        "status": "requires_action" if new.status in OPEN_CALL else "running",
    }
    _tell(effects, call, new.exposure, "tool.started", started)
    if new.status in OPEN_CALL and message_id is None and json_text.encoded_size(call.args) <= _SMALL:
        effects.opened_call = CallTransition(call, new.exposure, None, new.pauses_run)
    return StartedCall(call, is_new=True)


def finish(
    effects: Effects,
    call_id: str,
    *,
    status: CallStatus,
    result: Any,
    is_error: bool,
    error_kind: str | None,
    before: Sequence[NewEvent] = (),
    node_id: str | None = None,
) -> Program[CallRecord | None]:
    """A call that ran has ended, in this process if one is named. `before` are events that belong in front of that.
    None where it was ended."""
    moved = yield from rows.finish(
        call_id, status=status, result=result, is_error=is_error, error_kind=error_kind, node_id=node_id
    )
    if moved is None:
        return None
    effects.changed_calls[call_id] = moved.call
    for event in before:
        _tell(effects, moved.call, moved.exposure, event.type, event.data)
    yield from _show_end(effects, moved)
    if is_error and moved.call.execution_type == "prebuilt":
        # What readers saw of a message, while it was being written, ends too.
        yield from messaging.abandon_message(effects, messaging.message_id_for_call(call_id), "it could not be said")
    return moved.call


def submit(effects: Effects, submission: Submission) -> Program[CallRecord]:
    """Takes a result in, once. It goes to the caller who waits, or to the agent's inbox; never both, never neither."""
    if submission.entity_id is None:
        moved = yield from rows.resolve_directly(
            submission.call_id,
            result=submission.result,
            is_error=submission.is_error,
            source=submission.source,
            submission=submission.key,
            run_id=submission.run_id,
            space_id=submission.space_id,
        )
        if moved is not None:
            yield from _settle(effects, moved)
            return moved.call
    found = yield from rows.find_with_submission(submission.call_id)
    if found is None:
        raise RefusedError("not_found", f'there is no call "{submission.call_id}"')
    call, key, by, pauses = found
    yield from _check_submission(submission, call)
    moved = None
    if call.status in OPEN_CALL:
        if pauses:
            yield from rows.lock_paused_run(submission.call_id)
        moved = yield from rows.resolve(
            submission.call_id,
            result=submission.result,
            is_error=submission.is_error,
            source=submission.source,
            submission=submission.key,
            submitted_by=submission.entity_id,
        )
        if moved is None:  # Someone was faster.
            again = yield from rows.find_with_submission(submission.call_id)
            if again is not None:
                call, key, by, _ = again
    if moved is None:
        if submission.key is not None and submission.key == key and submission.entity_id == by:
            return call  # The same submission once more: its answer is the same too.
        raise RefusedError(
            "conflict",
            f'the call "{call.call_id}" has its result already' if call.status == "resolved"
            else f'the call "{call.call_id}" takes no result any more: it is {call.status}',
            callStatus=call.status,
            result=call.result,
            isError=call.is_error,
        )  # fmt: skip
    yield from _settle(effects, moved)
    return moved.call


def resolve_from_memory(known: CallTransition, submission: Submission) -> tuple[Effects, CallRecord] | None:
    """As `submit`, of a call that is known from when it was begun: nothing has to be read, and there is no program.
    None where something has to be looked at, or the call is not where they say."""
    call = known.call
    if (
        submission.entity_id is not None
        or known.pauses_run
        or call.execution_target == "server"
        or submission.run_id not in (None, call.run_id)
        or submission.space_id not in (None, call.space_id)
    ):
        return None
    moved, resolution = rows.build_resolution(
        known,
        result=submission.result,
        is_error=submission.is_error,
        source=submission.source,
        submission=submission.key,
    )
    effects = Effects(resolved_calls=[resolution])
    _hand_on(effects, moved)
    _tell_end(effects, moved)
    return effects, moved.call


def resolve_timer(effects: Effects, call_id: str, result: Any) -> Program[CallRecord | None]:
    """A call that answers itself does so. None where it was not open any more."""
    yield from rows.lock_paused_run(call_id)
    moved = yield from rows.resolve(
        call_id,
        result=result,
        is_error=False,
        source="server",
        submission=None,
        submitted_by=None,
    )
    if moved is None:
        return None
    yield from _settle(effects, moved)
    return moved.call


def make_pending(effects: Effects, call_id: str) -> Program[tuple[CallRecord, bool]]:
    """A caller stops waiting: from now on the result goes to the inbox. Where it came just before, here it is.

    The second says whether the caller may still have it, because it was on its way to nobody else.
    """
    moved = yield from rows.make_pending(call_id)
    if moved is not None:
        effects.changed_calls[call_id] = (
            moved.call
        )  # Where it was parked for a caller who does not know, that one hears of it.
        return moved.call, False
    call = yield from rows.find(call_id)
    if call is None:
        raise RefusedError("not_found", f'there is no call "{call_id}"')
    return call, call.status not in OPEN_CALL and (yield from rows.is_inline(call_id))


def end_call(
    effects: Effects,
    call_id: str,
    status: Literal["expired", "canceled"],
    reason: str,
    *,
    notify_agent: bool = True,
) -> Program[CallRecord | None]:
    """An open call ends without a result. None where it was not open."""
    kind = "timeout" if status == "expired" else "canceled"
    yield from rows.lock_paused_run(call_id)
    moved = yield from rows.end(call_id, status, error=reason, error_kind=kind, is_delivered=not notify_agent)
    if moved is None:
        return None
    yield from _settle(effects, moved, tells_agent=notify_agent)
    return moved.call


def cancel(effects: Effects, call_id: str, reason: str = "the call was canceled") -> Program[CallRecord]:
    """Ends an open call; one that runs is stopped where it runs, and ends there. Gives the call as it is then."""
    ended = yield from end_call(effects, call_id, "canceled", reason)
    if ended is not None:
        return ended
    call = yield from rows.find(call_id)
    if call is None:
        raise RefusedError("not_found", f'there is no call "{call_id}"')
    if call.status == "running":
        effects.calls_to_stop.append(call_id)
    elif call.status != "canceled":
        raise RefusedError("conflict", f'the call "{call_id}" has ended already: it is {call.status}')
    return call


def redirect_to_inbox(effects: Effects, call_id: str) -> Program[CallRecord | None]:
    """A result that did not reach its caller goes to the inbox."""
    moved = yield from rows.redirect_to_inbox(call_id)
    if moved is None:
        return None
    _push(effects, moved.call)
    return moved.call


def interrupt(effects: Effects, call_id: str) -> Program[CallRecord | None]:
    """The process that ran a call is gone: nobody knows whether it had an effect."""
    return (
        yield from finish(
            effects,
            call_id,
            status="failed",
            result="interrupted: the process that ran the call ended before it did",
            is_error=True,
            error_kind="internal_error",
        )
    )


def stream_events(
    effects: Effects, call: CallRecord, exposure: Visibility, events: Sequence[NewEvent]
) -> Program[None]:
    """What a running call says on its way."""
    for event in events:
        _tell(effects, call, exposure, event.type, event.data)
    return
    yield  # A program, though it asks for nothing itself.


def _check_submission(submission: Submission, call: CallRecord) -> Program[None]:
    name = f'the call "{call.call_id}"'
    if submission.entity_id is not None:
        member = call.space_id is not None and (yield from entities.is_member(call.space_id, submission.entity_id))
        if not member or not call.visible:
            raise RefusedError("forbidden", f"{name} is not yours to answer")
    if submission.run_id is not None and call.run_id != submission.run_id:
        if (yield from run_rows.find(submission.run_id)) is None:
            raise RefusedError("not_found", f'there is no run "{submission.run_id}"')
        raise RefusedError("forbidden", f'{name} does not belong to the run "{submission.run_id}"')
    if submission.space_id is not None and call.space_id != submission.space_id:
        if (yield from entities.find_space(submission.space_id)) is None:
            raise RefusedError("not_found", f'there is no space "{submission.space_id}"')
        raise RefusedError("forbidden", f'{name} does not belong to the space "{submission.space_id}"')
    if call.execution_target == "server":
        raise RefusedError("forbidden", f"{name} is executed by the gateway itself; it takes no result from outside")


def _settle(effects: Effects, moved: CallTransition, *, tells_agent: bool = True) -> Program[None]:
    call = moved.call
    goes_on = moved.pauses_run and call.run_id is not None and (yield from _go_on(effects, call.run_id))
    _hand_on(effects, moved, tells_agent=tells_agent and not goes_on)
    yield from _show_end(effects, moved)


def _go_on(effects: Effects, run_id: str) -> Program[bool]:
    """A run that waited goes on, once nothing of it is awaited any more. Whether it takes its results by itself: the
    run of a task does, and its agent need not hear of them."""
    if not (yield from rows.has_pausing_calls(run_id)):
        yield from run_rows.update_status(run_id, "running", only_from=("waiting_tool",))
    session_id = tasks.find_session_id(run_id)
    if session_id is None or (yield from sessions.find(session_id)) is None:
        return False
    run = yield from run_rows.find(run_id)
    if run is None or run.status in ENDED_RUN:
        return False
    if run.status == "running":
        yield from sessions.set_run(session_id, run_id)
        effects.wake_keys.append("sessions")
    return True


def _hand_on(effects: Effects, moved: CallTransition, *, tells_agent: bool = True) -> None:
    call = moved.call
    # A caller who waits takes what comes here for its own. What is the inbox's, it finds out by itself.
    effects.changed_calls[call.call_id] = call if moved.delivery == "inline" else None
    if moved.delivery == "inbox" and tells_agent:
        _push(effects, call)


def _push(effects: Effects, call: CallRecord) -> None:
    if call.agent_entity_id is None:
        return  # Nobody's inbox: whoever called looks the call up.
    agent, call_id, run_id = call.agent_entity_id, call.call_id, call.run_id
    task_id: str | msgspec.UnsetType = msgspec.UNSET
    if run_id is not None and (session_id := tasks.find_session_id(run_id)) is not None:
        task_id = tasks.task_id_of(session_id)
    data = _ResultTold(
        call_id, call_id, call.tool_name, run_id, call.space_id, call.status, call.result, call.is_error, task_id
    )
    row = inbox.build_row(agent, f"tool_result:{call_id}", "tool_result", data, priority=inbox.TOOL_RESULT)
    effects.inbox_rows.append(row)
    effects.notify_inbox(agent)


def _show_end(effects: Effects, moved: CallTransition) -> Program[None]:
    call = moved.call
    if call.message_id is not None:
        yield from messages.update_status(
            call.message_id, status="error" if call.is_error else "complete", content=_content(call)
        )
    _tell_end(effects, moved)


def _tell_end(effects: Effects, moved: CallTransition) -> None:
    call = moved.call
    data: dict[str, Any] = {
        "toolCallId": call.call_id,
        "toolName": call.tool_name,
        "runId": call.run_id,
        "messageId": call.message_id,
    }
    if call.is_error:
        reason = call.result if isinstance(call.result, str) else None
        data["error"], data["errorKind"] = reason or "the tool failed", call.error_kind or "execution_error"
        if reason is None:
            data["output"] = call.result
    else:
        data["output"], data["source"] = call.result, call.source
    data["durationMs"] = (call.resolved_at or call.created_at) - call.created_at
    _tell(effects, call, moved.exposure, "tool.error" if call.is_error else "tool.done", data)


def _tell(effects: Effects, call: CallRecord, exposure: Visibility, type: str, data: Any) -> None:
    event = NewEvent(type, data, exposure)
    if call.run_id is not None:
        effects.emit(run_stream(call.run_id), event)
    if call.space_id is not None and exposure != "none":
        effects.emit(space_stream(call.space_id), event)


def _content(call: CallRecord) -> dict[str, Any]:
    content: dict[str, Any] = {"toolCallId": call.call_id, "toolName": call.tool_name, "input": call.args}
    if call.status in ("completed", "resolved") and not call.is_error:
        content["output"] = call.result
    elif call.is_error:
        content["error"] = call.result
    return content


def _who_could_answer(new: NewCall) -> list[str]:
    """A worker of the tool; of a visible call also whoever reads the space or the run, where it is shown."""
    topics = [f"tool:{new.tool_name}"]
    if new.visible and new.space_id is not None:
        topics.append(space_stream(new.space_id))
    if new.run_id is not None:
        topics.append(run_stream(new.run_id))
    return topics

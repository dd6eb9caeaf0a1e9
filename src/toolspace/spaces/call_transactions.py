"""The transactions of tool calls: start, finish, submit a result, expire, cancel.

Each changes the row of the call, the message that shows it, the inbox of its agent and the event streams in one commit.
Used by `pending_calls`, `call_recorder`, `runs` and the sweeper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.core.result import ToolResult
from toolspace.core.stored_records import (
    ENDED_RUN,
    OPEN_CALL,
    CallRecord,
    CallStatus,
    MessageStatus,
    NewEvent,
    ResultSource,
    Visibility,
    run_stream,
    space_stream,
)
from toolspace.errors import ErrorKind, RefusedError
from toolspace.spaces import call_events, messaging
from toolspace.spaces.ledger import Effects
from toolspace.spaces.submitted_results import check_result
from toolspace.storage.database import Program
from toolspace.storage.queries import (
    approvals,
    call_delivery,
    calls,
    entities_and_spaces,
    inbox,
    messages,
    runs,
    sessions,
    tasks,
    workers_and_presence,
)
from toolspace.storage.queries.calls import CallTransition, NewCall

APPROVAL: Final = "approval"
"""The execution type of a call that waits for approval. Its execution target is `server`."""
_MAX_REMEMBERED_BYTES = 512
"""Of the arguments of an open call that the process remembers."""


class StartedCall(msgspec.Struct, frozen=True):
    """A call that was started, or the one that has its id already."""

    call: CallRecord
    is_new: bool


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A result that someone submits."""

    call_id: str
    result: Any
    is_error: bool = False
    error_kind: ErrorKind | None = None
    """The kind of a failure that is not the tool's own: a hook withholds the result."""
    source: ResultSource = "client"
    run_id: str | None = None
    """The run that the submitter named."""
    space_id: str | None = None
    """The space that the submitter named."""
    entity_id: str | None = None
    """The submitter, if only members of the call's space may submit; None for those who may resolve any call."""
    key: str | None = None
    """Identifies a repeated submission."""
    client_id: str | None = None
    """The client that submits, if it names itself."""
    is_checked: bool = False
    """Whether the result matched the output schema before hooks changed it."""


class _ResultEvent(msgspec.Struct, frozen=True, rename="camel"):
    """The data of an inbox event with a result."""

    call_id: str
    tool_call_id: str
    tool_name: str
    run_id: str | None
    space_id: str | None
    status: CallStatus
    result: Any
    is_error: bool
    task_id: str | msgspec.UnsetType
    may_be_known: Literal[True] | msgspec.UnsetType


def start(effects: Effects, new: NewCall, *, needs_worker: bool = False) -> Program[StartedCall]:
    """Stores a call before anything is done for it.

    Raises `RefusedError` if its run has ended, or if it needs a worker and no worker serves its tool.
    """
    seq = 0
    if new.run_id is not None:
        allocation = yield from calls.allocate_sequence_number(new.run_id)
        if allocation is None:
            raise RefusedError("not_found", f'there is no run "{new.run_id}"')
        seq, run_status, _ = allocation
        if run_status in ENDED_RUN:
            raise RefusedError(
                "conflict", f'the run "{new.run_id}" has ended: it is {run_status}', runStatus=run_status
            )
    if needs_worker and not (yield from workers_and_presence.is_any_served(list_submitter_topics(new))):
        raise RefusedError(
            "unavailable",
            f'no worker serves the tool "{new.tool_name}"; start one (GET /api/tools/stream, or ToolWorker), '
            "or remove whenUnserved from the tool",
        )
    message_id = new_id("msg") if new.visible and new.space_id is not None else None
    call = yield from calls.create(new, seq=seq, message_id=message_id)
    if call is None:
        call = yield from calls.find(new.call_id)
        if call is None:
            raise RefusedError("conflict", f'the call "{new.call_id}" was removed just now; try again')
        return StartedCall(call, is_new=False)
    if new.pauses_run and new.run_id is not None:
        yield from runs.update_status(new.run_id, "waiting_tool", from_statuses=("running", "queued"))
    if new.execution_type == APPROVAL:
        return StartedCall(call, is_new=True)  # Nobody sees or executes it before it is approved.
    yield from announce_start(effects, call, new)
    is_small = message_id is None and call.output_schema is None
    if new.status in OPEN_CALL and is_small and json_text.encoded_size(call.args) <= _MAX_REMEMBERED_BYTES:
        effects.opened_call = CallTransition(call, new.visibility, None, new.pauses_run, new.session_id)
    return StartedCall(call, is_new=True)


def announce_start(effects: Effects, call: CallRecord, new: NewCall) -> Program[None]:
    """Shows a call in its space, offers it to workers, and emits its start."""
    shown_status: MessageStatus = "requires_action" if call.status in OPEN_CALL else "running"
    if call.message_id is not None and call.space_id is not None:
        message = yield from messages.create(
            call.message_id,
            call.space_id,
            call.agent_entity_id or "",
            call_events.message_content(call),
            kind="tool",
            status=shown_status,
            run_id=call.run_id,
            call_id=call.call_id,
        )
        if message is None:
            raise RefusedError("not_found", f'there is no space "{call.space_id}"')
    if call.execution_type == "external":
        effects.notify_workers(call.tool_name)
    call_events.emit_start(effects, call, new, shown_status)


def finish(
    effects: Effects,
    call_id: str,
    result: ToolResult,
    *,
    before: Sequence[NewEvent] = (),
    node_id: str | None = None,
) -> Program[CallRecord | None]:
    """Stores the end of a running call; only if it runs in the process `node_id`, if that is given.

    `before` are events to emit in front of the end. None if the call has ended already.
    """
    transition = yield from calls.finish(
        call_id,
        status="completed" if result.ok else "canceled" if result.error_kind == "canceled" else "failed",
        result=json_text.to_json_data(result.result if result.ok else result.error),
        is_error=not result.ok,
        error_kind=result.error_kind,
        node_id=node_id,
    )
    if transition is None:
        return None
    effects.changed_calls[call_id] = transition.call
    for event in before:
        call_events.emit(effects, transition.call, transition.visibility, event.type, event.data)
    yield from _show_end(effects, transition)
    if not result.ok and transition.call.execution_type == "prebuilt":
        # Subscribers may have seen the beginning of a message of this call.
        yield from messaging.abandon_message(effects, messaging.message_id_for_call(call_id), "it could not be sent")
    return transition.call


def submit(effects: Effects, submission: Submission) -> Program[CallRecord]:
    """Resolves a call with a submitted result, once. The result goes to the waiting caller or to the agent's inbox."""
    values: dict[str, Any] = {
        "result": submission.result,
        "is_error": submission.is_error,
        "source": submission.source,
        "submission": submission.key,
        "client_id": submission.client_id,
    }
    if submission.entity_id is None:
        transition = yield from calls.resolve(
            submission.call_id, **values, was_read=False, run_id=submission.run_id, space_id=submission.space_id
        )
        if transition is not None:
            return (yield from _settle_submission(effects, transition, submission))
    row = yield from calls.find_with_submission(submission.call_id)
    if row is None:
        raise RefusedError("not_found", f'there is no call "{submission.call_id}"')
    call, key, submitter, pauses_run = row
    yield from _check_submission(submission, call)
    transition = None
    if call.status in OPEN_CALL:
        if not submission.is_error and not submission.is_checked:
            check_result(call, submission.result)
        if pauses_run:
            yield from calls.lock_paused_run(submission.call_id)
        transition = yield from calls.resolve(submission.call_id, **values, submitted_by=submission.entity_id)
        if transition is None:  # Another submission was faster.
            row = yield from calls.find_with_submission(submission.call_id)
            if row is not None:
                call, key, submitter, _ = row
    if transition is None:
        if submission.key is not None and submission.key == key and submission.entity_id == submitter:
            return call  # The same submission again.
        raise RefusedError(
            "conflict",
            f'the call "{call.call_id}" has its result already' if call.status == "resolved"
            else f'the call "{call.call_id}" takes no result any more: it is {call.status}',
            callStatus=call.status,
            result=call.result,
            isError=call.is_error,
        )  # fmt: skip
    return (yield from _settle_submission(effects, transition, submission))


def _settle_submission(effects: Effects, transition: CallTransition, submission: Submission) -> Program[CallRecord]:
    if submission.error_kind is not None:
        yield from calls.set_error_kind(submission.call_id, submission.error_kind)
        call = msgspec.structs.replace(transition.call, error_kind=submission.error_kind)
        transition = msgspec.structs.replace(transition, call=call)
    yield from settle(effects, transition)
    return transition.call


def find_open_call(submission: Submission) -> Program[CallRecord | None]:
    """Returns the call that a submission would resolve; None if it has its result. Raises as `submit` does."""
    call = yield from calls.find(submission.call_id)
    if call is None:
        raise RefusedError("not_found", f'there is no call "{submission.call_id}"')
    yield from _check_submission(submission, call)
    if call.status not in OPEN_CALL:
        return None
    if not submission.is_error:
        check_result(call, submission.result)
    return call


def resolve_from_memory(
    open_call: CallTransition, submission: Submission, *, now: int
) -> tuple[Effects, CallRecord] | None:
    """Twin path of `submit`, for an open call that this process remembers: reads nothing and runs no program.

    `benchmarks/gateway_results.py` (results per second) pays for it; `tests/spaces/test_submit_paths.py` compares it
    with `submit`. None if the call has to be read, or is not in the run or space that the submitter named.
    """
    call = open_call.call
    if (
        submission.entity_id is not None
        or submission.error_kind is not None
        or open_call.pauses_run
        or call.execution_target == "server"
        or submission.run_id not in (None, call.run_id)
        or submission.space_id not in (None, call.space_id)
    ):
        return None
    transition, resolution = calls.build_resolution(
        open_call,
        result=submission.result,
        is_error=submission.is_error,
        source=submission.source,
        submission=submission.key,
        client_id=submission.client_id,
        now=now,
    )
    effects = Effects(resolved_calls=[resolution])
    _deliver(effects, transition)
    call_events.emit_end(effects, transition)
    return effects, transition.call


def resolve_by_server(
    effects: Effects, call_id: str, result: Any, *, is_error: bool = False, error_kind: ErrorKind | None = None
) -> Program[CallRecord | None]:
    """Resolves a call with a result that nobody submitted: its timer ended. None if it was not open any more."""
    yield from calls.lock_paused_run(call_id)
    transition = yield from calls.resolve(
        call_id, result=result, is_error=is_error, source="server", submission=None, error_kind=error_kind
    )
    if transition is None:
        return None
    yield from settle(effects, transition)
    return transition.call


def make_pending(effects: Effects, call_id: str) -> Program[tuple[CallRecord, bool]]:
    """The caller stops waiting: from now on the result goes to the inbox.

    The second value says whether the result arrived just before: then it is the caller's.
    """
    transition = yield from calls.make_pending(call_id)
    if transition is not None:
        effects.changed_calls[call_id] = transition.call  # Another process may do this for a caller that still waits.
        return transition.call, False
    call = yield from calls.find(call_id)
    if call is None:
        raise RefusedError("not_found", f'there is no call "{call_id}"')
    return call, call.status not in OPEN_CALL and (yield from calls.is_inline(call_id))


def end_call(
    effects: Effects,
    call_id: str,
    status: Literal["expired", "canceled"],
    reason: str,
    *,
    notify_agent: bool = True,
    outcome: ToolResult | None = None,
) -> Program[CallRecord | None]:
    """Ends an open call without a result. None if it was not open. `outcome`: what hooks return instead."""
    kind = "timeout" if status == "expired" else "canceled"
    yield from calls.lock_paused_run(call_id)
    if outcome is not None and outcome.ok:
        transition = yield from calls.resolve(
            call_id, result=json_text.to_json_data(outcome.result), is_error=False, source="server", submission=None
        )
    else:
        error, error_kind = (reason, kind) if outcome is None else (outcome.error or reason, outcome.error_kind or kind)
        transition = yield from calls.end(
            call_id, status, error=error, error_kind=error_kind, is_delivered=not notify_agent
        )
    if transition is None:
        return None
    if transition.call.execution_target == "server":
        # A call that waits for approval, or is executed after it.
        if (yield from approvals.decide(call_id, status)):
            data = {"approvalId": call_id, "toolCallId": call_id, "decision": status, "reason": reason}
            call_events.emit(effects, transition.call, transition.visibility, "approval.decided", data)
        effects.calls_to_stop.append(call_id)
    yield from settle(effects, transition, notify_agent=notify_agent)
    return transition.call


def cancel(effects: Effects, call_id: str, reason: str = "the call was canceled") -> Program[CallRecord]:
    """Cancels an open call; a running one is stopped in its process, and ends there. Returns the call as it is then."""
    cancelled_call = yield from end_call(effects, call_id, "canceled", reason)
    if cancelled_call is not None:
        return cancelled_call
    call = yield from calls.find(call_id)
    if call is None:
        raise RefusedError("not_found", f'there is no call "{call_id}"')
    if call.status == "running":
        effects.calls_to_stop.append(call_id)
    elif call.status != "canceled":
        raise RefusedError("conflict", f'the call "{call_id}" has ended already: it is {call.status}')
    return call


def redirect_to_inbox(effects: Effects, call_id: str, *, may_be_known: bool = False) -> Program[CallRecord | None]:
    """Sends a result that did not reach its caller to the inbox. None if it did.

    `may_be_known`: the process died, so perhaps the result did reach its caller. The event says so.
    """
    transition = yield from call_delivery.redirect_to_inbox(call_id)
    if transition is None:
        return None
    _deliver(effects, transition, may_be_known=may_be_known)
    return transition.call


def interrupt(effects: Effects, call_id: str) -> Program[CallRecord | None]:
    """Fails a running call of a dead process: nobody knows whether it had an effect."""
    reason = "interrupted: the process that ran the call ended before it did"
    return (yield from finish(effects, call_id, ToolResult(False, error=reason, error_kind="internal_error")))


def stream_events(
    effects: Effects, call: CallRecord, visibility: Visibility, events: Sequence[NewEvent]
) -> Program[None]:
    """Emits progress and partial results of a running call."""
    for event in events:
        call_events.emit(effects, call, visibility, event.type, event.data)
    return
    yield  # Makes it a program.


def _check_submission(submission: Submission, call: CallRecord) -> Program[None]:
    name = f'the call "{call.call_id}"'
    if submission.entity_id is not None:
        is_member = call.space_id is not None and (
            yield from entities_and_spaces.is_member(call.space_id, submission.entity_id)
        )
        if not is_member or not call.visible:
            raise RefusedError("forbidden", f"{name} is not yours to answer")
    if submission.run_id is not None and call.run_id != submission.run_id:
        if (yield from runs.find(submission.run_id)) is None:
            raise RefusedError("not_found", f'there is no run "{submission.run_id}"')
        raise RefusedError("forbidden", f'{name} does not belong to the run "{submission.run_id}"')
    if submission.space_id is not None and call.space_id != submission.space_id:
        if (yield from entities_and_spaces.find_space(submission.space_id)) is None:
            raise RefusedError("not_found", f'there is no space "{submission.space_id}"')
        raise RefusedError("forbidden", f'{name} does not belong to the space "{submission.space_id}"')
    if call.execution_target == "server":
        raise RefusedError("forbidden", f"{name} is executed by the gateway itself; it takes no result from outside")


def settle(effects: Effects, transition: CallTransition, *, notify_agent: bool = True) -> Program[None]:
    """Everything that follows from the end of an open call."""
    call = transition.call
    if transition.pauses_run and call.run_id is not None and (yield from _continue_run(effects, call.run_id)):
        notify_agent = False
    _deliver(effects, transition, notify_agent=notify_agent)
    yield from _show_end(effects, transition)


def _continue_run(effects: Effects, run_id: str) -> Program[bool]:
    """Lets a paused run continue once all the calls that it waits for have ended.

    Returns whether the run fetches its results itself: the run of a background task does, so its agent gets no event.
    """
    if not (yield from calls.has_pausing_calls(run_id)):
        yield from runs.update_status(run_id, "running", from_statuses=("waiting_tool",))
    session_id = tasks.find_session_id(run_id)
    if session_id is None or (yield from sessions.find(session_id)) is None:
        return False
    run = yield from runs.find(run_id)
    if run is None or run.status in ENDED_RUN:
        return False
    if run.status == "running":
        yield from sessions.set_run(session_id, run_id)
        effects.wake_keys.append("sessions")
    return True


def _deliver(
    effects: Effects, transition: CallTransition, *, notify_agent: bool = True, may_be_known: bool = False
) -> None:
    """Wakes the caller that waits for a call, or adds the result to the inbox of its agent."""
    call = transition.call
    # A waiting caller takes the record as its result. None: the result is the inbox's, and the caller reads the row.
    effects.changed_calls[call.call_id] = call if transition.delivery == "inline" else None
    if transition.delivery != "inbox" or not notify_agent or call.agent_entity_id is None:
        return  # Without an agent, the caller reads the result from the call.
    agent, call_id, run_id = call.agent_entity_id, call.call_id, call.run_id
    task_id: str | msgspec.UnsetType = msgspec.UNSET
    if run_id is not None and (session_id := tasks.find_session_id(run_id)) is not None:
        task_id = tasks.task_id_of(session_id)
    known_flag = True if may_be_known else msgspec.UNSET
    data = _ResultEvent(
        call_id,
        call_id,
        call.tool_name,
        run_id,
        call.space_id,
        call.status,
        call.result,
        call.is_error,
        task_id,
        known_flag,
    )
    recipient = transition.session_id or agent
    event_id, at = inbox.result_event_id(call_id), call.resolved_at or call.created_at
    row = inbox.build_row(recipient, event_id, "tool_result", data, priority=inbox.TOOL_RESULT, at=at)
    effects.inbox_rows.append(row)
    effects.notify_inbox(recipient)


def _show_end(effects: Effects, transition: CallTransition) -> Program[None]:
    call = transition.call
    if call.message_id is not None:
        status = "error" if call.is_error else "complete"
        yield from messages.update_status(call.message_id, status=status, content=call_events.message_content(call))
    call_events.emit_end(effects, transition)


def list_submitter_topics(call: NewCall | CallRecord) -> list[str]:
    """Who may submit the result: workers of the tool, subscribers of its run, and of its space if it is visible."""
    topics = [workers_and_presence.tool_topic(call.tool_name)]
    if call.visible and call.space_id is not None:
        topics.append(space_stream(call.space_id))
    if call.run_id is not None:
        topics.append(run_stream(call.run_id))
    return topics

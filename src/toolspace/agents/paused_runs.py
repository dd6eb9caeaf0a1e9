"""Pauses a run that waits for a result, and continues it when the result has come.

The stored conversation has a mark in place of the missing result. The result comes to the agent's inbox; the
transaction that begins a cycle (`session_transactions.py`) inserts it there, and the run continues.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from toolspace.agents.handoff import event_data
from toolspace.agents.loop_hooks import PlannedCall
from toolspace.core import json_text
from toolspace.core.language_model import ModelToolResult, ResultsTurn, Turn
from toolspace.core.stored_records import ENDED_RUN, OPEN_CALL, CallRecord, InboxEvent
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import inbox, sessions
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries.sessions import StoredTurn

if TYPE_CHECKING:
    from toolspace.agents.session_transactions import SessionLease

_AWAITING_RESULT = "(no result yet: the run waits for it)"
"""Marks a result in the stored conversation that the run waits for."""


def mark_awaited_results(turn: Turn, calls: Sequence[PlannedCall], paused_call_ids: Collection[str] = ()) -> Turn:
    """Marks the missing results of calls that pause the run. `calls`: those that the turn has the results of.

    `paused_call_ids`: those that wait for approval.
    """
    if not isinstance(turn, ResultsTurn) or len(turn.results) != len(calls):
        return turn
    results = tuple(
        msgspec.structs.replace(result, text=f"{_AWAITING_RESULT} {result.text}")
        if not result.is_error and (call.call_id in paused_call_ids or (call.tool is not None and call.tool.pauses_run))
        else result
        for call, result in zip(calls, turn.results, strict=True)
    )
    return ResultsTurn(results)


def deliver_awaited_results(
    effects: Effects, lease: SessionLease, claim: str, events: Sequence[InboxEvent]
) -> Program[tuple[list[InboxEvent], str | None]]:
    """Delivers results to the runs that wait for them. Returns the other events, and the run of this session that can
    continue, if there is one."""
    other_events: list[InboxEvent] = []
    resumed_run_id: str | None = None
    for event in events:
        call = yield from _find_awaited_call(event)
        run = (yield from run_rows.find(call.run_id)) if call is not None and call.run_id is not None else None
        session_id = (yield from sessions.find_id_by_run(run.id)) if run is not None else None
        if call is None or run is None or session_id is None:
            other_events.append(event)
            continue
        is_own = session_id == lease.session_id
        if is_own and run.status == "running" and resumed_run_id not in (None, run.id):
            other_events.append(event)  # Another run of this session continues first.
            continue
        inserted_ids = yield from insert_awaited_results(session_id, run.id)
        if run.status in ENDED_RUN and (call.call_id in inserted_ids or event.attempts > 1):
            other_events.append(event)  # The run has ended: its result comes as any late result does.
        elif is_own and run.status == "running":
            resumed_run_id = run.id
            # The run claims the event: if it fails, the result comes again.
            yield from inbox.transfer_claim(lease.agent_entity_id, claim, [event.event_id], f"run:{run.id}")
        else:
            yield from inbox.acknowledge(lease.agent_entity_id, claim, [event.event_id])
            if run.status == "running":
                yield from sessions.set_run(session_id, run.id)
                effects.wake_keys.append("sessions")
    return other_events, resumed_run_id


def _find_awaited_call(event: InboxEvent) -> Program[CallRecord | None]:
    """The call whose result an event contains, if its run waits for that result."""
    if event.type != "tool_result":
        return None
    match = yield from call_rows.find_with_submission(str(event_data(event).get("callId")))
    return match[0] if match is not None and match[3] else None


def insert_awaited_results(session_id: str, run_id: str) -> Program[set[str]]:
    """Replaces the marks in a run's conversation by the results that have come. Returns the ids of their calls."""
    turns = yield from sessions.list_turns_of_run(session_id, run_id)
    inserted_ids: set[str] = set()
    for model_row, results_row in itertools.pairwise(turns):
        turn = results_row.stored_turn.turn
        if not isinstance(turn, ResultsTurn) or not any(_is_awaited(result) for result in turn.results):
            continue
        results = list(turn.results)
        for index, call_id in enumerate(model_row.stored_turn.call_ids):
            call = (yield from call_rows.find(call_id)) if _is_awaited(results[index]) else None
            if call is not None and call.status not in OPEN_CALL:
                results[index] = _result_of(call, results[index])
                inserted_ids.add(call_id)
        yield from sessions.replace_turn(session_id, results_row.seq, StoredTurn(ResultsTurn(tuple(results))))
    return inserted_ids


def _is_awaited(result: ModelToolResult) -> bool:
    return result.text.startswith(_AWAITING_RESULT)


def _result_of(call: CallRecord, mark: ModelToolResult) -> ModelToolResult:
    """The result of an ended call as the model reads it, in place of its mark."""
    value = call.result if isinstance(call.result, str) else json_text.encode(call.result)
    text = f"(tool failed: {value})" if call.is_error else value
    return ModelToolResult(mark.id, mark.name, text, call.is_error)

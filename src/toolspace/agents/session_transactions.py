"""The transactions of a session: a cycle begins, saves a step, pauses, ends. Sends no model requests.

The scheduler, the cycle runner and the cycle commit them. Each one checks the lease first, so a process that lost the
session to another one changes nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from toolspace.agents import handoff, paused_runs, plain_answers
from toolspace.agents.loop_hooks import PlannedCall
from toolspace.agents.run_principal import find_principal
from toolspace.core import inbox_text, json_text
from toolspace.core.ids import new_id, session_id_for
from toolspace.core.json_text import quote_name, quote_truncated
from toolspace.core.language_model import ModelTurn, ResultsTurn, Turn, Usage, UserTurn
from toolspace.core.stored_records import ENDED_RUN, CallRecord, InboxEvent, RunRecord
from toolspace.core.token_count import estimate_tokens
from toolspace.errors import ToolspaceError
from toolspace.spaces import announced_calls, call_transactions, messaging, runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries import call_delivery, entities_and_spaces, inbox, sessions
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries.calls import NewCall
from toolspace.storage.queries.sessions import HistoryTurn, NewTurn, SessionKind, StoredTurn

LEASE_MS = 6_000
"""How long a process may be silent before another one takes its sessions over."""
_CLAIM_MS = 20 * 365 * 86_400_000
"""The claim on a cycle's events does not expire: a cycle that is interrupted continues, and still needs them."""
_PREVIEWED_EVENTS = 8
_MAX_INBOX_TEXT, _MIN_EVENT_TEXT = 300_000, 2_000
"""Characters. About how long the inbox text of a cycle may be; how much of each event is shown in any case."""
_MAX_CONTINUED_RESULT = 2_000
"""Characters of a late result that the CONTINUE note repeats."""
_MAX_ERROR = 10_000

WriteProgram = Callable[[Effects], Program[None]]
"""Writes that are committed together with something else."""


class LeaseLost(ToolspaceError):
    """Another process has the lease of the session now."""


class RunEnded(ToolspaceError):
    """The run was ended from outside: cancelled, or its agent was removed."""


class SessionLease(msgspec.Struct, frozen=True):
    """The right to run a session. Every write names the token; it is void once another process has a higher one."""

    session_id: str
    agent_entity_id: str
    token: int
    kind: SessionKind = "agent"
    scope_key: str = ""

    @property
    def owner_id(self) -> str:
        """The session of the agent that goals, memories and plans belong to: for a task, the one that started it."""
        return session_id_for(self.agent_entity_id, self.scope_key)


class StartedCycle(msgspec.Struct, frozen=True, kw_only=True):
    """A cycle under way."""

    run: RunRecord
    cycle: int
    """Its number in the session."""
    events: Sequence[InboxEvent] = ()
    """The inbox events of a new cycle; empty for a cycle that continues."""


class CycleStep(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a step, before its calls are executed."""

    run_id: str
    cycle: int
    turns: Sequence[Turn]
    planned_calls: Sequence[PlannedCall] = ()
    number: int = 0
    usage: Usage | None = None
    new_calls: Sequence[NewCall] = ()
    """Calls of this process that can be stored together with the step."""
    write_stream: WriteProgram | None = None
    """Publishes the output of the model that subscribers have not received yet."""


# The lease


def release(effects: Effects, lease: SessionLease) -> Program[None]:
    """Releases the lease. If a run of the session is under way, other processes are notified."""
    if (yield from sessions.release_lease(lease.session_id, lease.token)):
        effects.wake_keys.append("sessions")


def renew(lease: SessionLease) -> Program[None]:
    """Renews the lease. Raises `LeaseLost` if another process has it."""
    if not (yield from sessions.renew_lease(lease.session_id, lease.token, lease_ms=LEASE_MS)):
        raise LeaseLost(f"session {lease.session_id}: another process has the lease; stopping here")


# The start of a cycle


def begin(
    effects: Effects,
    lease: SessionLease,
    *,
    batch: int,
    max_agent_turns: int,
    is_router: bool = False,
    enters_space: bool = False,
) -> Program[StartedCycle | Literal[False] | None]:
    """Claims the events of the inbox and opens a run for them. Returns None, and releases the lease, if there are none.

    Returns False if the events need no run: they were results for runs that wait for them, agents have answered one
    another `max_agent_turns` times, or they are answers to requests that a router (`is_router`) has handed off.
    `enters_space`: if all events are messages of one space, the run begins there.
    """
    yield from renew(lease)
    session = yield from sessions.find(lease.session_id)
    if session is None:
        raise LeaseLost(f"session {lease.session_id} does not exist any more")
    run_id = new_id("run")
    claim = f"run:{run_id}"
    agent_id = lease.agent_entity_id
    events = yield from inbox.claim(agent_id, claim, count=batch, lease_ms=_CLAIM_MS, session_id=lease.session_id)
    if not events:
        yield from sessions.release_lease(lease.session_id, lease.token)
        return None
    events, resumed_run_id = yield from paused_runs.deliver_awaited_results(effects, lease, claim, events)
    if resumed_run_id is not None:
        yield from inbox.undo_claim(agent_id, claim, [event.event_id for event in events])
        return (yield from _resume(effects, lease, resumed_run_id))
    if not events:
        return False
    is_from_agents = all(_is_from_agent(event) for event in events)
    turn = inbox_turn((yield from messaging.add_space_names(events)))
    has_talked_enough = is_from_agents and session.agent_turns >= max_agent_turns
    # A router that ran for such an answer would hand it off to the agent that gave it.
    if has_talked_enough or (is_from_agents and is_router and (yield from _are_handoff_answers(agent_id, events))):
        yield from sessions.append_turns(lease.session_id, session.cycle, [new_turn(turn)])
        yield from inbox.acknowledge(agent_id, claim, [event.event_id for event in events])
        return False
    trigger: dict[str, object] = {"type": events[0].type, "events": [event.event_id for event in events]}
    answer_space_id = yield from plain_answers.find_answer_space(agent_id, events)
    if answer_space_id is not None:
        trigger[plain_answers.ANSWER_SPACE_KEY] = answer_space_id
    space_id = plain_answers.find_common_space(events) if enters_space else None
    if space_id is not None and not (yield from entities_and_spaces.is_member(space_id, agent_id)):
        space_id = None
    principal = yield from find_principal(agent_id, events)
    run = yield from runs.open_run(
        effects,
        agent_id,
        run_id=run_id,
        space_id=space_id,
        trigger=trigger,
        principal=principal,
        session_id=lease.session_id,
    )
    agent_turns = session.agent_turns + 1 if is_from_agents else 0
    cycle = yield from sessions.start_cycle(lease.session_id, run_id, agent_turns=agent_turns)
    yield from sessions.append_turns(lease.session_id, cycle, [new_turn(turn, run_id)])
    return StartedCycle(run=run, cycle=cycle, events=events)


def _resume(effects: Effects, lease: SessionLease, run_id: str) -> Program[StartedCycle]:
    """Continues a run of this session that has waited for a result."""
    session = yield from sessions.find(lease.session_id)
    assert session is not None
    yield from sessions.set_run(lease.session_id, run_id)
    turns = yield from sessions.list_turns_of_run(lease.session_id, run_id)
    if turns and turns[-1].seq != session.last_seq:
        # Other cycles ran in between: the results are repeated at the end of the conversation.
        last_turn = turns[-1].stored_turn.turn
        results = last_turn.results if isinstance(last_turn, ResultsTurn) else ()
        lines = [
            "CONTINUE: the result of an earlier call has come; go on with that.",
            *(
                f"{quote_name(result.name)}: {quote_truncated(result.text, _MAX_CONTINUED_RESULT)}"
                for result in results
            ),
        ]
        note = new_turn(UserTurn("\n".join(lines)), run_id)
        yield from sessions.append_turns(lease.session_id, session.cycle, [note])
    run = yield from runs.get_run(run_id)
    return StartedCycle(run=run, cycle=session.cycle)


def reopen(effects: Effects, lease: SessionLease, on_ended: WriteProgram | None = None) -> Program[StartedCycle | None]:
    """Returns the cycle that is under way in the session. None: there is none, or its run was ended from outside.

    `on_ended` is committed if the run was ended from outside.
    """
    yield from renew(lease)
    session = yield from sessions.find(lease.session_id)
    if session is None or session.run_id is None:
        return None
    run = yield from run_rows.find(session.run_id)
    if run is None or run.status in ENDED_RUN:
        yield from close_left_open(effects, session.run_id)
        yield from _close(effects, lease, session.run_id)
        if on_ended is not None:
            yield from on_ended(effects)
        return None
    yield from paused_runs.insert_awaited_results(session.id, run.id)
    return StartedCycle(run=run, cycle=session.cycle)


def load_conversation(
    lease: SessionLease, run: RunRecord
) -> Program[tuple[str | None, list[HistoryTurn], tuple[str, ...]]]:
    """Reads what a cycle continues from: the session's summary, its turns, and who handed the request off before."""
    session = yield from sessions.find(lease.session_id)
    turns = yield from sessions.list_turns(lease.session_id)
    path = yield from handoff.handoff_path(run)
    return session.summary if session is not None else None, turns, path


def adopt_calls(
    effects: Effects, lease: SessionLease, call_ids: Sequence[str], node_id: str
) -> Program[dict[str, tuple[CallRecord, bool]]]:
    """Takes over the calls of an interrupted turn. Returns those that were started, each with whether its result goes
    to the inbox."""
    yield from renew(lease)
    adopted_calls: dict[str, tuple[CallRecord, bool]] = {}
    for call_id in call_ids:
        yield from call_rows.adopt(call_id, node_id)
        match = yield from call_rows.find_for_caller(call_id)
        if match is not None and match[0].status == "waiting":
            # The process that waited for the result is gone, so the result will come to the inbox.
            record, is_inline = yield from call_transactions.make_pending(effects, call_id)
            match = (record, not is_inline)
        if match is not None:
            adopted_calls[call_id] = match
            # A result that was meant for the waiting process is in the conversation now, so not in the inbox, too.
            yield from call_delivery.mark_delivered([call_id])
    return adopted_calls


# The steps of a cycle


def save_step(
    effects: Effects, lease: SessionLease, step: CycleStep
) -> Program[Mapping[str, call_transactions.StartedCall]]:
    """Stores a step. Returns the calls that were stored with it, by id. Raises `RunEnded`."""
    yield from renew(lease)
    usage = json_text.encode(msgspec.to_builtins(step.usage)) if step.usage is not None else None
    if not (yield from run_rows.record_step(step.run_id, step.number, usage)):
        raise RunEnded(f'the run "{step.run_id}" has ended')
    yield from sessions.append_turns(lease.session_id, step.cycle, new_turns(step))
    if step.write_stream is not None:
        yield from step.write_stream(effects)
    started: dict[str, call_transactions.StartedCall] = {}
    for call in step.new_calls:
        started[call.call_id] = yield from call_transactions.start(effects, call)
    return started


def inbox_preview(session_id: str) -> Program[UserTurn | None]:
    """A short note about the events that have arrived during the cycle, oldest first. None if there are none."""
    events, total = yield from inbox.list_waiting(session_id, limit=_PREVIEWED_EVENTS)
    if not total:
        return None
    events = yield from messaging.add_space_names(events)
    lines = [f"[INBOX PREVIEW — {total} waiting]", *(f"  {inbox_text.preview(event)}" for event in events)]
    if total > len(events):
        lines.append(f"  … and {total - len(events)} more")
    lines.append("(peek_inbox takes them now; else they come in your next cycle.)")
    return UserTurn("\n".join(lines))


# The end of a cycle


def end(
    effects: Effects,
    lease: SessionLease,
    step: CycleStep,
    *,
    status: Literal["completed", "failed"],
    error: str | None = None,
    retries_events: bool = False,
    is_internal_error: bool = False,
    before: WriteProgram | None = None,
    also: WriteProgram | None = None,
) -> Program[None]:
    """Ends a run, and commits `before` and `also` with it.

    `retries_events`: its events return to the inbox and are tried again. After an internal error (`is_internal_error`)
    of a run that has taken steps they are set aside instead: nobody knows what another attempt would repeat.
    """
    yield from renew(lease)
    if error is not None:
        error = json_text.storable_text(error)[:_MAX_ERROR]  # Models and providers may send any characters.
    if step.turns:
        yield from sessions.append_turns(lease.session_id, step.cycle, new_turns(step))
    run = yield from runs.get_run(step.run_id)
    if retries_events and run.steps == 0:
        # The model never answered: the next run tells it the same events again.
        yield from sessions.delete_turns_of_run(lease.session_id, step.run_id)
    if run.status not in ENDED_RUN:
        if status == "failed":
            yield from messaging.abandon_messages_of_run(effects, step.run_id, "its run failed")
        if before is not None:
            yield from before(effects)
        usage = msgspec.to_builtins(step.usage) if step.usage is not None else None
        yield from runs.close_run(effects, step.run_id, status, error=error, usage=usage)
    if retries_events and is_internal_error and run.steps:
        yield from _set_events_aside(lease, run, error)
    yield from _close(effects, lease, step.run_id, acknowledges=not retries_events, error=error)
    if also is not None:
        yield from also(effects)


def pause(effects: Effects, lease: SessionLease, step: CycleStep) -> Program[bool]:
    """Stores that a run waits for a result; its session is free for other cycles until then.

    Returns False if the result has already come: the run continues at once. Raises `RunEnded`.
    """
    yield from renew(lease)
    run = yield from run_rows.find(step.run_id)
    if run is None or run.status in ENDED_RUN:
        raise RunEnded(f'the run "{step.run_id}" has ended')
    yield from sessions.append_turns(lease.session_id, step.cycle, new_turns(step))
    if run.status == "running":
        return False
    yield from _close(effects, lease, step.run_id)
    return True


def postpone(
    effects: Effects, lease: SessionLease, step: CycleStep, delays: Sequence[int], *, at_least: int = 0
) -> Program[int | None]:
    """Releases the session and schedules its run to continue later. Returns the delay in milliseconds.

    Returns None, and changes nothing, if the run was postponed `len(delays)` times without a step: it has failed.
    """
    yield from renew(lease)
    session = yield from sessions.find(lease.session_id)
    attempts = 0 if step.turns or session is None else session.attempts
    if attempts >= len(delays):
        return None
    if step.turns:
        yield from sessions.append_turns(lease.session_id, step.cycle, new_turns(step))
    delay = max(delays[attempts], at_least)
    now = yield from current_time()
    yield from sessions.postpone(lease.session_id, lease.token, now + delay)
    return delay


def abandon(
    effects: Effects, lease: SessionLease, run_id: str, reason: str, also: WriteProgram | None = None
) -> Program[bool]:
    """Cleans up after a run that was ended from outside, and commits `also`. Returns False if the run has not ended."""
    yield from renew(lease)
    run = yield from run_rows.find(run_id)
    if run is not None and run.status not in ENDED_RUN:
        return False
    yield from messaging.abandon_messages_of_run(effects, run_id, reason)
    yield from _close(effects, lease, run_id)
    if also is not None:
        yield from also(effects)
    return True


def end_without_agent(
    effects: Effects, lease: SessionLease, run_id: str, reason: str, also: WriteProgram | None
) -> Program[None]:
    """Cancels an interrupted run whose agent no process has any more, and commits `also`."""
    run = yield from run_rows.find(run_id)
    if run is not None and run.status not in ENDED_RUN:
        yield from runs.cancel_run(effects, run_id)
    yield from close_left_open(effects, run_id)
    yield from abandon(effects, lease, run_id, reason, also)


def close_left_open(effects: Effects, run_id: str) -> Program[None]:
    """Ends the messages and calls that an ended run left open in a process that is gone."""
    yield from messaging.abandon_messages_of_run(effects, run_id)
    yield from announced_calls.end_interrupted(effects, run_id)
    for call_id in (yield from call_rows.list_open_of_run(run_id)):
        # Calls whose results others submit stay open: those results come to the inbox.
        yield from runs.interrupt_call(effects, call_id)


# Turns as they are stored


def inbox_turn(events: Sequence[InboxEvent]) -> UserTurn:
    """The events of a cycle as the model reads them."""
    per_event = max(_MIN_EVENT_TEXT, _MAX_INBOX_TEXT // max(1, len(events)))
    limit = min(inbox_text.MAX_EVENT_CHARACTERS, per_event)
    return UserTurn("\n".join(["INBOX:", *(inbox_text.render(event, limit) for event in events)]))


def new_turn(turn: Turn, run_id: str | None = None, call_ids: tuple[str, ...] = ()) -> NewTurn:
    """A turn to be stored, with the number of tokens that it takes."""
    return NewTurn(stored_turn=StoredTurn(turn, call_ids), tokens=estimate_turn_tokens(turn), run_id=run_id)


def new_turns(step: CycleStep) -> list[NewTurn]:
    """The turns of a step to be stored: the model's turn with the ids of its calls."""
    ids = tuple(plan.call_id for plan in step.planned_calls)
    return [new_turn(turn, step.run_id, ids if isinstance(turn, ModelTurn) else ()) for turn in step.turns]


def estimate_turn_tokens(turn: Turn) -> int:
    """How many tokens a turn takes, about."""
    if isinstance(turn, UserTurn):
        return estimate_tokens(turn.text) + 4
    if isinstance(turn, ResultsTurn):
        return sum(estimate_tokens(result.text) + 8 for result in turn.results)
    return estimate_tokens(turn.text) + sum(estimate_tokens(call.arguments) + 12 for call in turn.calls) + 4


def _close(
    effects: Effects, lease: SessionLease, run_id: str, *, acknowledges: bool = True, error: str | None = None
) -> Program[None]:
    """Marks that the session has no run under way. Acknowledges the run's events, or returns them to the inbox."""
    yield from sessions.clear_run(lease.session_id)
    claim = f"run:{run_id}"
    events = yield from inbox.list_claimed(lease.agent_entity_id, claim)
    if acknowledges:
        yield from inbox.acknowledge(lease.agent_entity_id, claim, events)
    elif events:
        yield from inbox.release(lease.agent_entity_id, claim, events, error=error)
        effects.notify_inbox(lease.owner_id)


def _set_events_aside(lease: SessionLease, run: RunRecord, error: str | None) -> Program[None]:
    """Marks the events of a run as failed, for an operator."""
    claim, agent_id = f"run:{run.id}", lease.agent_entity_id
    advice = (
        f'{error}; the run "{run.id}" had taken {run.steps} {"step" if run.steps == 1 else "steps"}, so its events are '
        "not retried automatically; check its calls and messages, and retry the event if its work is not done"
    )
    yield from inbox.set_aside(agent_id, claim, (yield from inbox.list_claimed(agent_id, claim)), error=advice)


def _are_handoff_answers(agent_entity_id: str, events: Sequence[InboxEvent]) -> Program[bool]:
    for event in events:
        if not (yield from handoff.is_answer_to_handoff(agent_entity_id, event)):
            return False
    return True


def _is_from_agent(event: InboxEvent) -> bool:
    return event.type == "space_message" and handoff.event_data(event).get("senderType") == "agent"

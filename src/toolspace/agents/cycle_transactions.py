"""What happens to sessions, each as one transaction: a cycle begins, takes a step, pauses, ends. Asks no model.

Each names the token under which the session is held: whoever lost it changes nothing any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from toolspace.agents import handoff
from toolspace.agents.loop import PlannedCall
from toolspace.core import inbox_text, json_text
from toolspace.core.ids import new_id, now_ms
from toolspace.core.line_escaping import quote_name, quote_truncated
from toolspace.core.model import ModelToolResult, ModelTurn, ResultsTurn, Turn, Usage, UserTurn
from toolspace.core.records import ENDED_RUN, OPEN_CALL, CallRecord, InboxEvent, RunRecord
from toolspace.core.tokens import estimate_tokens
from toolspace.errors import ToolspaceError
from toolspace.spaces import call_transactions, messaging, runs
from toolspace.spaces.ledger import Effects
from toolspace.spaces.messaging import add_space_names
from toolspace.storage.database import Program
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import inbox, sessions
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries.calls import NewCall
from toolspace.storage.queries.sessions import NewTurn, SessionRecord, StoredTurn

LEASE_MS = 6_000
"""How long a process may be silent before another takes its sessions over."""
_FOREVER_MS = 20 * 365 * 86_400_000
"""The events of a cycle are its own until it ends: a cycle that is cut off goes on, and has them still."""
_SHOWN_IN_PREVIEW = 8
_LONGEST_INBOX, _LEAST_OF_AN_EVENT = 300_000, 2_000
"""Characters that a cycle is told at once, about; and of one event, however many there are."""
_LONGEST_CONTINUED = 2_000
"""Characters of a result that has come to its place in the conversation, and is named again."""
_LONGEST_ERROR = 10_000
AWAITING_RESULT = "(no result yet: the run waits for it)"


class LeaseLost(ToolspaceError):
    """Another process thinks for this agent now."""


class RunEnded(ToolspaceError):
    """The run was ended by someone else: canceled, or its agent removed."""


WriteProgram = Callable[[Effects], Program[None]]
"""Something that happens together with something else."""


class SessionLease(msgspec.Struct, frozen=True):
    """A session, as whoever holds it names it."""

    session_id: str
    agent_entity_id: str
    token: int


class StartedCycle(msgspec.Struct, frozen=True, kw_only=True):
    """A cycle that is under way."""

    run: RunRecord
    cycle: int
    events: Sequence[InboxEvent] = ()
    """What it is about, where it has just begun."""


def acquire(effects: Effects, session_id: str, node_id: str) -> Program[SessionRecord | None]:
    """Holds a session, if nobody else does."""
    return (yield from sessions.acquire_lease(session_id, node_id, lease_ms=LEASE_MS))


def release(effects: Effects, hold: SessionLease) -> Program[None]:
    """Lets go of it. Where its run is to go on, others take it at once."""
    if (yield from sessions.release_lease(hold.session_id, hold.token)):
        effects.wake_keys.append("sessions")


def renew(hold: SessionLease) -> Program[None]:
    """Raises where the session is another's by now."""
    yield from _guard(hold)


def begin(
    effects: Effects, hold: SessionLease, *, batch: int, max_agent_turns: int, is_router: bool = False
) -> Program[StartedCycle | Literal[False] | None]:
    """Takes what the inbox has, and opens a run for it; None where it has nothing, and the session is let go then.

    False where there is nothing left to think about: results went to the runs that waited for them, agents have talked
    enough among themselves, or all there is are the answers of those whom it has handed requests on to (`is_router`).
    """
    yield from _guard(hold)
    session = yield from sessions.find(hold.session_id)
    if session is None:
        raise LeaseLost(f'the session "{hold.session_id}" is gone')
    run_id = new_id("run")
    claim = f"run:{run_id}"
    agent = hold.agent_entity_id
    events = yield from inbox.claim(agent, claim, count=batch, lease_ms=_FOREVER_MS)
    if not events:
        yield from sessions.release_lease(hold.session_id, hold.token)
        return None
    events, resumed = yield from _settle_awaited(effects, hold, claim, events)
    if resumed is not None:
        yield from inbox.undo_claim(agent, claim, [event.event_id for event in events])
        return (yield from _resume(effects, hold, resumed))
    if not events:
        return False
    from_agents = all(_is_from_agent(event) for event in events)
    told = NewTurn(stored=StoredTurn(inbox_turn((yield from add_space_names(events)))), tokens=0, run_id=None)
    is_enough = from_agents and session.agent_turns >= max_agent_turns
    # Woken by them, a router would hand the answer to the one who gave it.
    if is_enough or (from_agents and is_router and (yield from _are_answers(agent, events))):
        yield from sessions.append_turns(hold.session_id, session.cycle, [_weighed(told)])
        yield from inbox.acknowledge(agent, claim, [event.event_id for event in events])
        return False
    trigger = {"type": events[0].type, "events": [event.event_id for event in events]}
    run = yield from runs.open_run(effects, agent, run_id=run_id, trigger=trigger)
    cycle = yield from sessions.start_cycle(
        hold.session_id, run_id, agent_turns=session.agent_turns + 1 if from_agents else 0
    )
    told = msgspec.structs.replace(told, run_id=run_id)
    yield from sessions.append_turns(hold.session_id, cycle, [_weighed(told)])
    return StartedCycle(run=run, cycle=cycle, events=events)


def reopen(effects: Effects, hold: SessionLease, over: WriteProgram | None = None) -> Program[StartedCycle | None]:
    """The cycle that is under way already; None where there is none, or its run was ended by someone else.

    `over`: what else happens then.
    """
    yield from _guard(hold)
    session = yield from sessions.find(hold.session_id)
    if session is None or session.run_id is None:
        return None
    run = yield from run_rows.find(session.run_id)
    if run is None or run.status in ENDED_RUN:
        yield from close_left_open(effects, session.run_id)
        yield from _close(effects, hold, session.run_id, done=True)
        if over is not None:
            yield from over(effects)
        return None
    yield from _fill_in(session.id, run.id)
    return StartedCycle(run=run, cycle=session.cycle)


def close_left_open(effects: Effects, run_id: str) -> Program[None]:
    """Ends what a run has left open that is over, and whose process is gone: nobody else would."""
    yield from messaging.abandon_messages_of_run(effects, run_id)
    for call_id in (yield from call_rows.list_open_of_run(run_id)):
        yield from runs.interrupt_call(effects, call_id)  # Those that others answer stay open: that comes by inbox.


class CycleStep(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be kept of a step before its calls are made."""

    run_id: str
    cycle: int
    turns: Sequence[Turn]
    planned_calls: Sequence[PlannedCall] = ()
    number: int = 0
    usage: Usage | None = None
    new_calls: Sequence[NewCall] = ()
    """Calls that run here, and can be written down at once."""
    write_stream: Callable[[Effects], Program[None]] | None = None
    """What the model wrote that readers have not seen yet."""


def save_step(
    effects: Effects, hold: SessionLease, step: CycleStep
) -> Program[Mapping[str, call_transactions.StartedCall]]:
    """Keeps a step. Gives the calls that were written down with it, by their ids."""
    yield from _guard(hold)
    moved = yield from run_rows.record_step(step.run_id, step.number, encode_usage(step.usage))
    if not moved:
        raise RunEnded(f'the run "{step.run_id}" has ended')
    yield from sessions.append_turns(hold.session_id, step.cycle, new_turns(step))
    if step.write_stream is not None:
        yield from step.write_stream(effects)
    begun: dict[str, call_transactions.StartedCall] = {}
    for new in step.new_calls:
        begun[new.call_id] = yield from call_transactions.start(effects, new)
    return begun


def end(
    effects: Effects,
    hold: SessionLease,
    step: CycleStep,
    *,
    status: Literal["completed", "failed"],
    error: str | None = None,
    retried: bool = False,
) -> Program[None]:
    """Ends a run. `retried`: its events come again later, because it could not do with them what it should."""
    yield from _guard(hold)
    if error is not None:
        error = json_text.storable_text(error)[:_LONGEST_ERROR]  # What a model or a provider says has any characters.
    if step.turns:
        yield from sessions.append_turns(hold.session_id, step.cycle, new_turns(step))
    run = yield from runs.get_run(step.run_id)
    if retried and run.steps == 0:
        # Nothing came of it: what it was told, it is told again.
        yield from sessions.delete_turns_of_run(hold.session_id, step.run_id)
    if run.status not in ENDED_RUN:
        usage = None if step.usage is None else _usage(step.usage)
        yield from runs.close_run(effects, step.run_id, status, error=error, usage=usage)
    yield from _close(effects, hold, step.run_id, done=not retried, error=error)


def pause(effects: Effects, hold: SessionLease, step: CycleStep) -> Program[bool]:
    """A run waits for a result, and its agent is free for other things until that comes.

    False where it has come already: then the run stays under way, and goes on.
    """
    yield from _guard(hold)
    run = yield from run_rows.find(step.run_id)
    if run is None or run.status in ENDED_RUN:
        raise RunEnded(f'the run "{step.run_id}" has ended')
    yield from sessions.append_turns(hold.session_id, step.cycle, new_turns(step))
    if run.status == "running":
        return False
    yield from _close(effects, hold, step.run_id, done=True)
    return True


def postpone(
    effects: Effects, hold: SessionLease, step: CycleStep, delays: Sequence[int], *, at_least: int = 0
) -> Program[int | None]:
    """Leaves a run that cannot go on now for later; says in how many milliseconds someone takes it up.

    None where it was put off as often as there are `delays`, and no step came of it: then it has failed.
    """
    yield from _guard(hold)
    session = yield from sessions.find(hold.session_id)
    attempts = 0 if step.turns or session is None else session.attempts
    if attempts >= len(delays):
        return None
    if step.turns:
        yield from sessions.append_turns(hold.session_id, step.cycle, new_turns(step))
    delay = max(delays[attempts], at_least)
    yield from sessions.postpone(hold.session_id, hold.token, now_ms() + delay)
    return delay


def abandon(effects: Effects, hold: SessionLease, run_id: str, reason: str) -> Program[bool]:
    """Ends what a canceled run left open, and forgets that it was under way. False where it is not over."""
    yield from _guard(hold)
    run = yield from run_rows.find(run_id)
    if run is not None and run.status not in ENDED_RUN:
        return False
    yield from messaging.abandon_messages_of_run(effects, run_id, reason)
    yield from _close(effects, hold, run_id, done=True)
    return True


def adopt_calls(
    effects: Effects, hold: SessionLease, call_ids: Sequence[str], node_id: str
) -> Program[dict[str, tuple[CallRecord, bool]]]:
    """What became of the calls of a turn: each that was begun, and whether its result goes to the inbox.

    Those that ran in a process that is gone are this one's now.
    """
    yield from _guard(hold)
    found: dict[str, tuple[CallRecord, bool]] = {}
    for call_id in call_ids:
        yield from call_rows.adopt(call_id, node_id)
        known = yield from call_rows.find_for_caller(call_id)
        if known is not None and known[0].status == "waiting":
            # Whoever waited is gone; what comes now comes to the inbox.
            parked, mine = yield from call_transactions.make_pending(effects, call_id)
            known = (parked, not mine)
        if known is not None:
            found[call_id] = known
            yield from call_rows.mark_delivered(
                [call_id]
            )  # Where it was for who waited, it need not come by inbox, too.
    return found


def inbox_preview(agent_entity_id: str) -> Program[UserTurn | None]:
    """What has arrived meanwhile, in short, oldest first."""
    events, total = yield from inbox.list_waiting(agent_entity_id, limit=_SHOWN_IN_PREVIEW)
    if not total:
        return None
    events = yield from add_space_names(events)
    lines = [f"[INBOX PREVIEW — {total} waiting]", *(f"  {inbox_text.preview(event)}" for event in events)]
    if total > len(events):
        lines.append(f"  … and {total - len(events)} more")
    lines.append("(peek_inbox takes them now; else they come in your next cycle.)")
    return UserTurn("\n".join(lines))


def inbox_turn(events: Sequence[InboxEvent]) -> UserTurn:
    """What a cycle is about, as the model reads it."""
    longest = min(inbox_text.MAX_EVENT_CHARACTERS, max(_LEAST_OF_AN_EVENT, _LONGEST_INBOX // max(1, len(events))))
    return UserTurn("\n".join(["INBOX:", *(inbox_text.render(event, longest) for event in events)]))


def new_turns(step: CycleStep) -> list[NewTurn]:
    """The turns of a step as they are kept: the model's with the ids of its calls."""
    ids = tuple(one.call_id for one in step.planned_calls)
    return [
        _weighed(
            NewTurn(stored=StoredTurn(turn, ids if isinstance(turn, ModelTurn) else ()), tokens=0, run_id=step.run_id)
        )
        for turn in step.turns
    ]


def encode_usage(usage: Usage | None) -> str | None:
    return None if usage is None else json_text.encode(_usage(usage))


def _usage(usage: Usage) -> dict[str, Any]:
    return cast("dict[str, Any]", msgspec.to_builtins(usage))


def _weighed(turn: NewTurn) -> NewTurn:
    """With what it will cost the model to read it: about."""
    return msgspec.structs.replace(turn, tokens=estimate_turn_tokens(turn.stored.turn))


def estimate_turn_tokens(turn: Turn) -> int:
    """How many tokens a turn takes, about."""
    if isinstance(turn, UserTurn):
        return estimate_tokens(turn.text) + 4
    if isinstance(turn, ResultsTurn):
        return sum(estimate_tokens(one.text) + 8 for one in turn.results)
    return estimate_tokens(turn.text) + sum(estimate_tokens(one.arguments) + 12 for one in turn.calls) + 4


def _guard(hold: SessionLease) -> Program[None]:
    if not (yield from sessions.renew_lease(hold.session_id, hold.token, lease_ms=LEASE_MS)):
        raise LeaseLost(f'the session "{hold.session_id}" is held by another process')


def _close(effects: Effects, hold: SessionLease, run_id: str, *, done: bool, error: str | None = None) -> Program[None]:
    """No run is under way any more. Its events are done with, or come again."""
    yield from sessions.clear_run(hold.session_id)
    claim = f"run:{run_id}"
    events = yield from inbox.list_claimed(hold.agent_entity_id, claim)
    if done:
        yield from inbox.acknowledge(hold.agent_entity_id, claim, events)
    elif events:
        yield from inbox.release(hold.agent_entity_id, claim, events, error=error)
        effects.notify_inbox(hold.agent_entity_id)


def _settle_awaited(
    effects: Effects, hold: SessionLease, claim: str, events: Sequence[InboxEvent]
) -> Program[tuple[list[InboxEvent], str | None]]:
    """Gives results to the runs that wait for them. What else there is, and the run of this session that can go on."""
    others: list[InboxEvent] = []
    resumed: str | None = None
    for event in events:
        call = yield from _awaited_call(event)
        run = (yield from run_rows.find(call.run_id)) if call is not None and call.run_id is not None else None
        session_id = (yield from sessions.find_id_by_run(run.id)) if run is not None else None
        if call is None or run is None or session_id is None:
            others.append(event)
            continue
        own = session_id == hold.session_id
        if own and run.status == "running" and resumed not in (None, run.id):
            others.append(event)  # One after the other: it is that run's turn next.
            continue
        filled = yield from _fill_in(session_id, run.id)
        if run.status in ENDED_RUN and (call.call_id in filled or event.attempts > 1):
            others.append(event)  # Nothing waits for it any more: it comes as any late result does.
        elif own and run.status == "running":
            resumed = run.id
            # The event is that run's now: should it fail, the result comes again.
            yield from inbox.transfer_claim(hold.agent_entity_id, claim, [event.event_id], f"run:{run.id}")
        else:
            yield from inbox.acknowledge(hold.agent_entity_id, claim, [event.event_id])
            if run.status == "running":
                yield from sessions.set_run(session_id, run.id)
                effects.wake_keys.append("sessions")
    return others, resumed


def _resume(effects: Effects, hold: SessionLease, run_id: str) -> Program[StartedCycle]:
    """A run that waited for a result goes on."""
    session = yield from sessions.find(hold.session_id)
    assert session is not None
    yield from sessions.set_run(hold.session_id, run_id)
    turns = yield from sessions.list_turns_of_run(hold.session_id, run_id)
    if turns and turns[-1].seq != session.last_seq:
        # Other cycles came in between: the model is told what this is about.
        last = turns[-1].stored.turn
        answers = last.results if isinstance(last, ResultsTurn) else ()
        results = [f"{quote_name(one.name)}: {quote_truncated(one.text, _LONGEST_CONTINUED)}" for one in answers]
        told = UserTurn("\n".join(["CONTINUE: the result of an earlier call has come; go on with that.", *results]))
        kept = _weighed(NewTurn(stored=StoredTurn(told), tokens=0, run_id=run_id))
        yield from sessions.append_turns(hold.session_id, session.cycle, [kept])
    run = yield from runs.get_run(run_id)
    return StartedCycle(run=run, cycle=session.cycle)


def _awaited_call(event: InboxEvent) -> Program[CallRecord | None]:
    """The call whose result an event brings, where its run waits for that."""
    data: Any = event.data
    if event.type != "tool_result" or not isinstance(data, dict):
        return None
    found = yield from call_rows.find_with_submission(str(cast("dict[str, Any]", data).get("callId")))
    return found[0] if found is not None and found[3] else None


def _fill_in(session_id: str, run_id: str) -> Program[set[str]]:
    """Puts the results of a run that have come into the place where they were awaited. Says of which calls."""
    turns = yield from sessions.list_turns_of_run(session_id, run_id)
    filled: set[str] = set()
    for asked, answered in itertools.pairwise(turns):
        turn = answered.stored.turn
        if not isinstance(turn, ResultsTurn) or not any(one.text.startswith(AWAITING_RESULT) for one in turn.results):
            continue
        answers = list(turn.results)
        for index, call_id in enumerate(asked.stored.call_ids):
            call = (yield from call_rows.find(call_id)) if answers[index].text.startswith(AWAITING_RESULT) else None
            if call is not None and call.status not in OPEN_CALL:
                answers[index] = answer_from_record(answers[index], call)
                filled.add(call_id)
        yield from sessions.replace_turn(session_id, answered.seq, StoredTurn(ResultsTurn(tuple(answers))))
    return filled


def answer_from_record(answer: ModelToolResult, call: CallRecord) -> ModelToolResult:
    """A call that has ended, as the model reads it."""
    value = call.result if isinstance(call.result, str) else json_text.encode(call.result)
    text = f"(tool failed: {value})" if call.is_error else value
    return ModelToolResult(answer.id, answer.name, text, call.is_error)


def _are_answers(agent: str, events: Sequence[InboxEvent]) -> Program[bool]:
    for event in events:
        if not (yield from handoff.is_answer_to_handoff(agent, event)):
            return False
    return True


def _is_from_agent(event: InboxEvent) -> bool:
    data: Any = event.data
    return (
        event.type == "space_message"
        and isinstance(data, dict)
        and cast("dict[str, Any]", data).get("senderType") == "agent"
    )

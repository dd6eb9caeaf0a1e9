"""Converts the stored turns and calls of a session: to what a model gets, and to records that people read.

Cycles and programs' runs restore and shorten conversations with it; task tools and API routes list turns. Reads no
database.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.core import json_text
from toolspace.core.language_model import ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.stored_records import OPEN_CALL, CallRecord, TurnCall, TurnRecord, TurnResult
from toolspace.errors import NOT_EXECUTED, ErrorKind

if TYPE_CHECKING:
    from toolspace.storage.queries.sessions import HistoryTurn

_NO_RESULT = "(no result: the run ended before there was one)"
_MAX_RESULT, _MAX_TEXT = 400, 4_000
"""Characters that remain of a result and of a text in a conversation that is too long, with the mark."""
_MARK = "… (left out: too long)"
_NO_ARGUMENTS = '{"…": "left out: too long"}'
_LEFT_OUT = UserTurn("(The beginning of this conversation was left out: it was too long.)")


# For the model


class RestoredConversation(msgspec.Struct, frozen=True):
    """A conversation, without its last turn if that is the model's and has no results yet."""

    turns: list[Turn]
    unfinished_turn: ModelTurn | None = None
    """The last turn, if it is the model's and of the run that continues: its calls must be executed or adopted."""
    call_ids: tuple[str, ...] = ()
    """The ids of the calls of the unfinished turn."""


def restore(rows: Sequence[HistoryTurn], *, run_id: str, summary: str | None) -> RestoredConversation:
    """Restores the conversation of a run, in a form that every model accepts: each call is followed by its result.

    Calls of runs that ended before their results came get a result that says so.
    """
    turns: list[Turn] = []
    if summary:
        turns.append(UserTurn(f"SUMMARY OF EARLIER CYCLES:\n{summary}"))
    for index, row in enumerate(rows):
        turn = row.stored_turn.turn
        turns.append(turn)
        if not isinstance(turn, ModelTurn):
            continue
        next_turn = rows[index + 1].stored_turn.turn if index + 1 < len(rows) else None
        if next_turn is None and row.run_id == run_id:
            turns.pop()
            return RestoredConversation(turns, turn, row.stored_turn.call_ids)
        if isinstance(next_turn, ResultsTurn) or not turn.calls:
            continue
        turns.append(_build_missing_results(turn))
    return RestoredConversation(turns)


def add_missing_results(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Returns a conversation in a form that every model accepts: each call is followed by its result.

    Calls of a run that ended before their results came get a result that says so.
    """
    complete_turns: list[Turn] = []
    for index, turn in enumerate(turns):
        complete_turns.append(turn)
        next_turn = turns[index + 1] if index + 1 < len(turns) else None
        if isinstance(turn, ModelTurn) and turn.calls and not isinstance(next_turn, ResultsTurn):
            complete_turns.append(_build_missing_results(turn))
    return tuple(complete_turns)


def _build_missing_results(turn: ModelTurn) -> ResultsTurn:
    return ResultsTurn(tuple(ModelToolResult(call.id, call.name, _NO_RESULT, True) for call in turn.calls))


def shorten(turns: list[Turn], *, keep: int) -> bool:
    """Shortens a conversation that is too long for its model, in place. Returns whether it could.

    First it truncates long texts before the last `keep` turns, then it drops the older half of the turns, then it
    truncates long texts everywhere.
    """
    return _truncate_turns(turns, len(turns) - keep) or _drop_older_half(turns) or _truncate_turns(turns, len(turns))


def _truncate_turns(turns: list[Turn], end: int) -> bool:
    """Truncates the turns before index `end`. Returns whether one was too long."""
    has_changed = False
    for index, turn in enumerate(turns[: max(end, 0)]):
        short_turn = _truncate_turn(turn)
        if short_turn is not turn:
            turns[index] = short_turn
            has_changed = True
    return has_changed


def _truncate_turn(turn: Turn) -> Turn:
    """A turn without long texts and media; the same object if it has none."""
    if isinstance(turn, ResultsTurn):
        if not any(len(result.text) > _MAX_RESULT or result.media for result in turn.results):
            return turn
        results = (
            msgspec.structs.replace(result, text=_truncate(result.text, _MAX_RESULT), media=())
            for result in turn.results
        )
        return ResultsTurn(tuple(results))
    if isinstance(turn, UserTurn):
        if len(turn.text) <= _MAX_TEXT and not turn.media:
            return turn
        return UserTurn(_truncate(turn.text, _MAX_TEXT))
    if len(turn.text) <= _MAX_TEXT and not any(len(call.arguments) > _MAX_TEXT for call in turn.calls):
        return turn
    calls = tuple(
        call if len(call.arguments) <= _MAX_TEXT else ModelCall(call.id, call.name, _NO_ARGUMENTS)
        for call in turn.calls
    )
    return msgspec.structs.replace(turn, text=_truncate(turn.text, _MAX_TEXT), calls=calls)


def _drop_older_half(turns: list[Turn]) -> bool:
    """Drops the turns before a user turn in the middle: calls and their results stay together."""
    half = max(len(turns) // 2, 1)
    start = next((index for index in range(half, len(turns)) if isinstance(turns[index], UserTurn)), None)
    if start is None or (start == 1 and turns[0] == _LEFT_OUT):
        return False
    turns[:start] = [_LEFT_OUT]
    return True


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - len(_MARK)]}{_MARK}"


def result_from_record(call: CallRecord, *, goes_to_inbox: bool) -> ToolResult:
    """The result that the caller of a stored call would have received."""
    if goes_to_inbox or call.status in OPEN_CALL:
        value = {"status": "pending", PENDING_CALL_KEY: call.call_id}
        extras = {PENDING_CALL_KEY: call.call_id}
        return ToolResult(True, value, extras=extras, tool=call.tool_name, call_id=call.call_id)
    if not call.is_error:
        return ToolResult(True, call.result, tool=call.tool_name, call_id=call.call_id)
    text = call.result if isinstance(call.result, str) else json_text.describe(call.result, 500)
    kinds: Mapping[str, ErrorKind] = {"canceled": "canceled", "expired": "timeout"}
    kind: Any = call.error_kind or kinds.get(call.status, "execution_error")
    executed = kind not in NOT_EXECUTED
    return ToolResult(False, error=text, error_kind=kind, executed=executed, tool=call.tool_name, call_id=call.call_id)


# For people and agents that look back


def render_transcript(rows: Sequence[HistoryTurn], *, max_result: int | None = None) -> str:
    """Renders turns as text, by cycle. `max_result` limits the characters of each result."""
    parts: list[str] = []
    for cycle, cycle_rows in itertools.groupby(rows, key=lambda row: row.cycle):
        parts.append(f"## Cycle {cycle}")
        parts += ["\n".join(turn_lines(row.stored_turn.turn, max_result=max_result)) for row in cycle_rows]
    return "\n\n".join(filter(None, parts)) + "\n"


def turn_lines(turn: Turn, *, max_result: int | None = None) -> list[str]:
    """A turn as text: what was said, and one line for each call or result."""
    if isinstance(turn, ResultsTurn):
        return [f"← {result.name}: {shorten_text(result.text, max_result)}" for result in turn.results]
    lines = [turn.text] if turn.text else []
    return (
        [*lines, *(f"→ {call.name} {call.arguments}" for call in turn.calls)] if isinstance(turn, ModelTurn) else lines
    )


def shorten_text(text: str, limit: int | None) -> str:
    """The first `limit` characters of a text, with an ellipsis if there are more."""
    return text if limit is None or len(text) <= limit else f"{text[:limit]}…"


def shorten_middle(text: str, limit: int) -> str:
    """The first and the last `limit / 2` characters of a longer text."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n…\n{text[-half:]}"


def to_turn_records(rows: Sequence[HistoryTurn]) -> list[TurnRecord]:
    """Converts turns to records, oldest first. Results have the ids of the calls in the turn before."""
    turns: list[TurnRecord] = []
    call_ids: tuple[str, ...] = ()
    for row in rows:
        turns.append(_to_turn_record(row, call_ids))
        call_ids = row.stored_turn.call_ids
    return turns


def to_messages(rows: Sequence[HistoryTurn]) -> list[dict[str, Any]]:
    """Converts turns to what `task_replay` returns: `{role, text?, calls?, results?}` each."""
    turns = msgspec.to_builtins(to_turn_records(rows))
    return [{key: turn[key] for key in ("role", "text", "calls", "results") if key in turn} for turn in turns]


def _to_turn_record(row: HistoryTurn, previous_call_ids: tuple[str, ...]) -> TurnRecord:
    turn = row.stored_turn.turn
    fields: dict[str, Any] = {"seq": row.seq, "cycle": row.cycle, "run_id": row.run_id, "at": row.at}
    if isinstance(turn, UserTurn):
        return TurnRecord(role="user", text=turn.text, **fields)
    if isinstance(turn, ModelTurn):
        ids = row.stored_turn.call_ids
        calls = tuple(
            TurnCall(call_id=_call_id(ids, index, call.id), name=call.name, arguments=_decode(call.arguments))
            for index, call in enumerate(turn.calls)
        )
        return TurnRecord(role="assistant", text=turn.text, calls=calls, **fields)
    results = tuple(
        TurnResult(
            call_id=_call_id(previous_call_ids, index, result.id),
            name=result.name,
            text=result.text,
            is_error=result.is_error,
        )
        for index, result in enumerate(turn.results)
    )
    return TurnRecord(role="tool", results=results, **fields)


def _call_id(ids: tuple[str, ...], index: int, model_id: str) -> str:
    """The stored id of a call; the model's own id if none is stored."""
    return ids[index] if index < len(ids) else model_id


def _decode(arguments: str) -> Any:
    try:
        return json_text.decode(arguments or "{}")
    except ValueError:
        return arguments

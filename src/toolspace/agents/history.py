"""What a session remembers, as the conversation that its model is given. Reads no database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.model import ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn
from toolspace.core.records import TurnCall, TurnRecord, TurnResult
from toolspace.storage.queries.sessions import HistoryTurn

_NO_RESULT = "(no result: the run ended before there was one)"
_KEPT_OF_A_RESULT, _KEPT_OF_A_TEXT = 400, 4_000
"""Characters that stay where the whole conversation is too long for the model, with what is said of the rest."""
_MARK = "… (left out: too long)"
_NO_ARGUMENTS = '{"…": "left out: too long"}'
_LEFT_OUT = UserTurn("(The beginning of this conversation was left out: it was too long.)")


class RestoredConversation(msgspec.Struct, frozen=True):
    """A conversation, and the turn of it that was kept last: its calls have to be made or seen to, or it was the last
    word of its run."""

    turns: list[Turn]
    unfinished: ModelTurn | None = None
    call_ids: tuple[str, ...] = ()
    """Of the unfinished turn."""


def restore(rows: Sequence[HistoryTurn], *, run_id: str, summary: str | None) -> RestoredConversation:
    """The conversation of a run: all that is remembered, in a form that every model takes.

    Each call has an answer behind it: one of a run that was ended in between has been given none.
    """
    turns: list[Turn] = []
    if summary:
        turns.append(UserTurn(f"SUMMARY OF EARLIER CYCLES:\n{summary}"))
    for place, row in enumerate(rows):
        turn = row.stored.turn
        turns.append(turn)
        if not isinstance(turn, ModelTurn):
            continue
        following = rows[place + 1].stored.turn if place + 1 < len(rows) else None
        if following is None and row.run_id == run_id:
            turns.pop()
            return RestoredConversation(turns, turn, row.stored.call_ids)
        if isinstance(following, ResultsTurn) or not turn.calls:
            continue
        turns.append(ResultsTurn(tuple(ModelToolResult(one.id, one.name, _NO_RESULT, True) for one in turn.calls)))
    return RestoredConversation(turns)


def shorten(turns: list[Turn], *, keep: int) -> bool:
    """Makes a conversation shorter that is too long for its model. Whether anything was left out.

    What is said at length before the last `keep` turns goes first, then the older half of the turns; and where that
    was not enough, what is said at length in the others.
    """
    return _cut_long(turns, len(turns) - keep) or _leave_out(turns) or _cut_long(turns, len(turns))


def _cut_long(turns: list[Turn], end: int) -> bool:
    """Cuts what is said at length before a place."""
    shortened = False
    for place, turn in enumerate(turns[: max(end, 0)]):
        cut = _shortened(turn)
        if cut is not turn:
            turns[place] = cut
            shortened = True
    return shortened


def _shortened(turn: Turn) -> Turn:
    """A turn without what takes much room; the same where nothing does."""
    if isinstance(turn, ResultsTurn):
        if not any(len(one.text) > _KEPT_OF_A_RESULT or one.media for one in turn.results):
            return turn
        return ResultsTurn(
            tuple(
                msgspec.structs.replace(one, text=_cut(one.text, _KEPT_OF_A_RESULT), media=()) for one in turn.results
            )
        )
    if isinstance(turn, UserTurn):
        if len(turn.text) <= _KEPT_OF_A_TEXT and not turn.media:
            return turn
        return UserTurn(_cut(turn.text, _KEPT_OF_A_TEXT))
    if len(turn.text) <= _KEPT_OF_A_TEXT and not any(len(one.arguments) > _KEPT_OF_A_TEXT for one in turn.calls):
        return turn
    calls = tuple(
        one if len(one.arguments) <= _KEPT_OF_A_TEXT else ModelCall(one.id, one.name, _NO_ARGUMENTS)
        for one in turn.calls
    )
    return msgspec.structs.replace(turn, text=_cut(turn.text, _KEPT_OF_A_TEXT), calls=calls)


def _leave_out(turns: list[Turn]) -> bool:
    """Leaves the older half out, where a conversation can begin: not between calls and their answers."""
    half = max(len(turns) // 2, 1)
    start = next((at for at in range(half, len(turns)) if isinstance(turns[at], UserTurn)), None)
    if start is None or (start == 1 and turns[0] == _LEFT_OUT):
        return False
    turns[:start] = [_LEFT_OUT]
    return True


def _cut(text: str, kept: int) -> str:
    return text if len(text) <= kept else f"{text[: kept - len(_MARK)]}{_MARK}"


# MERGED from transcript: A conversation as people and agents look back on it: who said what, called what and was a…


def to_turn_records(rows: Sequence[HistoryTurn]) -> list[TurnRecord]:
    """The turns of a conversation, oldest first. The answers of a turn bear the ids of the calls before it."""
    turns: list[TurnRecord] = []
    asked: tuple[str, ...] = ()
    for row in rows:
        turns.append(_turn(row, asked))
        asked = row.stored.call_ids
    return turns


def to_messages(rows: Sequence[HistoryTurn]) -> list[dict[str, Any]]:
    """The same as a tool tells it: `{role, text?, calls?, results?}` each."""
    told = msgspec.to_builtins(to_turn_records(rows))
    return [{key: turn[key] for key in ("role", "text", "calls", "results") if key in turn} for turn in told]


def _turn(row: HistoryTurn, asked: tuple[str, ...]) -> TurnRecord:
    turn = row.stored.turn
    place: dict[str, Any] = {"seq": row.seq, "cycle": row.cycle, "run_id": row.run_id, "at": row.at}
    if isinstance(turn, UserTurn):
        return TurnRecord(role="user", text=turn.text, **place)
    if isinstance(turn, ModelTurn):
        ids = row.stored.call_ids
        calls = tuple(
            TurnCall(call_id=_id(ids, at, one.id), name=one.name, arguments=_arguments(one.arguments))
            for at, one in enumerate(turn.calls)
        )
        return TurnRecord(role="assistant", text=turn.text, calls=calls, **place)
    return TurnRecord(role="tool", results=_results(turn, asked), **place)


def _results(turn: ResultsTurn, asked: tuple[str, ...]) -> tuple[TurnResult, ...]:
    return tuple(
        TurnResult(call_id=_id(asked, at, one.id), name=one.name, text=one.text, is_error=one.is_error)
        for at, one in enumerate(turn.results)
    )


def _id(ids: tuple[str, ...], at: int, said: str) -> str:
    return ids[at] if at < len(ids) else said


def _arguments(text: str) -> Any:
    try:
        return json_text.decode(text or "{}")
    except ValueError:
        return text

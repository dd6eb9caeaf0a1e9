"""A conversation as people and agents look back on it: who said what, called what and was answered what.

Reads no database. What a model is given of it is for `recollection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.conversation import ModelTurn, ResultsTurn, UserTurn
from toolspace.core.records import CallSaid, ResultSaid, TurnRecord
from toolspace.storage.queries.sessions import Remembered


def replay(rows: Sequence[Remembered]) -> list[TurnRecord]:
    """The turns of a conversation, oldest first. The answers of a turn bear the ids of the calls before it."""
    turns: list[TurnRecord] = []
    asked: tuple[str, ...] = ()
    for row in rows:
        turns.append(_turn(row, asked))
        asked = row.kept.call_ids
    return turns


def messages(rows: Sequence[Remembered]) -> list[dict[str, Any]]:
    """The same as a tool tells it: `{role, text?, calls?, results?}` each."""
    told = msgspec.to_builtins(replay(rows))
    return [{key: turn[key] for key in ("role", "text", "calls", "results") if key in turn} for turn in told]


def _turn(row: Remembered, asked: tuple[str, ...]) -> TurnRecord:
    turn = row.kept.turn
    place: dict[str, Any] = {"seq": row.seq, "cycle": row.cycle, "run_id": row.run_id, "at": row.at}
    if isinstance(turn, UserTurn):
        return TurnRecord(role="user", text=turn.text, **place)
    if isinstance(turn, ModelTurn):
        ids = row.kept.call_ids
        calls = tuple(
            CallSaid(call_id=_id(ids, at, one.id), name=one.name, arguments=_arguments(one.arguments))
            for at, one in enumerate(turn.calls)
        )
        return TurnRecord(role="assistant", text=turn.text, calls=calls, **place)
    return TurnRecord(role="tool", results=_results(turn, asked), **place)


def _results(turn: ResultsTurn, asked: tuple[str, ...]) -> tuple[ResultSaid, ...]:
    return tuple(
        ResultSaid(call_id=_id(asked, at, one.id), name=one.name, text=one.text, is_error=one.is_error)
        for at, one in enumerate(turn.answers)
    )


def _id(ids: tuple[str, ...], at: int, said: str) -> str:
    return ids[at] if at < len(ids) else said


def _arguments(text: str) -> Any:
    try:
        return json_text.decode(text or "{}")
    except ValueError:
        return text

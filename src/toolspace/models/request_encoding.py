"""Encodes conversations and tools in the forms that all providers accept.

Providers differ in what they refuse: empty texts, a call without a result, a result without a call, duplicate ids, a
conversation that the model begins. The encoded request has none of these. Used by
the model adapters. Sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.language_model import Media, ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn
from toolspace.core.names import is_local_name, sanitise
from toolspace.core.result import AudioPart, ImagePart
from toolspace.core.tool import Tool
from toolspace.core.tool_export import ToolFormat, export_tools

PDF = "application/pdf"
IMAGES_AND_PDF = frozenset(("image/png", "image/jpeg", "image/gif", "image/webp", PDF))
MALFORMED = "_malformed"
"""The key under which a model gets back arguments that it wrote and that are no JSON object."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MISSING_RESULT = "(no result: the call was interrupted)"
_EARLIER_TURNS = "(The conversation began earlier.)"
_CONTINUE = "(Go on.)"
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_EMPTY_OBJECT = msgspec.Raw(b"{}")
_NO_RESULTS = ResultsTurn(())

TurnPiece = str | ModelCall | Mapping[str, Any]


# Conversations


def normalize_turns(turns: Sequence[Turn], accepted_types: frozenset[str] = IMAGES_AND_PDF) -> list[Turn]:
    """The turns in an order that providers accept: user and model alternate, and results follow their calls.

    The calls have unique ids, and the results have the ids of their calls. Media have one of the accepted MIME types.
    """
    normalized_turns: list[Turn] = []
    used_ids: set[str] = set()
    open_calls: tuple[ModelCall, ...] = ()
    original_calls: tuple[ModelCall, ...] = ()
    for place, turn in enumerate(turns):
        if isinstance(turn, ResultsTurn):
            if open_calls:
                normalized_turns.append(_align_results(open_calls, original_calls, turn))
                open_calls = ()
            elif turn.results:
                text = "\n".join(f"Result of {result.name}: {result.text}" for result in turn.results)
                _append_user_turn(normalized_turns, UserTurn(text))
            continue
        if open_calls:
            normalized_turns.append(_align_results(open_calls, original_calls, _NO_RESULTS))
            open_calls = ()
        if isinstance(turn, UserTurn):
            if turn.text.strip() or turn.media:
                _append_user_turn(normalized_turns, turn)
        elif turn.calls or turn.text.strip():
            if not normalized_turns:
                normalized_turns.append(UserTurn(_EARLIER_TURNS))
            original_calls = turn.calls
            open_calls = _normalize_calls(turn.calls, used_ids, place)
            is_same = open_calls == original_calls
            normalized_turns.append(turn if is_same else msgspec.structs.replace(turn, calls=open_calls))
    if open_calls:
        normalized_turns.append(_align_results(open_calls, original_calls, _NO_RESULTS))
    if not normalized_turns or isinstance(normalized_turns[-1], ModelTurn):
        normalized_turns.append(UserTurn(_CONTINUE))
    return [_select_media(turn, accepted_types) for turn in normalized_turns]


def _append_user_turn(turns: list[Turn], turn: UserTurn) -> None:
    last = turns[-1] if turns else None
    if isinstance(last, UserTurn):
        texts = [text for text in (last.text, turn.text) if text.strip()]
        turn = UserTurn("\n\n".join(texts), (*last.media, *turn.media))
        turns.pop()
    turns.append(turn)


def _normalize_calls(calls: tuple[ModelCall, ...], used_ids: set[str], place: int) -> tuple[ModelCall, ...]:
    """The calls with ids that are unique in the conversation, and names that providers accept."""
    normalized_calls: list[ModelCall] = []
    for index, call in enumerate(calls):
        call_id, name = call.id, call.name
        if call_id in used_ids or not _ID.fullmatch(call_id):
            call_id = f"call_{place}_{index}"
            while call_id in used_ids:
                call_id += "_"
        used_ids.add(call_id)
        if not is_local_name(name):
            name = sanitise(name)[:64] or "_"
        is_same = call_id == call.id and name == call.name
        normalized_calls.append(call if is_same else ModelCall(call_id, name, call.arguments))
    return tuple(normalized_calls)


def _align_results(
    calls: tuple[ModelCall, ...], original_calls: tuple[ModelCall, ...], turn: ResultsTurn
) -> ResultsTurn:
    """One result for each call, in the order of the calls."""
    results = turn.results
    if len(results) == len(calls) and all(result.id == call.id for result, call in zip(results, calls, strict=True)):
        return turn
    unused = list(results)
    aligned_results: list[ModelToolResult] = []
    for call, original in zip(calls, original_calls, strict=True):
        position = next((index for index, result in enumerate(unused) if result.id == original.id), None)
        if position is None:
            aligned_results.append(ModelToolResult(call.id, call.name, _MISSING_RESULT, is_error=True))
        else:
            aligned_results.append(msgspec.structs.replace(unused.pop(position), id=call.id, name=call.name))
    return ResultsTurn(tuple(aligned_results))


def split_turn(turn: ModelTurn, model: str) -> Iterator[TurnPiece]:
    """The pieces of a turn in order: texts, calls, and the provider's own entries for the same model.

    A `ModelTurn` has one text and its calls. If a model needs its reasoning back at the same place, `thinking` has the
    order of the pieces: see `TurnLayout`.
    """
    rest, calls = turn.text, dict(enumerate(turn.calls))
    if turn.model == model:
        for entry in turn.thinking_data:
            kind = entry.get("type")
            if kind == "text":
                length = int(entry.get("length", 0))
                if rest[:length].strip():
                    yield rest[:length]
                rest = rest[length:]
            elif kind == "call":
                call = calls.pop(entry.get("index", -1), None)
                if call is not None:
                    yield call
            else:
                yield entry
    if rest.strip():
        yield rest
    yield from calls.values()


class TurnLayout:
    """Records the order of the pieces of a turn, for `ModelTurn.thinking_data`."""

    __slots__ = ("_entries", "_is_needed")

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._is_needed = False

    def add_text(self, length: int) -> None:
        last = self._entries[-1] if self._entries else None
        if last is not None and last["type"] == "text":
            last["length"] += length
        else:
            self._entries.append({"type": "text", "length": length})

    def add_call(self, index: int) -> None:
        self._entries.append({"type": "call", "index": index})

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Adds an entry that the provider needs back at this place. Its `type` is neither `text` nor `call`."""
        self._is_needed = True
        self._entries.append(entry)

    def prepend(self, entries: Sequence[dict[str, Any]]) -> None:
        """Adds entries that the provider needs back at the beginning."""
        self._is_needed = self._is_needed or bool(entries)
        self._entries[:0] = entries

    @property
    def entries(self) -> tuple[Mapping[str, Any], ...]:
        """Empty if there are only texts and calls, whose order needs no record."""
        return tuple(self._entries) if self._is_needed else ()


def encode_arguments(call: ModelCall) -> msgspec.Raw:
    """The arguments of a call as a JSON object, even if the model wrote something else."""
    text = call.arguments
    if not text.strip():
        return _EMPTY_OBJECT
    try:
        _object_decoder.decode(text)
        return msgspec.Raw(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return msgspec.Raw(msgspec.json.encode({MALFORMED: text.encode("utf-8", "replace").decode()}))


def media_data(part: Media) -> str:
    """The content of an image, a sound or a document, in base64."""
    return (part.data if isinstance(part, ImagePart | AudioPart) else part.blob) or ""


def _select_media(turn: Turn, accepted_types: frozenset[str]) -> Turn:
    """The turn with the media of accepted MIME types, and placeholder texts for the others."""
    if isinstance(turn, UserTurn) and turn.media:
        accepted_media = _accepted_media(turn.media, accepted_types)
        placeholders = [part.placeholder for part in turn.media if part not in accepted_media]
        text = "\n".join((turn.text, *placeholders)) if turn.text.strip() else "\n".join(placeholders)
        return UserTurn(text, accepted_media)
    if isinstance(turn, ResultsTurn) and any(result.media for result in turn.results):
        # The texts of results have placeholders already.
        results = [
            msgspec.structs.replace(result, media=_accepted_media(result.media, accepted_types))
            for result in turn.results
        ]
        return ResultsTurn(tuple(results))
    return turn


def _accepted_media(media: Sequence[Media], accepted_types: frozenset[str]) -> tuple[Media, ...]:
    return tuple(part for part in media if part.mime_type in accepted_types and media_data(part))


# Tools

_MAX_CACHED = 16
_MAX_BRIEF_DESCRIPTION = 1000
"""Characters of a description that every provider accepts."""

FinishDefinitions = Callable[[list[dict[str, Any]]], Any]
"""Turns the list of tool definitions into the provider's form of it."""


class EncodedTools(msgspec.Struct, frozen=True):
    """The tools of a request, encoded."""

    tools: tuple[Tool, ...]
    raw: msgspec.Raw
    names: frozenset[str]


class ToolEncoder:
    """Encodes tuples of tools and caches the result by identity: one agent sends the same tuple again and again."""

    __slots__ = ("_cache", "_finish", "_format")

    def __init__(self, format: ToolFormat, finish: FinishDefinitions | None = None) -> None:
        self._format: ToolFormat = format
        self._finish = finish
        self._cache: dict[tuple[int, bool], EncodedTools] = {}

    def encode(self, tools: tuple[Tool, ...], *, brief: bool = False) -> EncodedTools:
        """`brief` cuts long descriptions."""
        key = (id(tools), brief)
        cached = self._cache.get(key)
        if cached is not None:  # It references the tuple, so that no other tuple can have this id.
            return cached
        exported_tools = [
            _shorten_definition(definition, brief=brief) for definition in export_tools(tools, self._format)
        ]
        definitions: Any = exported_tools if self._finish is None else self._finish(exported_tools)
        if len(self._cache) >= _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        raw = msgspec.Raw(json_text.encode_bytes(definitions))
        encoded = self._cache[key] = EncodedTools(tools, raw, frozenset(tool.name for tool in tools))
        return encoded


def _shorten_definition(definition: dict[str, Any], *, brief: bool) -> dict[str, Any]:
    inner: dict[str, Any] = definition.get("function") or definition
    if brief and len(inner["description"]) > _MAX_BRIEF_DESCRIPTION:
        inner["description"] = f"{inner['description'][:_MAX_BRIEF_DESCRIPTION]}…"
    return definition

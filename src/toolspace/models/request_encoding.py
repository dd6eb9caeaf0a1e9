"""Makes of a conversation what every provider accepts, and of a turn the pieces in the order they were said.

Providers differ in what they refuse: empty texts, a call without an answer, an answer without a call, ids that come
twice, a conversation that the model begins. What is left here has none of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.export import ToolFormat, export_tools
from toolspace.core.model import Media, ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn
from toolspace.core.names import is_local_name, sanitise
from toolspace.core.result import AudioPart, ImagePart
from toolspace.core.tool import Tool

IMAGES = frozenset(("image/png", "image/jpeg", "image/gif", "image/webp"))
PDF = "application/pdf"
MALFORMED = "_malformed"
"""Under this name a model gets back the arguments that it wrote and that are no JSON object."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_UNANSWERED = "(no result: the call was interrupted)"
_BEFORE = "(The conversation began earlier.)"
_ON = "(Go on.)"
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])

TurnPiece = str | ModelCall | Mapping[str, Any]


def normalize_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, so that user and model alternate and each call has its answer right behind it, under the same id."""
    made: list[Turn] = []
    used: set[str] = set()
    open_calls: tuple[ModelCall, ...] = ()
    originals: tuple[ModelCall, ...] = ()
    for place, turn in enumerate(turns):
        if isinstance(turn, ResultsTurn):
            if open_calls:
                made.append(_answered(open_calls, originals, turn))
                open_calls = ()
            elif turn.results:
                _say(made, UserTurn("\n".join(f"Result of {one.name}: {one.text}" for one in turn.results)))
            continue
        if open_calls:
            made.append(_answered(open_calls, originals, _NO_ANSWERS))
            open_calls = ()
        if isinstance(turn, UserTurn):
            if turn.text.strip() or turn.media:
                _say(made, turn)
        elif turn.calls or turn.text.strip():
            if not made:
                made.append(UserTurn(_BEFORE))
            originals = turn.calls
            open_calls = _named(turn.calls, used, place)
            made.append(turn if open_calls is originals else msgspec.structs.replace(turn, calls=open_calls))
    if open_calls:
        made.append(_answered(open_calls, originals, _NO_ANSWERS))
    if not made or isinstance(made[-1], ModelTurn):
        made.append(UserTurn(_ON))
    return made


def split_turn(turn: ModelTurn, model: str) -> Iterator[TurnPiece]:
    """What a turn consists of, in order: texts, calls, and what the same model wants back unchanged.

    A `ModelTurn` has one text and its calls. Where a model also wants its thoughts back, at their place, `thinking`
    says what came when: see `Layout`.
    """
    rest, calls = turn.text, list(enumerate(turn.calls))
    if turn.model == model:
        for entry in turn.thinking:
            kind = entry.get("type")
            if kind == "text":
                length = int(entry.get("length", 0))
                if rest[:length].strip():
                    yield rest[:length]
                rest = rest[length:]
            elif kind == "call":
                at = next((at for at, (index, _) in enumerate(calls) if index == entry.get("index")), None)
                if at is not None:
                    yield calls.pop(at)[1]
            else:
                yield entry
    if rest.strip():
        yield rest
    for _, call in calls:
        yield call


class TurnLayout:
    """Notes in which order the pieces of a turn came, for `ModelTurn.thinking`."""

    __slots__ = ("_entries", "_needed")

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._needed = False

    def add_text(self, length: int) -> None:
        last = self._entries[-1] if self._entries else None
        if last is not None and last["type"] == "text":
            last["length"] += length
        else:
            self._entries.append({"type": "text", "length": length})

    def add_call(self, index: int) -> None:
        self._entries.append({"type": "call", "index": index})

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Something that the provider wants back at this place. Its `type` is neither `text` nor `call`."""
        self._needed = True
        self._entries.append(entry)

    def prepend(self, entries: Sequence[dict[str, Any]]) -> None:
        """The same, at the very beginning."""
        self._needed = self._needed or bool(entries)
        self._entries[:0] = entries

    @property
    def entries(self) -> tuple[Mapping[str, Any], ...]:
        """Nothing, where texts and calls alone say it all."""
        return tuple(self._entries) if self._needed else ()


def encode_arguments(call: ModelCall) -> msgspec.Raw:
    """A call's arguments as a JSON object, whatever the model wrote."""
    text = call.arguments
    if not text.strip():
        return _EMPTY
    try:
        _object.decode(text)
        return msgspec.Raw(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return msgspec.Raw(msgspec.json.encode({MALFORMED: text.encode("utf-8", "replace").decode()}))


def split_media(media: Sequence[Media], accepted: frozenset[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """What a model can look at, as MIME types and base64; and how the rest reads."""
    seen: list[tuple[str, str]] = []
    rest: list[str] = []
    for part in media:
        kind = part.mime_type or ""
        data = part.data if isinstance(part, ImagePart | AudioPart) else part.blob
        if data and kind in accepted:
            seen.append((kind, data))
        else:
            rest.append(part.placeholder)
    return seen, rest


def _say(made: list[Turn], turn: UserTurn) -> None:
    last = made[-1] if made else None
    if isinstance(last, UserTurn):
        texts = [text for text in (last.text, turn.text) if text.strip()]
        turn = UserTurn("\n\n".join(texts), (*last.media, *turn.media))
        made.pop()
    made.append(turn)


def _named(calls: tuple[ModelCall, ...], used: set[str], place: int) -> tuple[ModelCall, ...]:
    """The calls under ids that are unique in the conversation, and names that providers take."""
    named: list[ModelCall] | None = None
    for index, call in enumerate(calls):
        identity, name = call.id, call.name
        if identity in used or not _ID.fullmatch(identity):
            identity = f"call_{place}_{index}"
            while identity in used:
                identity += "_"
        used.add(identity)
        if not is_local_name(name):
            name = sanitise(name)[:64] or "_"
        if identity != call.id or name != call.name:
            named = list(calls) if named is None else named
            named[index] = ModelCall(identity, name, call.arguments)
    return calls if named is None else tuple(named)


def _answered(calls: tuple[ModelCall, ...], originals: tuple[ModelCall, ...], turn: ResultsTurn) -> ResultsTurn:
    answers = turn.results
    if len(answers) == len(calls) and all(one.id == call.id for one, call in zip(answers, calls, strict=True)):
        return turn
    left = list(answers)
    aligned: list[ModelToolResult] = []
    for call, original in zip(calls, originals, strict=True):
        at = next((at for at, one in enumerate(left) if one.id == original.id), None)
        if at is None:
            aligned.append(ModelToolResult(call.id, call.name, _UNANSWERED, is_error=True))
        else:
            aligned.append(msgspec.structs.replace(left.pop(at), id=call.id, name=call.name))
    return ResultsTurn(tuple(aligned))


_EMPTY = msgspec.Raw(b"{}")
_NO_ANSWERS = ResultsTurn(())


# MERGED from tool_encoding: Tools as the bytes of a request, made once for the same tools. Sends nothing.

_CHOICES = ("oneOf", "anyOf", "allOf")
_REFUSED = (*_CHOICES, "not", "enum", "if", "then", "else")
"""What providers do not take at the top of a tool's schema, only inside."""
_REMEMBERED = 16
_BRIEF = 1000
"""Characters of a description that even the strictest provider takes."""

Finish = Callable[[list[dict[str, Any]]], Any]
"""What a provider makes of the list of definitions."""


class EncodedTools(msgspec.Struct, frozen=True):
    """Tools as a request has them."""

    tools: tuple[Tool, ...]
    raw: msgspec.Raw
    names: frozenset[str]


class ToolEncoder:
    """Remembers what it made of tuples of tools, by identity: the same agent asks with the same tuple."""

    __slots__ = ("_finish", "_format", "_made")

    def __init__(self, format: ToolFormat, finish: Finish | None = None) -> None:
        self._format: ToolFormat = format
        self._finish = finish
        self._made: dict[tuple[int, bool], EncodedTools] = {}

    def encode(self, tools: tuple[Tool, ...], *, brief: bool = False) -> EncodedTools:
        key = (id(tools), brief)
        found = self._made.get(key)
        if found is not None:  # It holds the tuple, so the id cannot have become another's.
            return found
        exported = [_accepted(one, brief=brief) for one in export_tools(tools, self._format)]
        made: Any = exported if self._finish is None else self._finish(exported)
        if len(self._made) >= _REMEMBERED:
            del self._made[next(iter(self._made))]
        raw = msgspec.Raw(json_text.encode_bytes(made))
        self._made[key] = EncodedTools(tools, raw, frozenset(tool.name for tool in tools))
        return self._made[key]


def to_object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that is plainly an object at its top, as providers want it.

    Alternatives at the top become one object with all their properties, of which those are required that each of
    them requires. The model may then write what the tool refuses; it hears of that and writes again.
    """
    kind = schema.get("type")
    if kind == "object" and not any(word in schema for word in _REFUSED):
        return schema if "properties" in schema else {**schema, "properties": {}}
    made = {key: value for key, value in schema.items() if key not in _REFUSED}
    properties: dict[str, Any] = dict(_mapping(schema.get("properties")))
    required: list[str] = list(schema.get("required") or ())
    for word in _CHOICES:
        options = [_mapping(one) for one in cast("list[Any]", schema.get(word) or [])]
        demanded = [set[str](one.get("required") or ()) for one in options]
        for one in options:
            for name, value in _mapping(one.get("properties")).items():
                properties.setdefault(name, value)
        if demanded:
            shared = demanded[0].union(*demanded) if word == "allOf" else demanded[0].intersection(*demanded)
            required += sorted(shared - set(required))
    made |= {"type": "object", "properties": properties}
    if required:
        made["required"] = required
    if made.get("additionalProperties") is False and len(properties) > len(_mapping(schema.get("properties"))):
        del made["additionalProperties"]
    return made


def _accepted(definition: dict[str, Any], *, brief: bool) -> dict[str, Any]:
    inner: dict[str, Any] = definition.get("function") or definition
    for key in ("parameters", "input_schema"):
        if key in inner:
            inner[key] = to_object_schema(inner[key])
    if brief and len(inner["description"]) > _BRIEF:
        inner["description"] = f"{inner['description'][:_BRIEF]}…"
    return definition


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}

"""Bodies with holes: data that becomes JSON or a form, and text whose holes are escaped as its type needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import quote
from xml.sax.saxutils import escape as escape_xml

from toolspace.core import json_text
from toolspace.errors import ToolValidationError
from toolspace.providers.rest.target import query_pairs
from toolspace.providers.rest.template import ABSENT, Escape, Hole, Pieces, as_text, compile_data, compile_text, split

Encode = Callable[[Mapping[str, Any], Mapping[str, Any] | None], bytes | None]
"""The body for some arguments, with those that nothing else uses merged in; None where there is nothing to send."""

_XML = {'"': "&quot;", "'": "&apos;"}


def compile_body(template: object, content_type: str | None) -> tuple[Encode, str | None]:
    """What makes the body, and its content type where the configuration gave none."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if isinstance(template, str):
        pieces = split(template)
        if not (len(pieces) == 1 and isinstance(pieces[0], Hole)):
            return _compile_text(pieces, media_type)
    fill = compile_data(template) if template is not None else None
    fixed = frozenset(cast("Mapping[str, Any]", template)) if isinstance(template, Mapping) else None
    as_form = media_type == "application/x-www-form-urlencoded"
    # An argument that is the whole body of a text type goes as it is, and not as a JSON string.
    as_text_type = bool(media_type) and not _is_json(media_type)

    def encode(parameters: Mapping[str, Any], more: Mapping[str, Any] | None) -> bytes | None:
        value: Any = ABSENT if fill is None else fill(parameters)
        if more:
            if fixed is not None:
                refuse_fixed(more, fixed)
                value = {**value, **more}
            elif fill is None:
                value = more
            else:
                refuse_unused(more)
        if value is ABSENT:
            return None
        if as_form and isinstance(value, Mapping):
            return _form(cast("Mapping[str, Any]", value))
        if as_text_type and isinstance(value, str):
            return value.encode("utf-8", "replace")
        return json_text.encode_bytes(value)

    return encode, None if content_type else "application/json"


def refuse_fixed(parameters: Mapping[str, Any], fixed: frozenset[str]) -> None:
    """What the configuration has set, no argument sets anew: it may be a key, or the filter that keeps users apart."""
    if not fixed.isdisjoint(parameters):
        names = ", ".join(sorted(fixed.intersection(parameters)))
        raise ToolValidationError(f"{names}: set by the tool's configuration; leave it out")


def refuse_unused(parameters: Mapping[str, Any]) -> None:
    """An argument without effect would mislead whoever gave it."""
    raise ToolValidationError(f"{', '.join(parameters)}: the tool's body has no place for it; leave it out")


def _is_json(media_type: str) -> bool:
    return media_type.endswith(("/json", "+json"))


def _compile_text(pieces: Pieces, media_type: str) -> tuple[Encode, str | None]:
    looks_like_json = isinstance(pieces[0], str) and pieces[0].lstrip()[:1] in ("{", "[") if pieces else False
    if _is_json(media_type) or (not media_type and looks_like_json):
        return _json_text(pieces), None if media_type else "application/json"
    escape: Escape | None = None
    if media_type == "application/x-www-form-urlencoded":
        escape = _escape_form
    elif media_type.endswith(("/xml", "+xml")):
        escape = _escape_xml
    fill = compile_text(pieces, escape)

    def encode(parameters: Mapping[str, Any], more: Mapping[str, Any] | None) -> bytes | None:
        if more:
            refuse_unused(more)
        text = fill(parameters)
        return b"" if text is ABSENT else text.encode("utf-8", "replace")

    return encode, None if media_type else "text/plain; charset=utf-8"


def _json_text(pieces: Pieces) -> Encode:
    """A hole between quotes is a piece of that string; one outside is a JSON value of its own."""
    quoted: list[bool] = []
    inside = False
    for piece in pieces:
        quoted.append(inside)
        if isinstance(piece, str):
            inside = _ends_in_string(piece, inside)

    def encode(parameters: Mapping[str, Any], more: Mapping[str, Any] | None) -> bytes | None:
        if more:
            refuse_unused(more)
        parts: list[str] = []
        for piece, in_string in zip(pieces, quoted, strict=True):
            if isinstance(piece, str):
                parts.append(piece)
                continue
            value = piece.of(parameters)
            if in_string:
                parts.append(json_text.encode(as_text(value))[1:-1])
            else:
                parts.append("null" if value is ABSENT else json_text.encode(value))
        return "".join(parts).encode("utf-8", "replace")

    return encode


def _ends_in_string(text: str, inside: bool) -> bool:
    escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = inside
        elif character == '"':
            inside = not inside
    return inside


def _form(values: Mapping[str, Any]) -> bytes:
    return "&".join(pair for name, value in values.items() for pair in query_pairs(name, value)).encode()


def _escape_form(text: str) -> str:
    return quote(text, safe="", errors="replace")


def _escape_xml(text: str) -> str:
    return escape_xml(text, _XML)

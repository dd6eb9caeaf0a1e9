"""Writes argument values as a path, a query, a header or a cookie wants them. Knows nothing of documents.

The styles are those of RFC 6570 that OpenAPI names. A value that is null is left out, as it is there. Values inside a
list or an object that are no plain values themselves have no style, and are written as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import quote

from toolspace.core import json_text
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.parameters import Parameter
from toolspace.providers.rest.target import encode_segment

Write = Callable[[Any], str]
"""A value as text: where it stands alone in its place."""
Pairs = Callable[[Any], list[str]]
"""A value as `name=value` texts: none where there is nothing to send."""
Encode = Callable[[str], str]

# Of the characters that a query may hold as they are, without those that end a value or change its meaning.
_RESERVED = ":/?[]@!$'()*,;="
_DEEPEST = 20


def plain(value: Any) -> str:
    """One plain value as text: `true`, `3`, the text itself; anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # A whole number is an integer in JSON, however it was written.
    return json_text.encode(value)


def encoded(text: str) -> str:
    """Percent-encoded, all but letters, digits and `-._~`."""
    return quote(text, safe="", errors="replace")


def encoded_reserved(text: str) -> str:
    """The same, with what `allowReserved` leaves as it is."""
    return quote(text, safe=_RESERVED, errors="replace")


def path_writer(parameter: Parameter) -> Write:
    """Writes a value into a path. No part of it leaves its segment; whoever joins texts checks the whole again."""
    name, style, explode = parameter.name, parameter.style, parameter.explode
    prefix, between = {"simple": ("", ","), "label": (".", "."), "matrix": (";", ";")}[style]
    key = encoded(name)

    def text(value: Any) -> str:
        return encode_segment(plain(value), name)

    def write(value: Any) -> str:
        if _is_empty(value):  # Without it, the path would be another one: that of all, in place of one.
            raise ToolValidationError(f"{name}: empty, but it is a part of the path; give a value")
        if parameter.as_json:
            return encode_segment(json_text.encode(value), name)
        if isinstance(value, dict):
            items = _items(value)
            if explode:
                return prefix + between.join(f"{encoded(one)}={text(item)}" for one, item in items)
            flat = ",".join(f"{encode_segment(one, name)},{text(item)}" for one, item in items)
            return f";{key}={flat}" if style == "matrix" else prefix + flat
        if isinstance(value, list):
            texts = [text(item) for item in _members(value)]
            if style == "matrix":
                return "".join(f";{key}={one}" for one in texts) if explode else f";{key}={','.join(texts)}"
            return prefix + (between if explode else ",").join(texts)
        return f";{key}={text(value)}" if style == "matrix" else prefix + text(value)

    return write


def query_writer(parameter: Parameter, encode: Encode | None = None) -> Pairs:
    """Writes a value as entries of a query, or of a form when it is given another way to encode."""
    name, style, explode = parameter.name, parameter.style, parameter.explode
    encode = encode or (encoded_reserved if parameter.allow_reserved else encoded)
    key = (encode if encode is not encoded_reserved else encoded)(name)
    # Encoded also where 3.0 shows them bare: no URL may hold a space or a bar.
    between = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}.get(style, ",")

    def write(value: Any) -> list[str]:
        if value is None:
            return []
        if parameter.as_json:
            return [f"{key}={encode(json_text.encode(value))}"]
        if isinstance(value, list):
            texts = [encode(plain(item)) for item in _members(value)]
            if explode or style == "deepObject":
                return [f"{key}={text}" for text in texts]
            return [f"{key}={between.join(texts)}"] if texts else []
        if isinstance(value, dict):
            if style == "deepObject":
                return [f"{key}{path}={encode(text)}" for path, text in _deep(value, encode, 0)]
            items = [(encode(one), encode(plain(item))) for one, item in _items(value)]
            if explode:
                return [f"{one}={text}" for one, text in items]
            return [f"{key}={between.join(between.join(pair) for pair in items)}"] if items else []
        return [f"{key}={encode(plain(value))}"]

    return write


def header_writer(parameter: Parameter) -> Write:
    """Writes a value into a header: as it is, since headers know no encoding, but never more than one line."""
    name, explode = parameter.name, parameter.explode

    def write(value: Any) -> str:
        if parameter.as_json:
            text = json_text.encode(value)
        elif isinstance(value, dict):
            between = "=" if explode else ","
            text = ",".join(f"{one}{between}{plain(item)}" for one, item in _items(value))
        elif isinstance(value, list):
            text = ",".join(plain(item) for item in _members(value))
        else:
            text = plain(value)
        return checked_header(text, name)

    return write


def checked_header(text: str, name: str) -> str:
    """The text, if it can be the value of a header. Raises `ToolValidationError`."""
    if any((ord(character) < 32 and character != "\t") or ord(character) == 127 for character in text):
        raise ToolValidationError(f"{name}: a header cannot hold line breaks or other control characters")
    return json_text.valid_text(text).strip(" \t")


def cookie_writer(parameter: Parameter) -> Pairs:
    """Writes a value as cookies, encoded: a cookie can hold no semicolon, comma or space."""
    name, explode = parameter.name, parameter.explode

    def write(value: Any) -> list[str]:
        if value is None:
            return []
        if parameter.as_json:
            return [f"{name}={encoded(json_text.encode(value))}"]
        if isinstance(value, dict):
            items = [(encoded(one), encoded(plain(item))) for one, item in _items(value)]
            if explode:
                return [f"{one}={text}" for one, text in items]
            return [f"{name}={','.join(','.join(pair) for pair in items)}"] if items else []
        if isinstance(value, list):
            texts = [encoded(plain(item)) for item in _members(value)]
            if explode:
                return [f"{name}={text}" for text in texts]
            return [f"{name}={','.join(texts)}"] if texts else []
        return [f"{name}={encoded(plain(value))}"]

    return write


def _is_empty(value: Any) -> bool:
    """Whether nothing of it would be written."""
    if isinstance(value, dict):
        return not _items(value)
    return not _members(value) if isinstance(value, list) else value is None


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(name, item) for name, item in cast("dict[str, Any]", value).items() if item is not None]


def _members(value: Any) -> list[Any]:
    return [item for item in cast("list[Any]", value) if item is not None]


def _deep(value: Any, encode: Encode, depth: int) -> Iterator[tuple[str, str]]:
    """`[a][b]` and the text there. What is deeper than anyone means, is written as JSON."""
    for name, item in _items(value):
        path = f"[{encode(name)}]"
        if isinstance(item, dict) and depth < _DEEPEST:
            yield from ((path + rest, text) for rest, text in _deep(cast("Any", item), encode, depth + 1))
        elif isinstance(item, list):
            yield from ((path, plain(one)) for one in _members(cast("Any", item)))
        else:
            yield path, plain(item)

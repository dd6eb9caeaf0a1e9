"""What an operation takes beside its body: parameters as the document describes them. Sends nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast
from urllib.parse import quote

import msgspec

from toolspace.core import json_text
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.document import DocumentFile, JsonObject, OpenApiError, as_object
from toolspace.providers.openapi.schemas import Refs, SchemaConverter
from toolspace.providers.rest.url_template import encode_path_segment

ParameterLocation = Literal["path", "query", "header", "cookie"]
ParameterStyle = Literal["simple", "label", "matrix", "form", "spaceDelimited", "pipeDelimited", "deepObject"]

LOCATIONS: tuple[ParameterLocation, ...] = ("path", "query", "header", "cookie")
"""Of two parameters with one name, the first of these keeps it."""

_STYLES: dict[ParameterLocation, tuple[ParameterStyle, ...]] = {
    "path": ("simple", "label", "matrix"),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
_SAID_ELSEWHERE = frozenset(("accept", "content-type", "authorization"))
"""Headers that are no parameters, says the standard: bodies, responses and security schemes describe them."""
_ABOUT_THE_MESSAGE = "content-length transfer-encoding connection upgrade te trailer keep-alive expect"
FORBIDDEN_HEADERS = frozenset((*_ABOUT_THE_MESSAGE.split(), "host", "proxy-authorization", "proxy-connection"))
"""Headers that say where a message ends and whom it is for: who chooses them can send a second one inside the first."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class OpenApiParameter(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a path, a query, a header or a cookie."""

    name: str
    location: ParameterLocation
    required: bool
    style: ParameterStyle
    explode: bool
    allow_reserved: bool = False
    as_json: bool = False
    """Described by `content`: sent as JSON text."""
    schema: Any
    """Of its argument: shared by all operations that use the parameter."""
    refs: Refs


def read_parameter(node: Any, source: DocumentFile, schemas: SchemaConverter) -> OpenApiParameter | None:
    """The parameter that stands there; None for one that is not the caller's to give. Raises `Broken`."""
    said = as_object(node)
    if said is None:
        raise OpenApiError(f"expected a parameter, got {json_text.describe(node)}")
    name, place = said.get("name"), said.get("in")
    if not isinstance(name, str) or not name or place not in LOCATIONS:
        raise OpenApiError(f"a parameter needs a name, and in: {', '.join(LOCATIONS)}; got {name!r} in {place!r}")
    if place in ("header", "cookie") and not is_valid_name(name):
        raise OpenApiError(f"the name of the {place} parameter {name!r} cannot be sent")
    if place == "header" and name.lower() in _SAID_ELSEWHERE | FORBIDDEN_HEADERS:
        return None
    style = said.get("style") or _STYLES[place][0]
    if style not in _STYLES[place]:
        raise OpenApiError(
            f"the {place} parameter {name!r} has the style {style!r}; it is {' or '.join(_STYLES[place])}"
        )
    explode = said.get("explode")
    refs: Refs = {}
    return OpenApiParameter(
        name=name,
        location=place,
        required=place == "path" or said.get("required") is True,
        style=style,
        explode=explode if isinstance(explode, bool) else style == "form",
        allow_reserved=said.get("allowReserved") is True,
        as_json=bool(as_object(said.get("content"))),
        schema=_schema(said, source, schemas, refs),
        refs=refs,
    )


def is_valid_name(name: str) -> bool:
    """Whether it can name a header or a cookie."""
    return _TOKEN.fullmatch(name) is not None


def implied_path_parameter(name: str) -> OpenApiParameter:
    """A hole in a path that no parameter describes: it has to be filled all the same."""
    return OpenApiParameter(
        name=name, location="path", required=True, style="simple", explode=False, schema={"type": "string"}, refs={}
    )


def _schema(said: JsonObject, source: DocumentFile, schemas: SchemaConverter, refs: Refs) -> Any:
    node: Any = said.get("schema")
    if content := as_object(said.get("content")):
        node = (as_object(next(iter(content.values()))) or {}).get("schema")
    converted = schemas.convert({} if node is None else node, source, refs)
    schema = as_object(converted) or {}
    if said.get("allowEmptyValue") is True and said.get("in") == "query" and schema.get("type") != "string":
        schema = {"anyOf": [schema, {"const": ""}]}
    extra: JsonObject = {}
    if isinstance(description := said.get("description"), str) and description:
        extra["description"] = description
    if said.get("deprecated") is True:
        extra["deprecated"] = True
    return {**schema, **extra} if extra else schema


# MERGED from serialize: Writes argument values as a path, a query, a header or a cookie wants them. Knows nothing …

WriteValue = Callable[[Any], str]
"""A value as text: where it stands alone in its place."""
WritePairs = Callable[[Any], list[str]]
"""A value as `name=value` texts: none where there is nothing to send."""
EncodeText = Callable[[str], str]

# Of the characters that a query may hold as they are, without those that end a value or change its meaning.
_RESERVED = ":/?[]@!$'()*,;="
_DEEPEST = 20


def format_value(value: Any) -> str:
    """One plain value as text: `true`, `3`, the text itself; anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # A whole number is an integer in JSON, however it was written.
    return json_text.encode(value)


def percent_encode(text: str) -> str:
    """Percent-encoded, all but letters, digits and `-._~`."""
    return quote(text, safe="", errors="replace")


def percent_encode_unreserved(text: str) -> str:
    """The same, with what `allowReserved` leaves as it is."""
    return quote(text, safe=_RESERVED, errors="replace")


def path_writer(parameter: OpenApiParameter) -> WriteValue:
    """Writes a value into a path. No part of it leaves its segment; whoever joins texts checks the whole again."""
    name, style, explode = parameter.name, parameter.style, parameter.explode
    prefix, between = {"simple": ("", ","), "label": (".", "."), "matrix": (";", ";")}[style]
    key = percent_encode(name)

    def text(value: Any) -> str:
        return encode_path_segment(format_value(value), name)

    def write(value: Any) -> str:
        if _is_empty(value):  # Without it, the path would be another one: that of all, in place of one.
            raise ToolValidationError(f"{name}: empty, but it is a part of the path; give a value")
        if parameter.as_json:
            return encode_path_segment(json_text.encode(value), name)
        if isinstance(value, dict):
            items = _items(value)
            if explode:
                return prefix + between.join(f"{percent_encode(one)}={text(item)}" for one, item in items)
            flat = ",".join(f"{encode_path_segment(one, name)},{text(item)}" for one, item in items)
            return f";{key}={flat}" if style == "matrix" else prefix + flat
        if isinstance(value, list):
            texts = [text(item) for item in _members(value)]
            if style == "matrix":
                return "".join(f";{key}={one}" for one in texts) if explode else f";{key}={','.join(texts)}"
            return prefix + (between if explode else ",").join(texts)
        return f";{key}={text(value)}" if style == "matrix" else prefix + text(value)

    return write


def query_writer(parameter: OpenApiParameter, encode: EncodeText | None = None) -> WritePairs:
    """Writes a value as entries of a query, or of a form when it is given another way to encode."""
    name, style, explode = parameter.name, parameter.style, parameter.explode
    encode = encode or (percent_encode_unreserved if parameter.allow_reserved else percent_encode)
    key = (encode if encode is not percent_encode_unreserved else percent_encode)(name)
    # Encoded also where 3.0 shows them bare: no URL may hold a space or a bar.
    between = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}.get(style, ",")

    def write(value: Any) -> list[str]:
        if value is None:
            return []
        if parameter.as_json:
            return [f"{key}={encode(json_text.encode(value))}"]
        if isinstance(value, list):
            texts = [encode(format_value(item)) for item in _members(value)]
            if explode or style == "deepObject":
                return [f"{key}={text}" for text in texts]
            return [f"{key}={between.join(texts)}"] if texts else []
        if isinstance(value, dict):
            if style == "deepObject":
                return [f"{key}{path}={encode(text)}" for path, text in _deep(value, encode, 0)]
            items = [(encode(one), encode(format_value(item))) for one, item in _items(value)]
            if explode:
                return [f"{one}={text}" for one, text in items]
            return [f"{key}={between.join(between.join(pair) for pair in items)}"] if items else []
        return [f"{key}={encode(format_value(value))}"]

    return write


def header_writer(parameter: OpenApiParameter) -> WriteValue:
    """Writes a value into a header: as it is, since headers know no encoding, but never more than one line."""
    name, explode = parameter.name, parameter.explode

    def write(value: Any) -> str:
        if parameter.as_json:
            text = json_text.encode(value)
        elif isinstance(value, dict):
            between = "=" if explode else ","
            text = ",".join(f"{one}{between}{format_value(item)}" for one, item in _items(value))
        elif isinstance(value, list):
            text = ",".join(format_value(item) for item in _members(value))
        else:
            text = format_value(value)
        return validate_header(text, name)

    return write


def validate_header(text: str, name: str) -> str:
    """The text, if it can be the value of a header. Raises `ToolValidationError`."""
    if any((ord(character) < 32 and character != "\t") or ord(character) == 127 for character in text):
        raise ToolValidationError(f"{name}: a header cannot hold line breaks or other control characters")
    return json_text.valid_text(text).strip(" \t")


def cookie_writer(parameter: OpenApiParameter) -> WritePairs:
    """Writes a value as cookies, encoded: a cookie can hold no semicolon, comma or space."""
    name, explode = parameter.name, parameter.explode

    def write(value: Any) -> list[str]:
        if value is None:
            return []
        if parameter.as_json:
            return [f"{name}={percent_encode(json_text.encode(value))}"]
        if isinstance(value, dict):
            items = [(percent_encode(one), percent_encode(format_value(item))) for one, item in _items(value)]
            if explode:
                return [f"{one}={text}" for one, text in items]
            return [f"{name}={','.join(','.join(pair) for pair in items)}"] if items else []
        if isinstance(value, list):
            texts = [percent_encode(format_value(item)) for item in _members(value)]
            if explode:
                return [f"{name}={text}" for text in texts]
            return [f"{name}={','.join(texts)}"] if texts else []
        return [f"{name}={percent_encode(format_value(value))}"]

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


def _deep(value: Any, encode: EncodeText, depth: int) -> Iterator[tuple[str, str]]:
    """`[a][b]` and the text there. What is deeper than anyone means, is written as JSON."""
    for name, item in _items(value):
        path = f"[{encode(name)}]"
        if isinstance(item, dict) and depth < _DEEPEST:
            yield from ((path + rest, text) for rest, text in _deep(cast("Any", item), encode, depth + 1))
        elif isinstance(item, list):
            yield from ((path, format_value(one)) for one in _members(cast("Any", item)))
        else:
            yield path, format_value(item)

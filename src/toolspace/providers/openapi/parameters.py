"""Reads the parameters of an operation, and writes argument values into paths, queries, headers and cookies.

The styles are those of RFC 6570 that OpenAPI names. A null value is left out. A list or object inside a list or an
object has no style and is written as JSON. `operations` reads parameters; `request_builder` and `bodies` write values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast
from urllib.parse import quote

import msgspec

from toolspace.core import json_text
from toolspace.core.http_messages import CLIENT_HEADERS, is_token
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.document import DocumentFile, JsonObject, OpenApiError, as_object
from toolspace.providers.openapi.schemas import Refs, SchemaConverter
from toolspace.providers.rest.url_template import encode_path_segment

ParameterLocation = Literal["path", "query", "header", "cookie"]
ParameterStyle = Literal["simple", "label", "matrix", "form", "spaceDelimited", "pipeDelimited", "deepObject"]

LOCATIONS: tuple[ParameterLocation, ...] = ("path", "query", "header", "cookie")
"""If two parameters have the same name, the one whose location comes first keeps it."""

_STYLES: dict[ParameterLocation, tuple[ParameterStyle, ...]] = {
    "path": ("simple", "label", "matrix"),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
_DESCRIBED_ELSEWHERE = frozenset(("accept", "content-type", "authorization"))
"""Headers that OpenAPI describes by bodies, responses and security schemes, not by parameters."""
# The reserved characters that a query may contain unencoded, without those that end a value or change its meaning.
_RESERVED = ":/?[]@!$'()*,;="
_MAX_DEEP_OBJECT_DEPTH = 20

WriteValue = Callable[[Any], str]
"""Formats a value that stands alone in its place."""
WritePairs = Callable[[Any], list[str]]
"""Formats a value as `name=value` texts; none if there is nothing to send."""
EncodeText = Callable[[str], str]


class OpenApiParameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter in a path, a query, a header or a cookie."""

    name: str
    location: ParameterLocation
    required: bool
    style: ParameterStyle
    explode: bool
    allow_reserved: bool = False
    as_json: bool = False
    """Described by `content`, so it is sent as JSON text."""
    schema: Any
    """The schema of its argument. Operations that share the parameter share the schema."""
    refs: Refs


def read_parameter(node: Any, file: DocumentFile, schemas: SchemaConverter) -> OpenApiParameter | None:
    """Reads a parameter; None for a header that the caller cannot set. Raises `OpenApiError`."""
    parameter = as_object(node)
    if parameter is None:
        raise OpenApiError(f"expected a parameter, got {json_text.describe(node)}")
    name, location = parameter.get("name"), parameter.get("in")
    if not isinstance(name, str) or not name or location not in LOCATIONS:
        raise OpenApiError(f"a parameter needs a name, and in: {', '.join(LOCATIONS)}; got {name!r} in {location!r}")
    if location in ("header", "cookie") and not is_token(name):
        raise OpenApiError(f"the name of the {location} parameter {name!r} cannot be sent")
    if location == "header" and name.lower() in _DESCRIBED_ELSEWHERE | CLIENT_HEADERS:
        return None
    style = parameter.get("style") or _STYLES[location][0]
    if style not in _STYLES[location]:
        raise OpenApiError(
            f"the {location} parameter {name!r} has the style {style!r}; use {' or '.join(_STYLES[location])}"
        )
    explode = parameter.get("explode")
    refs: Refs = {}
    return OpenApiParameter(
        name=name,
        location=location,
        required=location == "path" or parameter.get("required") is True,
        style=style,
        explode=explode if isinstance(explode, bool) else style == "form",
        allow_reserved=parameter.get("allowReserved") is True,
        as_json=bool(as_object(parameter.get("content"))),
        schema=_parameter_schema(parameter, file, schemas, refs),
        refs=refs,
    )


def implied_path_parameter(name: str) -> OpenApiParameter:
    """The parameter for a placeholder in a path that the document does not describe."""
    return OpenApiParameter(
        name=name, location="path", required=True, style="simple", explode=False, schema={"type": "string"}, refs={}
    )


def _parameter_schema(parameter: JsonObject, file: DocumentFile, schemas: SchemaConverter, refs: Refs) -> Any:
    node: Any = parameter.get("schema")
    if content := as_object(parameter.get("content")):
        node = (as_object(next(iter(content.values()))) or {}).get("schema")
    schema = as_object(schemas.convert({} if node is None else node, file, refs)) or {}
    if parameter.get("allowEmptyValue") is True and parameter.get("in") == "query" and schema.get("type") != "string":
        schema = {"anyOf": [schema, {"const": ""}]}
    extra: JsonObject = {}
    if isinstance(description := parameter.get("description"), str) and description:
        extra["description"] = description
    if parameter.get("deprecated") is True:
        extra["deprecated"] = True
    return {**schema, **extra} if extra else schema


def format_value(value: Any) -> str:
    """A plain value as text: `true`, `3`, the text itself; anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # In JSON, 3.0 is an integer too.
    return json_text.encode(value)


def percent_encode(text: str) -> str:
    """Encodes everything except letters, digits and `-._~`."""
    return quote(text, safe="", errors="replace")


def percent_encode_unreserved(text: str) -> str:
    """Encodes everything that `allowReserved` does not leave unencoded."""
    return quote(text, safe=_RESERVED, errors="replace")


def path_writer(parameter: OpenApiParameter) -> WriteValue:
    """Writes a value into a path segment. The caller checks the joined segment again."""
    name, style, explode = parameter.name, parameter.style, parameter.explode
    prefix, separator = {"simple": ("", ","), "label": (".", "."), "matrix": (";", ";")}[style]
    encoded_name = percent_encode(name)

    def encode(value: Any) -> str:
        return encode_path_segment(format_value(value), name)

    def write(value: Any) -> str:
        if _is_empty(value):  # The shorter path could be another operation: all items instead of one.
            raise ToolValidationError(f"{name}: empty, but it is a part of the path; give a value")
        if parameter.as_json:
            return encode_path_segment(json_text.encode(value), name)
        if isinstance(value, dict):
            items = _items(value)
            if explode:
                return prefix + separator.join(f"{percent_encode(key)}={encode(item)}" for key, item in items)
            text = ",".join(f"{encode_path_segment(key, name)},{encode(item)}" for key, item in items)
            return f";{encoded_name}={text}" if style == "matrix" else prefix + text
        if isinstance(value, list):
            texts = [encode(item) for item in _members(value)]
            if style == "matrix" and explode:
                return "".join(f";{encoded_name}={text}" for text in texts)
            if style == "matrix":
                return f";{encoded_name}={','.join(texts)}"
            return prefix + (separator if explode else ",").join(texts)
        return f";{encoded_name}={encode(value)}" if style == "matrix" else prefix + encode(value)

    return write


def query_writer(parameter: OpenApiParameter, encode: EncodeText | None = None) -> WritePairs:
    """Writes a value into a query, or with another `encode` into a form."""
    name, style, explode = parameter.name, parameter.style, parameter.explode
    encode = encode or (percent_encode_unreserved if parameter.allow_reserved else percent_encode)
    encoded_name = (encode if encode is not percent_encode_unreserved else percent_encode)(name)
    # Encoded even though OpenAPI 3.0 shows them plain: a URL cannot contain a space or a bar.
    separator = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}.get(style, ",")

    def write(value: Any) -> list[str]:
        if value is None:
            return []
        if parameter.as_json:
            return [f"{encoded_name}={encode(json_text.encode(value))}"]
        if isinstance(value, list):
            texts = [encode(format_value(item)) for item in _members(value)]
            if explode or style == "deepObject":
                return [f"{encoded_name}={text}" for text in texts]
            return [f"{encoded_name}={separator.join(texts)}"] if texts else []
        if isinstance(value, dict):
            if style == "deepObject":
                return [f"{encoded_name}{path}={encode(text)}" for path, text in _deep_items(value, encode, 0)]
            return _object_pairs(encoded_name, value, encode, separator, explode=explode)
        return [f"{encoded_name}={encode(format_value(value))}"]

    return write


def header_writer(parameter: OpenApiParameter) -> WriteValue:
    """Writes a value into a header, unencoded. Raises `ToolValidationError` for more than one line."""
    name, explode = parameter.name, parameter.explode

    def write(value: Any) -> str:
        if parameter.as_json:
            text = json_text.encode(value)
        elif isinstance(value, dict):
            separator = "=" if explode else ","
            text = ",".join(f"{key}{separator}{format_value(item)}" for key, item in _items(value))
        elif isinstance(value, list):
            text = ",".join(format_value(item) for item in _members(value))
        else:
            text = format_value(value)
        if any((ord(character) < 32 and character != "\t") or ord(character) == 127 for character in text):
            raise ToolValidationError(f"{name}: a header cannot contain line breaks or other control characters")
        return json_text.valid_text(text).strip(" \t")

    return write


def cookie_writer(parameter: OpenApiParameter) -> WritePairs:
    """Writes a value into cookies, encoded: a cookie cannot contain a semicolon, a comma or a space."""
    name, explode = parameter.name, parameter.explode

    def write(value: Any) -> list[str]:
        if value is None:
            return []
        if parameter.as_json:
            return [f"{name}={percent_encode(json_text.encode(value))}"]
        if isinstance(value, dict):
            return _object_pairs(name, value, percent_encode, ",", explode=explode)
        if isinstance(value, list):
            texts = [percent_encode(format_value(item)) for item in _members(value)]
            if explode:
                return [f"{name}={text}" for text in texts]
            return [f"{name}={','.join(texts)}"] if texts else []
        return [f"{name}={percent_encode(format_value(value))}"]

    return write


def _object_pairs(name: str, value: Any, encode: EncodeText, separator: str, *, explode: bool) -> list[str]:
    items = [(encode(key), encode(format_value(item))) for key, item in _items(value)]
    if explode:
        return [f"{key}={text}" for key, text in items]
    return [f"{name}={separator.join(separator.join(item) for item in items)}"] if items else []


def _is_empty(value: Any) -> bool:
    """Whether nothing would be written for it."""
    if isinstance(value, dict):
        return not _items(value)
    return not _members(value) if isinstance(value, list) else value is None


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(name, item) for name, item in cast("dict[str, Any]", value).items() if item is not None]


def _members(value: Any) -> list[Any]:
    return [item for item in cast("list[Any]", value) if item is not None]


def _deep_items(value: Any, encode: EncodeText, depth: int) -> Iterator[tuple[str, str]]:
    """`[a][b]` and the text of that member. Objects that are nested too deeply are written as JSON."""
    for name, item in _items(value):
        path = f"[{encode(name)}]"
        if isinstance(item, dict) and depth < _MAX_DEEP_OBJECT_DEPTH:
            yield from ((path + rest, text) for rest, text in _deep_items(cast("Any", item), encode, depth + 1))
        elif isinstance(item, list):
            yield from ((path, format_value(member)) for member in _members(cast("Any", item)))
        else:
            yield path, format_value(item)

"""Reads the request body of an operation, and encodes arguments as that body: JSON, forms, files, text.

`operations` reads bodies; `request_builder` encodes them. JSON is preferred if a document offers several media types.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import quote, quote_plus

import msgspec

from toolspace.core import json_text
from toolspace.core.http_messages import CLIENT_HEADERS, is_token
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.document import DocumentFile, JsonObject, OpenApiError, as_list, as_object
from toolspace.providers.openapi.schemas import (
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    Refs,
    SchemaConverter,
    SchemaDefinition,
)
from toolspace.providers.rest.templates import encode_path_segment

# MERGED from parameters: Reads the parameters of an operation, and writes argument values into paths, queries, headers

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


BodyKind = Literal["json", "form", "multipart", "text", "binary"]

_BASE64_SCHEMA: JsonObject = {"type": "string", "contentEncoding": "base64"}
_FILE_SCHEMA: JsonObject = {
    "anyOf": [
        {**_BASE64_SCHEMA, "description": "The content in base64."},
        {
            "type": "object",
            "properties": {
                "data": {**_BASE64_SCHEMA, "description": "The content in base64."},
                "filename": {"type": "string"},
                "contentType": {"type": "string", "description": "The media type, such as image/png."},
            },
            "required": ["data"],
            "additionalProperties": False,
        },
    ]
}
"""The argument for binary content, which JSON cannot contain."""

_KIND_ORDER: tuple[BodyKind, ...] = ("json", "form", "multipart", "text", "binary")
_PLAIN_OBJECT_KEYWORDS = frozenset(
    ("type", "properties", "required", "title", "description", "examples", "default", "deprecated", "allOf")
)
_FIELD_STYLES = ("form", "spaceDelimited", "pipeDelimited", "deepObject")
_MAX_REFERENCE_CHAIN = 16
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:; ?[a-z-]+=[A-Za-z0-9_.+-]+)*")


class FieldEncoding(msgspec.Struct, frozen=True, kw_only=True):
    """How one field of a form is sent."""

    style: ParameterStyle | None = None
    """None: the type of the value decides."""
    explode: bool = True
    allow_reserved: bool = False
    content_type: str | None = None
    binary: bool = False


_DEFAULT_ENCODING = FieldEncoding()


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body that an operation takes."""

    media_type: str
    kind: BodyKind
    required: bool
    schema: Any
    """The schema of one argument for the whole body."""
    refs: Refs
    fields: JsonObject | None = None
    """The properties of a plain object, so that each can be an argument of its own."""
    required_fields: tuple[str, ...] = ()
    field_refs: Refs = {}
    encodings: dict[str, FieldEncoding] = {}


class _Fields(NamedTuple):
    properties: JsonObject
    required: tuple[str, ...]
    refs: Refs


class EncodedBody(NamedTuple):
    content: bytes
    content_type: str


EncodeFields = Callable[[Any], EncodedBody]
"""Encodes one value: an object of the fields by name, or the whole body."""


def read_request_body(node: Any, file: DocumentFile, schemas: SchemaConverter) -> RequestBody | None:
    """Reads a `requestBody`; None if it describes no content. Raises `OpenApiError`."""
    reference = file.follow(node)
    body = as_object(reference.node)
    if body is None:
        raise OpenApiError(f"expected a requestBody, got {json_text.describe(reference.node)}")
    content = as_object(body.get("content"))
    if not content:
        return None
    media_type, media = _choose_media_type(content)
    kind = _body_kind(media_type)
    file = reference.file
    node = media.get("schema", True)
    schema: Any = _FILE_SCHEMA
    refs: Refs = {}
    fields: _Fields | None = None
    encodings: dict[str, FieldEncoding] = {}
    if kind != "binary":
        definition = schemas.resolve_definition(node, file)
        schema, refs = definition.schema, definition.refs
        if "$ref" in (as_object(node) or ()):
            refs = {}
            schema = schemas.convert(node, file, refs)
        is_form = kind in ("form", "multipart")
        if kind == "json" or is_form:
            fields = _read_fields(definition, schemas, set(), lenient=is_form)
        if is_form:
            encodings = _read_encodings(media.get("encoding"))
        if is_form and fields is not None:
            if kind == "multipart":
                fields, encodings = _add_files(fields, encodings, schemas)
            # Built from the fields: files among them have another schema than in the document.
            schema, refs = _fields_schema(fields), fields.refs
        if kind == "text" and "type" not in (as_object(schema) or ()):
            schema = {"type": "string"}
    if isinstance(description := body.get("description"), str) and description:
        schema = {**(as_object(schema) or {}), "description": description}
    return RequestBody(
        media_type=media_type,
        kind=kind,
        required=body.get("required") is True,
        schema=schema,
        refs=refs,
        fields=fields.properties if fields is not None else None,
        required_fields=fields.required if fields is not None else (),
        field_refs=fields.refs if fields is not None else {},
        encodings=encodings,
    )


def is_json_type(media_type: str) -> bool:
    base = media_type.partition(";")[0].strip().lower()
    return base in ("application/json", "text/json") or base.endswith("+json")


def _choose_media_type(content: JsonObject) -> tuple[str, JsonObject]:
    """JSON if it is offered, otherwise the media type that is easiest for the caller."""
    media_types = [(name, as_object(media) or {}) for name, media in content.items()]
    return min(media_types, key=lambda item: (_KIND_ORDER.index(_body_kind(item[0])), not is_json_type(item[0])))


def _body_kind(media_type: str) -> BodyKind:
    base = media_type.partition(";")[0].strip().lower()
    if is_json_type(base) or base in ("*/*", "application/*"):
        return "json"
    if base == "application/x-www-form-urlencoded":
        return "form"
    if base.startswith("multipart/"):
        return "multipart"
    if base.startswith("text/") or base.endswith(("/xml", "+xml", "/yaml", "+yaml", "/x-yaml", "/x-ndjson", "/jsonl")):
        return "text"
    return "binary"


def _read_fields(
    definition: SchemaDefinition, schemas: SchemaConverter, part_names: set[str], *, lenient: bool
) -> _Fields | None:
    """The properties of a plain object, `allOf` parts included; None for any other schema.

    A form is always an object, so its other keywords do not matter (`lenient`). `part_names` are the definitions that
    are already included: one that occurs twice adds nothing, or is circular.
    """
    schema = as_object(definition.schema)
    if schema is None or schema.get("type", "object") != "object":
        return None
    if not lenient:
        other_keywords = schema.keys() - _PLAIN_OBJECT_KEYWORDS
        if other_keywords - {"additionalProperties"} or schema.get("additionalProperties", False) is not False:
            return None
    parts = [_Fields(schema.get("properties") or {}, tuple(schema.get("required") or ()), definition.refs)]
    for part in as_list(schema.get("allOf")):
        name = str((as_object(part) or {}).get("$ref", "")).removeprefix("#/$defs/")
        if name in part_names:
            return None
        if name:
            part_names.add(name)
        part_definition = schemas.get_definition(name) if name else SchemaDefinition(part, definition.refs)
        part_fields = _read_fields(part_definition, schemas, part_names, lenient=lenient)
        if part_fields is None:
            return None
        parts.append(part_fields)
    properties: JsonObject = {}
    required: dict[str, None] = {}
    refs: Refs = {}
    for part in parts:
        if not properties.keys().isdisjoint(part.properties):
            return None  # Both schemas of the property would apply.
        properties.update(part.properties)
        required.update(dict.fromkeys(part.required))
        refs.update(part.refs)
    if not properties or not required.keys() <= properties.keys():
        return None
    return _Fields(properties, tuple(required), _used_refs(properties, refs))


def _fields_schema(fields: _Fields) -> JsonObject:
    schema: JsonObject = {"type": "object", "properties": fields.properties}
    return {**schema, "required": list(fields.required)} if fields.required else schema


def _used_refs(properties: JsonObject, refs: Refs) -> Refs:
    """The definitions that the properties refer to, without the `allOf` parts that they come from."""
    used_refs: Refs = {}
    pending_nodes: list[Any] = list(properties.values()) if refs else []
    while pending_nodes:
        node = pending_nodes.pop()
        if isinstance(node, list):
            pending_nodes += cast("list[Any]", node)
        elif isinstance(node, dict):
            for key, value in cast("JsonObject", node).items():
                if key == "$ref":
                    used_refs[value.removeprefix("#/$defs/")] = None
                elif key == "properties" or key in SCHEMA_MAP_KEYWORDS:
                    pending_nodes += value.values()
                elif key in SCHEMA_KEYWORDS or key in SCHEMA_LIST_KEYWORDS:
                    pending_nodes.append(value)
    return used_refs


def _read_encodings(node: Any) -> dict[str, FieldEncoding]:
    encodings: dict[str, FieldEncoding] = {}
    for name, value in (as_object(node) or {}).items():
        encoding = as_object(value)
        if not encoding:
            continue
        has_style = any(key in encoding for key in ("style", "explode", "allowReserved"))
        style = encoding.get("style", "form") if has_style else None
        if style is not None and style not in _FIELD_STYLES:
            raise OpenApiError(f"the field {name!r} has the style {style!r}; use {' or '.join(_FIELD_STYLES)}")
        content_type = encoding.get("contentType")
        encodings[name] = FieldEncoding(
            style=style,
            explode=encoding.get("explode", style in (None, "form")) is True,
            allow_reserved=encoding.get("allowReserved") is True,
            # It may list several: `image/png, image/jpeg`.
            content_type=content_type.partition(",")[0].strip() if isinstance(content_type, str) else None,
        )
    return encodings


def _add_files(
    fields: _Fields, encodings: dict[str, FieldEncoding], schemas: SchemaConverter
) -> tuple[_Fields, dict[str, FieldEncoding]]:
    """Gives every field that contains one or several files the schema for base64 content."""
    properties = dict(fields.properties)
    encodings = dict(encodings)
    for name, node in fields.properties.items():
        encoding = encodings.get(name) or _DEFAULT_ENCODING
        schema = _resolve_schema(node, schemas)
        if schema.get("type") == "array" and _is_file(_resolve_schema(schema.get("items"), schemas), encoding):
            properties[name] = {**schema, "items": _FILE_SCHEMA}
        elif _is_file(schema, encoding):
            annotations = {key: schema[key] for key in ("title", "description", "deprecated") if key in schema}
            properties[name] = {**annotations, **_FILE_SCHEMA}
        else:
            continue
        encodings[name] = msgspec.structs.replace(encoding, binary=True)
    return _Fields(properties, fields.required, _used_refs(properties, fields.refs)), encodings


def _resolve_schema(node: Any, schemas: SchemaConverter) -> JsonObject:
    for _ in range(_MAX_REFERENCE_CHAIN):
        schema = as_object(node)
        if schema is None:
            break
        if "$ref" not in schema:
            return schema
        node = schemas.get_definition(schema["$ref"].removeprefix("#/$defs/")).schema
    return {}


def _is_file(schema: JsonObject, encoding: FieldEncoding) -> bool:
    types = as_list(schema.get("type")) or [schema.get("type")]
    if any(name not in ("string", "null", None) for name in types) or "contentEncoding" in schema:
        return False
    if schema.get("format") == "binary":
        return True
    if "enum" in schema or "anyOf" in schema or "oneOf" in schema or "allOf" in schema:
        return False
    content_type = encoding.content_type or schema.get("contentMediaType")
    return content_type is not None and _body_kind(content_type) == "binary"


def compile_body_encoder(body: RequestBody) -> EncodeFields:
    """The function that encodes a body. Compiled once per tool; it raises `ToolValidationError`."""
    media_type = body.media_type
    if body.kind == "json":
        content_type = media_type if is_json_type(media_type) else "application/json"
        return lambda value: EncodedBody(json_text.encode_bytes(value), content_type)
    if body.kind == "text":
        return lambda value: EncodedBody(format_value(value).encode("utf-8", "replace"), media_type)
    if body.kind == "form":
        return _compile_form_encoder(body)
    if body.kind == "multipart":
        return lambda value: _encode_multipart(_check_object(value), body)

    def encode_binary(value: Any) -> EncodedBody:
        part = _file_part(value, "body", media_type if "*" not in media_type else "application/octet-stream")
        return EncodedBody(part.content, part.content_type)

    return encode_binary


def _compile_form_encoder(body: RequestBody) -> EncodeFields:
    def field_writer(name: str) -> Callable[[Any], list[str]]:
        encoding = body.encodings.get(name, _DEFAULT_ENCODING)
        as_json = encoding.content_type is not None and is_json_type(encoding.content_type)
        encode_text = percent_encode_unreserved if encoding.allow_reserved else _encode_form_text
        write = query_writer(_field_parameter(name, encoding, as_json=as_json), encode_text)
        write_json = query_writer(_field_parameter(name, encoding, as_json=True), _encode_form_text)
        # Without a style, an object is sent as JSON: exploded, it would lose the name of its field.
        return lambda value: (write_json if encoding.style is None and isinstance(value, dict) else write)(value)

    writers = {name: field_writer(name) for name in body.fields or {}}

    def encode(value: Any) -> EncodedBody:
        pairs: list[str] = []
        for name, item in _check_object(value).items():
            pairs += (writers.get(name) or field_writer(name))(item)
        return EncodedBody("&".join(pairs).encode(), body.media_type)

    return encode


def _field_parameter(name: str, encoding: FieldEncoding, *, as_json: bool) -> OpenApiParameter:
    """A field as a query parameter: both are written in the same way."""
    return OpenApiParameter(
        name=name,
        location="query",
        required=False,
        style=encoding.style or "form",
        explode=encoding.explode,
        allow_reserved=encoding.allow_reserved,
        as_json=as_json,
        schema=True,
        refs={},
    )


def _encode_form_text(text: str) -> str:
    return quote_plus(text, errors="replace")


class _Part(NamedTuple):
    content: bytes
    content_type: str
    filename: str | None = None


def _encode_multipart(value: dict[str, Any], body: RequestBody) -> EncodedBody:
    boundary = secrets.token_hex(16)  # Unpredictable, so no content can contain it.
    pieces: list[bytes] = []
    for name, item in value.items():
        encoding = body.encodings.get(name, _DEFAULT_ENCODING)
        if item is None:
            continue
        if isinstance(item, list) and not (encoding.content_type and is_json_type(encoding.content_type)):
            parts = [_field_part(name, member, encoding) for member in cast("list[Any]", item) if member is not None]
        else:
            parts = [_field_part(name, item, encoding)]
        for part in parts:
            filename = f'; filename="{_escape_quoted(part.filename)}"' if part.filename is not None else ""
            head = (
                f"--{boundary}\r\n"
                f'Content-Disposition: form-data; name="{_escape_quoted(name)}"{filename}\r\n'
                f"Content-Type: {part.content_type}\r\n\r\n"
            )
            pieces += (head.encode("utf-8", "replace"), part.content, b"\r\n")
    pieces.append(f"--{boundary}--\r\n".encode())
    media_type = body.media_type.partition(";")[0].strip()
    if "*" in media_type:
        media_type = "multipart/form-data"
    return EncodedBody(b"".join(pieces), f"{media_type}; boundary={boundary}")


def _field_part(name: str, value: Any, encoding: FieldEncoding) -> _Part:
    content_type = encoding.content_type
    if encoding.binary:
        return _file_part(value, name, content_type or "application/octet-stream")
    if content_type is not None and is_json_type(content_type):
        return _Part(json_text.encode_bytes(value), content_type)
    if isinstance(value, dict | list):
        return _Part(json_text.encode_bytes(cast("object", value)), content_type or "application/json")
    return _Part(format_value(value).encode("utf-8", "replace"), content_type or "text/plain; charset=utf-8")


def _file_part(value: Any, name: str, content_type: str) -> _Part:
    filename: str = name
    data = value
    if isinstance(value, dict):
        file = cast("dict[str, Any]", value)
        data = file.get("data")
        filename = str(file.get("filename") or name).replace("\\", "/").rpartition("/")[2] or name
        content_type = str(file.get("contentType") or content_type)
    if not _MEDIA_TYPE.fullmatch(content_type):
        raise ToolValidationError(f"{name}.contentType: expected a media type such as image/png")
    try:
        content = base64.b64decode("".join(str(data).split()), validate=True)
    except (binascii.Error, ValueError):
        raise ToolValidationError(f'{name}: expected the content in base64, such as "aGVsbG8="') from None
    return _Part(content, content_type, filename)


def _check_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ToolValidationError("body: a form has named fields; give an object")
    return cast("dict[str, Any]", value)


def _escape_quoted(text: str) -> str:
    """Escapes a name inside quotes as browsers do."""
    for character, escape in (("\r", "%0D"), ("\n", "%0A"), ('"', "%22"), ("\0", "")):
        text = text.replace(character, escape)
    return text

"""What an operation takes as its body: which media type to send, and as which arguments. Encodes nothing."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import quote_plus

import msgspec

from toolspace.core import json_text
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi import schemas as keywords
from toolspace.providers.openapi.document import DocumentFile, JsonObject, OpenApiError, as_list, as_object
from toolspace.providers.openapi.parameters import (
    OpenApiParameter,
    ParameterStyle,
    format_value,
    percent_encode_unreserved,
    query_writer,
)
from toolspace.providers.openapi.schemas import Refs, SchemaConverter, SchemaDefinition

BodyKind = Literal["json", "form", "multipart", "text", "binary"]

_BASE64: JsonObject = {"type": "string", "contentEncoding": "base64"}
FILE_SCHEMA: JsonObject = {
    "anyOf": [
        {**_BASE64, "description": "The content in base64."},
        {
            "type": "object",
            "properties": {
                "data": {**_BASE64, "description": "The content in base64."},
                "filename": {"type": "string"},
                "contentType": {"type": "string", "description": "Its media type, such as image/png."},
            },
            "required": ["data"],
            "additionalProperties": False,
        },
    ]
}
"""What a model gives for binary content, which JSON cannot carry."""

_ORDER: tuple[BodyKind, ...] = ("json", "form", "multipart", "text", "binary")
_PLAIN = frozenset(("type", "properties", "required", "title", "description", "examples", "default", "deprecated"))
_STYLES = ("form", "spaceDelimited", "pipeDelimited", "deepObject")
_LONGEST_CHAIN = 16


class FieldEncoding(msgspec.Struct, frozen=True, kw_only=True):
    """How one field of a form is sent."""

    style: ParameterStyle | None = None
    """None where the document leaves it to the type of the value."""
    explode: bool = True
    allow_reserved: bool = False
    content_type: str | None = None
    binary: bool = False


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    media_type: str
    kind: BodyKind
    required: bool
    schema: Any
    """Of the argument that is the whole body."""
    refs: Refs
    fields: JsonObject | None = None
    """The properties, where the body is a plain object, so that each may be an argument of its own."""
    required_fields: tuple[str, ...] = ()
    """Those of the fields that a body cannot be without."""
    field_refs: Refs = {}
    encodings: dict[str, FieldEncoding] = {}


class _Fields(NamedTuple):
    properties: JsonObject
    needed: tuple[str, ...]
    refs: Refs


def read_request_body(node: Any, source: DocumentFile, schemas: SchemaConverter) -> RequestBody | None:
    """The body that a `requestBody` describes; None where it describes none. Raises `Broken`."""
    target = source.follow(node)
    said = as_object(target.node)
    if said is None:
        raise OpenApiError(f"expected a requestBody, got {json_text.describe(target.node)}")
    content = as_object(said.get("content"))
    if not content:
        return None
    media_type, media = _choose(content)
    kind = _kind(media_type)
    source = target.source
    schema = media.get("schema", True)
    converted: Any
    refs: Refs = {}
    fields: _Fields | None = None
    encodings: dict[str, FieldEncoding] = {}
    if kind == "binary":
        converted = FILE_SCHEMA
    else:
        meant = schemas.resolve_definition(schema, source)
        converted, refs = meant.schema, meant.refs
        if "$ref" in (as_object(schema) or ()):
            refs = {}
            converted = schemas.convert(schema, source, refs)
        form = kind in ("form", "multipart")
        if kind == "json" or form:
            fields = _fields(meant, schemas, set(), lenient=form)
        if form:
            encodings = _encodings(media.get("encoding"))
        if form and fields is not None:
            if kind == "multipart":
                fields, encodings = _with_files(fields, encodings, schemas)
            # The fields stand for the whole: the files among them are not what the document says they are.
            converted, refs = _fields_schema(fields), fields.refs
        if kind == "text" and "type" not in (as_object(converted) or ()):
            converted = {"type": "string"}
    if isinstance(description := said.get("description"), str) and description:
        converted = {**(as_object(converted) or {}), "description": description}
    return RequestBody(
        media_type=media_type,
        kind=kind,
        required=said.get("required") is True,
        schema=converted,
        refs=refs,
        fields=fields.properties if fields is not None else None,
        required_fields=fields.needed if fields is not None else (),
        field_refs=fields.refs if fields is not None else {},
        encodings=encodings,
    )


def is_json_type(media_type: str) -> bool:
    base = media_type.partition(";")[0].strip().lower()
    return base in ("application/json", "text/json") or base.endswith("+json")


def _choose(content: JsonObject) -> tuple[str, JsonObject]:
    """The media type to send: JSON if it is offered, else the one that needs the least of the caller."""
    offered = [(name, as_object(media) or {}) for name, media in content.items()]
    return min(offered, key=lambda one: (_ORDER.index(_kind(one[0])), not is_json_type(one[0])))


def _kind(media_type: str) -> BodyKind:
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


def _fields(
    definition: SchemaDefinition, schemas: SchemaConverter, parts_of: set[str], *, lenient: bool
) -> _Fields | None:
    """The properties of a plain object, also of one that is made of several; None for anything else.

    A form has to be an object: there, whatever else the schema says of it does not matter (`lenient`).
    `parts_of` are the definitions that it is made of so far: one that comes twice has nothing new to say, or no end.
    """
    said = as_object(definition.schema)
    if said is None or said.get("type", "object") != "object":
        return None
    if not lenient:
        others = said.keys() - _PLAIN - {"allOf"}
        if others - {"additionalProperties"} or said.get("additionalProperties", False) is not False:
            return None
    parts = [_Fields(said.get("properties") or {}, tuple(said.get("required") or ()), definition.refs)]
    for part in as_list(said.get("allOf")):
        name = str((as_object(part) or {}).get("$ref", "")).removeprefix("#/$defs/")
        if name in parts_of:
            return None
        if name:
            parts_of.add(name)
        inner = schemas.get_definition(name) if name else SchemaDefinition(part, definition.refs)
        found = _fields(inner, schemas, parts_of, lenient=lenient)
        if found is None:
            return None
        parts.append(found)
    properties: JsonObject = {}
    needed: dict[str, None] = {}
    refs: Refs = {}
    for part in parts:
        if not properties.keys().isdisjoint(part.properties):
            return None  # Both would have to hold.
        properties.update(part.properties)
        needed.update(dict.fromkeys(part.needed))
        refs.update(part.refs)
    if not properties or not needed.keys() <= properties.keys():
        return None
    return _Fields(properties, tuple(needed), _used(properties, refs))


def _fields_schema(fields: _Fields) -> JsonObject:
    schema: JsonObject = {"type": "object", "properties": fields.properties}
    return {**schema, "required": list(fields.needed)} if fields.needed else schema


def _used(properties: JsonObject, refs: Refs) -> Refs:
    """Of the definitions, those that the properties refer to: not the parts that they were taken from."""
    found: Refs = {}
    pending: list[Any] = list(properties.values()) if refs else []
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += cast("list[Any]", node)
        elif isinstance(node, dict):
            for key, value in cast("JsonObject", node).items():
                if key == "$ref":
                    found[value.removeprefix("#/$defs/")] = None
                elif key == "properties" or key in keywords.SCHEMA_MAP_KEYWORDS:
                    pending += value.values()
                elif key in keywords.SCHEMA_KEYWORDS or key in keywords.SCHEMA_LIST_KEYWORDS:
                    pending.append(value)
    return found


def _encodings(node: Any) -> dict[str, FieldEncoding]:
    found: dict[str, FieldEncoding] = {}
    for name, said in (as_object(node) or {}).items():
        if one := as_object(said):
            styled = any(key in one for key in ("style", "explode", "allowReserved"))
            style = one.get("style", "form") if styled else None
            if style is not None and style not in _STYLES:
                raise OpenApiError(f"the field {name!r} has the style {style!r}; it is {' or '.join(_STYLES)}")
            content_type = one.get("contentType")
            found[name] = FieldEncoding(
                style=style,
                explode=one.get("explode", style in (None, "form")) is True,
                allow_reserved=one.get("allowReserved") is True,
                # It may be a choice of several: `image/png, image/jpeg`.
                content_type=content_type.partition(",")[0].strip() if isinstance(content_type, str) else None,
            )
    return found


def _with_files(
    fields: _Fields, encodings: dict[str, FieldEncoding], schemas: SchemaConverter
) -> tuple[_Fields, dict[str, FieldEncoding]]:
    """The fields with a place for base64 in each that holds a file, or several."""
    properties = dict(fields.properties)
    encodings = dict(encodings)
    for name, schema in fields.properties.items():
        encoding = encodings.get(name) or FieldEncoding()
        meant = _meant(schema, schemas)
        if meant.get("type") == "array" and _is_file(_meant(meant.get("items"), schemas), encoding):
            kept = {key: value for key, value in meant.items() if key != "items"}
            properties[name] = {**kept, "items": FILE_SCHEMA}
        elif _is_file(meant, encoding):
            kept = {key: meant[key] for key in ("title", "description", "deprecated") if key in meant}
            properties[name] = {**kept, **FILE_SCHEMA}
        else:
            continue
        encodings[name] = msgspec.structs.replace(encoding, binary=True)
    return _Fields(properties, fields.needed, _used(properties, fields.refs)), encodings


def _meant(schema: Any, schemas: SchemaConverter) -> JsonObject:
    for _ in range(_LONGEST_CHAIN):
        said = as_object(schema)
        if said is None:
            break
        if "$ref" not in said:
            return said
        schema = schemas.get_definition(said["$ref"].removeprefix("#/$defs/")).schema
    return {}


def _is_file(schema: JsonObject, encoding: FieldEncoding) -> bool:
    kind: Any = schema.get("type")
    kinds = as_list(kind) or [kind]
    if any(one not in ("string", "null", None) for one in kinds) or "contentEncoding" in schema:
        return False
    if schema.get("format") == "binary":
        return True
    if "enum" in schema or "anyOf" in schema or "oneOf" in schema or "allOf" in schema:
        return False
    said = encoding.content_type or schema.get("contentMediaType")
    return said is not None and _kind(said) == "binary"


# MERGED from payload: Encodes arguments as the body of a request: JSON, forms, files, text. Knows nothing of docum…

_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:; ?[a-z-]+=[A-Za-z0-9_.+-]+)*")
_DEFAULT = FieldEncoding()


class EncodedBody(NamedTuple):
    content: bytes
    content_type: str


EncodeFields = Callable[[Any], EncodedBody]
"""Makes the body of one value: of the fields by name, where the body is an object."""


def compile_body_encoder(body: RequestBody) -> EncodeFields:
    """What encodes a body. Compiled once per tool."""
    media_type = body.media_type
    if body.kind == "json":
        sent = media_type if is_json_type(media_type) else "application/json"
        return lambda value: EncodedBody(json_text.encode_bytes(value), sent)
    if body.kind == "text":
        return lambda value: EncodedBody(format_value(value).encode("utf-8", "replace"), media_type)
    if body.kind == "form":
        return _form(body)
    if body.kind == "multipart":
        return lambda value: _multipart(_object(value), body)

    def binary(value: Any) -> EncodedBody:
        file = _file(value, "body", media_type if "*" not in media_type else "application/octet-stream")
        return EncodedBody(file.content, file.content_type)

    return binary


def _form(body: RequestBody) -> EncodeFields:
    def writer(name: str) -> Callable[[Any], list[str]]:
        encoding = body.encodings.get(name, _DEFAULT)
        as_json = encoding.content_type is not None and is_json_type(encoding.content_type)
        styled = _parameter(name, encoding, as_json=as_json)
        write = query_writer(styled, percent_encode_unreserved if encoding.allow_reserved else _plus)
        whole = query_writer(_parameter(name, encoding, as_json=True), _plus)
        # Without a style, an object has no other form than JSON: spread out, it would lose its own name.
        return lambda value: (whole if encoding.style is None and isinstance(value, dict) else write)(value)

    writers = {name: writer(name) for name in body.fields or {}}

    def encode(value: Any) -> EncodedBody:
        pairs: list[str] = []
        for name, item in _object(value).items():
            pairs += (writers.get(name) or writer(name))(item)
        return EncodedBody("&".join(pairs).encode(), body.media_type)

    return encode


def _parameter(name: str, encoding: FieldEncoding, *, as_json: bool) -> OpenApiParameter:
    style = encoding.style or "form"
    return OpenApiParameter(
        name=name,
        location="query",
        required=False,
        style=style,
        explode=encoding.explode,
        allow_reserved=encoding.allow_reserved,
        as_json=as_json,
        schema=True,
        refs={},
    )


def _plus(text: str) -> str:
    return quote_plus(text, errors="replace")


class _Part(NamedTuple):
    content: bytes
    content_type: str
    filename: str | None = None


def _multipart(value: dict[str, Any], body: RequestBody) -> EncodedBody:
    boundary = secrets.token_hex(16)  # Nobody can know it, so no content can hold it.
    pieces: list[bytes] = []
    for name, item in value.items():
        encoding = body.encodings.get(name, _DEFAULT)
        if item is None:
            continue
        if isinstance(item, list) and not (encoding.content_type and is_json_type(encoding.content_type)):
            parts = [_part(name, one, encoding) for one in cast("list[Any]", item) if one is not None]
        else:
            parts = [_part(name, item, encoding)]
        for part in parts:
            filename = f'; filename="{_quoted(part.filename)}"' if part.filename is not None else ""
            head = (
                f"--{boundary}\r\n"
                f'Content-Disposition: form-data; name="{_quoted(name)}"{filename}\r\n'
                f"Content-Type: {part.content_type}\r\n\r\n"
            )
            pieces += (head.encode("utf-8", "replace"), part.content, b"\r\n")
    pieces.append(f"--{boundary}--\r\n".encode())
    media_type = body.media_type.partition(";")[0].strip()
    if "*" in media_type:
        media_type = "multipart/form-data"
    return EncodedBody(b"".join(pieces), f"{media_type}; boundary={boundary}")


def _part(name: str, value: Any, encoding: FieldEncoding) -> _Part:
    if encoding.binary:
        return _file(value, name, encoding.content_type or "application/octet-stream")
    said = encoding.content_type
    if said is not None and is_json_type(said):
        return _Part(json_text.encode_bytes(value), said)
    if isinstance(value, dict | list):
        return _Part(json_text.encode_bytes(cast("object", value)), said or "application/json")
    return _Part(format_value(value).encode("utf-8", "replace"), said or "text/plain; charset=utf-8")


def _file(value: Any, name: str, content_type: str) -> _Part:
    filename: str = name
    data = value
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        data = given.get("data")
        filename = str(given.get("filename") or name).replace("\\", "/").rpartition("/")[2] or name
        content_type = str(given.get("contentType") or content_type)
    if not _MEDIA_TYPE.fullmatch(content_type):
        raise ToolValidationError(f"{name}.contentType: expected a media type such as image/png")
    try:
        content = base64.b64decode("".join(str(data).split()), validate=True)
    except (binascii.Error, ValueError):
        raise ToolValidationError(f'{name}: expected the content in base64, such as "aGVsbG8="') from None
    return _Part(content, content_type, filename)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ToolValidationError("body: a form is made of named fields; give an object")
    return cast("dict[str, Any]", value)


def _quoted(text: str) -> str:
    """A name inside quotes: what would end it is written as browsers write it."""
    for character, escape in (("\r", "%0D"), ("\n", "%0A"), ('"', "%22"), ("\0", "")):
        text = text.replace(character, escape)
    return text

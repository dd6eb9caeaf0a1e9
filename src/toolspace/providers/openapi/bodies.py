"""What an operation takes as its body: which media type to send, and as which arguments. Encodes nothing."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import msgspec

from toolspace.core import json_text
from toolspace.providers.openapi import keywords
from toolspace.providers.openapi.document import Broken, Json, Source, mapping, members
from toolspace.providers.openapi.parameters import Style
from toolspace.providers.openapi.schemas import Definition, Refs, Schemas

Kind = Literal["json", "form", "multipart", "text", "binary"]

_BASE64: Json = {"type": "string", "contentEncoding": "base64"}
FILE: Json = {
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

_ORDER: tuple[Kind, ...] = ("json", "form", "multipart", "text", "binary")
_PLAIN = frozenset(("type", "properties", "required", "title", "description", "examples", "default", "deprecated"))
_STYLES = ("form", "spaceDelimited", "pipeDelimited", "deepObject")
_LONGEST_CHAIN = 16


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """How one field of a form is sent."""

    style: Style | None = None
    """None where the document leaves it to the type of the value."""
    explode: bool = True
    allow_reserved: bool = False
    content_type: str | None = None
    binary: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    media_type: str
    kind: Kind
    required: bool
    schema: Any
    """Of the argument that is the whole body."""
    refs: Refs
    fields: Json | None = None
    """The properties, where the body is a plain object, so that each may be an argument of its own."""
    needed: tuple[str, ...] = ()
    """Those of the fields that a body cannot be without."""
    field_refs: Refs = {}
    encodings: dict[str, Encoding] = {}


class _Fields(NamedTuple):
    properties: Json
    needed: tuple[str, ...]
    refs: Refs


def read_body(node: Any, source: Source, schemas: Schemas) -> Body | None:
    """The body that a `requestBody` describes; None where it describes none. Raises `Broken`."""
    target = source.follow(node)
    said = mapping(target.node)
    if said is None:
        raise Broken(f"expected a requestBody, got {json_text.describe(target.node)}")
    content = mapping(said.get("content"))
    if not content:
        return None
    media_type, media = _choose(content)
    kind = _kind(media_type)
    source = target.source
    schema = media.get("schema", True)
    converted: Any
    refs: Refs = {}
    fields: _Fields | None = None
    encodings: dict[str, Encoding] = {}
    if kind == "binary":
        converted = FILE
    else:
        meant = schemas.definition(schema, source)
        converted, refs = meant.schema, meant.refs
        if "$ref" in (mapping(schema) or ()):
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
            converted, refs = _object(fields), fields.refs
        if kind == "text" and "type" not in (mapping(converted) or ()):
            converted = {"type": "string"}
    if isinstance(description := said.get("description"), str) and description:
        converted = {**(mapping(converted) or {}), "description": description}
    return Body(
        media_type=media_type,
        kind=kind,
        required=said.get("required") is True,
        schema=converted,
        refs=refs,
        fields=fields.properties if fields is not None else None,
        needed=fields.needed if fields is not None else (),
        field_refs=fields.refs if fields is not None else {},
        encodings=encodings,
    )


def is_json(media_type: str) -> bool:
    base = media_type.partition(";")[0].strip().lower()
    return base in ("application/json", "text/json") or base.endswith("+json")


def _choose(content: Json) -> tuple[str, Json]:
    """The media type to send: JSON if it is offered, else the one that needs the least of the caller."""
    offered = [(name, mapping(media) or {}) for name, media in content.items()]
    return min(offered, key=lambda one: (_ORDER.index(_kind(one[0])), not is_json(one[0])))


def _kind(media_type: str) -> Kind:
    base = media_type.partition(";")[0].strip().lower()
    if is_json(base) or base in ("*/*", "application/*"):
        return "json"
    if base == "application/x-www-form-urlencoded":
        return "form"
    if base.startswith("multipart/"):
        return "multipart"
    if base.startswith("text/") or base.endswith(("/xml", "+xml", "/yaml", "+yaml", "/x-yaml", "/x-ndjson", "/jsonl")):
        return "text"
    return "binary"


def _fields(definition: Definition, schemas: Schemas, parts_of: set[str], *, lenient: bool) -> _Fields | None:
    """The properties of a plain object, also of one that is made of several; None for anything else.

    A form has to be an object: there, whatever else the schema says of it does not matter (`lenient`).
    `parts_of` are the definitions that it is made of so far: one that comes twice has nothing new to say, or no end.
    """
    said = mapping(definition.schema)
    if said is None or said.get("type", "object") != "object":
        return None
    if not lenient:
        others = said.keys() - _PLAIN - {"allOf"}
        if others - {"additionalProperties"} or said.get("additionalProperties", False) is not False:
            return None
    parts = [_Fields(said.get("properties") or {}, tuple(said.get("required") or ()), definition.refs)]
    for part in members(said.get("allOf")):
        name = str((mapping(part) or {}).get("$ref", "")).removeprefix("#/$defs/")
        if name in parts_of:
            return None
        if name:
            parts_of.add(name)
        inner = schemas.meant_by(name) if name else Definition(part, definition.refs)
        found = _fields(inner, schemas, parts_of, lenient=lenient)
        if found is None:
            return None
        parts.append(found)
    properties: Json = {}
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


def _object(fields: _Fields) -> Json:
    schema: Json = {"type": "object", "properties": fields.properties}
    return {**schema, "required": list(fields.needed)} if fields.needed else schema


def _used(properties: Json, refs: Refs) -> Refs:
    """Of the definitions, those that the properties refer to: not the parts that they were taken from."""
    found: Refs = {}
    pending: list[Any] = list(properties.values()) if refs else []
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += cast("list[Any]", node)
        elif isinstance(node, dict):
            for key, value in cast("Json", node).items():
                if key == "$ref":
                    found[value.removeprefix("#/$defs/")] = None
                elif key == "properties" or key in keywords.NAMED:
                    pending += value.values()
                elif key in keywords.ONE or key in keywords.SEVERAL:
                    pending.append(value)
    return found


def _encodings(node: Any) -> dict[str, Encoding]:
    found: dict[str, Encoding] = {}
    for name, said in (mapping(node) or {}).items():
        if one := mapping(said):
            styled = any(key in one for key in ("style", "explode", "allowReserved"))
            style = one.get("style", "form") if styled else None
            if style is not None and style not in _STYLES:
                raise Broken(f"the field {name!r} has the style {style!r}; it is {' or '.join(_STYLES)}")
            content_type = one.get("contentType")
            found[name] = Encoding(
                style=style,
                explode=one.get("explode", style in (None, "form")) is True,
                allow_reserved=one.get("allowReserved") is True,
                # It may be a choice of several: `image/png, image/jpeg`.
                content_type=content_type.partition(",")[0].strip() if isinstance(content_type, str) else None,
            )
    return found


def _with_files(
    fields: _Fields, encodings: dict[str, Encoding], schemas: Schemas
) -> tuple[_Fields, dict[str, Encoding]]:
    """The fields with a place for base64 in each that holds a file, or several."""
    properties = dict(fields.properties)
    encodings = dict(encodings)
    for name, schema in fields.properties.items():
        encoding = encodings.get(name) or Encoding()
        meant = _meant(schema, schemas)
        if meant.get("type") == "array" and _is_file(_meant(meant.get("items"), schemas), encoding):
            kept = {key: value for key, value in meant.items() if key != "items"}
            properties[name] = {**kept, "items": FILE}
        elif _is_file(meant, encoding):
            kept = {key: meant[key] for key in ("title", "description", "deprecated") if key in meant}
            properties[name] = {**kept, **FILE}
        else:
            continue
        encodings[name] = msgspec.structs.replace(encoding, binary=True)
    return _Fields(properties, fields.needed, _used(properties, fields.refs)), encodings


def _meant(schema: Any, schemas: Schemas) -> Json:
    for _ in range(_LONGEST_CHAIN):
        said = mapping(schema)
        if said is None:
            break
        if "$ref" not in said:
            return said
        schema = schemas.meant_by(said["$ref"].removeprefix("#/$defs/")).schema
    return {}


def _is_file(schema: Json, encoding: Encoding) -> bool:
    kind: Any = schema.get("type")
    kinds = members(kind) or [kind]
    if any(one not in ("string", "null", None) for one in kinds) or "contentEncoding" in schema:
        return False
    if schema.get("format") == "binary":
        return True
    if "enum" in schema or "anyOf" in schema or "oneOf" in schema or "allOf" in schema:
        return False
    said = encoding.content_type or schema.get("contentMediaType")
    return said is not None and _kind(said) == "binary"

"""Reads the parameters and the request body of an operation, and combines them into one object of arguments.

`operations` uses it; `request_builder` writes the arguments into requests. JSON is preferred if a document offers
several media types for a body.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.http_messages import CLIENT_HEADERS, is_token
from toolspace.providers.openapi.document import DocumentFile, JsonObject, OpenApiError, as_list, as_object
from toolspace.providers.openapi.schemas import (
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    Refs,
    SchemaConverter,
    SchemaDefinition,
    add_definitions,
)

ParameterLocation = Literal["path", "query", "header", "cookie"]
ParameterStyle = Literal["simple", "label", "matrix", "form", "spaceDelimited", "pipeDelimited", "deepObject"]
BodyKind = Literal["json", "form", "multipart", "text", "binary"]

_STYLES: dict[ParameterLocation, tuple[ParameterStyle, ...]] = {
    "path": ("simple", "label", "matrix"),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
"""If two parameters have the same name, the one whose location comes first keeps it."""
_DESCRIBED_ELSEWHERE = frozenset(("accept", "content-type", "authorization"))
"""Headers that OpenAPI describes by bodies, responses and security schemes, not by parameters."""
_KIND_ORDER: tuple[BodyKind, ...] = ("json", "form", "multipart", "text", "binary")
_PLAIN_OBJECT_KEYWORDS = frozenset(
    ("type", "properties", "required", "title", "description", "examples", "default", "deprecated", "allOf")
)
_MAX_REFERENCE_CHAIN = 16
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

    @property
    def key(self) -> tuple[str, str]:
        """Its location and name. Names of headers ignore case."""
        return self.location, self.name.lower() if self.location == "header" else self.name


class FieldEncoding(msgspec.Struct, frozen=True, kw_only=True):
    """How one field of a form is sent."""

    style: ParameterStyle | None = None
    """None: the type of the value decides."""
    explode: bool = True
    allow_reserved: bool = False
    content_type: str | None = None
    binary: bool = False

    @property
    def is_json(self) -> bool:
        return self.content_type is not None and is_json_type(self.content_type)


DEFAULT_ENCODING = FieldEncoding()


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body that an operation takes."""

    media_type: str
    kind: BodyKind
    required: bool
    schema: Any
    """The schema of one argument for the whole body."""
    refs: Refs
    fields: _Fields | None = None
    """The properties of a plain object, so that each can be an argument of its own."""
    encodings: dict[str, FieldEncoding] = {}


class _Fields(NamedTuple):
    properties: JsonObject
    required: tuple[str, ...]
    refs: Refs


class OperationInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of an operation, and where each goes."""

    parameters: tuple[tuple[str, OpenApiParameter], ...]
    """Each parameter with the name of its argument."""
    body: RequestBody | None
    body_argument: str | None
    """The argument that is the whole body; None if each field of the body is an argument."""
    schema: JsonObject


# Parameters


def read_parameter(node: Any, file: DocumentFile, schemas: SchemaConverter) -> OpenApiParameter | None:
    """Reads a parameter; None for a header that the caller cannot set. Raises `OpenApiError`."""
    parameter = as_object(node)
    if parameter is None:
        raise OpenApiError(f"expected a parameter, got {json_text.describe(node)}")
    name, location = parameter.get("name"), parameter.get("in")
    if not isinstance(name, str) or not name or location not in _STYLES:
        raise OpenApiError(f"a parameter needs a name, and in: {', '.join(_STYLES)}; got {name!r} in {location!r}")
    if location in ("header", "cookie") and not is_token(name):
        raise OpenApiError(f"the name of the {location} parameter {name!r} cannot be sent")
    if location == "header" and name.lower() in _DESCRIBED_ELSEWHERE | CLIENT_HEADERS:
        return None
    style = parameter.get("style") or _STYLES[location][0]
    if style not in _STYLES[location]:
        raise OpenApiError(_style_problem(f"the {location} parameter {name!r}", style, location))
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


def _style_problem(subject: str, style: Any, location: ParameterLocation) -> str:
    return f"{subject} has the style {style!r}; use {' or '.join(_STYLES[location])}"


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


# Bodies


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
        fields=fields,
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
        if style is not None and style not in _STYLES["query"]:
            raise OpenApiError(_style_problem(f"the field {name!r}", style, "query"))
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
        encoding = encodings.get(name) or DEFAULT_ENCODING
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


# Arguments


def combine_inputs(
    parameters: list[OpenApiParameter], body: RequestBody | None, schemas: SchemaConverter
) -> OperationInputs:
    """Combines parameters and body into one object of arguments. Raises `OpenApiError`."""
    parameters_by_argument = _name_arguments(parameters)
    properties: JsonObject = {argument: parameter.schema for argument, parameter in parameters_by_argument.items()}
    required = [argument for argument, parameter in parameters_by_argument.items() if parameter.required]
    refs: Refs = {name: None for parameter in parameters for name in parameter.refs}
    schema: JsonObject = {"type": "object", "properties": properties, "additionalProperties": False}
    body_argument = None
    if body is not None:
        fields = body.fields
        if fields is not None and properties.keys().isdisjoint(fields.properties):
            properties.update(fields.properties)
            refs |= fields.refs
            if body.required:
                required += fields.required
            elif fields.required:
                # The body may be left out, but a body with some of its fields needs all required ones.
                schema["dependentRequired"] = {name: list(fields.required) for name in fields.properties}
        else:
            body_argument = "body"
            while body_argument in properties:
                body_argument = f"request_{body_argument}"
            properties[body_argument] = body.schema
            refs |= body.refs
            if body.required:
                required.append(body_argument)
    if required:
        schema["required"] = required
    return OperationInputs(
        parameters=tuple(parameters_by_argument.items()),
        body=body,
        body_argument=body_argument,
        schema=add_definitions(schema, schemas.collect_definitions(refs)) if refs else schema,
    )


def _name_arguments(parameters: list[OpenApiParameter]) -> dict[str, OpenApiParameter]:
    """Parameters by the name of their argument. Equal names in different locations get a suffix."""
    names = [parameter.name for parameter in parameters]
    if len(set(names)) == len(names):
        return dict(zip(names, parameters, strict=True))
    parameters_by_argument: dict[str, OpenApiParameter] = {}
    used_names, locations = set(names), list(_STYLES)
    for parameter in sorted(parameters, key=lambda parameter: locations.index(parameter.location)):
        argument = parameter.name
        if argument in parameters_by_argument:
            argument = f"{argument}_{parameter.location}"
            while argument in used_names:
                argument += "_"
            used_names.add(argument)
        parameters_by_argument[argument] = parameter
    return parameters_by_argument

"""Converts the schemas of a document to self-contained JSON Schema 2020-12. Knows nothing of operations.

A `$ref` becomes a reference to `#/$defs/…` of the schema that contains it. Each definition is converted once and shared
by all tools that use it; circular definitions need no special handling.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from toolspace.core import json_text
from toolspace.core.names import short_hash
from toolspace.providers.openapi.document import (
    DocumentFile,
    JsonObject,
    OpenApiDocument,
    OpenApiError,
    ResolvedReference,
    as_list,
    as_object,
)

Direction = Literal["request", "response"]
Refs = dict[str, None]
"""The names of the definitions that a schema refers to, in order."""

MAX_DEFINITIONS = 2000
"""Definitions of one schema. More is a mistake, and no model could read it."""

_COMPONENT_PREFIX = "#/components/schemas/"
_CLEAN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_UNCLEAN_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_NO_NAMES: frozenset[str] = frozenset()
_JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_MAX_EXAMPLE_LENGTH = 200
_MAX_EXAMPLES = 3


class SchemaDefinition(NamedTuple):
    """A converted schema, and the definitions that it refers to."""

    schema: Any
    refs: Refs


class SchemaConverter:
    """Converts the schemas of one document, either as requests or as responses see them."""

    def __init__(self, document: OpenApiDocument, direction: Direction) -> None:
        self.document = document
        self._hidden_keyword = "readOnly" if direction == "request" else "writeOnly"
        self._names: dict[str, str] = {}
        self._references: dict[str, ResolvedReference] = {}
        self._definitions: dict[str, SchemaDefinition | OpenApiError] = {}

    def convert(self, node: Any, file: DocumentFile, refs: Refs, hidden_names: frozenset[str] = _NO_NAMES) -> Any:
        """The converted schema. Adds the definitions that it refers to to `refs`. Raises `OpenApiError`.

        `hidden_names` are properties that a schema around this one hides; this schema does not require them.
        """
        if isinstance(node, bool):
            return node
        schema = as_object(node)
        if schema is None:
            raise OpenApiError(f"expected a schema, got {json_text.describe(node)}")
        if "$ref" not in schema:
            return self._convert_object(schema, file, refs, hidden_names)
        name = self._name_of(file.resolve(schema["$ref"]))
        refs[name] = None
        reference: JsonObject = {"$ref": f"#/$defs/{name}"}
        if self.document.version == "3.0" or len(schema) == 1:
            return reference
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return reference | self._convert_object(siblings, file, refs, hidden_names)

    def collect_definitions(self, refs: Iterable[str]) -> JsonObject:
        """The `$defs` for a schema that refers to these names, with everything that they refer to.

        Raises `OpenApiError` if a definition is invalid or there are too many.
        """
        definitions: JsonObject = {}
        pending_names = list(refs)
        while pending_names:
            name = pending_names.pop()
            if name in definitions:
                continue
            if len(definitions) >= MAX_DEFINITIONS:
                raise OpenApiError(f"its schema needs more than {MAX_DEFINITIONS} definitions")
            definition = self.get_definition(name)
            definitions[name] = definition.schema
            pending_names.extend(definition.refs)
        return dict(sorted(definitions.items()))

    def get_definition(self, name: str) -> SchemaDefinition:
        """The definition under a name in `$defs`. Raises `OpenApiError` if it is invalid."""
        definition = self._definitions.get(name)
        if definition is None:
            reference = self._references[name]
            refs: Refs = {}
            try:
                definition = SchemaDefinition(self.convert(reference.node, reference.file, refs), refs)
            except OpenApiError as error:
                definition = OpenApiError(f"in {reference.key}: {error}")
            except RecursionError:
                definition = OpenApiError(f"in {reference.key}: it is nested too deeply")
            self._definitions[name] = definition
        if isinstance(definition, OpenApiError):
            raise definition
        return definition

    def resolve_definition(self, node: Any, file: DocumentFile) -> SchemaDefinition:
        """The converted schema; if it is a reference, the definition behind it. Raises `OpenApiError`."""
        reference = file.follow(node)
        if reference.key:
            return self.get_definition(self._name_of(reference))
        refs: Refs = {}
        return SchemaDefinition(self.convert(node, file, refs), refs)

    def _is_hidden(self, node: Any, file: DocumentFile) -> bool:
        """Whether a property is hidden in this direction: requests hide read-only properties."""
        schema = as_object(node)
        if schema is not None and "$ref" in schema:
            schema = as_object(file.resolve(schema["$ref"]).node)
        return schema is not None and schema.get(self._hidden_keyword) is True

    def _convert_object(
        self, node: JsonObject, file: DocumentFile, refs: Refs, hidden_names: frozenset[str]
    ) -> JsonObject:
        schema: JsonObject = {}
        if "allOf" in node:
            hidden_names = hidden_names | self._hidden_names(node, file, set())
        for key, value in node.items():
            if (value_type := _VALUE_TYPES.get(key)) is not None:
                if _is_valid(value, value_type):
                    schema[key] = value
            elif key == "type":
                _convert_type(value, schema)
            elif key == "properties":
                schema[key], hidden_properties = self._convert_properties(value, file, refs)
                hidden_names = hidden_names | hidden_properties
            elif key == "items" and isinstance(value, list):  # Drafts before 2020 write tuples so.
                if value:
                    schema["prefixItems"] = [self.convert(part, file, refs) for part in as_list(value)]
            elif key in SCHEMA_KEYWORDS:
                schema[key] = self.convert(value, file, refs)
            elif key in SCHEMA_LIST_KEYWORDS:
                if parts := as_list(value):
                    part_hidden = hidden_names if key == "allOf" else _NO_NAMES
                    schema[key] = [self.convert(part, file, refs, part_hidden) for part in parts]
            elif key in SCHEMA_MAP_KEYWORDS:
                if members := as_object(value):
                    schema[key] = {
                        name: self.convert(part, file, refs)
                        for name, part in members.items()
                        if key != "patternProperties" or _is_valid_pattern(name)
                    }
            elif key == "pattern":
                if isinstance(value, str) and _is_valid_pattern(value):
                    schema[key] = value
            elif key == "example":
                if _is_short_example(value):
                    schema["examples"] = [value]
            elif key == "examples" and isinstance(value, list):
                schema[key] = [item for item in as_list(value)[:_MAX_EXAMPLES] if _is_short_example(item)]
        if isinstance(required := node.get("required"), list):
            names = [name for name in dict.fromkeys(map(str, as_list(required))) if name not in hidden_names]
            if names:
                schema["required"] = names
        for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if node.get(exclusive) is True and limit in schema:  # OpenAPI 3.0 has a flag beside the limit.
                schema[exclusive] = schema.pop(limit)
        return _add_null(schema) if node.get("nullable") is True else schema

    def _name_of(self, reference: ResolvedReference) -> str:
        """The name of a definition. It depends only on the place of the schema, not on which others are used."""
        name = self._names.get(reference.key)
        if name is not None:
            return name
        name = reference.key.removeprefix(_COMPONENT_PREFIX)
        if reference.key == name or not _CLEAN_NAME.fullmatch(name):
            last_step = _UNCLEAN_CHARACTERS.sub("_", reference.key.rpartition("/")[2]) or "schema"
            name = f"{last_step}_{short_hash(reference.key)}"
        while name in self._references:
            name += "_"
        self._names[reference.key] = name
        self._references[name] = reference
        return name

    def _convert_properties(self, value: Any, file: DocumentFile, refs: Refs) -> tuple[JsonObject, frozenset[str]]:
        """The converted properties, and the names of the hidden ones."""
        members = as_object(value)
        if members is None:
            raise OpenApiError(f"expected properties by name, got {json_text.describe(value)}")
        properties: JsonObject = {}
        hidden_names: set[str] = set()
        for name, part in members.items():
            if self._is_hidden(part, file):
                hidden_names.add(name)
            else:
                properties[name] = self.convert(part, file, refs)
        return properties, frozenset(hidden_names)

    def _hidden_names(self, node: JsonObject, file: DocumentFile, visited_ids: set[int]) -> frozenset[str]:
        """The hidden properties of a schema and of its `allOf` parts: one part may require what another hides."""
        visited_ids.add(id(node))
        names: set[str] = set()
        if members := as_object(node.get("properties")):
            names.update(name for name, part in members.items() if self._is_hidden(part, file))
        for part in as_list(node.get("allOf")):
            reference = file.follow(part)
            schema = as_object(reference.node)
            if schema is not None and id(schema) not in visited_ids:
                names |= self._hidden_names(schema, reference.file, visited_ids)
        return frozenset(names)


def add_definitions(schema: JsonObject, definitions: Mapping[str, Any]) -> JsonObject:
    return {**schema, "$defs": definitions} if definitions else schema


def _convert_type(value: Any, schema: JsonObject) -> None:
    if value == "file":  # Swagger's name for binary content, which many documents still use.
        schema["type"] = "string"
        schema["format"] = "binary"
    elif isinstance(value, list):
        types = dict.fromkeys(str(item) for item in as_list(value))
        if types and all(name in _JSON_TYPES for name in types):
            schema["type"] = list(types)
    elif isinstance(value, str) and value in _JSON_TYPES:
        schema["type"] = value


def _add_null(schema: JsonObject) -> JsonObject:
    """The schema of a `nullable` value."""
    if "$ref" in schema or not SCHEMA_LIST_KEYWORDS.isdisjoint(schema):
        outer = {key: schema[key] for key in ("title", "description", "default") if key in schema}
        inner = {key: value for key, value in schema.items() if key not in outer}
        return {**outer, "anyOf": [inner, {"type": "null"}]}
    type_name = schema.get("type")
    if isinstance(type_name, str) and type_name != "null":
        schema["type"] = [type_name, "null"]
    if "enum" in schema and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


@functools.lru_cache(4096)
def _is_valid_pattern(pattern: str) -> bool:
    """Whether the argument validator can compile it. An invalid pattern would make the whole schema invalid."""
    import jsonschema_rs  # Imported here: it takes 30 ms, and most documents have no pattern.

    try:
        jsonschema_rs.validator_for({"pattern": pattern})
    except (ValueError, jsonschema_rs.ValidationError):
        return False
    return True


def _is_short_example(value: Any) -> bool:
    """Whether an example is worth showing to a model."""
    return len(value) <= _MAX_EXAMPLE_LENGTH if isinstance(value, str) else isinstance(value, int | float)


def _is_valid(value: Any, value_type: Any) -> bool:
    if isinstance(value_type, type):  # The most frequent keywords, fast.
        return isinstance(value, value_type)
    try:
        msgspec.convert(value, value_type)
    except msgspec.ValidationError:
        return False
    return value_type is not _Dependencies or all(len(set(names)) == len(names) for names in value.values())


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Dependencies = dict[str, list[str]]
_VALUE_TYPES: dict[str, Any] = {
    **dict.fromkeys(("title", "description", "format", "contentEncoding", "contentMediaType"), str),
    **dict.fromkeys(("default", "const"), object),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly", "uniqueItems"), bool),
    **dict.fromkeys(("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum"), int | float),
    **dict.fromkeys(("maxLength", "minLength", "maxItems", "minItems", "maxContains", "minContains"), _Count),
    **dict.fromkeys(("maxProperties", "minProperties"), _Count),
    "multipleOf": Annotated[int, msgspec.Meta(gt=0)] | Annotated[float, msgspec.Meta(gt=0)],
    "enum": list[Any],
    "dependentRequired": _Dependencies,
}
"""Keywords with a plain value, which are copied if the value has this type."""
SCHEMA_KEYWORDS = frozenset((
    "items", "not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "unevaluatedItems",
    "unevaluatedProperties", "contentSchema",
))  # fmt: skip
"""Keywords whose value is a schema."""
SCHEMA_LIST_KEYWORDS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
"""Keywords whose value is a list of schemas."""
SCHEMA_MAP_KEYWORDS = frozenset(("patternProperties", "dependentSchemas"))
"""Keywords whose value is an object of schemas by name."""

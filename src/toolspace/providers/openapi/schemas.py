"""Turns a document's schemas into JSON Schema 2020-12 that stands alone. Knows nothing of operations.

A `$ref` stays one: to `#/$defs/…` of the schema that it is part of. What it means is converted once, whoever uses it,
so a thousand tools share the definitions that they have in common, and circles need no thought.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

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

# MERGED from keywords: Which JSON Schema keywords a document's schemas keep, and what each may hold. Converts noth…

JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_LONGEST_EXAMPLE = 200


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_anything(value: Any) -> bool:
    return True


def _is_dependency(value: Any) -> bool:
    return isinstance(value, dict) and all(is_name_list(one) for one in cast("dict[str, Any]", value).values())


def is_name_list(value: Any) -> bool:
    """Whether it may stand as `required`."""
    if not isinstance(value, list):
        return False
    names = cast("list[Any]", value)
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


@functools.lru_cache(4096)
def is_valid_pattern(pattern: str) -> bool:
    """Whether the checker of arguments can compile it; what it cannot, would make the whole schema invalid."""
    import jsonschema_rs  # Here: most documents have no pattern, and it takes 30 ms to import.

    try:
        jsonschema_rs.validator_for({"pattern": pattern})
    except (ValueError, jsonschema_rs.ValidationError):
        return False
    return True


def is_short_example(value: Any) -> bool:
    """Whether an example is worth showing to a model."""
    return len(value) <= _LONGEST_EXAMPLE if isinstance(value, str) else isinstance(value, int | float)


VALUE_KEYWORDS: dict[str, Callable[[Any], bool]] = {
    "title": _is_text,
    "description": _is_text,
    "default": _is_anything,
    "const": _is_anything,
    "enum": _is_list,
    "format": _is_text,
    "deprecated": _is_flag,
    "readOnly": _is_flag,
    "writeOnly": _is_flag,
    "maximum": _is_number,
    "minimum": _is_number,
    "exclusiveMaximum": _is_number,
    "exclusiveMinimum": _is_number,
    "multipleOf": _is_positive,
    "maxLength": _is_count,
    "minLength": _is_count,
    "maxItems": _is_count,
    "minItems": _is_count,
    "maxContains": _is_count,
    "minContains": _is_count,
    "maxProperties": _is_count,
    "minProperties": _is_count,
    "uniqueItems": _is_flag,
    "contentEncoding": _is_text,
    "contentMediaType": _is_text,
    "dependentRequired": _is_dependency,
}
"""Keywords that hold a plain value: kept as they are where the value is one that they may hold."""
_ONE = "items not if then else contains propertyNames additionalProperties unevaluatedItems unevaluatedProperties"
SCHEMA_KEYWORDS = frozenset((*_ONE.split(), "contentSchema"))
"""Keywords that hold one schema."""
SCHEMA_LIST_KEYWORDS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
"""Keywords that hold a list of schemas."""
SCHEMA_MAP_KEYWORDS = frozenset(("patternProperties", "dependentSchemas"))
"""Keywords that hold schemas by name."""


View = Literal["request", "response"]
Refs = dict[str, None]
"""The definitions that a schema refers to, in the order in which it does."""

MAX_DEFINITIONS = 2000
"""In one schema: more is a mistake, and no model could read it."""

_COMPONENT = "#/components/schemas/"
_CLEAN = re.compile(r"[A-Za-z0-9_.-]+")
_UNCLEAN = re.compile(r"[^A-Za-z0-9_.-]+")
_NOTHING: frozenset[str] = frozenset()


class SchemaDefinition(NamedTuple):
    """A schema that has a place of its own, converted, and what it refers to."""

    schema: Any
    refs: Refs


class SchemaConverter:
    """The schemas of one document, as a request or as a response shows them."""

    def __init__(self, document: OpenApiDocument, view: View) -> None:
        self.document = document
        self._hidden = "readOnly" if view == "request" else "writeOnly"
        self._names: dict[str, str] = {}
        self._targets: dict[str, ResolvedReference] = {}
        self._definitions: dict[str, SchemaDefinition | OpenApiError] = {}

    def convert(self, node: Any, source: DocumentFile, refs: Refs, without: frozenset[str] = _NOTHING) -> Any:
        """The schema in JSON Schema 2020-12. Adds what it refers to. Raises `Broken`.

        `without` are properties that a schema around this one hides, so that it cannot require them.
        """
        if isinstance(node, bool):
            return node
        given = as_object(node)
        if given is None:
            raise OpenApiError(f"expected a schema, got {json_text.describe(node)}")
        if "$ref" in given:
            reference = self._reference(given["$ref"], source, refs)
            if self.document.version == "3.0" or len(given) == 1:
                return reference
            given = {key: value for key, value in given.items() if key != "$ref"}
            return reference | self._object(given, source, refs, without)
        return self._object(given, source, refs, without)

    def collect_definitions(self, refs: Iterable[str]) -> JsonObject:
        """`$defs` for a schema that refers to these: they, and all that they lead to. Raises `Broken`."""
        found: JsonObject = {}
        pending = list(refs)
        while pending:
            name = pending.pop()
            if name in found:
                continue
            if len(found) >= MAX_DEFINITIONS:
                raise OpenApiError(f"its schema needs more than {MAX_DEFINITIONS} definitions")
            definition = self.get_definition(name)
            found[name] = definition.schema
            pending.extend(definition.refs)
        return dict(sorted(found.items()))

    def get_definition(self, name: str) -> SchemaDefinition:
        """What stands under a name in `$defs`. Raises `Broken`."""
        found = self._definitions.get(name)
        if found is None:
            target = self._targets[name]
            refs: Refs = {}
            try:
                found = SchemaDefinition(self.convert(target.node, target.source, refs), refs)
            except OpenApiError as error:
                found = OpenApiError(f"in {target.key}: {error}")
            except RecursionError:
                found = OpenApiError(f"in {target.key}: it is nested too deeply")
            self._definitions[name] = found
        if isinstance(found, OpenApiError):
            raise found
        return found

    def resolve_definition(self, node: Any, source: DocumentFile) -> SchemaDefinition:
        """A schema with the reference that it may be replaced by what that means. Raises `Broken`."""
        target = source.follow(node)
        if target.key:
            return self.get_definition(self._names.get(target.key) or self._name(target))
        refs: Refs = {}
        return SchemaDefinition(self.convert(node, source, refs), refs)

    def is_hidden(self, node: Any, source: DocumentFile) -> bool:
        """Whether a property is not for this view: read-only ones are no part of a request."""
        said = as_object(node)
        if said is not None and "$ref" in said:
            said = as_object(source.resolve(said["$ref"]).node)
        return said is not None and said.get(self._hidden) is True

    def _object(self, node: JsonObject, source: DocumentFile, refs: Refs, without: frozenset[str]) -> JsonObject:
        out: JsonObject = {}
        if "allOf" in node:
            without = without | self._hidden_names(node, source, set())
        for key, value in node.items():
            if (fits := VALUE_KEYWORDS.get(key)) is not None:
                if fits(value):
                    out[key] = value
            elif key == "type":
                self._type(value, out)
            elif key == "properties":
                out[key], dropped = self._properties(value, source, refs)
                without = without | dropped if dropped else without
            elif key in SCHEMA_KEYWORDS:
                self._one(key, value, source, refs, out)
            elif key in SCHEMA_LIST_KEYWORDS:
                if parts := as_list(value):
                    hidden = without if key == "allOf" else _NOTHING
                    out[key] = [self.convert(part, source, refs, hidden) for part in parts]
            elif key in SCHEMA_MAP_KEYWORDS:
                if named := as_object(value):
                    out[key] = {
                        name: self.convert(part, source, refs)
                        for name, part in named.items()
                        if key != "patternProperties" or is_valid_pattern(name)
                    }
            elif key == "pattern":
                if isinstance(value, str) and is_valid_pattern(value):
                    out[key] = value
            elif key == "example":
                if is_short_example(value):
                    out["examples"] = [value]
            elif key == "examples" and isinstance(value, list):
                out[key] = [one for one in as_list(value)[:3] if is_short_example(one)]
        if "required" in node:
            _require(node["required"], without, out)
        for limit, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if node.get(strict) is True and limit in out:  # As 3.0 writes it.
                out[strict] = out.pop(limit)
        return _with_null(out) if node.get("nullable") is True else out

    def _reference(self, ref: Any, source: DocumentFile, refs: Refs) -> JsonObject:
        target = source.resolve(ref)
        name = self._names.get(target.key) or self._name(target)
        refs[name] = None
        return {"$ref": f"#/$defs/{name}"}

    def _name(self, target: ResolvedReference) -> str:
        """A name that depends on nothing but the place, so that it never changes with what else is used."""
        plain = target.key.removeprefix(_COMPONENT)
        if target.key == plain or not _CLEAN.fullmatch(plain):
            last = _UNCLEAN.sub("_", target.key.rpartition("/")[2]) or "schema"
            plain = f"{last}_{short_hash(target.key)}"
        while plain in self._targets:
            plain += "_"
        self._names[target.key] = plain
        self._targets[plain] = target
        return plain

    def _properties(self, value: Any, source: DocumentFile, refs: Refs) -> tuple[JsonObject, frozenset[str]]:
        named = as_object(value)
        if named is None:
            raise OpenApiError(f"expected properties by name, got {json_text.describe(value)}")
        kept: JsonObject = {}
        dropped: set[str] = set()
        for name, part in named.items():
            if self.is_hidden(part, source):
                dropped.add(name)
            else:
                kept[name] = self.convert(part, source, refs)
        return kept, frozenset(dropped)

    def _one(self, key: str, value: Any, source: DocumentFile, refs: Refs, out: JsonObject) -> None:
        if key == "items" and isinstance(value, list):  # As drafts before 2020 write tuples.
            out["prefixItems"] = [self.convert(part, source, refs) for part in as_list(value)]
            if not value:
                del out["prefixItems"]
        else:
            out[key] = self.convert(value, source, refs)

    @staticmethod
    def _type(value: Any, out: JsonObject) -> None:
        if value == "file":  # What it was called in Swagger, and still is in many documents.
            out["type"] = "string"
            out["format"] = "binary"
        elif isinstance(value, list):
            types = dict.fromkeys(str(one) for one in as_list(value))
            if types and all(one in JSON_TYPES for one in types):
                out["type"] = list(types)
        elif isinstance(value, str) and value in JSON_TYPES:
            out["type"] = value

    def _hidden_names(self, node: JsonObject, source: DocumentFile, seen: set[int]) -> frozenset[str]:
        """What a schema and those that it is made of hide: one part may require what another hides."""
        seen.add(id(node))
        names: set[str] = set()
        if named := as_object(node.get("properties")):
            names.update(name for name, part in named.items() if self.is_hidden(part, source))
        for part in as_list(node.get("allOf")):
            target = source.follow(part)
            said = as_object(target.node)
            if said is not None and id(said) not in seen:
                names |= self._hidden_names(said, target.source, seen)
        return frozenset(names)


def add_definitions(schema: JsonObject, definitions: Mapping[str, Any]) -> JsonObject:
    return {**schema, "$defs": definitions} if definitions else schema


def _require(value: Any, without: frozenset[str], out: JsonObject) -> None:
    if isinstance(value, list):
        names = [name for name in dict.fromkeys(map(str, as_list(value))) if name not in without]
        if names:
            out["required"] = names


def _with_null(schema: JsonObject) -> JsonObject:
    if "$ref" in schema or not SCHEMA_LIST_KEYWORDS.isdisjoint(schema):
        around = {key: schema[key] for key in ("title", "description", "default") if key in schema}
        inner = {key: value for key, value in schema.items() if key not in around}
        return {**around, "anyOf": [inner, {"type": "null"}]}
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    if "enum" in schema and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema

"""Schemas for OpenAI's strict mode, in which the model can write only arguments that fit.

Strict mode accepts a subset of JSON Schema: closed objects whose properties are all required. Optional properties may
be null; validation drops such a null again. Constraints that the subset lacks go into descriptions. A schema that
allows more than the subset can express, such as an object with any keys, has no strict form.
"""

from __future__ import annotations

import re
from typing import Any

from toolspace.core.model_schemas import ModelSchema, add_note
from toolspace.core.schema_parts import (
    JsonSchema,
    References,
    as_list,
    as_names,
    as_schema,
    is_schema,
    list_types,
    merge_all_of,
    walk_schemas,
)

_KEPT_KEYWORDS = frozenset(
    (
        "type", "description", "enum", "const", "anyOf", "$ref", "properties", "required", "additionalProperties",
        "items", "pattern", "format", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "minItems", "maxItems",
    )
)  # fmt: skip
_SILENT_KEYWORDS = frozenset(
    ("$schema", "$id", "$anchor", "$comment", "title", "examples", "example", "deprecated", "readOnly", "writeOnly")
)
"""Keywords that allow and forbid nothing, so that nobody misses them."""
_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"))
_LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?:[=!]|<[=!])")
_JSON_TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (type(None), "null"))
MAX_PROPERTIES = 5_000
MAX_DEPTH = 10
MAX_ENUM_VALUES = 1_000
MAX_NAME_CHARACTERS = 120_000


class NotStrict(Exception):
    """The schema has no strict form. The message says why."""


def build_strict_schema(schema: JsonSchema) -> ModelSchema:
    """Returns the strict form of a schema of `core.model_schemas`. Raises `NotStrict`."""
    conversion = _StrictConversion(schema)
    try:
        result = conversion.convert(schema, "the arguments", 1)
        if definitions := as_schema(schema.get("$defs")):
            result["$defs"] = {
                name: conversion.convert(as_schema(part), f"$defs.{name}", 1) for name, part in definitions.items()
            }
    except RecursionError:
        raise NotStrict("the schema is nested too deeply") from None
    _check_size(result)
    return ModelSchema(result, tuple(conversion.changes))


class _StrictConversion:
    def __init__(self, root: JsonSchema) -> None:
        self.changes: dict[str, None] = {}
        self._references = References(root)

    def convert(self, schema: JsonSchema, place: str, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH * 2:
            raise NotStrict(f"{place} is nested too deeply")
        if "allOf" in schema:
            merged_schema = merge_all_of(schema, self._references)
            if merged_schema is None:
                raise NotStrict(f"{place} has an allOf whose parts cannot be merged")
            schema = merged_schema
        schema = _with_types(schema)
        self._check(schema, place)
        result = self._keep(schema, place)
        if "properties" in schema or "object" in list_types(schema):
            result |= self._convert_object(schema, place, depth)
        if "items" in schema and "array" in list_types(schema):
            result["items"] = self.convert(as_schema(schema["items"]), f"{place}[]", depth + 1)
        options = [*as_list(schema.get("anyOf")), *as_list(schema.get("oneOf"))]
        if options:
            if "oneOf" in schema and len(options) > 1:
                self.changes[f"{place}: oneOf became anyOf"] = None
            result["anyOf"] = [
                self.convert(as_schema(option), f"{place}.{number}", depth) for number, option in enumerate(options)
            ]
        if "$ref" in result and len(result) > 1:  # A reference must be alone.
            result["anyOf"] = [{"$ref": result.pop("$ref")}]
        return result

    def _check(self, schema: JsonSchema, place: str) -> None:
        if schema.get("not") == {} or not (list_types(schema) or {"$ref", "anyOf", "oneOf"} & schema.keys()):
            raise NotStrict(f"{place} has no type")
        if "anyOf" in schema and "oneOf" in schema:
            raise NotStrict(f"{place} has anyOf and oneOf")
        if "array" in list_types(schema):
            if "prefixItems" in schema:
                raise NotStrict(f"{place} is an array with a schema for each place")
            if not as_schema(schema.get("items")):
                raise NotStrict(f"{place} is an array of anything")
        reference = schema.get("$ref")
        if reference is not None and self._references.resolve(reference) is None:
            raise NotStrict(f"{place} has the reference {str(reference)[:80]}, which leads nowhere")

    def _keep(self, schema: JsonSchema, place: str) -> dict[str, Any]:
        """The keywords of one schema that strict mode accepts. The others become a note."""
        result: dict[str, Any] = {}
        constraints: dict[str, Any] = {}
        is_typed = bool(list_types(schema))
        for keyword, value in schema.items():
            if keyword in ("properties", "required", "additionalProperties", "items", "anyOf", "oneOf", "$defs"):
                continue
            is_kept = keyword in _KEPT_KEYWORDS
            if keyword == "format":
                is_kept = value in _FORMATS
            elif keyword == "pattern":
                is_kept = not _LOOKAROUND.search(value)
            elif keyword == "enum":
                is_kept = is_typed and bool(value)
            if is_kept:
                result[keyword] = value
            elif keyword not in _SILENT_KEYWORDS and not keyword.startswith("x-"):
                constraints[keyword] = value
        if constraints:
            note = ", ".join(f"{keyword}: {str(value)[:80]}" for keyword, value in constraints.items())
            self.changes[f"{place}: only in the description: {note}"] = None
            result = add_note(result, note)
        return result

    def _convert_object(self, schema: JsonSchema, place: str, depth: int) -> dict[str, Any]:
        for keyword in ("additionalProperties", "unevaluatedProperties", "patternProperties"):
            if schema.get(keyword, False) is not False:
                raise NotStrict(f"{place} may have any keys")
        properties = as_schema(schema.get("properties"))
        if not properties and "additionalProperties" not in schema and place != "the arguments":
            raise NotStrict(f"{place} may have any keys")
        required = as_names(schema.get("required"))
        if missing := [name for name in required if name not in properties]:
            raise NotStrict(f"{place} requires {missing[0]}, which has no schema")
        new_properties: dict[str, Any] = {}
        for name, part in properties.items():
            if not is_schema(part):
                raise NotStrict(f"{place}.{name} may be anything")
            part_schema = self.convert(part, f"{place}.{name}", depth + 1)
            new_properties[name] = part_schema if name in required else _nullable(part_schema)
        return {"properties": new_properties, "required": list(new_properties), "additionalProperties": False}


def _with_types(schema: JsonSchema) -> JsonSchema:
    """Returns the schema with the `type` that its other keywords imply."""
    if "type" in schema:
        return schema
    values = as_list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    types = {_type_of(value) for value in values}
    if "" in types:
        raise NotStrict("a constant is an object or an array")
    if not types and "properties" in schema:
        types = {"object"}
    if not types and as_schema(schema.get("items")):
        types = {"array"}
    if not types:
        return schema
    names = sorted(types)
    return {**schema, "type": names[0] if len(names) == 1 else names}


def _type_of(value: object) -> str:
    return next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "")


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an optional property: null stands for a property that is left out."""
    types = list_types(schema)
    if "null" in types:
        return schema
    if types and "enum" not in schema and "const" not in schema and "anyOf" not in schema:
        return {**schema, "type": [*types, "null"]}
    options = as_list(schema.get("anyOf"))
    if options and not types:
        is_nullable = any("null" in list_types(as_schema(option)) for option in options)
        return schema if is_nullable else {**schema, "anyOf": [*options, {"type": "null"}]}
    description = {"description": schema["description"]} if "description" in schema else {}
    inner = {keyword: value for keyword, value in schema.items() if keyword != "description"}
    return {"anyOf": [inner, {"type": "null"}], **description}


def _check_size(schema: JsonSchema) -> None:
    property_count = enum_count = characters = 0
    for part in walk_schemas(schema):
        names = [*as_schema(part.get("properties")), *as_schema(part.get("$defs"))]
        values = [*as_list(part.get("enum")), *([part["const"]] if "const" in part else [])]
        property_count += len(as_schema(part.get("properties")))
        enum_count += len(as_list(part.get("enum")))
        characters += sum(map(len, names)) + sum(len(value) for value in values if isinstance(value, str))
    for count, limit, noun in (
        (property_count, MAX_PROPERTIES, "properties"),
        (enum_count, MAX_ENUM_VALUES, "values of enum"),
        (characters, MAX_NAME_CHARACTERS, "characters of names and constants"),
        (_object_depth(schema), MAX_DEPTH, "levels of objects"),
    ):
        if count > limit:
            raise NotStrict(f"the schema has {count:,} {noun}; strict mode accepts {limit:,}")


def _object_depth(schema: JsonSchema, depth: int = 0) -> int:
    """Returns how many objects are inside of each other at most, without following references."""
    depth += "properties" in schema
    children = [*as_schema(schema.get("properties")).values(), *as_schema(schema.get("$defs")).values()]
    children += [schema.get("items"), *as_list(schema.get("anyOf"))]
    return max((_object_depth(as_schema(child), depth) for child in children if is_schema(child)), default=depth)

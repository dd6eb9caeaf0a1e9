"""Input schemas as models get them: an object at the top, names that all providers accept, valid JSON Schema 2020-12.

Every export to a model starts from it; `core.strict_schemas` and `core.gemini_schemas` narrow its result down. What is
not expressed any more is in the list of changes, and in a description where the model can use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from toolspace.core.argument_names import ArgumentNames
from toolspace.core.schema_parts import (
    DEFINITION_KEYWORDS,
    IN_PLACE_KEYWORDS,
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    JsonSchema,
    References,
    as_list,
    as_names,
    as_schema,
    is_list,
    is_schema,
    list_types,
    split_pointer,
    walk_schemas,
)

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFUSED_AT_TOP = (*IN_PLACE_KEYWORDS, "not", "enum", "const", "if", "then", "else", "$ref", "$dynamicRef")
"""Keywords that providers refuse at the top of a tool's schema."""
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_NUMBER_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_COUNT_KEYWORDS = frozenset(
    (
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
        "maxContains",
    )
)  # fmt: skip
_TEXT_KEYWORDS = frozenset(
    ("pattern", "format", "title", "description", "$comment", "contentEncoding", "contentMediaType", "$anchor")
)
_BOOLEAN_KEYWORDS = frozenset(("uniqueItems", "deprecated", "readOnly", "writeOnly"))
_LIST_KEYWORDS = frozenset(("enum", "examples"))
_NO_DEFINITION = re.compile(r"[^A-Za-z0-9_.-]+")
_MAX_MERGE_DEPTH = 8
_MAX_NOTE = 300
_MAX_CHANGES = 100


class ModelSchema(NamedTuple):
    """A schema for models, and what it does not say any more, or says in another way."""

    schema: JsonSchema
    changes: tuple[str, ...] = ()


_UNREADABLE = ModelSchema({"type": "object", "properties": {}}, ("the schema is nested too deeply to be shown",))


def build_model_schema(schema: JsonSchema, names: ArgumentNames | None) -> ModelSchema:
    """Returns the schema for models that accept JSON Schema. `names` are those of the schema."""
    try:
        if names is None and _is_ready(schema):
            return ModelSchema(schema)
        conversion = _Conversion(schema, names.model_names if names is not None else {})
        result = to_object_schema(conversion.convert_root())
    except RecursionError:
        return _UNREADABLE
    return ModelSchema(result.schema, tuple(dict.fromkeys((*conversion.changes, *result.changes)))[:_MAX_CHANGES])


def add_note(schema: JsonSchema, note: str) -> dict[str, Any]:
    """Returns the schema with a note at the end of its description."""
    note = note if len(note) <= _MAX_NOTE else f"{note[:_MAX_NOTE]}…"
    description = schema.get("description")
    text = f"{description} ({note})" if isinstance(description, str) and description.strip() else note
    return {**schema, "description": text}


def _is_ready(schema: JsonSchema) -> bool:
    """Whether models can have the schema as it is. Most schemas are ready, and this is faster than to convert them."""
    if schema.get("type") != "object" or "properties" not in schema or any(map(schema.__contains__, _REFUSED_AT_TOP)):
        return False
    conversion = _Conversion(schema, {})
    return all(conversion.is_ready(part, is_root=part is schema) for part in walk_schemas(schema))


class _Conversion:
    """Converts one schema. The references of the result lead to `$defs` or to the root."""

    def __init__(self, root: JsonSchema, model_names: Mapping[str, str]) -> None:
        self.changes: dict[str, None] = {}
        self._root = root
        self._references = References(root)
        self._model_names = model_names
        self._definitions: dict[str, Any] = {}
        self._names_by_id: dict[int, str] = {}

    def convert_root(self) -> dict[str, Any]:
        result = self.convert(self._root, is_root=True)
        for keyword in ("$defs", "definitions"):
            for name, part in as_schema(self._root.get(keyword)).items():
                if is_schema(part):
                    self._define(part, name)
        return {**result, "$defs": self._definitions} if self._definitions else result

    def is_ready(self, schema: JsonSchema, *, is_root: bool) -> bool:
        """Whether a schema, without those inside of it, can stay as it is."""
        for keyword, value in schema.items():
            if keyword in DEFINITION_KEYWORDS and (not is_root or keyword != "$defs"):
                return False
            if keyword == "$ref" and not self._is_ready_reference(value):
                return False
            if keyword in ("$dynamicRef", "$id") or not _is_valid(keyword, value):
                return False
        return "items" in schema or "array" not in list_types(schema)

    def _is_ready_reference(self, reference: object) -> bool:
        if reference == "#":
            return True
        name = reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""
        definitions = as_schema(self._root.get("$defs"))
        return is_schema(definitions.get(name)) and not _NO_DEFINITION.search(name)

    def convert(self, schema: JsonSchema, *, is_root: bool = False) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in DEFINITION_KEYWORDS or (keyword == "$id" and not is_root):
                continue
            if keyword in ("$ref", "$dynamicRef"):
                result |= self._convert_reference(value)
            elif keyword == "$schema" and value != _DIALECT:
                continue
            elif keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
                continue  # OpenAPI 3.0 and old drafts; see below.
            elif not _is_valid(keyword, value):
                self._convert_invalid(result, keyword, value)
            elif keyword == "properties":
                result[keyword] = {
                    self._model_name(name): self._convert_property(name, part)
                    for name, part in as_schema(value).items()
                }
            elif keyword == "required":
                result[keyword] = list(map(self._model_name, as_names(value)))
            elif keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
                result[keyword] = {
                    self._model_name(name): list(map(self._model_name, as_names(part)))
                    if is_list(part)
                    else self._convert_part(part)
                    for name, part in as_schema(value).items()
                }
            elif keyword == "propertyNames":
                result |= self._convert_property_names(value)
            elif keyword == "discriminator" and is_schema(value):
                name = as_schema(value).get("propertyName")
                result[keyword] = {**as_schema(value), "propertyName": self._model_name(str(name))}
            elif keyword in SCHEMA_KEYWORDS:
                result[keyword] = self._convert_part(value)
            elif keyword in SCHEMA_LIST_KEYWORDS:
                result[keyword] = list(map(self._convert_part, as_list(value)))
            elif keyword in SCHEMA_MAP_KEYWORDS:
                result[keyword] = {name: self._convert_part(part) for name, part in as_schema(value).items()}
            else:
                result[keyword] = value
        for bound in ("minimum", "maximum"):
            keyword = f"exclusive{bound.capitalize()}"
            if schema.get(keyword) is True and bound in result:
                result[keyword] = result.pop(bound)
        if "array" in list_types(result) and "items" not in result:
            result["items"] = {}  # Some providers refuse an array without it.
        return result

    def _convert_part(self, part: Any) -> Any:
        return self.convert(part) if is_schema(part) else part

    def _convert_property(self, name: str, part: Any) -> Any:
        new_schema = self._convert_part(part)
        if name not in self._model_names:
            return new_schema
        model_name = self._model_names[name]
        self.changes[f'the property "{name}" is called "{model_name}"'] = None
        return add_note(new_schema, f'called "{name}"') if is_schema(new_schema) else new_schema

    def _convert_property_names(self, value: Any) -> dict[str, Any]:
        schema = dict(as_schema(value))
        for keyword in ("enum", "const"):
            if keyword in schema:
                names = as_list(schema[keyword]) if keyword == "enum" else [schema[keyword]]
                model_names = [self._model_name(name) if isinstance(name, str) else name for name in names]
                schema[keyword] = model_names if keyword == "enum" else model_names[0]
        if self._model_names and "pattern" in schema:  # The names for models may not match it.
            self._add_change("propertyNames", "pattern", schema.pop("pattern"))
        return {"propertyNames": self._convert_part(schema) if is_schema(value) else value}

    def _convert_invalid(self, result: dict[str, Any], keyword: str, value: Any) -> None:
        if keyword == "items" and is_list(value):  # A tuple, as older drafts write it.
            if value:
                result["prefixItems"] = list(map(self._convert_part, as_list(value)))
            return
        if keyword == "type" and (types := [type for type in as_names(value) if type in _TYPES]):
            result[keyword] = types
        elif keyword == "required" and (names := as_names(value)):
            result[keyword] = list(map(self._model_name, names))
        elif keyword == "properties" and is_schema(value):
            result[keyword] = {
                self._model_name(str(name)): self._convert_property(str(name), part)
                if isinstance(part, Mapping | bool)
                else {}
                for name, part in as_schema(value).items()
            }
        elif keyword != "$schema":
            self._add_change("", keyword, value)

    def _add_change(self, place: str, keyword: str, value: object) -> None:
        suffix = f" of {place}" if place else ""
        self.changes[f"left out: {keyword}{suffix} = {str(value)[:80]}"] = None

    def _model_name(self, name: str) -> str:
        return self._model_names.get(name, name)

    def _convert_reference(self, reference: object) -> dict[str, Any]:
        target = self._references.resolve(reference)
        if target is self._root:
            return {"$ref": "#"}
        if isinstance(target, bool):
            return {} if target else {"not": {}}
        if target is None:
            self.changes[f"left out: the reference {str(reference)[:80]}, which leads nowhere"] = None
            return {}
        return {"$ref": f"#/$defs/{self._define(target, split_pointer(str(reference))[-1])}"}

    def _define(self, target: JsonSchema, wanted_name: str) -> str:
        """Adds a definition, once, and returns its name."""
        name = self._names_by_id.get(id(target))
        if name is None:
            base = _NO_DEFINITION.sub("_", wanted_name) or "definition"
            name, number = base, 1
            while name in self._definitions:
                number += 1
                name = f"{base}_{number}"
            self._names_by_id[id(target)] = name
            self._definitions[name] = {}
            self._definitions[name] = self.convert(target)
        return name


def _is_valid(keyword: str, value: Any) -> bool:
    """Whether the value of a keyword has the form that JSON Schema 2020-12 requires."""
    if keyword == "type":
        types = as_names(value)
        is_whole = is_list(value) and bool(types) and len(types) == len(value)
        return value in _TYPES if isinstance(value, str) else is_whole and all(map(_TYPES.__contains__, types))
    if keyword in SCHEMA_KEYWORDS:
        return isinstance(value, Mapping | bool)
    if keyword in SCHEMA_LIST_KEYWORDS:
        return bool(as_list(value)) and all(isinstance(part, Mapping | bool) for part in as_list(value))
    if keyword == "dependencies":
        return is_schema(value)
    if keyword in SCHEMA_MAP_KEYWORDS:
        return is_schema(value) and all(
            isinstance(name, str) and isinstance(part, Mapping | bool)
            for name, part in cast("Mapping[object, object]", value).items()
        )
    if keyword in _NUMBER_KEYWORDS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (keyword != "multipleOf" or value > 0)
    if keyword in _COUNT_KEYWORDS:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return is_whole and not isinstance(value, bool) and value >= 0
    if keyword in _TEXT_KEYWORDS:
        return isinstance(value, str)
    if keyword in _BOOLEAN_KEYWORDS:
        return isinstance(value, bool)
    if keyword in _LIST_KEYWORDS:
        return is_list(value)
    if keyword == "required":
        return is_list(value) and len(as_names(value)) == len(as_list(value))
    if keyword == "dependentRequired":
        parts = as_schema(value).values()
        return is_schema(value) and all(is_list(part) and len(as_names(part)) == len(as_list(part)) for part in parts)
    return keyword != "$schema" or value == _DIALECT


# The top of a schema


def to_object_schema(schema: JsonSchema) -> ModelSchema:
    """Returns a schema whose top is a plain object, as providers require it.

    Alternatives at the top become one object with all their properties; those are required that each alternative
    requires. The model may then write arguments that the tool refuses; it reads the error and tries again.
    """
    if schema.get("type") == "object" and not any(word in schema for word in _REFUSED_AT_TOP):
        return ModelSchema(schema if "properties" in schema else {**schema, "properties": {}})
    merge = _Merge(schema)
    merge.add(schema, is_required=True, depth=0)
    kept_words = ("$schema", "$id", "$defs", "title", "description")
    result: dict[str, Any] = {key: value for key, value in schema.items() if key not in _REFUSED_AT_TOP}
    for part in merge.parts:
        for key, value in part.items():
            if key not in _REFUSED_AT_TOP and key not in kept_words:
                result.setdefault(key, value)
    result |= {"type": "object", "properties": merge.build_properties()}
    result.pop("required", None)
    if merge.required:
        result["required"] = list(merge.required)
    if len(merge.parts) > 1:  # `additionalProperties` of one part is about the properties of that part only.
        is_closed = all(part.get("additionalProperties") is False for part in merge.parts if "properties" in part)
        for keyword in ("additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties"):
            result.pop(keyword, None)
        if is_closed and any("properties" in part for part in merge.parts):
            result["additionalProperties"] = False
    if merge.alternatives:
        result = add_note(result, f"give one of these sets of parameters: {'; '.join(merge.alternatives)}")
    return ModelSchema(result, tuple(merge.changes))


class _Merge:
    """Collects the properties of a schema, of what it refers to, and of its alternatives."""

    def __init__(self, root: JsonSchema) -> None:
        self.parts: list[JsonSchema] = []
        self.required: dict[str, None] = {}
        self.alternatives: dict[str, None] = {}
        self.changes: dict[str, None] = {}
        self._references = References(root)
        self._properties: dict[str, list[tuple[Any, bool]]] = {}
        self._seen_ids: set[int] = set()

    def add(self, schema: JsonSchema, *, is_required: bool, depth: int) -> set[str]:
        """Adds a part. `is_required`: it applies to every call. Returns the names that the part requires."""
        if id(schema) in self._seen_ids or depth > _MAX_MERGE_DEPTH:
            return set()
        self._seen_ids.add(id(schema))
        self.parts.append(schema)
        for name, part in as_schema(schema.get("properties")).items():
            self._properties.setdefault(name, []).append((part, is_required))
        own_required = as_names(schema.get("required"))
        required = set(own_required)
        if is_required:
            self.required.update(dict.fromkeys(own_required))
        if "$ref" in schema:
            target = as_schema(self._references.resolve(schema["$ref"]))
            required |= self.add(target, is_required=is_required, depth=depth + 1)
        for part in map(as_schema, as_list(schema.get("allOf"))):
            required |= self.add(part, is_required=is_required, depth=depth + 1)
        for keyword in ("anyOf", "oneOf"):
            options = [as_schema(option) for option in as_list(schema.get(keyword))]
            if not options:
                continue
            names = [self.add(option, is_required=False, depth=depth + 1) for option in options]
            self.changes[f"{keyword} at the top became one object with the properties of all options"] = None
            if len(options) > 1 and any(names) and len({frozenset(group) for group in names}) > 1:
                self.alternatives.update((", ".join(sorted(group)) or "none", None) for group in names)
            required |= names[0].intersection(*names)
        for keyword in ("then", "else"):
            self.add(as_schema(schema.get(keyword)), is_required=False, depth=depth + 1)
        for keyword in ("not", "if", "enum", "const"):
            if keyword in schema:
                self.changes[f"left out: {keyword} at the top"] = None
        if is_required:
            self.required.update(dict.fromkeys(sorted(required)))
        return required

    def build_properties(self) -> dict[str, Any]:
        return {name: _merge_property(parts) for name, parts in self._properties.items()}


def _merge_property(parts: Iterable[tuple[Any, bool]]) -> Any:
    """Returns one schema for a property that several parts describe."""
    always: list[Any] = []
    options: list[Any] = []
    for part, is_required in parts:
        group = always if is_required else options
        if part not in group:
            group.append(part)
    schema = always[0] if len(always) == 1 else {"allOf": always}
    if not options:
        return schema
    if always:
        return schema  # The general part; an option only narrows it.
    constants = [as_schema(option)["const"] for option in options if "const" in as_schema(option)]
    if len(options) > 1 and len(constants) == len(options):
        return {"enum": constants}
    return options[0] if len(options) == 1 else {"anyOf": options}

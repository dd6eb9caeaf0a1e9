"""Schemas for Gemini, whose `parametersJsonSchema` accepts a part of JSON Schema.

Constraints that Gemini does not know go into descriptions, so that the model still reads them.
"""

from __future__ import annotations

from typing import Any, cast

from toolspace.core import json_text
from toolspace.core.model_schemas import ModelSchema, add_note
from toolspace.core.schema_parts import (
    JsonSchema,
    References,
    as_list,
    as_names,
    as_schema,
    is_schema,
    list_subschemas,
    list_types,
    map_subschemas,
    merge_all_of,
)

KEYWORDS = frozenset(
    (
        "$anchor", "$defs", "$id", "$ref", "additionalProperties", "anyOf", "description", "enum", "format", "items",
        "maxItems", "maximum", "minItems", "minimum", "oneOf", "prefixItems", "properties", "propertyOrdering",
        "required", "title", "type",
    )
)  # fmt: skip
"""The keywords that Google's documentation of `responseJsonSchema` lists."""
_SILENT_KEYWORDS = frozenset(
    ("$schema", "$comment", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator")
)
"""Keywords that allow and forbid nothing, so that nobody misses them."""
_EXCLUSIVE_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def build_gemini_schema(schema: JsonSchema) -> ModelSchema:
    """Returns the form of a schema of `core.model_schemas` that Gemini accepts."""
    conversion = _GeminiConversion(schema)
    try:
        return ModelSchema(conversion.convert(schema, "the arguments"), tuple(conversion.changes))
    except RecursionError:
        return ModelSchema({"type": "object", "properties": {}}, ("the schema is nested too deeply to be shown",))


class _GeminiConversion:
    def __init__(self, root: JsonSchema) -> None:
        self.changes: dict[str, None] = {}
        self._root = root
        self._references = References(root)
        self._is_cyclic: dict[str, bool] = {}

    def convert(self, schema: JsonSchema, place: str) -> dict[str, Any]:
        if "allOf" in schema:
            schema = self._merge(schema, place)
        constant = {"enum": [schema["const"]]} if "const" in schema and "enum" not in schema else {}
        result: dict[str, Any] = {}
        constraints: dict[str, Any] = {}
        for keyword, value in {**schema, **constant}.items():
            if keyword == "enum":
                self._convert_enum(schema, as_list(value), result, constraints)
            elif keyword in KEYWORDS:
                result[keyword] = value
            elif keyword in _EXCLUSIVE_BOUNDS:
                result.setdefault(_EXCLUSIVE_BOUNDS[keyword], value)
                constraints[keyword] = value
            elif keyword == "default":
                constraints[keyword] = json_text.describe(value, 80)
            elif keyword not in _SILENT_KEYWORDS and keyword != "const" and not keyword.startswith("x-"):
                constraints[keyword] = value
        result = {keyword: value for keyword, value in result.items() if keyword not in constraints}
        if constraints:
            note = ", ".join(f"{keyword}: {str(value)[:80]}" for keyword, value in constraints.items())
            self.changes[f"{place}: only in the description: {note}"] = None
            result = add_note(result, note)
        result = self._convert_subschemas(result, place)
        if "required" in result:
            self._convert_required(result, place)
        if "$ref" in result and any(not keyword.startswith("$") for keyword in result):  # It must be alone.
            result = {"anyOf": [{"$ref": result.pop("$ref")}], **result}
        return result

    def _merge(self, schema: JsonSchema, place: str) -> JsonSchema:
        merged_schema = merge_all_of(schema, self._references)
        if merged_schema is not None:
            return merged_schema
        # The parts differ in some keyword: the properties of all parts, and of the other keywords the first ones.
        result: dict[str, Any] = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
        for part in map(as_schema, as_list(schema.get("allOf"))):
            if "$ref" in part:
                part = as_schema(self._references.resolve(part["$ref"]))
            for keyword, value in part.items():
                if keyword == "properties":
                    result[keyword] = {**as_schema(value), **as_schema(result.get(keyword))}
                elif keyword == "required":
                    result[keyword] = as_names([*as_list(result.get(keyword)), *as_list(value)])
                elif keyword not in ("$defs", "allOf"):
                    result.setdefault(keyword, value)
        self.changes[f"{place}: the parts of allOf became one schema"] = None
        return result

    def _convert_enum(
        self, schema: JsonSchema, values: list[Any], result: dict[str, Any], constraints: dict[str, Any]
    ) -> None:
        """Keeps the texts and numbers of `enum`. Gemini accepts no other values."""
        plain_values = [
            value for value in values if isinstance(value, str | int | float) and not isinstance(value, bool)
        ]
        other_values = [value for value in values if value is not None and value not in plain_values]
        if other_values or not plain_values:
            constraints["enum"] = [json_text.describe(value, 30) for value in values[:12]]
            return
        result["enum"] = plain_values
        types = list_types(schema) or sorted(
            {"string" if isinstance(value, str) else "number" for value in plain_values}
        )
        if None in values and "null" not in types:
            types = [*types, "null"]
        result["type"] = types[0] if len(types) == 1 else types

    def _convert_subschemas(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        if "properties" in schema:
            properties: dict[str, Any] = {}
            for name, part in as_schema(schema["properties"]).items():
                if part is False:
                    self.changes[f"{place}.{name} is not shown: no value is allowed"] = None
                    continue
                properties[name] = self.convert(as_schema(part), f"{place}.{name}")
            schema = {**schema, "properties": properties}
        inner = {keyword: value for keyword, value in schema.items() if keyword != "properties"}
        new_schema = map_subschemas(inner, lambda part: self.convert(part, place))
        if isinstance(new_schema.get("items"), bool):
            new_schema["items"] = {}
        for keyword in ("anyOf", "oneOf", "prefixItems"):
            if keyword in new_schema:
                options = as_list(new_schema[keyword])
                new_schema[keyword] = [as_schema(option) for option in options if option is not False] or [{}]
        if "$defs" in new_schema:
            new_schema["$defs"] = {name: as_schema(part) for name, part in as_schema(new_schema["$defs"]).items()}
        return {keyword: new_schema.get(keyword, value) for keyword, value in schema.items()}

    def _convert_required(self, schema: dict[str, Any], place: str) -> None:
        """Gemini accepts as required only what has a schema and does not contain itself."""
        properties = as_schema(schema.get("properties"))
        required: list[str] = []
        for name in as_names(schema["required"]):
            if name not in properties:
                self.changes[f"{place}: {name} is required, but has no schema"] = None
            elif self._contains_cycle(as_schema(properties[name])):
                self.changes[f"{place}.{name} is shown as optional: it can contain itself"] = None
            else:
                required.append(name)
        if required:
            schema["required"] = required
        else:
            del schema["required"]

    def _contains_cycle(self, schema: JsonSchema) -> bool:
        """Whether a schema has a reference to something that contains itself, outside of its own properties."""
        parts = [schema]
        while parts:
            part = parts.pop()
            if "$ref" in part and self._leads_to_itself(str(part["$ref"])):
                return True
            inner = {keyword: value for keyword, value in part.items() if keyword not in ("properties", "$defs")}
            parts.extend(list_subschemas(inner))
        return False

    def _leads_to_itself(self, reference: str) -> bool:
        if reference not in self._is_cyclic:
            target = self._references.resolve(reference)
            seen_ids: set[int] = set()
            stack = list(list_subschemas(as_schema(target)))
            is_cyclic = False
            if is_schema(target) and "$ref" in target:
                stack.append(cast("JsonSchema", {"$ref": target["$ref"]}))
            while stack and not is_cyclic:
                part = stack.pop()
                if id(part) in seen_ids:
                    continue
                seen_ids.add(id(part))
                stack.extend(list_subschemas(part))
                if "$ref" in part:
                    next_target = self._references.resolve(part["$ref"])
                    is_cyclic = next_target is target
                    stack.append(as_schema(next_target))
            self._is_cyclic[reference] = is_cyclic
        return self._is_cyclic[reference]

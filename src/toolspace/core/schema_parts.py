"""The structure of JSON Schemas: which keywords hold other schemas, and where references lead.

The modules that write schemas for models use it. It validates nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

JsonSchema = Mapping[str, Any]

SCHEMA_KEYWORDS = frozenset(
    (
        "items", "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    )
)  # fmt: skip
"""Keywords whose value is a schema. In older drafts `items` may also be a list of schemas."""
SCHEMA_LIST_KEYWORDS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
DEFINITION_KEYWORDS = frozenset(("$defs", "definitions"))
SCHEMA_MAP_KEYWORDS = DEFINITION_KEYWORDS | {"dependencies", "dependentSchemas", "patternProperties", "properties"}
IN_PLACE_KEYWORDS = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas describe the same value as the schema around them."""
_MAX_MERGE_DEPTH = 8


def is_schema(value: object) -> TypeGuard[JsonSchema]:
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def as_schema(value: object) -> JsonSchema:
    """Returns the value if it is a mapping; else an empty schema, which allows everything."""
    return value if is_schema(value) else {}


def as_list(value: object) -> list[Any]:
    return value if is_list(value) else []


def as_names(value: object) -> list[str]:
    """Returns the texts of a list such as that of `required`, each once."""
    return list(dict.fromkeys(name for name in as_list(value) if isinstance(name, str)))


def list_types(schema: JsonSchema) -> list[str]:
    """Returns the JSON types that `type` names; none if it is missing."""
    types = schema.get("type")
    return [types] if isinstance(types, str) else as_names(types)


def list_subschemas(schema: JsonSchema) -> Iterator[JsonSchema]:
    """Yields the schemas directly inside of a schema, without those that are only true or false."""
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAP_KEYWORDS:
            parts: list[Any] = list(as_schema(value).values())
        elif keyword in SCHEMA_KEYWORDS or keyword in SCHEMA_LIST_KEYWORDS:
            parts = as_list(value) or [value]
        else:
            continue
        for part in parts:
            if is_schema(part):
                yield part


def map_subschemas(schema: JsonSchema, convert: Callable[[JsonSchema], Any]) -> dict[str, Any]:
    """Returns a copy with each schema directly inside of it converted. Schemas that are true or false stay."""

    def convert_part(part: Any) -> Any:
        return convert(part) if is_schema(part) else part

    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAP_KEYWORDS and is_schema(value):
            result[keyword] = {name: convert_part(part) for name, part in as_schema(value).items()}
        elif keyword in SCHEMA_KEYWORDS or keyword in SCHEMA_LIST_KEYWORDS:
            result[keyword] = list(map(convert_part, as_list(value))) if is_list(value) else convert_part(value)
        else:
            result[keyword] = value
    return result


def walk_schemas(root: JsonSchema) -> Iterator[JsonSchema]:
    """Yields the schema and all schemas inside of it, without following references and without recursion."""
    stack = [root]
    while stack:
        schema = stack.pop()
        yield schema
        stack.extend(list_subschemas(schema))


class References:
    """Finds what the references inside of one schema mean."""

    def __init__(self, root: JsonSchema) -> None:
        self._root = root
        self._anchors: dict[str, JsonSchema] | None = None

    def resolve(self, reference: object) -> Any:
        """Returns the schema that a reference leads to; None if it leads nowhere, or out of the root."""
        if not isinstance(reference, str):
            return None
        base = self._root.get("$id")
        if isinstance(base, str) and base and not base.startswith("#"):
            reference = reference.removeprefix(base.rstrip("#"))
        if reference in ("", "#"):
            return self._root
        if not reference.startswith("#/"):
            return self._find_anchor(reference)
        target: Any = self._root
        for step in split_pointer(reference):
            if is_schema(target) and step in target:
                target = target[step]
            elif is_list(target) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                return None
        return target if is_schema(target) or isinstance(target, bool) else None

    def _find_anchor(self, reference: str) -> JsonSchema | None:
        if self._anchors is None:
            self._anchors = {}
            for schema in walk_schemas(self._root):
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(name := schema.get(keyword), str):
                        self._anchors[f"#{name}"] = schema
        return self._anchors.get(reference)


def split_pointer(reference: str) -> list[str]:
    """Returns the steps of `#/a/b`, decoded."""
    from urllib.parse import unquote

    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(reference[2:]).split("/")]


def merge_all_of(schema: JsonSchema, references: References, depth: int = 0) -> dict[str, Any] | None:
    """Returns the schema with the parts of its `allOf` in it; None if one schema cannot say the same."""
    if depth > _MAX_MERGE_DEPTH:
        return None
    own_part = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    if len(parts := as_list(schema.get("allOf"))) == 1 and "$ref" in own_part:
        return None
    result: dict[str, Any] = {}
    for part in (own_part, *parts):
        if isinstance(part, bool):
            if not part:
                return None
            continue
        part_schema = as_schema(part)
        if "$ref" in part_schema and part is not own_part:
            target = references.resolve(part_schema["$ref"])
            siblings = {keyword: value for keyword, value in part_schema.items() if keyword != "$ref"}
            part_schema = {"allOf": [as_schema(target)], **siblings}
        if "allOf" in part_schema:
            merged_part = merge_all_of(part_schema, references, depth + 1)
            if merged_part is None:
                return None
            part_schema = merged_part
        if not _merge_into(result, part_schema):
            return None
    return result


def _merge_into(result: dict[str, Any], part: JsonSchema) -> bool:
    """Adds the keywords of a part. Returns False if two parts say different things about the same."""
    for keyword, value in part.items():
        if keyword not in result or keyword in ("title", "description", "examples", "default"):
            result.setdefault(keyword, value)
        elif keyword == "required":
            result[keyword] = [*result[keyword], *(name for name in as_names(value) if name not in result[keyword])]
        elif keyword == "properties":
            properties = dict(as_schema(result[keyword]))
            for name, property_schema in as_schema(value).items():
                if properties.setdefault(name, property_schema) != property_schema:
                    return False
            result[keyword] = properties
        elif result[keyword] != value:
            return False
    # Closed parts allow only their own properties, so two of them together are not the union of both.
    return not (result.get("additionalProperties") is False and "properties" in part and part is not result and (
        set(as_schema(result.get("properties"))) != set(as_schema(part.get("properties")))
    ))  # fmt: skip

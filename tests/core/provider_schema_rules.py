"""The rules that providers publish for the schemas of tools, as checks. Each returns the violations it finds.

Sources: Anthropic's tool use reference (draft 2020-12; keys of properties), OpenAI's function calling and structured
outputs guides, Google's reference of `responseJsonSchema`. The checks share no code with the exports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs

KEY = re.compile(r"^[a-zA-Z0-9_.-]{1,64}\Z")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLES = (
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
STRICT_KEYWORDS = {
    "type", "description", "enum", "const", "anyOf", "$ref", "$defs", "properties", "required", "additionalProperties",
    "items", "pattern", "format", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minItems", "maxItems",
}  # fmt: skip
STRICT_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
GEMINI_KEYWORDS = {
    "$id", "$defs", "$ref", "$anchor", "type", "format", "title", "description", "enum", "items", "prefixItems",
    "minItems", "maxItems", "minimum", "maximum", "anyOf", "oneOf", "properties", "additionalProperties", "required",
    "propertyOrdering",
}  # fmt: skip


def parts(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in MAPS:
        for name, part in (schema.get(keyword) or {}).items():
            yield from parts(part, f"{path}/{keyword}/{name}")
    for keyword in LISTS:
        for index, part in enumerate(schema.get(keyword) or []):
            yield from parts(part, f"{path}/{keyword}/{index}")
    for keyword in SINGLES:
        yield from parts(schema.get(keyword), f"{path}/{keyword}")


def types_of(schema: dict[str, Any]) -> list[str]:
    value = schema.get("type", [])
    return [value] if isinstance(value, str) else value


def check_common(schema: Any) -> Iterator[str]:
    """All of them: an object at the top, keys of properties, a valid JSON Schema whose references lead somewhere."""
    if not isinstance(schema, dict) or schema.get("type") != "object" or not isinstance(schema.get("properties"), dict):
        yield "#: the top is not a plain object"
        return
    for keyword in ("anyOf", "oneOf", "allOf", "not", "enum", "$ref"):
        if keyword in schema:
            yield f"#: {keyword} at the top"
    if not jsonschema_rs.meta.is_valid({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}):
        yield "#: no valid JSON Schema 2020-12"
    for path, part in parts(schema):
        for key in part.get("properties") or {}:
            if not KEY.match(key):
                yield f"{path}: the key {key!r}"
        reference = part.get("$ref")
        if reference is not None and not (
            reference == "#" or reference.removeprefix("#/$defs/") in schema.get("$defs", {})
        ):
            yield f"{path}: the reference {reference!r} leads nowhere"


def check_anthropic(schema: Any) -> Iterator[str]:
    yield from check_common(schema)


def check_openai(schema: Any) -> Iterator[str]:
    yield from check_common(schema)
    for path, part in parts(schema):
        if "array" in types_of(part) and not isinstance(part.get("items"), dict | bool):
            yield f"{path}: an array without items"


def check_openai_strict(schema: Any) -> Iterator[str]:
    yield from check_openai(schema)
    count = enums = characters = 0
    for path, part in parts(schema):
        count += len(part.get("properties") or {})
        enums += len(part.get("enum") or [])
        characters += sum(map(len, part.get("properties") or {}))
        if unknown_keywords := set(part) - STRICT_KEYWORDS:
            yield f"{path}: {sorted(unknown_keywords)} is not permitted"
        if "$ref" in part and len(part) > 1:
            yield f"{path}: $ref cannot have keywords beside it"
        if not {"type", "$ref", "anyOf"} & set(part):
            yield f"{path}: the schema must have a type"
        if part.get("format", "date") not in STRICT_FORMATS:
            yield f"{path}: the format {part['format']!r}"
        if "object" in types_of(part) or "properties" in part:
            if part.get("additionalProperties") is not False:
                yield f"{path}: additionalProperties must be false"
            if set(part.get("required") or []) != set(part.get("properties") or {}):
                yield f"{path}: all properties must be required"
        if "array" in types_of(part) and not {"type", "$ref", "anyOf"} & set(part.get("items") or {}):
            yield f"{path}: items without a type"
        if path.count("/properties/") > 10:
            yield f"{path}: too deep"
    if count > 5_000 or enums > 1_000 or characters > 120_000:
        yield "#: too large"


def check_gemini(schema: Any) -> Iterator[str]:
    yield from check_common(schema)
    for path, part in parts(schema):
        if unknown_keywords := set(part) - GEMINI_KEYWORDS:
            yield f"{path}: {sorted(unknown_keywords)} is not supported"
        if "$ref" in part and any(not keyword.startswith("$") for keyword in part):
            yield f"{path}: beside $ref only keywords that begin with $ are allowed"
        if undefined_names := set(part.get("required") or []) - set(part.get("properties") or {}):
            yield f"{path}: required, but not defined: {sorted(undefined_names)}"
        if not all(
            isinstance(value, str | int | float) and not isinstance(value, bool) for value in part.get("enum", ())
        ):
            yield f"{path}: enum has other values than texts and numbers"
        if "array" in types_of(part) and not isinstance(part.get("items"), dict):
            yield f"{path}: an array without items"
        if any(isinstance(value, bool) for value in (part.get("properties") or {}).values()):
            yield f"{path}: a property whose schema is true or false"


def definition_schema(format: str, definition: dict[str, Any]) -> Any:
    return {
        "openai": lambda: definition["function"]["parameters"],
        "openai-responses": lambda: definition["parameters"],
        "anthropic": lambda: definition["input_schema"],
        "gemini": lambda: definition["parametersJsonSchema"],
    }[format]()


RULES: dict[str, Callable[[Any], Iterator[str]]] = {
    "openai": check_openai,
    "openai-responses": check_openai,
    "anthropic": check_anthropic,
    "gemini": check_gemini,
}


def find_violations(ts: Any) -> list[str]:
    """Exports all tools of a toolspace to every format and returns the violations of the providers' rules."""
    violations: list[str] = []
    for format, check in RULES.items():
        for definition in ts.to_llm_tools(format):
            name = (definition.get("function") or definition)["name"]
            violations += [f"{format} {name} {text}" for text in check(definition_schema(format, definition))]
    for format in ("openai", "openai-responses"):
        for definition in ts.to_llm_tools(format, strict=True):
            inner = definition.get("function") or definition
            check = check_openai_strict if inner.get("strict") else check_openai
            violations += [f"strict {inner['name']} {text}" for text in check(inner["parameters"])]
    return violations

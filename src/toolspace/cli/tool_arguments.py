"""Parses the arguments of `toolspace call`: `key=value` by the schema of the tool, `key:=json`, and `--args`.

Calls no tool. Values that do not fit the schema stay as they are: the validation of the call reports them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import click

from toolspace.core import json_text
from toolspace.core.validation import coerce

Schema = Mapping[str, Any]
_MAX_DEPTH = 16
_ANY_TYPE: frozenset[str] = frozenset()
_MAX_BYTES = 64 * 1024 * 1024


class TypedArgument(NamedTuple):
    """One argument of the command line."""

    key: str
    text: str
    is_json: bool
    """Whether it is written `key:=json`."""


def read_args(text: str | None) -> dict[str, Any]:
    """Returns the arguments of `--args`: a JSON object, `@file`, or `-` for standard input."""
    if text is None:
        return {}
    content: str | bytes = text
    if text == "-":
        content = sys.stdin.buffer.read(_MAX_BYTES + 1)
    elif text.startswith("@"):
        try:
            with Path(text[1:]).open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise click.UsageError(f"--args: {text[1:]} cannot be read: {reason}") from None
    if len(content) > _MAX_BYTES:
        raise click.UsageError(f"--args: more than {_MAX_BYTES:,} bytes")
    try:
        return json_text.parse_arguments(
            content.removeprefix(b"\xef\xbb\xbf") if isinstance(content, bytes) else content
        )
    except ValueError as error:
        raise click.UsageError(f"--args: {error}") from None


def combine_arguments(args: Mapping[str, Any], words: Sequence[str], schema: Schema) -> dict[str, Any]:
    """Returns all arguments of a call. A `key=value` replaces the same key of `--args`."""
    grouped: dict[str, list[TypedArgument]] = {}
    for word in words:
        pair = _parse_word(word, schema, {*args, *grouped})
        grouped.setdefault(pair.key, []).append(pair)
    return {**args, **{key: _convert(pairs, schema) for key, pairs in grouped.items()}}


def _parse_word(word: str, schema: Schema, present_keys: set[str]) -> TypedArgument:
    key, equals, text = word.partition("=")
    is_json = key.endswith(":")
    key = key.removesuffix(":")
    if equals and key:
        return TypedArgument(key, text, is_json)
    names = list(_properties(schema))
    missing_names = [name for name in schema.get("required") or () if name not in present_keys]
    hint = f"; the parameters are {', '.join(names)}" if names else ""
    if missing_names and not equals:
        hint = f"; did you mean {missing_names[0]}={word}?"
    raise click.UsageError(f"{word!r} is not key=value{hint}")


def _convert(pairs: Sequence[TypedArgument], schema: Schema) -> object:
    """Returns the value of one key, which may occur several times for a list."""
    key = pairs[0].key
    node = _properties(schema).get(key, schema.get("additionalProperties"))
    types = _types(node, schema)
    if len(pairs) == 1:
        return _convert_value(pairs[0], node, types, schema)
    if "array" not in types:
        raise click.UsageError(f"{key} is given {len(pairs)} times, but it takes one value")
    items = _items(node, schema)
    return [_convert_value(pair, items, _types(items, schema), schema) for pair in pairs]


def _convert_value(pair: TypedArgument, node: object, types: frozenset[str], root: Schema) -> object:
    key, text, is_json = pair
    if is_json:
        return _parse_json(f"{key}:={text}", text)
    if "string" in types:
        return text
    if not types:
        try:
            return json_text.decode(text)
        except ValueError:
            return text
    if (text[:1] == "[" and "array" in types) or (text[:1] == "{" and "object" in types):
        return _parse_json(f"{key}={text}", text)
    if "array" in types:
        items = _items(node, root)
        return [_convert_value(pair, items, _types(items, root), root)]
    value = coerce({"type": sorted(types)}, text)
    return _parse_large_number(text) if isinstance(value, str) and types & {"integer", "number"} else value


def _parse_json(word: str, text: str) -> object:
    try:
        return json_text.decode(text)
    except ValueError as error:
        raise click.UsageError(f"{word!r} is not JSON: {error}") from None


def _parse_large_number(text: str) -> object:
    """Returns a number that is too large for `coerce`; other text stays as it is."""
    try:
        value = json_text.decode(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


# Schemas


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return cast("Schema", properties) if isinstance(properties, Mapping) else {}


def _types(node: object, root: Schema, depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a part of a schema accepts; empty if it accepts any type."""
    if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
        return _ANY_TYPE
    schema = _resolve_reference(cast("Schema", node), root)
    if isinstance(kind := schema.get("type"), str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(map(str, cast("list[object]", kind)))
    for keyword in ("anyOf", "oneOf"):
        if options := _list(schema, keyword):
            option_types = [_types(option, root, depth + 1) for option in options]
            return _ANY_TYPE.union(*option_types) if all(option_types) else _ANY_TYPE
    values = [schema["const"]] if "const" in schema else _list(schema, "enum")
    if values:
        return frozenset(map(_type_of, values))
    return next((types for part in _list(schema, "allOf") if (types := _types(part, root, depth + 1))), _ANY_TYPE)


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _items(node: object, root: Schema) -> object:
    """Returns the schema of the items of an array."""
    return next((schema["items"] for schema in _parts(node, root, 0) if "items" in schema), None)


def _parts(node: object, root: Schema, depth: int) -> Iterator[Schema]:
    if isinstance(node, Mapping) and depth <= _MAX_DEPTH:
        schema = _resolve_reference(cast("Schema", node), root)
        yield schema
        for keyword in ("anyOf", "oneOf", "allOf"):
            for option in _list(schema, keyword):
                yield from _parts(option, root, depth + 1)


def _list(node: Schema, keyword: str) -> list[object]:
    value = node.get(keyword)
    return cast("list[object]", value) if isinstance(value, list) else []


def _resolve_reference(node: Schema, root: Schema) -> Schema:
    for _ in range(_MAX_DEPTH):
        reference = node.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = cast("Schema", target).get(step) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            break
        node = cast("Schema", target)
    return node

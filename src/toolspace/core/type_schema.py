"""Builds the JSON Schema of common type hints without pydantic, which would have to build a validator first.

For all other hints it returns None, and `core.function_arguments` uses pydantic. It stays because the benchmark
`register` needs it; a property test compares both on random hints.
"""

from __future__ import annotations

import datetime
import enum
import types
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

Schema = dict[str, Any]

_PLAIN: dict[object, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
    dict: {"additionalProperties": True, "type": "object"},
    datetime.datetime: {"format": "date-time", "type": "string"},
    datetime.date: {"format": "date", "type": "string"},
    datetime.time: {"format": "time", "type": "string"},
    datetime.timedelta: {"format": "duration", "type": "string"},
    uuid.UUID: {"format": "uuid", "type": "string"},
    Path: {"format": "path", "type": "string"},
    PurePath: {"format": "path", "type": "string"},
}
_JSON_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ARRAYS = frozenset((list, Sequence, Iterable))


def schema_of(hint: object) -> Schema | None:
    """Returns the schema of a hint, or None if only pydantic supports it."""
    try:
        plain = _PLAIN.get(hint)
    except TypeError:
        return None
    if plain is not None:
        return dict(plain)
    if hint is list:
        return {"items": {}, "type": "array"}
    origin = get_origin(hint)
    if origin is None:
        return _enum(hint) if isinstance(hint, type) and issubclass(hint, enum.Enum) else None
    if origin is Annotated:
        return _annotated(hint)
    arguments = get_args(hint)
    if origin is Literal:
        return _choices(list(arguments))
    if origin is Union or origin is types.UnionType:
        return _union(arguments)
    if origin in _ARRAYS and len(arguments) == 1:
        items = schema_of(arguments[0])
        return None if items is None else {"items": items, "type": "array"}
    if (origin is dict or origin is Mapping) and len(arguments) == 2 and arguments[0] is str:
        values = schema_of(arguments[1])
        if values is None:
            return None
        return {"additionalProperties": values or True, "type": "object"}
    return None


def _union(arguments: tuple[object, ...]) -> Schema | None:
    options: list[Schema] = []
    for argument in sorted(arguments, key=lambda argument: argument is type(None)):  # Null last, as in pydantic.
        option = schema_of(argument)
        if option is None:
            return None
        if option in options:
            return None  # Pydantic merges equal options in its own way.
        options.append(option)
    return {"anyOf": options}


def _choices(values: list[object]) -> Schema | None:
    kinds = {type(value) for value in values}
    if not kinds <= _JSON_TYPES.keys():
        return None
    if len(values) == 1:
        return {"const": values[0], "type": _JSON_TYPES[type(values[0])]}
    return {"enum": values, "type": _JSON_TYPES[kinds.pop()]} if len(kinds) == 1 else {"enum": values}


def _enum(hint: type[enum.Enum]) -> Schema | None:
    values = [member.value for member in hint]
    if hint.__doc__ or not values:
        return None  # Pydantic puts a docstring into a separate definition.
    return _choices(values)


def _annotated(hint: object) -> Schema | None:
    base, *metadata = get_args(hint)
    schema = schema_of(base)
    if schema is None:
        return None
    for item in metadata:
        if isinstance(item, str):
            schema["description"] = item
        elif type(item).__module__ == "pydantic.fields" and type(item).__name__ == "FieldInfo":
            if not _add_field(schema, item):
                return None
        elif not _add_constraint(schema, item):
            return None
    return schema


_SUPPORTED_FIELD_ATTRIBUTES = frozenset(("annotation", "description", "examples"))
_BOUNDS = {
    "Ge": ("ge", "minimum"),
    "Gt": ("gt", "exclusiveMinimum"),
    "Le": ("le", "maximum"),
    "Lt": ("lt", "exclusiveMaximum"),
}


def _add_field(schema: Schema, field: Any) -> bool:
    """Adds a pydantic `Field` to the schema. Returns False if it has unsupported attributes."""
    attributes = cast("Mapping[str, object]", field._attributes_set)
    if not attributes.keys() <= _SUPPORTED_FIELD_ATTRIBUTES:
        return False
    if field.description is not None:
        schema["description"] = field.description
    if field.examples is not None:
        schema["examples"] = field.examples
    return all(_add_constraint(schema, item) for item in field.metadata)


def _add_constraint(schema: Schema, item: Any) -> bool:
    """Adds a bound of `annotated_types` to the schema. Returns False if it is not supported."""
    if not schema.keys().isdisjoint(("const", "enum", "format")):
        return False  # Bounds of choices and dates mean something else.
    kind, name = schema.get("type"), type(item).__name__
    if name in _BOUNDS and kind in ("integer", "number"):
        attribute, keyword = _BOUNDS[name]
        schema[keyword] = getattr(item, attribute)
        return True
    if name in ("MinLen", "MaxLen") and kind in ("string", "array"):
        size = "Length" if kind == "string" else "Items"
        which, bound = ("min", item.min_length) if name == "MinLen" else ("max", item.max_length)
        schema[which + size] = bound
        return True
    return False

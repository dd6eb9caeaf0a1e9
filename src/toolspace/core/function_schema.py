"""Builds the JSON Schema and the validator of a Python function's arguments. `core.tool` uses it.

Pydantic validates. The schemas of common type hints are built without it: pydantic would have to build a validator
first.
"""

from __future__ import annotations

import datetime
import enum
import math
import types
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

from toolspace.core import json_text
from toolspace.core.argument_validation import (
    MAX_ISSUES,
    InvalidArguments,
    Issue,
    PlaceTree,
    add_place,
    coerce,
    format_path,
    masked_value,
    not_an_object_issue,
    unknown_parameter_message,
)
from toolspace.core.function_signature import MISSING, FunctionParameter, FunctionSignature
from toolspace.errors import ToolDefinitionError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails

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
_SUPPORTED_FIELD_ATTRIBUTES = frozenset(("annotation", "description", "examples"))
_BOUNDS = {
    "Ge": ("ge", "minimum"),
    "Gt": ("gt", "exclusiveMinimum"),
    "Le": ("le", "maximum"),
    "Lt": ("lt", "exclusiveMaximum"),
}
_KEYWORDS_WITH_NAMES = frozenset(("properties", "$defs", "patternProperties"))
_KEYWORDS_WITH_DATA = frozenset(("default", "const", "enum", "examples"))
_MAX_PLACES = 100
"""With more errors, coercion looks everywhere."""
_MAX_ERRORS = 10_000
"""More errors are only counted: a hostile caller can cause a million of them, and reading those takes seconds."""
_NOT_COERCIBLE = frozenset(("missing", "extra_forbidden", "too_short", "too_long", "value_error", "assertion_error"))


def input_schema(signature: FunctionSignature, tool: str) -> Schema:
    """Returns the JSON Schema of the parameters that the caller sets."""
    properties: dict[str, Schema] = {}
    for parameter in signature.parameters:
        schema = _property(parameter)
        if schema is None:
            return _schema_by_pydantic(signature, tool)
        properties[parameter.name] = schema
    extra: Schema | bool | None = False
    if signature.kwargs_hint is not MISSING:
        extra = schema_of(signature.kwargs_hint)
        if extra is None:
            return _schema_by_pydantic(signature, tool)
    return _object(signature, properties, extra if extra != {} else True)


def output_schema(signature: FunctionSignature) -> Schema | None:
    """Returns the JSON Schema of the return value, if its hint is an object with known fields; else None."""
    returns = signature.returns
    if not isinstance(returns, type) or returns.__module__ == "builtins":
        return None
    marks = ("__pydantic_fields__", "__dataclass_fields__", "__required_keys__")
    if not any(hasattr(returns, mark) for mark in marks):
        return None
    from pydantic import TypeAdapter

    try:
        schema = TypeAdapter(cast("Any", returns)).json_schema(mode="serialization")
    except Exception:
        return None  # Pydantic does not support the type. Calls do not need the schema.
    return cast("Schema", _without_titles(schema))


class FunctionValidator:
    """Validates and converts arguments with pydantic. JSON text is not parsed separately."""

    __slots__ = ("_bound_names", "_defaults", "_schema", "_validate_json", "_validate_python")

    def __init__(self, signature: FunctionSignature, schema: Callable[[], Mapping[str, Any]], tool: str) -> None:
        validator = _adapter(signature, tool).validator
        self._validate_json = validator.validate_json
        self._validate_python = validator.validate_python
        self._schema = schema
        # Defaults that Python would not apply by itself: it would pass a `Field(…)` unchanged, and a positional-only
        # parameter can be omitted only together with all that follow.
        self._defaults = {
            parameter.name: parameter.default
            for parameter in signature.parameters
            if _is_field(parameter.default)
            or (parameter.name in signature.positional_only and parameter.default is not MISSING)
        }
        self._bound_names = signature.bound_names if signature.kwargs_hint is not MISSING else None

    def from_json(self, text: str | bytes) -> dict[str, Any]:
        try:
            values = self._validate_json(text)
        except ValueError as error:  # Pydantic's error is one, and so is a surrogate in the text.
            values = self._coerce_and_validate(text, error)
        return self._complete(values) if self._defaults or self._bound_names else values

    def from_mapping(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            values = self._validate_python(arguments)
        except ValueError as error:
            values = self._coerce_and_validate(arguments, error)
        return self._complete(values) if self._defaults or self._bound_names else values

    def _complete(self, values: dict[str, Any]) -> dict[str, Any]:
        if self._bound_names and (names := self._bound_names & values.keys()):
            raise InvalidArguments([Issue(name, "no such parameter") for name in sorted(names)])
        for name, default in self._defaults.items():
            if name not in values:
                if _is_field(default):
                    default = default.get_default(call_default_factory=True, validated_data=values)
                values[name] = default
        return values

    def _coerce_and_validate(self, arguments: Mapping[str, Any] | str | bytes, error: ValueError) -> dict[str, Any]:
        """Validates again after coercing obvious mistakes. If that fails too, reports the first error."""
        try:
            parsed = json_text.parse_arguments(arguments)
        except ValueError as parse_error:
            raise InvalidArguments([not_an_object_issue(parse_error)]) from None
        details = _details(error)
        places = [_place(detail["loc"], detail["type"], parsed) for detail in details[:_MAX_PLACES]]
        invalid_places: PlaceTree | None = {} if 0 < len(details) <= _MAX_PLACES else None
        for detail, place in zip(details, places, strict=False):
            if detail["type"] not in _NOT_COERCIBLE:
                invalid_places = add_place(invalid_places, place)
        try:
            return self._validate_python(coerce(self._schema(), parsed, invalid_places))
        except ValueError as second_error:
            if not details:
                raise InvalidArguments([Issue("", str(second_error))]) from None
        details_by_path: dict[str, list[ErrorDetails]] = {}
        for detail, place in zip(details, places, strict=False):
            details_by_path.setdefault(format_path(place), []).append(detail)
        issues = [
            issue
            for path, path_details in islice(details_by_path.items(), MAX_ISSUES)
            for issue in _merge_issues(self._issue(detail, path) for detail in path_details)
        ]
        more = len(details) - len(places) + len(details_by_path) - min(len(details_by_path), MAX_ISSUES)
        raise InvalidArguments(issues, more=more) from None

    def _issue(self, detail: ErrorDetails, path: str) -> Issue:
        match detail["type"]:
            case "missing":
                return Issue(path, "required, but missing")
            case "extra_forbidden":
                names = cast("Mapping[str, Any]", self._schema()["properties"])
                return Issue(
                    path, unknown_parameter_message(path, names) if len(detail["loc"]) == 1 else "no such parameter"
                )
            case _:
                return Issue(path, _expected(detail["msg"]), masked_value(path, detail["input"]))


def _details(error: ValueError) -> list[ErrorDetails]:
    if not hasattr(error, "errors"):
        return []
    validation_error = cast("ValidationError", error)
    if (count := validation_error.error_count()) > _MAX_ERRORS:
        raise InvalidArguments([Issue("", f"{count:,} values do not fit the schema")]) from None
    return validation_error.errors(include_url=False)


def _merge_issues(issues: Iterable[Issue]) -> list[Issue]:
    """Returns one issue for each place: the expectations of all members of a union together."""
    alternatives: dict[tuple[str, str], dict[str, None]] = {}
    for issue in issues:
        alternatives.setdefault((issue.path, issue.actual), {})[issue.expected] = None
    return [Issue(path, _join_alternatives(texts), actual) for (path, actual), texts in alternatives.items()]


def _join_alternatives(texts: Iterable[str]) -> str:
    if all(text.startswith("expected ") for text in texts):
        return "expected " + " or ".join(text.removeprefix("expected ") for text in texts)
    return " or ".join(texts)


def _expected(message: str) -> str:
    text = message.replace("Input should be ", "expected ", 1).replace("expected a valid ", "expected ", 1)
    return text[:1].lower() + text[1:]


def _place(location: tuple[int | str, ...], kind: str, arguments: object) -> list[int | str]:
    """Returns pydantic's location without the names of union members and validators, which are no keys of the value."""
    place: list[int | str] = []
    value = arguments
    for index, step in enumerate(location):
        if isinstance(value, Mapping) and step in value:
            value = cast("Mapping[object, object]", value)[step]
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(cast("list[object]", value)):
            value = cast("list[object]", value)[step]
        elif kind != "missing" or index < len(location) - 1:
            continue
        place.append(step)
    return place


def _is_field(default: object) -> bool:
    """Whether it is a pydantic `Field(…)`. Compares the name, because pydantic may not be imported."""
    return type(default).__name__ == "FieldInfo"


def _property(parameter: FunctionParameter) -> Schema | None:
    default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
    schema = None if _is_field(default) else schema_of(parameter.hint)
    if schema is None:
        return None
    if parameter.description is not None:
        schema.setdefault("description", parameter.description)
    if default is not MISSING:
        if default is not None and type(default) not in (str, int, bool):
            return None
        schema["default"] = default
    return schema


def _object(signature: FunctionSignature, properties: Mapping[str, Schema], extra: Schema | bool) -> Schema:
    parameters = zip(properties, signature.parameters, strict=True)
    required = [name for name, parameter in parameters if _is_required(parameter)]
    schema: Schema = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    return schema | {"additionalProperties": extra}


def _schema_by_pydantic(signature: FunctionSignature, tool: str) -> Schema:
    from pydantic.errors import PydanticUserError

    try:
        schema = _adapter(signature, tool).json_schema()
    except PydanticUserError as error:
        raise _unsupported_type(tool, error) from error
    schema = cast("Schema", _without_titles(schema))
    schema.pop("description", None)
    properties = cast("dict[str, Schema]", schema.get("properties", {}))
    # They are in the order of the parameters, under their aliases if they have one.
    for parameter, property_schema in zip(signature.parameters, properties.values(), strict=True):
        # A `$ref` with other keywords beside it is valid in 2020-12, and pydantic writes it too.
        if parameter.description is not None:
            property_schema.setdefault("description", parameter.description)
        if "default" not in property_schema:
            property_schema.update(_default_keyword(parameter))
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return _object(signature, properties, schema.get("additionalProperties", False)) | definitions


def _default_keyword(parameter: FunctionParameter) -> Schema:
    """Returns the keyword `default`; nothing if each call creates the default, or JSON cannot express it."""
    default = parameter.default
    if _is_field(default):
        default = MISSING if default.is_required() or default.default_factory is not None else default.default
    if default is MISSING or (isinstance(default, float) and not math.isfinite(default)):
        return {}
    from pydantic_core import to_jsonable_python

    try:
        return {"default": json_text.to_json_data(to_jsonable_python(default))}
    except ValueError:
        return {}


def _is_required(parameter: FunctionParameter) -> bool:
    if parameter.default is not MISSING:
        return _is_field(parameter.default) and parameter.default.is_required()
    if type(parameter.hint) is type:
        return True
    metadata = get_args(parameter.hint)[1:] if get_origin(parameter.hint) is Annotated else ()
    return all(item.is_required() for item in metadata if _is_field(item))


def _adapter(signature: FunctionSignature, tool: str) -> TypeAdapter[Any]:
    """Returns a pydantic adapter of the arguments: a dict with exactly these keys."""
    from typing import NotRequired, Required

    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError
    from pydantic_core import SchemaError
    from typing_extensions import TypedDict

    fields: dict[str, Any] = {}
    for parameter in signature.parameters:
        hint: Any = _list_for_iterable(parameter.hint)
        if _is_field(parameter.default):
            hint = Annotated[hint, _without_default(parameter.default)]
        fields[parameter.name] = Required[hint] if _is_required(parameter) else NotRequired[hint]
    shape: Any = TypedDict(f"{tool}_arguments", fields)  # pyright: ignore
    # JSON has no NaN and no infinity, and few tools expect them.
    config: ConfigDict = {"extra": "forbid", "arbitrary_types_allowed": False, "allow_inf_nan": False}
    if signature.kwargs_hint is not MISSING:
        config["extra"] = "allow"
        shape.__extra_items__ = signature.kwargs_hint
    shape.__pydantic_config__ = config
    try:
        return TypeAdapter(shape)
    # Besides its own error: an undefined name, and a bound that the type does not support.
    except (PydanticUserError, NameError, TypeError, SchemaError) as error:
        raise _unsupported_type(tool, error) from error


def _list_for_iterable(hint: Any) -> Any:
    """Returns the hint with `list` for `Iterable`, whose items pydantic would validate only while the tool runs."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Iterable:
        return list[parts]
    if origin is Annotated:
        return Annotated[(_list_for_iterable(parts[0]), *parts[1:])]
    if origin is Union or origin is types.UnionType:
        return Union[tuple(map(_list_for_iterable, parts))]  # noqa: UP007 - a computed union needs it
    return hint


def _without_default(field: Any) -> Any:
    from pydantic import Field

    attributes = dict(cast("Mapping[str, Any]", field._attributes_set))
    for name in ("default", "default_factory"):
        attributes.pop(name, None)
    copy: Any = Field(**attributes)
    copy.metadata = list(field.metadata)
    return copy


def _unsupported_type(tool: str, error: Exception) -> ToolDefinitionError:
    reason = str(error).splitlines()[0]
    return ToolDefinitionError(
        f"a parameter of tool {tool!r} has a type that cannot be checked: {reason}; "
        "take plain data, or give the tool an input_schema"
    )


def _without_titles(schema: object, are_names: bool = False) -> object:
    """Returns the schema without the titles that pydantic derives from names: they only cost tokens."""
    if isinstance(schema, dict):
        items = cast("dict[str, object]", schema).items()
        return {
            key: value
            if key in _KEYWORDS_WITH_DATA and not are_names
            else _without_titles(value, key in _KEYWORDS_WITH_NAMES and not are_names)
            for key, value in items
            if are_names or key != "title" or not isinstance(value, str)
        }
    if isinstance(schema, list):
        return [_without_titles(item) for item in cast("list[object]", schema)]
    return schema


# The schema of a type hint, without pydantic


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
        return _enum_schema(hint) if isinstance(hint, type) and issubclass(hint, enum.Enum) else None
    if origin is Annotated:
        return _annotated_schema(hint)
    arguments = get_args(hint)
    if origin is Literal:
        return _choices_schema(list(arguments))
    if origin is Union or origin is types.UnionType:
        return _union_schema(arguments)
    if origin in _ARRAYS and len(arguments) == 1:
        items = schema_of(arguments[0])
        return None if items is None else {"items": items, "type": "array"}
    if (origin is dict or origin is Mapping) and len(arguments) == 2 and arguments[0] is str:
        values = schema_of(arguments[1])
        return None if values is None else {"additionalProperties": values or True, "type": "object"}
    return None


def _union_schema(arguments: tuple[object, ...]) -> Schema | None:
    options: list[Schema] = []
    for argument in sorted(arguments, key=lambda argument: argument is type(None)):  # Null last, as in pydantic.
        option = schema_of(argument)
        if option is None or option in options:  # Pydantic merges equal options in its own way.
            return None
        options.append(option)
    return {"anyOf": options}


def _choices_schema(values: list[object]) -> Schema | None:
    kinds = {type(value) for value in values}
    if not kinds <= _JSON_TYPES.keys():
        return None
    if len(values) == 1:
        return {"const": values[0], "type": _JSON_TYPES[type(values[0])]}
    return {"enum": values, "type": _JSON_TYPES[kinds.pop()]} if len(kinds) == 1 else {"enum": values}


def _enum_schema(hint: type[enum.Enum]) -> Schema | None:
    values = [member.value for member in hint]
    if hint.__doc__ or not values:
        return None  # Pydantic puts a docstring into a separate definition.
    return _choices_schema(values)


def _annotated_schema(hint: object) -> Schema | None:
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
        keyword, bound = ("min", item.min_length) if name == "MinLen" else ("max", item.max_length)
        schema[keyword + size] = bound
        return True
    return False

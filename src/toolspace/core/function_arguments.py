"""The schema and the validator of a function's arguments. Plain hints cost no pydantic until the first call."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union, cast, get_args, get_origin

from toolspace.core import json_text, type_schema
from toolspace.core.signature import MISSING, FunctionParameter, FunctionSignature
from toolspace.core.validation import (
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
from toolspace.errors import ToolDefinitionError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails

Schema = dict[str, Any]

_MOST_ISSUES = 100
_TOO_MANY = 10_000
"""Errors beyond which they are only counted: a hostile caller can make a million of them, and reading takes seconds."""
_NOT_MENDABLE = frozenset(("missing", "extra_forbidden", "too_short", "too_long", "value_error", "assertion_error"))


def input_schema(signature: FunctionSignature, tool: str) -> Schema:
    """JSON Schema of what the caller fills in."""
    properties: dict[str, Schema] = {}
    for parameter in signature.parameters:
        schema = _property(parameter)
        if schema is None:
            return _schema_by_pydantic(signature, tool)
        properties[parameter.name] = schema
    extra: Schema | bool | None = False
    if signature.kwargs_hint is not MISSING:
        extra = type_schema.schema_of(signature.kwargs_hint)
        if extra is None:
            return _schema_by_pydantic(signature, tool)
    return _object(signature, properties, extra if extra != {} else True)


def output_schema(signature: FunctionSignature, tool: str) -> Schema | None:
    """JSON Schema of what the function returns, where its hint promises an object with known fields."""
    returns = signature.returns
    if not isinstance(returns, type) or returns.__module__ == "builtins":
        return None
    structured = (
        hasattr(returns, "__pydantic_fields__")
        or hasattr(returns, "__dataclass_fields__")
        or hasattr(returns, "__required_keys__")
    )
    if not structured:
        return None
    from pydantic import TypeAdapter

    try:
        schema = TypeAdapter(cast("Any", returns)).json_schema(mode="serialization")
    except Exception:
        return None  # A type that pydantic cannot read promises nothing to a caller, and harms no call.
    return cast("Schema", _without_titles(schema))


class FunctionValidator:
    """Checks and converts arguments with pydantic, from JSON text without parsing it first."""

    __slots__ = ("_check_json", "_check_python", "_defaults", "_fixed", "_schema")

    def __init__(self, signature: FunctionSignature, schema: Callable[[], Mapping[str, Any]], tool: str) -> None:
        validator = _adapter(signature, tool).validator
        self._check_json = validator.validate_json
        self._check_python = validator.validate_python
        self._schema = schema
        # What Python would not fill in by itself: it would pass a `Field(…)` as it is, and a parameter without a
        # name can only be left out together with all that follow.
        self._defaults = {
            parameter.name: parameter
            for parameter in signature.parameters
            if _is_field(parameter.default)
            or (parameter.name in signature.positional_only and parameter.default is not MISSING)
        }
        self._fixed = signature.bound_names if signature.kwargs_hint is not MISSING else None

    def from_json(self, text: str | bytes) -> dict[str, Any]:
        try:
            values = self._check_json(text)
        except ValueError as error:  # pydantic's error is one, and so is a surrogate in the text.
            values = self._mend(text, error)
        return self._complete(values) if self._defaults or self._fixed else values

    def from_mapping(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            values = self._check_python(arguments)
        except ValueError as error:
            values = self._mend(arguments, error)
        return self._complete(values) if self._defaults or self._fixed else values

    def _complete(self, values: dict[str, Any]) -> dict[str, Any]:
        if self._fixed and (taken := self._fixed & values.keys()):
            raise InvalidArguments([Issue(name, "no such parameter") for name in sorted(taken)])
        for name, parameter in self._defaults.items():
            if name not in values:
                values[name] = _default_of(parameter, values)
        return values

    def _mend(self, arguments: Mapping[str, Any] | str | bytes, error: ValueError) -> dict[str, Any]:
        """Tries once more with the plain misunderstandings mended; the first error is the one to tell."""
        try:
            parsed = json_text.parse_arguments(arguments)
        except ValueError as fault:
            raise InvalidArguments([not_an_object_issue(fault)]) from None
        details = _details(error)
        places = [_place(detail["loc"], detail["type"], parsed) for detail in details[:_MOST_ISSUES]]
        wrong: PlaceTree | None = {} if 0 < len(details) <= _MOST_ISSUES else None
        for detail, place in zip(details, places, strict=False):
            if detail["type"] not in _NOT_MENDABLE:
                wrong = add_place(wrong, place)
        try:
            return self._check_python(coerce(self._schema(), parsed, wrong))
        except ValueError as second:
            if not details:
                raise InvalidArguments([Issue("", str(second))]) from None
        issues = _merged(self._issue(detail, place) for detail, place in zip(details, places, strict=False))
        raise InvalidArguments(issues, more=len(details) - len(places)) from None

    def _issue(self, detail: ErrorDetails, place: list[int | str]) -> Issue:
        path = format_path(place)
        match detail["type"]:
            case "missing":
                return Issue(path, "required, but missing")
            case "extra_forbidden":
                known = cast("Mapping[str, Any]", self._schema()["properties"])
                return Issue(path, unknown_parameter_message(path, known) if len(place) == 1 else "no such parameter")
            case _:
                return Issue(path, _expected(detail["msg"]), masked_value(path, detail["input"]))


def _details(error: ValueError) -> list[ErrorDetails]:
    if not hasattr(error, "errors"):
        return []
    found = cast("ValidationError", error)
    if found.error_count() > _TOO_MANY:
        raise InvalidArguments([Issue("", f"{found.error_count():,} values do not fit the schema")]) from None
    return found.errors(include_url=False)


def _merged(issues: Iterable[Issue]) -> list[Issue]:
    """One issue for each place: what each member of a union wanted, together."""
    merged: dict[tuple[str, str], dict[str, None]] = {}
    for issue in issues:
        merged.setdefault((issue.path, issue.actual), {})[issue.expected] = None
    return [Issue(path, _alternatives(list(expected)), given) for (path, given), expected in merged.items()]


def _alternatives(expected: list[str]) -> str:
    if all(text.startswith("expected ") for text in expected):
        return "expected " + " or ".join(text.removeprefix("expected ") for text in expected)
    return " or ".join(expected)


def _expected(message: str) -> str:
    text = message.replace("Input should be ", "expected ", 1).replace("expected a valid ", "expected ", 1)
    return text[:1].lower() + text[1:]


def _place(location: tuple[int | str, ...], kind: str, arguments: object) -> list[int | str]:
    """Without the names of union members and validators that pydantic adds to a location: it is walked to see."""
    place: list[int | str] = []
    here = arguments
    for index, step in enumerate(location):
        if isinstance(here, Mapping) and step in here:
            here = cast("Mapping[object, object]", here)[step]
        elif isinstance(here, list | tuple) and isinstance(step, int) and step < len(cast("list[object]", here)):
            here = cast("list[object]", here)[step]
        elif kind != "missing" or index < len(location) - 1:
            continue
        place.append(step)
    return place


def _is_field(default: object) -> bool:
    """Whether it is a pydantic `Field(…)`. By name, because pydantic may not even be loaded."""
    return type(default).__name__ == "FieldInfo"


def _property(parameter: FunctionParameter) -> Schema | None:
    default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
    schema = None if _is_field(default) else type_schema.schema_of(parameter.hint)
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
    schema: Schema = {"type": "object", "properties": properties}
    named = zip(properties, signature.parameters, strict=True)
    required = [name for name, parameter in named if _is_required(parameter)]
    if required:
        schema["required"] = required
    schema["additionalProperties"] = extra
    return schema


def _schema_by_pydantic(signature: FunctionSignature, tool: str) -> Schema:
    from pydantic.errors import PydanticUserError

    try:
        schema = _adapter(signature, tool).json_schema()
    except PydanticUserError as error:
        raise _unusable(tool, error) from error
    schema = cast("Schema", _without_titles(schema))
    schema.pop("description", None)
    properties = cast("dict[str, Schema]", schema.get("properties", {}))
    # In the order of the parameters, under their aliases where they have one.
    for parameter, described in zip(signature.parameters, properties.values(), strict=True):
        # A `$ref` beside other keywords is right in 2020-12, and is how pydantic writes it too.
        if parameter.description is not None:
            described.setdefault("description", parameter.description)
        if "default" not in described:
            described.update(_shown_default(parameter))
    ordered = _object(signature, properties, schema.get("additionalProperties", False))
    if "$defs" in schema:
        ordered["$defs"] = schema["$defs"]
    return ordered


def _shown_default(parameter: FunctionParameter) -> Schema:
    """The default as the schema says it: nothing where it is made anew for each call, or where JSON has no word."""
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


def _default_of(parameter: FunctionParameter, values: dict[str, Any]) -> Any:
    """The default, also where it is written as a pydantic `Field(…)`, for a call with these other values."""
    default = parameter.default
    return default.get_default(call_default_factory=True, validated_data=values) if _is_field(default) else default


def _is_required(parameter: FunctionParameter) -> bool:
    if parameter.default is not MISSING:
        return _is_field(parameter.default) and parameter.default.is_required()
    if type(parameter.hint) is type:
        return True
    metadata = get_args(parameter.hint)[1:] if get_origin(parameter.hint) is Annotated else ()
    return all(item.is_required() for item in metadata if _is_field(item))


def _adapter(signature: FunctionSignature, tool: str) -> TypeAdapter[Any]:
    """A pydantic adapter of the arguments: a dict of exactly these keys."""
    from typing import NotRequired, Required

    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError
    from pydantic_core import SchemaError
    from typing_extensions import TypedDict

    fields: dict[str, Any] = {}
    for parameter in signature.parameters:
        hint: Any = _eager(parameter.hint)
        if _is_field(parameter.default):
            hint = Annotated[hint, _without_default(parameter.default)]
        fields[parameter.name] = Required[hint] if _is_required(parameter) else NotRequired[hint]
    shape: Any = TypedDict(f"{tool}_arguments", fields)  # pyright: ignore
    # NaN and infinity are no JSON, and do harm in a tool that does not expect them.
    config: ConfigDict = {"extra": "forbid", "arbitrary_types_allowed": False, "allow_inf_nan": False}
    if signature.kwargs_hint is not MISSING:
        config["extra"] = "allow"
        shape.__extra_items__ = signature.kwargs_hint
    shape.__pydantic_config__ = config
    try:
        return TypeAdapter(shape)
    # Beside its own error: a name that nobody defines, and a bound that the type cannot have.
    except (PydanticUserError, NameError, TypeError, SchemaError) as error:
        raise _unusable(tool, error) from error


def _eager(hint: Any) -> Any:
    """An `Iterable` as a list: pydantic would check its items while the tool runs, which is too late."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Iterable:
        return list[parts]
    if origin is Annotated:
        return Annotated[(_eager(parts[0]), *parts[1:])]
    if origin is Union or origin is types.UnionType:
        return Union[tuple(map(_eager, parts))]  # noqa: UP007 - there is no other way to write a computed one
    return hint


def _without_default(field: Any) -> Any:
    from pydantic import Field

    said = cast("Mapping[str, Any]", field._attributes_set)
    bare: Any = Field(**{name: value for name, value in said.items() if name not in ("default", "default_factory")})
    bare.metadata = list(field.metadata)
    return bare


def _unusable(tool: str, error: Exception) -> ToolDefinitionError:
    reason = str(error).splitlines()[0]
    return ToolDefinitionError(
        f"a parameter of tool {tool!r} has a type that cannot be checked: {reason}; "
        "take plain data, or give the tool an input_schema"
    )


_NAMES = frozenset(("properties", "$defs", "patternProperties"))
_DATA = frozenset(("default", "const", "enum", "examples"))


def _without_titles(schema: object, names: bool = False) -> object:
    """The schema without the titles that pydantic makes of names: they cost tokens and say nothing."""
    if isinstance(schema, dict):
        items = cast("dict[str, object]", schema).items()
        return {
            key: value if key in _DATA and not names else _without_titles(value, key in _NAMES and not names)
            for key, value in items
            if names or key != "title" or not isinstance(value, str)
        }
    if isinstance(schema, list):
        return [_without_titles(item) for item in cast("list[object]", schema)]
    return schema

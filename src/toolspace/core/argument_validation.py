"""Validates arguments against JSON Schemas, lists every issue at once, and coerces obvious mistakes.

The stage `validate` uses it through a tool's `validator`. The validator of Python functions is in
`core.function_schema`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.errors import ToolDefinitionError

Schema = Mapping[str, Any]
PlaceTree = dict[str | int, "PlaceTree | None"]
"""Places inside a value, as a tree: `{"a": {0: None}}` is `a[0]`. None means the whole value there."""

_MAX_ISSUES = 8
_MAX_TEXT = 300
"""Characters of one part of a message: the caller may send megabytes."""
_MAX_BYTES_FOR_ALL_ERRORS = 64_000
"""For larger arguments only the first error is searched: finding each error takes microseconds."""
_COERCIBLE_ERRORS = frozenset(("type", "enum", "const", "anyOf", "oneOf"))

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "false": False}
_JSON_TYPES = (
    (type(None), "null"),
    (bool, "boolean"),  # Before numbers: a bool is an int.
    (int | float, "number"),
    (str, "string"),
    (list, "array"),
    (Mapping, "object"),
)
_MAX_DEPTH = 32
_MAX_STEPS = 50_000
"""A limit on the work of one coercion: a recursive schema has too many paths to visit, and so has a huge value."""


class Issue(NamedTuple):
    """One thing that is wrong with the arguments."""

    path: str
    expected: str
    actual: str = ""

    def __str__(self) -> str:
        actual = f", got {self.actual}" if self.actual else ""
        expected = _truncate(self.expected)
        return f"{_truncate(self.path)}: {expected}{actual}" if self.path else f"{expected}{actual}"


class InvalidArguments(Exception):
    """The arguments do not fit the schema. Has every issue, so that a model can correct all of them at once."""

    def __init__(self, issues: Iterable[Issue], *, more: int = 0) -> None:
        """`more` is how many issues there are besides these."""
        self.issues = tuple(issues)
        more += max(0, len(self.issues) - _MAX_ISSUES)
        super().__init__("; ".join(map(str, self.issues[:_MAX_ISSUES])) + (f"; and {more} more" if more else ""))


class Validator(Protocol):
    """Validates and coerces the arguments of one tool. Raises `InvalidArguments`."""

    def from_json(self, text: str | bytes) -> dict[str, Any]: ...
    def from_mapping(self, arguments: Mapping[str, Any]) -> dict[str, Any]: ...


class SchemaValidator:
    """Validates arguments against a JSON Schema with jsonschema-rs."""

    __slots__ = ("_schema", "_validator")

    def __init__(self, schema: Schema, *, tool: str) -> None:
        self._validator = compile_schema(schema, owner=f"tool {tool!r}")
        self._schema = schema

    def from_json(self, text: str | bytes) -> dict[str, Any]:
        return self.from_mapping(text)

    def from_mapping(self, arguments: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
        try:
            values = json_text.parse_arguments(arguments)
        except ValueError as error:
            raise InvalidArguments([not_an_object_issue(error)]) from None
        try:
            return values if self._validator.is_valid(values) else self._coerce(values)
        except (ValueError, TypeError) as error:  # Bytes, a date, a lone surrogate, or too deep for the library.
            raise InvalidArguments([Issue("", f"the arguments are not plain JSON: {error}")]) from None

    def _coerce(self, values: dict[str, Any]) -> dict[str, Any]:
        is_large = json_text.encoded_size(values) > _MAX_BYTES_FOR_ALL_ERRORS
        errors = _find_errors(self._validator, values, first_only=is_large)
        places: PlaceTree | None = None if is_large else {}
        for error in errors:
            if error.kind.name in _COERCIBLE_ERRORS:
                places = add_place(places, error.instance_path)
        coerced_values = coerce(self._schema, values, places)
        if isinstance(coerced_values, dict) and self._validator.is_valid(coerced_values):
            return cast("dict[str, Any]", coerced_values)
        raise InvalidArguments(_unique_issues(errors, cast("Schema", self._schema.get("properties") or {})))


def compile_schema(schema: Schema, *, owner: str) -> Any:
    """Returns a compiled validator. Raises `ToolDefinitionError` that names the owner if the schema is invalid."""
    import jsonschema_rs  # Imported here: it takes 30 ms, which a toolspace of Python functions never needs.

    try:
        # Masked: messages must not repeat megabytes of the caller's arguments.
        return jsonschema_rs.validator_for(dict(schema), retriever=_refuse_remote, mask="it")
    except jsonschema_rs.ValidationError as error:
        reason = "; ".join(map(str, _error_issues(error)))
    except (jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
        reason = str(error)
    raise ToolDefinitionError(f"the schema of {owner} is not a valid JSON Schema: {reason}")


def find_issues(validator: Any, value: object) -> list[Issue]:
    """Returns the issues that a compiled validator finds in a value."""
    is_large = json_text.encoded_size(value) > _MAX_BYTES_FOR_ALL_ERRORS
    return _unique_issues(_find_errors(validator, value, first_only=is_large))


def not_an_object_issue(error: ValueError) -> Issue:
    """Returns the issue of arguments that are no JSON object."""
    return Issue("", f"the arguments are not a JSON object: {error}")


def format_path(path: Iterable[str | int]) -> str:
    """Returns a path inside the arguments as messages write it: `filters[0].name`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else step)
    return text


def masked_value(path: str, value: object) -> str:
    """Returns a value for a message, without secrets, because messages reach logs."""
    return MASK if is_secret_name(path) else json_text.describe(mask_secrets([value])[0])


def unknown_parameter_message(name: str, parameter_names: Iterable[str]) -> str:
    """Returns the message for a parameter that does not exist."""
    names = list(parameter_names)
    hint = did_you_mean(name, names) or f"; it takes {', '.join(names) or 'none'}"
    return f"no such parameter{hint}"


def _find_errors(validator: Any, value: object, *, first_only: bool) -> list[Any]:
    if not first_only:
        return list(validator.iter_errors(value))
    try:
        validator.validate(value)
    except ValueError as error:
        return [error]
    return []


def _unique_issues(errors: Iterable[Any], parameter_names: Iterable[str] = ()) -> list[Issue]:
    """Returns each issue once, however many parts of the schema it violates."""
    return list(dict.fromkeys(issue for error in errors for issue in _error_issues(error, parameter_names)))


def _error_issues(error: Any, parameter_names: Iterable[str] = ()) -> Iterable[Issue]:
    """Yields the issues of one error of jsonschema-rs."""
    path = format_path(error.instance_path)
    kind = error.kind
    actual = masked_value(path, error.instance)
    match kind.name:
        case "required":
            yield Issue(f"{path}.{kind.property}" if path else kind.property, "required, but missing")
        case "additionalProperties" | "unevaluatedProperties":
            for name in kind.unexpected:
                message = "no such parameter" if path else unknown_parameter_message(name, parameter_names)
                yield Issue(f"{path}.{name}" if path else name, message)
        case "type":
            yield Issue(path, f"expected {' or '.join(kind.types)}", actual)
        case "enum":
            options = ", ".join(json_text.describe(option, 30) for option in kind.options[:12])
            yield Issue(path, f"expected one of {options}", actual)
        case "anyOf" | "oneOf" if all(kind.context):  # An option without errors: more than one option of `oneOf` fits.
            yield Issue(path, _expected_options(kind.context, path), actual)
        case _:
            yield Issue(path, str(error.message), actual)


def _expected_options(branches: Iterable[Iterable[Any]], path: str) -> str:
    """Returns what the options of `anyOf` expect; only those of the right type, if there are any."""
    options = [[issue for error in branch for issue in _error_issues(error)] for branch in branches]
    of_right_type = [issues for issues in options if not any(_is_type_issue(issue, path) for issue in issues)]
    if not of_right_type:
        types = dict.fromkeys(issue.expected.removeprefix("expected ") for issues in options for issue in issues)
        return f"expected {' or '.join(types)}"
    texts = [" and ".join(str(issue) for issue in issues[:_MAX_ISSUES]) for issues in of_right_type[:_MAX_ISSUES]]
    return f"fits no option ({' | '.join(dict.fromkeys(texts))})"


def _is_type_issue(issue: Issue, path: str) -> bool:
    return issue.path == path and issue.expected.startswith("expected ")


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"the reference {uri!r} leaves the schema; put what it points to under $defs")


def coerce(schema: Schema, value: object, invalid_places: PlaceTree | None = None) -> object:
    """Returns the value with every obvious mistake corrected, such as `"5"` for an integer.

    Only `invalid_places` are changed; None means everywhere. What cannot be coerced stays, for validation to report.
    """
    return _Coercion(schema).coerce(schema, value, invalid_places, 0)


def add_place(places: PlaceTree | None, path: Sequence[str | int]) -> PlaceTree | None:
    """Adds a place to a tree and returns the tree. An empty path means everywhere, so that returns None."""
    if places is None or not path:
        return None
    node = places
    for step in path[:-1]:
        child = node.setdefault(step, {})
        if child is None:
            return places
        node = child
    node[path[-1]] = None
    return places


class _Coercion:
    """Coerces one value, in a bounded number of steps."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._remaining_steps = _MAX_STEPS

    def coerce(self, schema: object, value: object, places: PlaceTree | None, depth: int) -> object:
        self._remaining_steps -= 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._remaining_steps < 0:
            return value
        target = resolve_reference(cast("Schema", schema), self._root)
        for keyword in ("anyOf", "oneOf"):
            options = target.get(keyword)
            if isinstance(options, list):
                value = self._coerce_to_option(cast("list[object]", options), value, places, depth)
        for part in _get_list(target, "allOf"):
            value = self.coerce(part, value, places, depth + 1)
        types = _types(target)
        if types and not _has_type(value, types):
            value = _convert(value, types)
            places = None
        if isinstance(value, dict):
            return self._coerce_object(target, cast("dict[str, object]", value), places, depth)
        if isinstance(value, list) and "items" in target:
            items, values = target["items"], cast("list[object]", value)
            return [
                self.coerce(items, item, places and places[index], depth + 1)
                if places is None or index in places
                else item
                for index, item in enumerate(values)
            ]
        return cast("object", value)

    def _coerce_object(
        self, schema: Schema, value: dict[str, object], places: PlaceTree | None, depth: int
    ) -> dict[str, object]:
        properties = cast("Mapping[str, object]", schema.get("properties") or {})
        required = _get_list(schema, "required")
        additional = schema.get("additionalProperties")
        coerced_values: dict[str, object] = {}
        for name, item in value.items():
            if places is not None and name not in places:
                coerced_values[name] = item
                continue
            item_schema = properties.get(name, additional)
            is_optional = name in properties and name not in required
            if item is None and is_optional and not _accepts_null(item_schema, self._root):
                continue  # Models write null for a parameter that they leave out.
            coerced_values[name] = self.coerce(item_schema, item, places and places[name], depth + 1)
        return coerced_values

    def _coerce_to_option(self, options: list[object], value: object, places: PlaceTree | None, depth: int) -> object:
        """Returns the value coerced to the first option that it fits then; unchanged if it fits none."""
        schemas = [
            resolve_reference(cast("Schema", option), self._root) for option in options if isinstance(option, Mapping)
        ]
        of_same_type = [schema for schema in schemas if not _types(schema) or _has_type(value, _types(schema))]
        for schema in sorted(of_same_type, key=lambda schema: not _is_plausible(schema, value)) or schemas:
            coerced_value = self.coerce(schema, value, places, depth + 1)
            types = _types(schema)
            if not types or _has_type(coerced_value, types):
                return coerced_value
        return value


def _is_plausible(option: Schema, value: object) -> bool:
    """Whether an object may be meant as this option: it has the required fields, and its constants are right."""
    if not isinstance(value, Mapping):
        return True
    fields = cast("Mapping[object, object]", value)
    if any(name not in fields for name in _get_list(option, "required")):
        return False
    properties = cast("Mapping[str, object]", option.get("properties") or {})
    for name, schema in properties.items():
        if name in fields and isinstance(schema, Mapping):
            field_schema = cast("Schema", schema)
            if "const" in field_schema and field_schema["const"] != fields[name]:
                return False
            if "enum" in field_schema and fields[name] not in _get_list(field_schema, "enum"):
                return False
    return True


def _convert(value: object, types: frozenset[str]) -> object:
    """Returns the value as one of the JSON types, if its meaning is obvious; else unchanged."""
    if isinstance(value, str):
        text = value.strip()
        if "boolean" in types and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if "integer" in types and _INTEGER.fullmatch(text):
            return int(text)
        if "number" in types and _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        if "null" in types and text.lower() in ("null", "none", ""):
            return None
        if (text[:1] == "{" and "object" in types) or (text[:1] == "[" and "array" in types):
            try:
                return json_text.decode(text)
            except ValueError:
                return value
    elif isinstance(value, float) and "integer" in types and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _accepts_null(schema: object, root: Schema, depth: int = 0) -> bool:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return True
    target = resolve_reference(cast("Schema", schema), root)
    for keyword in ("anyOf", "oneOf"):
        options = target.get(keyword)
        if isinstance(options, list):
            return any(_accepts_null(option, root, depth + 1) for option in cast("list[object]", options))
    if "enum" in target:
        return None in _get_list(target, "enum")
    types = _types(target)
    return not types or "null" in types


def resolve_reference(schema: Schema, root: Schema) -> Schema:
    """Follows the `$ref`s of a schema inside its root. Returns the schema itself if one leads nowhere."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: object = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or step not in target:
                return schema
            target = cast("object", target[step])
        if not isinstance(target, Mapping):
            return schema
        schema = cast("Schema", target)
    return schema


def _get_list(schema: Schema, keyword: str) -> list[object]:
    value = schema.get(keyword)
    return cast("list[object]", value) if isinstance(value, list) else []


def _types(schema: Schema) -> frozenset[str]:
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset((types,))
    return frozenset(cast("list[str]", types)) if isinstance(types, list) else frozenset()


def _has_type(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, int) and not isinstance(value, bool) and "integer" in types:
        return True
    return next((name in types for kind, name in _JSON_TYPES if isinstance(value, kind)), False)

"""Validates arguments against JSON Schemas, lists every issue at once, and coerces obvious mistakes.

The stage `validate` uses it through a tool's `validator`. The validator of Python functions is in
`core.function_schema`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.core.schema_size import MAX_SCHEMA_SIZE, SchemaSize, SchemaTooLarge, measure_schema
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.errors import ToolDefinitionError

Schema = Mapping[str, Any]
PlaceTree = dict[str | int, "PlaceTree | None"]
"""Places inside a value, as a tree: `{"a": {0: None}}` is `a[0]`. None means the whole value there."""

MAX_ISSUES = 8
_MAX_OPTIONS = 32
"""Options of `anyOf` that a message considers."""
_MAX_TEXT = 300
"""Characters of one part of a message: the caller may send megabytes."""
_MAX_BYTES_FOR_ALL_ERRORS = 16_000
"""For larger arguments only the first error is searched: finding each error takes microseconds."""
_MAX_ERROR_WORK = 2_000_000
"""Bytes of the arguments times values of the schema. The library finds all errors at once, and copies the part of the
arguments that each one is about; above this, only the first error is searched, or none."""
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
    """The arguments do not fit the schema. Has up to eight issues, so that a model can correct them at once."""

    def __init__(self, issues: Iterable[Issue], *, more: int = 0) -> None:
        """`more` is how many issues there are besides these."""
        all_issues = tuple(issues)
        self.issues = all_issues[:MAX_ISSUES]
        more += len(all_issues) - len(self.issues)
        super().__init__("; ".join(map(str, self.issues)) + (f"; and {more} more" if more else ""))


class Validator(Protocol):
    """Validates and coerces the arguments of one tool. Raises `InvalidArguments`."""

    def from_json(self, text: str | bytes) -> dict[str, Any]: ...
    def from_mapping(self, arguments: Mapping[str, Any]) -> dict[str, Any]: ...


class SchemaValidator:
    """Validates arguments against a JSON Schema with jsonschema-rs."""

    __slots__ = ("_schema", "_size", "_validator")

    def __init__(self, schema: Schema, *, tool: str) -> None:
        self._validator = compile_schema(schema, owner=f"tool {tool!r}")
        self._schema = schema
        self._size: SchemaSize | None = None

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
        if self._size is None:
            self._size = _measure(self._schema)
        errors = _find_errors(self._validator, values, self._size)
        places: PlaceTree | None = {} if errors.are_complete else None
        for error in errors.errors if errors.are_complete else ():
            if error.kind.name in _COERCIBLE_ERRORS:
                path: list[str | int] = error.instance_path
                places = add_place(places, path if _exists(values, path) else ())
        coerced_values = coerce(self._schema, values, places)
        if isinstance(coerced_values, dict) and self._validator.is_valid(coerced_values):
            return cast("dict[str, Any]", coerced_values)
        raise _invalid_arguments(errors, cast("Schema", self._schema.get("properties") or {}))


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


def find_issues(validator: Any, value: object, schema: Schema) -> list[Issue]:
    """Returns up to eight issues that the compiled validator of a schema finds in a value."""
    properties = cast("Schema", schema.get("properties") or {})
    return list(_invalid_arguments(_find_errors(validator, value, _measure(schema)), properties).issues)


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
    return MASK if is_secret_name(path) else json_text.describe(mask_secrets([_Excerpt().take(value)])[0])


class _Excerpt:
    """Takes the first parts of a value: masking all of a large value for a message of one line takes milliseconds."""

    def __init__(self) -> None:
        self._remaining = 100

    def take(self, value: object) -> object:
        self._remaining -= 1
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value).items()
            return {name: self.take(item) for name, item in islice(fields, max(0, self._remaining))}
        if isinstance(value, list):
            return [self.take(item) for item in islice(cast("list[object]", value), max(0, self._remaining))]
        return value


def unknown_parameter_message(name: str, parameter_names: Iterable[str]) -> str:
    """Returns the message for a parameter that does not exist."""
    names = list(parameter_names)
    hint = did_you_mean(name, names) or f"; it takes {', '.join(names) or 'none'}"
    return f"no such parameter{hint}"


class _Errors(NamedTuple):
    errors: list[Any]
    are_complete: bool


def _measure(schema: Schema) -> SchemaSize:
    try:
        return measure_schema(schema)
    except SchemaTooLarge:
        return SchemaSize(MAX_SCHEMA_SIZE, MAX_SCHEMA_SIZE, is_recursive=True)


def _find_errors(validator: Any, value: object, size: SchemaSize) -> _Errors:
    """Returns all errors, only the first, or none, so that the work is limited."""
    byte_count = work = json_text.encoded_size(value)
    if size.is_recursive and size.union_values:  # Each level tries the options of the level below again.
        work <<= _depth(value)
    if byte_count <= _MAX_BYTES_FOR_ALL_ERRORS and work * size.values <= _MAX_ERROR_WORK:
        return _Errors(list(validator.iter_errors(value)), are_complete=True)
    if work * size.union_values > _MAX_ERROR_WORK:  # The first error may have the errors of all options.
        return _Errors([], are_complete=False)
    try:
        validator.validate(value)
    except ValueError as error:
        return _Errors([error], are_complete=False)
    return _Errors([], are_complete=False)


def _depth(value: object) -> int:
    """Returns how deeply a value is nested, up to a limit."""
    depth, level = 0, [value]
    while level and depth < _MAX_DEPTH:
        children: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                children.extend(cast("Mapping[str, object]", item).values())
            elif isinstance(item, list):
                children.extend(cast("list[object]", item))
        level = children
        depth += 1
    return depth


def _invalid_arguments(errors: _Errors, parameter_names: Iterable[str] = ()) -> InvalidArguments:
    """Returns the exception with the first issues, each once however many parts of the schema it violates."""
    if not errors.errors:
        reason = "the arguments do not fit the schema; send smaller or less nested ones to see what is wrong"
        return InvalidArguments([Issue("", reason)])
    issues: dict[Issue, None] = {}
    more = 0
    for error in errors.errors:
        room = MAX_ISSUES - len(issues)
        new_issues = list(islice(_error_issues(error, parameter_names), room))
        issues.update(dict.fromkeys(new_issues))
        more += _issue_count(error) - len(new_issues)
    return InvalidArguments(issues, more=more)


def _issue_count(error: Any) -> int:
    has_names = error.kind.name in ("additionalProperties", "unevaluatedProperties")
    return len(error.kind.unexpected) if has_names else 1


def _error_issues(error: Any, parameter_names: Iterable[str] = ()) -> Iterable[Issue]:
    """Yields the issues of one error of jsonschema-rs."""
    path = format_path(error.instance_path)
    kind = error.kind
    match kind.name:
        case "required":
            yield Issue(f"{path}.{kind.property}" if path else kind.property, "required, but missing")
        case "additionalProperties" | "unevaluatedProperties":
            for name in kind.unexpected:
                message = "no such parameter" if path else unknown_parameter_message(name, parameter_names)
                yield Issue(f"{path}.{name}" if path else name, message)
        case "type":
            yield Issue(path, f"expected {' or '.join(kind.types)}", masked_value(path, error.instance))
        case "enum":
            options = ", ".join(json_text.describe(option, 30) for option in kind.options[:12])
            yield Issue(path, f"expected one of {options}", masked_value(path, error.instance))
        case "anyOf" | "oneOf" if all(kind.context):  # An option without errors: more than one option of `oneOf` fits.
            yield Issue(path, _expected_options(kind.context, path), masked_value(path, error.instance))
        case _:
            yield Issue(path, str(error.message), masked_value(path, error.instance))


def _expected_options(branches: Iterable[Iterable[Any]], path: str) -> str:
    """Returns what the options of `anyOf` expect; only those of the right type, if there are any."""
    options = [
        list(islice((issue for error in branch for issue in _error_issues(error)), MAX_ISSUES))
        for branch in islice(branches, _MAX_OPTIONS)
    ]
    of_right_type = [issues for issues in options if not any(_is_type_issue(issue, path) for issue in issues)]
    if not of_right_type:
        types = dict.fromkeys(issue.expected.removeprefix("expected ") for issues in options for issue in issues)
        return f"expected {' or '.join(types)}"
    texts = [" and ".join(str(issue) for issue in issues) for issues in of_right_type[:MAX_ISSUES]]
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


def _exists(value: Any, path: Iterable[str | int]) -> bool:
    """Whether a value has this place. The library leaves empty keys out of its paths."""
    try:
        for step in path:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return False
    return True


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
        required = {name for name in _get_list(schema, "required") if isinstance(name, str)}
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
        self._remaining_steps -= len(options)
        if self._remaining_steps < 0:
            return value
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

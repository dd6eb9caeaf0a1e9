"""What makes arguments right: the issues a check finds, and validators of raw JSON Schemas."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.errors import ToolDefinitionError

# MERGED from coerce: Mends arguments where the schema makes the meaning plain: `"5"` for an integer. Decides nothi…

PlaceTree = dict[str | int, "PlaceTree | None"]
"""The places that a check found wrong, as a tree: `{"a": {0: None}}` is `a[0]`. None means all of it."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "false": False}
_DEPTH = 32
_STEPS = 50_000
"""A schema that refers to itself in several ways has more paths than anyone can walk; so has a huge value."""


def coerce(schema: Schema, value: object, invalid_places: PlaceTree | None = None) -> object:
    """The value with every plain misunderstanding mended; the rest is left as it is for the check to name.

    What lies outside the places that are `wrong` is not touched: it is right as it is.
    """
    return _Coercion(schema).mend(schema, value, invalid_places, 0)


def add_place(wrong: PlaceTree | None, path: Sequence[str | int]) -> PlaceTree | None:
    """The tree with one more place in it."""
    if wrong is None or not path:
        return None
    node = wrong
    for step in path[:-1]:
        inside = node.setdefault(step, {})
        if inside is None:
            return wrong
        node = inside
    node[path[-1]] = None
    return wrong


class _Coercion:
    """Mends one value, within a bounded number of steps."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _STEPS

    def mend(self, schema: object, value: object, wrong: PlaceTree | None, depth: int) -> object:
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _DEPTH or self._left < 0:
            return value
        here = _follow(cast("Schema", schema), self._root)
        for keyword in ("anyOf", "oneOf"):
            options = here.get(keyword)
            if isinstance(options, list):
                value = self._one_of(cast("list[object]", options), value, wrong, depth)
        for part in _list(here, "allOf"):
            value = self.mend(part, value, wrong, depth + 1)
        wanted = _types(here)
        if wanted and not _fits(value, wanted):
            value = _convert(value, wanted)
            wrong = None
        if isinstance(value, dict):
            return self._object(here, cast("dict[str, object]", value), wrong, depth)
        if isinstance(value, list) and "items" in here:
            items, inside = here["items"], cast("list[object]", value)
            return [
                self.mend(items, item, wrong and wrong[index], depth + 1) if wrong is None or index in wrong else item
                for index, item in enumerate(inside)
            ]
        return cast("object", value)

    def _object(
        self, schema: Schema, value: dict[str, object], wrong: PlaceTree | None, depth: int
    ) -> dict[str, object]:
        properties = cast("Mapping[str, object]", schema.get("properties") or {})
        required = _list(schema, "required")
        rest = schema.get("additionalProperties")
        mended: dict[str, object] = {}
        for name, item in value.items():
            if wrong is not None and name not in wrong:
                mended[name] = item
                continue
            known = properties.get(name, rest)
            if item is None and name in properties and name not in required and not _takes_null(known, self._root):
                continue  # Models write null for "leave it out".
            mended[name] = self.mend(known, item, wrong and wrong[name], depth + 1)
        return mended

    def _one_of(self, options: list[object], value: object, wrong: PlaceTree | None, depth: int) -> object:
        followed = [_follow(cast("Schema", option), self._root) for option in options if isinstance(option, Mapping)]
        fitting = [option for option in followed if not _types(option) or _fits(value, _types(option))]
        for option in sorted(fitting, key=lambda option: not _plausible(option, value)) or followed:
            mended = self.mend(option, value, wrong, depth + 1)
            types = _types(option)
            if not types or _fits(mended, types):
                return mended
        return value


def _plausible(option: Schema, value: object) -> bool:
    """Whether an object may be meant as this option: what tells the options apart (`kind`) is right."""
    if not isinstance(value, Mapping):
        return True
    inside = cast("Mapping[object, object]", value)
    if any(name not in inside for name in _list(option, "required")):
        return False
    properties = cast("Mapping[str, object]", option.get("properties") or {})
    for name, schema in properties.items():
        if name in inside and isinstance(schema, Mapping):
            marks = cast("Schema", schema)
            if "const" in marks and marks["const"] != inside[name]:
                return False
            if "enum" in marks and inside[name] not in _list(marks, "enum"):
                return False
    return True


def _convert(value: object, wanted: frozenset[str]) -> object:
    if isinstance(value, str):
        text = value.strip()
        if "boolean" in wanted and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if "integer" in wanted and _INTEGER.fullmatch(text):
            return int(text)
        if "number" in wanted and _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        if "null" in wanted and text.lower() in ("null", "none", ""):
            return None
        if (text[:1] == "{" and "object" in wanted) or (text[:1] == "[" and "array" in wanted):
            try:
                return json_text.decode(text)
            except ValueError:
                return value
    elif isinstance(value, float) and "integer" in wanted and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _takes_null(schema: object, root: Schema, depth: int = 0) -> bool:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return True
    here = _follow(cast("Schema", schema), root)
    for keyword in ("anyOf", "oneOf"):
        options = here.get(keyword)
        if isinstance(options, list):
            return any(_takes_null(option, root, depth + 1) for option in cast("list[object]", options))
    if "enum" in here:
        return None in _list(here, "enum")
    types = _types(here)
    return not types or "null" in types


def _follow(schema: Schema, root: Schema) -> Schema:
    for _ in range(_DEPTH):
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


def _list(schema: Schema, keyword: str) -> list[object]:
    found = schema.get(keyword)
    return cast("list[object]", found) if isinstance(found, list) else []


def _types(schema: Schema) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    return frozenset(cast("list[str]", kind)) if isinstance(kind, list) else frozenset()


def _fits(value: object, wanted: frozenset[str]) -> bool:
    match value:
        case None:
            return "null" in wanted
        case bool():
            return "boolean" in wanted
        case int():
            return "integer" in wanted or "number" in wanted
        case float():
            return "number" in wanted
        case str():
            return "string" in wanted
        case list():
            return "array" in wanted
        case Mapping():
            return "object" in wanted
        case _:
            return False


Schema = Mapping[str, Any]

_SHOWN = 8
_LONGEST = 300
"""Characters of one part of a message: the rest came from the caller, and may be megabytes."""
_LARGE = 64_000
"""Bytes of arguments beyond which only the first error is looked for: finding them all takes microseconds each."""
_MENDABLE = frozenset(("type", "enum", "const", "anyOf", "oneOf"))


class Issue(NamedTuple):
    """One thing that is wrong with the arguments."""

    path: str
    expected: str
    actual: str = ""

    def __str__(self) -> str:
        given = f", got {self.actual}" if self.actual else ""
        expected = _cut(self.expected)
        return f"{_cut(self.path)}: {expected}{given}" if self.path else f"{expected}{given}"


class InvalidArguments(Exception):
    """The arguments do not fit; every issue at once, so that a model can mend all in one go."""

    def __init__(self, issues: Iterable[Issue], *, more: int = 0) -> None:
        """`more` is how many there are beyond the ones given."""
        self.issues = tuple(issues)
        more += max(0, len(self.issues) - _SHOWN)
        super().__init__("; ".join(map(str, self.issues[:_SHOWN])) + (f"; and {more} more" if more else ""))


class Validator(Protocol):
    """Checks and coerces the arguments of one tool."""

    def from_json(self, text: str | bytes) -> dict[str, Any]: ...
    def from_mapping(self, arguments: Mapping[str, Any]) -> dict[str, Any]: ...


class SchemaValidator:
    """Checks arguments against a raw JSON Schema, exactly, with jsonschema-rs."""

    __slots__ = ("_check", "_schema")

    def __init__(self, schema: Schema, *, tool: str) -> None:
        self._check = compile_schema(schema, owner=f"tool {tool!r}")
        self._schema = schema

    def from_json(self, text: str | bytes) -> dict[str, Any]:
        return self._checked(text)

    def from_mapping(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return self._checked(arguments)

    def _checked(self, arguments: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
        try:
            values = json_text.parse_arguments(arguments)
        except ValueError as error:
            raise InvalidArguments([not_an_object_issue(error)]) from None
        try:
            return values if self._check.is_valid(values) else self._mended(values)
        except (ValueError, TypeError) as error:  # Bytes, a date, a lone surrogate, more levels than it goes down.
            raise InvalidArguments([Issue("", f"the arguments are not plain JSON: {error}")]) from None

    def _mended(self, values: dict[str, Any]) -> dict[str, Any]:
        large = json_text.encoded_size(values) > _LARGE
        errors = _errors(self._check, values, first_only=large)
        coerced = coerce(self._schema, values, None if large else _wrong(errors))
        if isinstance(coerced, dict) and self._check.is_valid(coerced):
            return cast("dict[str, Any]", coerced)
        raise InvalidArguments(_issues(errors, cast("Schema", self._schema.get("properties") or {})))


def compile_schema(schema: Schema, *, owner: str) -> Any:
    """A compiled checker of a schema; a schema that is none is an error that names its owner."""
    import jsonschema_rs  # Here: 30 ms that a toolspace of functions never pays.

    try:
        # Masked: a message must not repeat megabytes of what the caller gave.
        return jsonschema_rs.validator_for(dict(schema), retriever=_refuse_remote, mask="it")
    except jsonschema_rs.ValidationError as error:
        reason = "; ".join(map(str, _read(error)))
    except (jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
        reason = str(error)
    raise ToolDefinitionError(f"the schema of {owner} is not a valid JSON Schema: {reason}")


def find_issues(check: Any, instance: object) -> list[Issue]:
    """What a compiled checker finds wrong, one issue for each place."""
    large = json_text.encoded_size(instance) > _LARGE
    return _issues(_errors(check, instance, first_only=large))


def not_an_object_issue(error: ValueError) -> Issue:
    """What to say of arguments that cannot be read."""
    return Issue("", f"the arguments are not a JSON object: {error}")


def format_path(path: Iterable[str | int]) -> str:
    """`filters[0].name`: how messages write a place inside the arguments."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else step)
    return text


def masked_value(path: str, value: object) -> str:
    """A value as a message repeats it: messages reach logs, so without secrets."""
    return MASK if is_secret_name(path) else json_text.describe(mask_secrets([value])[0])


def _errors(check: Any, instance: object, *, first_only: bool) -> list[Any]:
    if not first_only:
        return list(check.iter_errors(instance))
    try:
        check.validate(instance)
    except ValueError as error:
        return [error]
    return []


def _wrong(errors: Iterable[Any]) -> PlaceTree | None:
    """Where mending could help."""
    wrong: PlaceTree | None = {}
    for error in errors:
        if error.kind.name in _MENDABLE:
            wrong = add_place(wrong, error.instance_path)
    return wrong


def _issues(errors: Iterable[Any], known: Iterable[str] = ()) -> list[Issue]:
    """Each issue once, however many parts of the schema found it."""
    return list(dict.fromkeys(issue for error in errors for issue in _read(error, known)))


def _read(error: Any, known: Iterable[str] = ()) -> Iterable[Issue]:
    path = format_path(error.instance_path)
    kind = error.kind
    given = masked_value(path, error.instance)
    match kind.name:
        case "required":
            yield Issue(f"{path}.{kind.property}" if path else kind.property, "required, but missing")
        case "additionalProperties" | "unevaluatedProperties":
            for name in kind.unexpected:
                yield (
                    Issue(f"{path}.{name}", "no such parameter")
                    if path
                    else Issue(name, unknown_parameter_message(name, known))
                )
        case "type":
            yield Issue(path, f"expected {' or '.join(kind.types)}", given)
        case "enum":
            options = ", ".join(json_text.describe(option, 30) for option in kind.options[:12])
            yield Issue(path, f"expected one of {options}", given)
        case "anyOf" | "oneOf" if all(kind.context):  # An option without an error: more than one of `oneOf` fits.
            yield Issue(path, _expected_options(kind.context, path), given)
        case _:
            yield Issue(path, str(error.message), given)


def _expected_options(branches: Iterable[Iterable[Any]], path: str) -> str:
    """What each option wanted; only of the options of the right type, where there are any."""
    read = [[issue for error in branch for issue in _read(error)] for branch in branches]
    meant = [issues for issues in read if not any(_is_type(issue, path) for issue in issues)]
    if not meant:
        types = dict.fromkeys(issue.expected.removeprefix("expected ") for issues in read for issue in issues)
        return f"expected {' or '.join(types)}"
    texts = [" and ".join(str(issue) for issue in issues[:_SHOWN]) for issues in meant[:_SHOWN]]
    return f"fits no option ({' | '.join(dict.fromkeys(texts))})"


def _is_type(issue: Issue, path: str) -> bool:
    return issue.path == path and issue.expected.startswith("expected ")


def unknown_parameter_message(name: str, parameter_names: Iterable[str]) -> str:
    """What to say of a parameter that does not exist."""
    names = list(parameter_names)
    hint = did_you_mean(name, names)
    if hint:
        return f"no such parameter{hint}"
    return f"no such parameter; it takes {', '.join(names)}" if names else "no such parameter; it takes none"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"the reference {uri!r} leaves the schema; put what it points to under $defs")

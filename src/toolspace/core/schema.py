"""What makes arguments right: the issues a check finds, and validators of raw JSON Schemas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast

from toolspace.core import json_text
from toolspace.core.coerce import Places, add_place, coerce
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import HIDDEN, is_secret_name, redact
from toolspace.errors import ToolDefinitionError

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
    given: str = ""

    def __str__(self) -> str:
        given = f", got {self.given}" if self.given else ""
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
            raise InvalidArguments([not_an_object(error)]) from None
        try:
            return values if self._check.is_valid(values) else self._mended(values)
        except (ValueError, TypeError) as error:  # Bytes, a date, a lone surrogate, more levels than it goes down.
            raise InvalidArguments([Issue("", f"the arguments are not plain JSON: {error}")]) from None

    def _mended(self, values: dict[str, Any]) -> dict[str, Any]:
        large = json_text.size(values) > _LARGE
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


def issues_of(check: Any, instance: object) -> list[Issue]:
    """What a compiled checker finds wrong, one issue for each place."""
    large = json_text.size(instance) > _LARGE
    return _issues(_errors(check, instance, first_only=large))


def not_an_object(error: ValueError) -> Issue:
    """What to say of arguments that cannot be read."""
    return Issue("", f"the arguments are not a JSON object: {error}")


def path_text(path: Iterable[str | int]) -> str:
    """`filters[0].name`: how messages write a place inside the arguments."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else step)
    return text


def shown(path: str, value: object) -> str:
    """A value as a message repeats it: messages reach logs, so without secrets."""
    return HIDDEN if is_secret_name(path) else json_text.describe(redact([value])[0])


def _errors(check: Any, instance: object, *, first_only: bool) -> list[Any]:
    if not first_only:
        return list(check.iter_errors(instance))
    try:
        check.validate(instance)
    except ValueError as error:
        return [error]
    return []


def _wrong(errors: Iterable[Any]) -> Places | None:
    """Where mending could help."""
    wrong: Places | None = {}
    for error in errors:
        if error.kind.name in _MENDABLE:
            wrong = add_place(wrong, error.instance_path)
    return wrong


def _issues(errors: Iterable[Any], known: Iterable[str] = ()) -> list[Issue]:
    """Each issue once, however many parts of the schema found it."""
    return list(dict.fromkeys(issue for error in errors for issue in _read(error, known)))


def _read(error: Any, known: Iterable[str] = ()) -> Iterable[Issue]:
    path = path_text(error.instance_path)
    kind = error.kind
    given = shown(path, error.instance)
    match kind.name:
        case "required":
            yield Issue(f"{path}.{kind.property}" if path else kind.property, "required, but missing")
        case "additionalProperties" | "unevaluatedProperties":
            for name in kind.unexpected:
                yield (
                    Issue(f"{path}.{name}", "no such parameter")
                    if path
                    else Issue(name, unknown_parameter(name, known))
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


def unknown_parameter(name: str, known: Iterable[str]) -> str:
    """What to say of a parameter that does not exist."""
    names = list(known)
    hint = did_you_mean(name, names)
    if hint:
        return f"no such parameter{hint}"
    return f"no such parameter; it takes {', '.join(names)}" if names else "no such parameter; it takes none"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"the reference {uri!r} leaves the schema; put what it points to under $defs")

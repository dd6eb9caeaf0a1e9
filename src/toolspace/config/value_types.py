"""The types of values that settings take: numbers, durations, paths, lists and so on.

Used by the modules that declare settings: the names in camel case are types of fields, and the others read a value.
Knows no particular setting.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from toolspace.config.secret_references import has_reference
from toolspace.config.validation import (
    AlreadyReported,
    InvalidValue,
    Section,
    SectionType,
    Value,
    ValueType,
    read_named_entries,
    read_value,
    value_type,
)
from toolspace.core.names import did_you_mean
from toolspace.core.times import format_duration, parse_duration
from toolspace.core.tool import CacheScope

T = TypeVar("T")

HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_NUMBER = re.compile(r"[-+]?\d{1,18}(?:\.\d{0,18})?")
_MAIL = re.compile(r"(?:[^<>@]*<[^<>@\s]+@[^<>@\s]+>|[^<>@\s]+@[^<>@\s]+)")
_RATE = re.compile(r"\s*(\d{1,9})\s*(?:/|per)\s*(s|sec|second|min|minute|h|hour)\s*")
_PERIOD_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SQLITE = "sqlite:///"

_STRING = {"type": "string"}
_SCALAR = {"type": ["string", "number", "boolean"]}
_OBJECT = {"type": "object"}


class RateSetting(Section, frozen=True, kw_only=True):
    """A number of calls or requests in a number of seconds."""

    count: int
    seconds: float


# Text


@value_type("string", "a string", _STRING)
def string(value: Value) -> str:
    if not isinstance(value.data, str):
        raise InvalidValue("a string")
    return value.data


@value_type("string", "a string", _SCALAR)
def scalar_string(value: Value) -> str:
    """Text that may look like a number or a boolean: `8080` in a list of arguments, `1.10` as a version."""
    data = value.data
    if isinstance(data, str):
        return data
    if isinstance(data, bool):
        return "true" if data else "false"
    if isinstance(data, int | float):
        return value.context.document.texts.get(value.path, str(data))
    raise InvalidValue("a string")


@value_type("string", "a name", _STRING)
def name(value: Value) -> str:
    text = value.data.strip() if isinstance(value.data, str) else ""
    if not text or not text.isprintable():
        raise InvalidValue("a name")
    return text


@value_type("string", "a string", _STRING)
def storable_string(value: Value) -> str:
    """Text that databases can store: without NUL characters and unpaired surrogates."""
    text = string.read(value)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidValue("text without NUL characters and halves of characters")
    return text


def secret_string(minimum: int) -> ValueType[str]:
    """A key or password that is too long to be guessed."""
    expected = f"a string of at least {minimum} plain characters without spaces"

    def read(value: Value) -> str:
        data = value.data
        if isinstance(data, str) and has_reference(data):
            return data  # Checked when it is resolved.
        is_plain = isinstance(data, str) and data.isascii() and data.isprintable() and " " not in data
        if not is_plain or len(data) < minimum:
            raise InvalidValue(expected)
        return data

    return ValueType("string", expected, read, schema=_STRING)


@value_type("mail address", "a mail address", _STRING)
def mail_address(value: Value) -> str:
    # Printable means one line: text after a line break would become a mail header.
    text = value.data.strip() if isinstance(value.data, str) else ""
    if not _MAIL.fullmatch(text) or not text.isprintable():
        raise InvalidValue('a mail address, such as "ann@example.com" or "Ann <ann@example.com>"')
    return text


def choice(*options: str, aliases: Mapping[str, str] | None = None) -> ValueType[Any]:
    """One of several words, in upper or lower case."""
    expected = f"one of {', '.join(options)}"
    by_word = {option.lower(): option for option in options}
    by_word.update({alias.lower(): option for alias, option in (aliases or {}).items()})

    def read(value: Value) -> str:
        if not isinstance(value.data, str):
            raise InvalidValue(expected)
        option = by_word.get(value.data.strip().lower())
        if option is None:
            raise InvalidValue(expected, did_you_mean(value.data, options))
        return option

    label = " \\| ".join(f"`{option}`" for option in options)
    words = dict.fromkeys((*map(str, options), *(aliases or ()), *by_word))
    return ValueType(label, expected, read, schema={"enum": list(words)})


# Booleans and numbers


@value_type("boolean", "true or false", {"anyOf": [{"type": "boolean"}, {"enum": [*_TRUE, *_FALSE]}]})
def boolean(value: Value) -> bool:
    if isinstance(value.data, bool):
        return value.data
    if isinstance(value.data, str):
        word = value.data.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    raise InvalidValue("true or false")


def integer(minimum: int, maximum: int | None = None, *, nullable: bool = False) -> ValueType[int]:
    upper = "" if maximum is None else f" and at most {maximum}"
    expected = f"an integer of at least {minimum}{upper}" + (", or null" if nullable else "")

    def read(value: Value) -> int:
        data = value.data
        # A variable holds text only. Some JSON writers write a whole number as `3.0`.
        if (isinstance(data, str) and _INTEGER.fullmatch(data.strip())) or (
            isinstance(data, float) and data.is_integer()
        ):
            data = int(data)
        if isinstance(data, bool) or not isinstance(data, int):
            raise InvalidValue(expected)
        if data < minimum or (maximum is not None and data > maximum):
            raise InvalidValue(expected)
        return data

    label = "integer or null" if nullable else "integer"
    schema = _range_schema("integer", minimum, maximum, nullable=nullable)
    return ValueType(label, expected, read, schema=schema, nullable=nullable)


def number(minimum: float, maximum: float | None = None, *, nullable: bool = False) -> ValueType[float]:
    upper = "" if maximum is None else f" and at most {maximum:g}"
    expected = f"a number of at least {minimum:g}{upper}" + (", or null" if nullable else "")

    def read(value: Value) -> float:
        data = value.data
        if isinstance(data, str) and _NUMBER.fullmatch(data.strip()):
            data = float(data)
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise InvalidValue(expected)
        # Compared before the conversion: no float holds an integer of 400 digits. NaN is in no range.
        if not minimum <= data <= (sys.float_info.max if maximum is None else maximum):
            raise InvalidValue(expected)
        return float(data)

    label = "number or null" if nullable else "number"
    schema = _range_schema("number", minimum, maximum, nullable=nullable)
    return ValueType(label, expected, read, schema=schema, nullable=nullable)


def _range_schema(json_type: str, minimum: float, maximum: float | None, *, nullable: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": [json_type, "null"] if nullable else json_type, "minimum": minimum}
    return schema if maximum is None else {**schema, "maximum": maximum}


def nullable(value_type: ValueType[T]) -> ValueType[T]:
    """The same type, where `null` is a value of its own."""
    return ValueType(
        f"{value_type.label} or null",
        f"{value_type.expected}, or null",
        value_type.read,
        schema={"anyOf": [value_type, {"type": "null"}]},
        nullable=True,
        format_default=value_type.format_default,
    )


# Durations and rates


def _read_seconds(value: Value) -> float:
    try:
        seconds = parse_duration(value.data)
    except (ValueError, OverflowError):
        raise InvalidValue('milliseconds or a duration such as "30s"') from None
    if not math.isfinite(seconds):
        raise InvalidValue('milliseconds or a duration such as "30s"')
    return seconds


@value_type("duration", 'a duration such as "30s"', {"type": ["string", "number"]}, format_default=format_duration)
def duration(value: Value) -> float:
    seconds = _read_seconds(value)
    if seconds <= 0:
        raise InvalidValue("a duration longer than 0")
    return seconds


@value_type("duration", 'a duration such as "2s"', {"type": ["string", "number"]}, format_default=format_duration)
def duration_or_zero(value: Value) -> float:
    seconds = _read_seconds(value)
    if seconds < 0:
        raise InvalidValue("a duration, or 0")
    return seconds


@value_type("duration", 'a duration such as "5m"', _SCALAR)
def cache_duration(value: Value) -> float:
    if value.data is False or (isinstance(value.data, str) and value.data.strip().lower() in ("false", "no", "off")):
        return 0.0
    try:
        return _read_seconds(value)
    except InvalidValue as error:
        raise InvalidValue(f"{error}; 0 or false for no cache") from None


_scope_word = choice("principal", "shared")


@value_type(_scope_word.label, _scope_word.expected, {"anyOf": [_scope_word, boolean]})
def cache_scope(value: Value) -> CacheScope:
    """`principal` or `shared`. The older setting `cachePerUser` is true or false."""
    with suppress(InvalidValue):
        return "principal" if boolean.read(value) else "shared"
    return _scope_word.read(value)


def _format_rate(rate: RateSetting) -> str:
    period = next(word for word in ("second", "minute", "hour") if _PERIOD_SECONDS[word] == rate.seconds)
    return f"{rate.count}/{period}"


@value_type("rate", 'a rate such as "5/second"', _STRING, format_default=_format_rate)
def rate(value: Value) -> RateSetting:
    match = _RATE.fullmatch(value.data) if isinstance(value.data, str) else None
    if match is None or int(match[1]) < 1:
        raise InvalidValue('a rate such as "5/second", "100/minute" or "1000/hour"')
    return RateSetting(count=int(match[1]), seconds=_PERIOD_SECONDS[match[2]])


# Paths and URLs


def resolve_path(value: Value, text: str) -> Path:
    """The absolute path: from a file relative to the file, from a variable relative to the working directory."""
    if "\0" in text or has_reference(text):
        raise InvalidValue("a path")
    base = value.context.base_dir if value.variable is None else Path.cwd()
    try:
        return Path(os.path.normpath(base / Path(text).expanduser()))
    except RuntimeError:  # `~user` of a user that does not exist.
        raise InvalidValue("a path, of a user that exists") from None


@value_type("path", "a path", _STRING)
def path(value: Value) -> Path:
    if not isinstance(value.data, str) or not value.data:
        raise InvalidValue("a path")
    return resolve_path(value, value.data)


@value_type("URL or path", "a URL or the path of a file", _STRING)
def url_or_path(value: Value) -> str:
    if not isinstance(value.data, str) or not value.data:
        raise InvalidValue("a URL or the path of a file")
    return value.data if _URL.match(value.data) else str(resolve_path(value, value.data))


@value_type("URL", "a URL that begins with http:// or https://", _STRING)
def http_url(value: Value) -> str:
    url = value.data.strip() if isinstance(value.data, str) else ""
    if has_reference(url):
        return url
    try:
        parts = urlsplit(url)
        is_http = parts.scheme.lower() in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # An invalid port, or an unclosed bracket.
        is_http = False
    if not is_http:
        raise InvalidValue("a URL that begins with http:// or https://")
    return url


_DATABASE = "postgresql://… or the path of a SQLite file"


@value_type("URL or path", _DATABASE, _STRING)
def database_url(value: Value) -> str:
    """Returns `postgresql://…`, or `sqlite:///` and the absolute path of a file."""
    if not isinstance(value.data, str) or not value.data.strip():
        raise InvalidValue(_DATABASE)
    text = value.data.strip()
    if has_reference(text):
        return text  # Checked when it is resolved.
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _SQLITE + str(resolve_path(value, text))
    match scheme.lower():
        case "postgresql" | "postgres":
            return f"postgresql://{rest}"
        case "sqlite" if rest.startswith("/") and len(rest) > 1:
            # As in SQLAlchemy: a relative path follows three slashes, an absolute one follows four.
            return _SQLITE + str(resolve_path(value, rest[1:]))
        case "sqlite":
            raise InvalidValue("sqlite:/// and the path of a file")
        case _:
            raise InvalidValue(_DATABASE)


# Lists and mappings


def list_of(item: ValueType[T], label: str, expected: str, *, separator: str = ",") -> ValueType[tuple[T, ...]]:
    """A list. A single value counts as a list with one element."""

    def read(value: Value) -> tuple[T, ...]:
        try:
            elements = value.elements()
        except InvalidValue:
            raise InvalidValue(expected) from None
        items: list[T] = []
        is_valid = True
        for element in elements:
            try:
                items.append(read_value(item, element))
            except AlreadyReported:
                is_valid = False
        if not is_valid:
            raise AlreadyReported
        return tuple(items)

    schema = {"anyOf": [{"type": "array", "items": item}, _STRING]}
    return ValueType(label, expected, read, schema=schema, separator=separator)


strings = list_of(scalar_string, "list of strings", "a list of strings")
names = list_of(name, "list of names", "a list of names")
globs = list_of(string, "list of names or globs", "a list of names or globs")
paths = list_of(path, "list of paths", "a list of paths", separator=os.pathsep)
mail_addresses = list_of(mail_address, "list of mail addresses", "a list of mail addresses")


@value_type(
    "mapping of strings",
    "a mapping of strings",
    {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
    fits_variable=False,
)
def string_map(value: Value) -> dict[str, str]:
    strings_by_key: dict[str, str] = {}
    for key, inner in value.items():
        if inner.data is None:  # Editors write null for a variable that is not passed on.
            continue
        with suppress(AlreadyReported):
            strings_by_key[key] = read_value(scalar_string, inner, secret=True)
    return strings_by_key


@value_type("mapping", "a mapping", _OBJECT, fits_variable=False)
def mapping(value: Value) -> dict[str, Any]:
    return dict(value.mapping())


@value_type("JSON Schema", "a JSON Schema of an object", _OBJECT, fits_variable=False)
def schema(value: Value) -> dict[str, Any]:
    object_schema = mapping.read(value)
    if object_schema.get("type", "object") != "object":
        raise InvalidValue('a JSON Schema of type "object"')
    return object_schema


any_value = ValueType("any value", "a value", lambda value: value.data, schema={}, fits_variable=False)


def entries_by_name(entry: ValueType[Any], entry_label: str) -> ValueType[dict[str, Any]]:
    """Entries by name: a mapping, or a list whose elements have a `name`."""
    return ValueType(
        f"{entry_label} by name",
        f"a mapping of {entry_label} by name",
        lambda value: read_named_entries(entry, value, entry_label=entry_label),
        schema=entries_schema(entry),
        fits_variable=False,
    )


def entries_schema(entry: ValueType[Any]) -> dict[str, Any]:
    """The JSON Schema of entries by name."""
    elements = {"type": "object", "required": ["name"]}
    return {"anyOf": [{"type": "object", "additionalProperties": entry}, {"type": "array", "items": elements}]}


# Types of fields

Count = Annotated[int, integer(1)]
NullableCount = Annotated[int | None, integer(1, nullable=True)]
Duration = Annotated[float, duration]
"""In seconds."""
NullableRate = Annotated[RateSetting | None, nullable(rate)]
Name = Annotated[str, name]
Names = Annotated[tuple[str, ...], names]
Globs = Annotated[tuple[str, ...], globs]
HttpUrl = Annotated[str, http_url]
ScalarText = Annotated[str, scalar_string]
StorableText = Annotated[str, storable_string]
ObjectSchema = Annotated[Mapping[str, Any], schema]

_DEFAULT_TYPES: Mapping[Any, ValueType[Any]] = {
    str: string,
    bool: boolean,
    Path: path,
    tuple[str, ...]: strings,
    tuple[Path, ...]: paths,
    Mapping[str, str]: string_map,
    Mapping[str, Any]: mapping,
}


def default_type(annotation: Any) -> ValueType[Any]:
    """The type of value that a field of this Python type has, unless its declaration says otherwise."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (member for member in get_args(annotation) if member is not NoneType)
    if hasattr(annotation, "__metadata__"):  # One of the types above.
        return annotation.__metadata__[0]
    if get_origin(annotation) is Literal:
        return choice(*get_args(annotation))
    if annotation not in _DEFAULT_TYPES and issubclass(annotation, StrEnum):
        return choice(*annotation)
    return _DEFAULT_TYPES.get(annotation) or SectionType(annotation)

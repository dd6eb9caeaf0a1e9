"""The kinds of value that settings take: numbers, durations, paths, lists, … Knows no particular setting."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from toolspace.config.model import RateSetting
from toolspace.config.reader import AlreadyReported, InvalidValue, Value, ValueType, read_value
from toolspace.core.names import did_you_mean
from toolspace.core.times import parse_duration

T = TypeVar("T")

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_NUMBER = re.compile(r"[-+]?\d{1,18}(?:\.\d{0,18})?")
_MAIL = re.compile(r"(?:[^<>@]*<[^<>@\s]+@[^<>@\s]+>|[^<>@\s]+@[^<>@\s]+)")
_RATE = re.compile(r"\s*(\d{1,9})\s*(?:/|per)\s*(s|sec|second|min|minute|h|hour)\s*")
_PERIODS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def _text(value: Value) -> str:
    if not isinstance(value.data, str):
        raise InvalidValue("a string")
    return value.data


def _word(value: Value) -> str:
    """Text that may look like something else: `8080` in a list of arguments, `1.10` as a version."""
    data = value.data
    if isinstance(data, str):
        return data
    if isinstance(data, bool):
        return "true" if data else "false"
    if isinstance(data, int | float):
        return value.context.document.texts.get(value.path, str(data))
    raise InvalidValue("a string")


def _flag(value: Value) -> bool:
    if isinstance(value.data, bool):
        return value.data
    if isinstance(value.data, str):
        word = value.data.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    raise InvalidValue("true or false")


def _label(value: Value) -> str:
    found = value.data.strip() if isinstance(value.data, str) else ""
    if not found or not found.isprintable():
        raise InvalidValue("a name")
    return found


def _prose(value: Value) -> str:
    """Text that is kept: what no database can hold is better found now."""
    found = _text(value)
    if "\0" in found or any("\ud800" <= character <= "\udfff" for character in found):
        raise InvalidValue("text without NUL characters and halves of characters")
    return found


string = ValueType("string", "a string", _text)
storable_string = ValueType("string", "a string", _prose)
name = ValueType("string", "a name", _label)
scalar_string = ValueType("string", "a string", _word)
boolean = ValueType("boolean", "true or false", _flag)


def integer(minimum: int, maximum: int | None = None, *, nullable: bool = False) -> ValueType[int]:
    upper = "" if maximum is None else f" and at most {maximum}"
    expects = f"an integer of at least {minimum}{upper}" + (", or null" if nullable else "")

    def read(value: Value) -> int:
        data = value.data
        # A variable can only hold text; `3.0` is how some writers of JSON put a whole number.
        if (isinstance(data, str) and _INTEGER.fullmatch(data.strip())) or (
            isinstance(data, float) and data.is_integer()
        ):
            data = int(data)
        if isinstance(data, bool) or not isinstance(data, int):
            raise InvalidValue(expects)
        if data < minimum or (maximum is not None and data > maximum):
            raise InvalidValue(expects)
        return data

    return ValueType("integer or null" if nullable else "integer", expects, read, nullable=nullable)


def number(minimum: float, maximum: float | None = None, *, nullable: bool = False) -> ValueType[float]:
    upper = "" if maximum is None else f" and at most {maximum:g}"
    expects = f"a number of at least {minimum:g}{upper}" + (", or null" if nullable else "")

    def read(value: Value) -> float:
        data = value.data
        if isinstance(data, str) and _NUMBER.fullmatch(data.strip()):
            data = float(data)
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise InvalidValue(expects)
        # Compared before it is converted: no float holds an integer of 400 digits. NaN is in no range.
        if not minimum <= data <= (sys.float_info.max if maximum is None else maximum):
            raise InvalidValue(expects)
        return float(data)

    return ValueType("number or null" if nullable else "number", expects, read, nullable=nullable)


def _seconds(value: Value) -> float:
    try:
        seconds = parse_duration(value.data)
    except (ValueError, OverflowError):
        raise InvalidValue('milliseconds or a duration such as "30s"') from None
    if not math.isfinite(seconds):
        raise InvalidValue('milliseconds or a duration such as "30s"')
    return seconds


def _duration(value: Value) -> float:
    seconds = _seconds(value)
    if seconds <= 0:
        raise InvalidValue("a duration longer than 0")
    return seconds


def _cache(value: Value) -> float:
    if value.data is False or (isinstance(value.data, str) and value.data.strip().lower() in ("false", "no", "off")):
        return 0.0
    try:
        return _seconds(value)
    except InvalidValue as wrong:
        raise InvalidValue(f"{wrong}; 0 or false for no cache") from None


duration = ValueType("duration", 'a duration such as "30s"', _duration)
cache_duration = ValueType("duration", 'a duration such as "5m"', _cache)


def _rate(value: Value) -> RateSetting:
    match = _RATE.fullmatch(value.data) if isinstance(value.data, str) else None
    if match is None or int(match[1]) < 1:
        raise InvalidValue('a rate such as "5/second", "100/minute" or "1000/hour"')
    return RateSetting(count=int(match[1]), seconds=_PERIODS[match[2]])


rate = ValueType("rate", 'a rate such as "5/second"', _rate)


def nullable(kind: ValueType[T]) -> ValueType[T]:
    """The same, where `null` says something too."""
    return ValueType(f"{kind.label} or null", f"{kind.expected}, or null", kind.read, nullable=True)


def choice(*options: str, aliases: Mapping[str, str] | None = None) -> ValueType[Any]:
    expects = f"one of {', '.join(options)}"
    known = {option.lower(): option for option in options}
    known.update({alias.lower(): option for alias, option in (aliases or {}).items()})

    def read(value: Value) -> str:
        if not isinstance(value.data, str):
            raise InvalidValue(expects)
        found = known.get(value.data.strip().lower())
        if found is None:
            raise InvalidValue(expects, did_you_mean(value.data, options))
        return found

    return ValueType(" \\| ".join(f"`{option}`" for option in options), expects, read)


def resolve_path(value: Value, written: str) -> Path:
    """A path as it was meant: in the file relative to the file, in a variable to the working folder."""
    if "\0" in written:
        raise InvalidValue("a path")
    base = value.context.base_dir if value.variable is None else Path.cwd()
    try:
        return Path(os.path.normpath(base / Path(written).expanduser()))
    except RuntimeError:  # `~user` of a user that does not exist.
        raise InvalidValue("a path, of a user that exists") from None


def _path(value: Value) -> Path:
    if not isinstance(value.data, str) or not value.data:
        raise InvalidValue("a path")
    return resolve_path(value, value.data)


def _location(value: Value) -> str:
    if not isinstance(value.data, str) or not value.data:
        raise InvalidValue("a URL or the path of a file")
    return value.data if _URL.match(value.data) else str(resolve_path(value, value.data))


path = ValueType("path", "a path", _path)
url_or_path = ValueType("URL or path", "a URL or the path of a file", _location)


def _web(value: Value) -> str:
    found = value.data.strip() if isinstance(value.data, str) else ""
    try:
        parts = urlsplit(found)
        usable = parts.scheme.lower() in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # A port that is none, brackets that do not close.
        usable = False
    if not usable:
        raise InvalidValue("a URL that begins with http:// or https://")
    return found


def _database(value: Value) -> str:
    """`postgresql://…` as it is; a file as `sqlite:///` and its absolute path, whichever way it was written."""
    expects = "postgresql://… or the path of a SQLite file"
    if not isinstance(value.data, str) or not value.data.strip():
        raise InvalidValue(expects)
    written = value.data.strip()
    scheme, found, rest = written.partition("://")
    if not found:
        return _SQLITE + str(resolve_path(value, written))
    match scheme.lower():
        case "postgresql" | "postgres":
            return f"postgresql://{rest}"
        case "sqlite" if rest.startswith("/") and len(rest) > 1:
            # As others write it: after three slashes a relative path, after four an absolute one.
            return _SQLITE + str(resolve_path(value, rest[1:]))
        case "sqlite":
            raise InvalidValue("sqlite:/// and the path of a file")
        case _:
            raise InvalidValue(expects)


_SQLITE = "sqlite:///"
http_url = ValueType("URL", "a URL that begins with http:// or https://", _web)
database_url = ValueType("URL or path", "postgresql://… or the path of a SQLite file", _database)


def secret_string(minimum: int) -> ValueType[str]:
    """A key or password, long enough not to be guessed."""
    expects = f"a string of at least {minimum} plain characters without spaces"

    def read(value: Value) -> str:
        data = value.data
        usable = isinstance(data, str) and data.isascii() and data.isprintable() and " " not in data
        if not usable or len(data) < minimum:
            raise InvalidValue(expects)
        return data

    return ValueType("string", expects, read)


def list_of(item: ValueType[T], label: str, expects: str, *, separator: str = ",") -> ValueType[tuple[T, ...]]:
    """A list; a single value counts as a list of one."""

    def read(value: Value) -> tuple[T, ...]:
        try:
            elements = value.elements()
        except InvalidValue:
            raise InvalidValue(expects) from None
        found: list[T] = []
        failed = False
        for element in elements:
            try:
                found.append(read_value(item, element))
            except AlreadyReported:
                failed = True
        if failed:
            raise AlreadyReported
        return tuple(found)

    return ValueType(label, expects, read, separator=separator)


def _mail_address(value: Value) -> str:
    # Within one line: what follows a line break would be a header of its own.
    written = value.data.strip() if isinstance(value.data, str) else ""
    if not _MAIL.fullmatch(written) or not written.isprintable():
        raise InvalidValue('a mail address, such as "ann@example.com" or "Ann <ann@example.com>"')
    return written


mail_address = ValueType("mail address", "a mail address", _mail_address)
mail_addresses = list_of(mail_address, "list of mail addresses", "a list of mail addresses")
strings = list_of(scalar_string, "list of strings", "a list of strings")
names = list_of(name, "list of names", "a list of names")
globs = list_of(string, "list of names or globs", "a list of names or globs")
paths = list_of(path, "list of paths", "a list of paths", separator=os.pathsep)


def _word_map(value: Value) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, inner in value.items():
        if inner.data is None:  # How editors say that a variable is not passed on.
            continue
        try:
            found[key] = read_value(scalar_string, inner, secret=True)
        except AlreadyReported:
            continue
    return found


def _mapping(value: Value) -> dict[str, Any]:
    return dict(value.mapping())


def _schema(value: Value) -> dict[str, Any]:
    schema = _mapping(value)
    if schema.get("type", "object") != "object":
        raise InvalidValue('a JSON Schema of type "object"')
    return schema


string_map = ValueType("mapping of strings", "a mapping of strings", _word_map, fits_variable=False)
mapping = ValueType("mapping", "a mapping", _mapping, fits_variable=False)
schema = ValueType("JSON Schema", "a JSON Schema of an object", _schema, fits_variable=False)
any_value = ValueType("any value", "a value", lambda value: value.data, fits_variable=False)


def _names_or_flag(value: Value) -> bool | tuple[str, ...]:
    if isinstance(value.data, bool):
        return value.data
    if isinstance(value.data, str) and value.data.strip().lower() in _TRUE + _FALSE:
        return _flag(value)
    try:
        return globs.read(value)
    except InvalidValue:
        raise InvalidValue("true, false, or a list of names or globs") from None


boolean_or_globs: ValueType[bool | tuple[str, ...]] = ValueType(
    "boolean or list of names or globs",
    "true, false, or a list of names or globs",
    _names_or_flag,
    separator=",",
)

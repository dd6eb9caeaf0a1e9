"""Turns the values of a document into typed ones, noting all that is wrong. Knows no particular setting.

A `Kind` reads one value; a `Record` reads a mapping of settings into a struct. A reader that cannot go on
raises `Wrong`, which becomes a problem at its place; reading continues beside it, so that a user sees all
faults at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec

from toolspace.config.document import ConfigDocument, ConfigProblem, KeyPath, format_key_path, format_value
from toolspace.core.names import did_you_mean

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_SLIP = 0.85
"""How much alike two keys are if one is the other mistyped, and not the key of another program."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class InvalidValue(Exception):
    """A value is not what its setting takes; the text says what is: `an integer of at least 1`."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.hint = hint


class AlreadyReported(Exception):
    """A value cannot be used, and why has been noted already."""


class ReadingContext:
    """One reading of one document: what it needs to know, and what it finds out."""

    def __init__(
        self,
        document: ConfigDocument,
        *,
        base_dir: Path,
        unexpanded: Mapping[KeyPath, str] | None = None,
        overrides: Mapping[KeyPath, tuple[str, Any]] | None = None,
        problems: Iterable[ConfigProblem] = (),
    ) -> None:
        self.document = document
        self.base_dir = base_dir
        self.unexpanded = unexpanded or {}
        self.overrides = overrides or {}
        self.problems = list(problems)
        self.warnings: list[str] = []
        self.origins: dict[KeyPath, KeyPath | str] = {}
        """Where each setting that was given came from: a place in the document, or the name of a variable."""
        self._unusable = {problem.path for problem in self.problems}

    def isolated(self) -> ReadingContext:
        """A reading of one part of the document by itself, which no variable overrides. Its faults are noted here."""
        part = ReadingContext(self.document, base_dir=self.base_dir, unexpanded=self.unexpanded)
        part.problems, part.warnings, part._unusable = self.problems, self.warnings, self._unusable
        return part

    def report(self, at: KeyPath, message: str, variable: str | None = None) -> None:
        if variable is not None or at not in self._unusable:  # What could not be expanded has had its word.
            self.problems.append(ConfigProblem(at, message, variable))

    def warn(self, at: KeyPath, message: str) -> None:
        self.warnings.append(f"{self.document.format_location(at)}: {format_key_path(at)}: {message}")

    def has_override_below(self, name: KeyPath) -> bool:
        return any(path[: len(name)] == name for path in self.overrides)


class Value:
    """One value, with its place in the document (`at`) and in the configuration (`name`)."""

    __slots__ = ("context", "data", "key", "path", "variable")

    def __init__(
        self, data: Any, context: ReadingContext, path: KeyPath = (), key: KeyPath = (), variable: str | None = None
    ) -> None:
        self.data = data
        self.context = context
        self.path = path
        self.key = key
        self.variable = variable

    def child(self, key: str | int, data: Any, *, name: str | None = None) -> Value:
        named = (*self.key, key if name is None else name)
        return Value(data, self.context, (*self.path, key), named, self.variable)

    def renamed(self, *name: str | int) -> Value:
        """The same value under another name in the configuration."""
        return Value(self.data, self.context, self.path, name, self.variable)

    def report(self, message: str) -> None:
        self.context.report(self.path, message, self.variable)

    def report_invalid(self, expected: str, hint: str = "", *, secret: bool = False) -> None:
        """Notes what was expected and what was there instead; never what a variable or a secret holds."""
        if self.path in self.context.unexpanded and self.variable is None:
            got = f"what {format_value(self.context.unexpanded[self.path])} expands to"
        else:
            got = "something else" if secret and isinstance(self.data, str) else format_value(self.data)
        self.report(f"expected {expected}, got {got}{hint}")

    def record_origin(self) -> None:
        """Remembers where this setting came from."""
        self.context.origins[self.key] = self.variable or self.path

    def mapping(self) -> Mapping[str, Any]:
        data: object = self.data
        if not isinstance(data, Mapping):
            raise InvalidValue("a mapping")
        return cast("Mapping[str, Any]", data)

    def items(self) -> list[tuple[str, Value]]:
        """The pairs of a mapping."""
        return [(key, self.child(key, data)) for key, data in self.mapping().items()]

    def elements(self) -> list[Value]:
        """The elements of a list; a single string counts as a list of one."""
        data: object = self.data
        if isinstance(data, str):
            return [self]
        if not isinstance(data, list):
            raise InvalidValue("a list")
        return [self.child(index, item) for index, item in enumerate(cast("list[Any]", data))]


class ValueType(Generic[T]):
    """A kind of value: how to read it, what messages and documentation call it."""

    def __init__(
        self,
        label: str,
        expected: str,
        read: Callable[[Value], T],
        *,
        nullable: bool = False,
        separator: str | None = None,
        fits_variable: bool = True,
        has_settings: bool = False,
    ) -> None:
        self.label = label
        self.expected = expected
        self._read = read
        self.nullable = nullable
        """Whether `null` is a value of its own; elsewhere it means that nothing is said."""
        self.separator = separator
        """What parts the elements of a list in an environment variable."""
        self.fits_variable = fits_variable
        """Whether one environment variable can hold it."""
        self.has_settings = has_settings
        """Whether it has settings of its own, some of which may be given though it is not."""

    def read(self, value: Value) -> T:
        return self._read(value)


def read_value(kind: ValueType[T], value: Value, *, secret: bool = False) -> T:
    """Reads a value; a wrong one is noted. Raises `Reported` then."""
    try:
        result = kind.read(value)
    except InvalidValue as wrong:
        value.report_invalid(str(wrong), wrong.hint, secret=secret)
        raise AlreadyReported from None
    value.record_origin()
    return result


class Setting:
    """One key of a record: what it takes, what it does, and what holds without it."""

    def __init__(
        self,
        key: str,
        kind: ValueType[Any],
        effect: str,
        *,
        default: str = "",
        attribute: str | None = None,
        aliases: tuple[str, ...] = (),
        required: bool = False,
        secret: bool = False,
        environment: bool = True,
    ) -> None:
        self.key = key
        self.kind = kind
        self.effect = effect
        self.default = default
        """The default as a user would write it; empty for none."""
        self.attribute = attribute or snake_case(key)
        self.aliases = aliases
        self.required = required
        self.secret = secret
        self.environment = environment


class SectionType(ValueType[S]):
    """A mapping with known keys, read into a struct."""

    def __init__(
        self,
        struct: type[S],
        *settings: Setting,
        extra: str | None = None,
        named: bool = False,
        shorthand: str | None = None,
        ignored: Callable[[str], bool] = lambda key: False,
    ) -> None:
        super().__init__("mapping", "a mapping", self._record, fits_variable=False, has_settings=True)
        self.struct = struct
        self.settings = settings
        self.extra = extra
        """The attribute that keeps unknown keys; without one they are errors."""
        self.named = named
        """Whether the struct has the name of its entry."""
        self.shorthand = shorthand
        """The key that a bare string stands for."""
        self.ignored = ignored
        self._by_key = {key: setting for setting in settings for key in (setting.key, *setting.aliases)}

    def _record(self, value: Value) -> S:
        data = value.data
        if isinstance(data, str) and self.shorthand is not None:
            data = {self.shorthand: data}
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            raise InvalidValue("a mapping")
        mapping = cast("Mapping[str, Any]", data)
        fields, sound = self._fields(value, mapping)
        unknown = self._unknown(value, mapping)
        if self.extra is not None:
            fields[self.extra] = unknown
        elif unknown:
            sound = False
        if self.named:
            fields["name"] = str(value.key[-1])
        if not sound:
            raise AlreadyReported
        return self.struct(**fields)

    def _fields(self, value: Value, mapping: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        fields: dict[str, Any] = {}
        sound = True
        for setting in self.settings:
            inner = self._find(value, mapping, setting)
            if inner is None or (inner.data is None and not setting.kind.nullable and not setting.kind.has_settings):
                if setting.required:
                    value.report(f'"{setting.key}" is missing; expected {setting.kind.expected}')
                    sound = False
                continue
            if inner.data is None and setting.kind.nullable:
                inner.record_origin()
                fields[setting.attribute] = None
                continue
            try:
                fields[setting.attribute] = read_value(setting.kind, inner, secret=setting.secret)
            except AlreadyReported:
                sound = False
        return fields, sound

    def _find(self, value: Value, mapping: Mapping[str, Any], setting: Setting) -> Value | None:
        """The value of a setting: from the environment, else under its key, else under an older one."""
        name = (*value.key, setting.key)
        if name in value.context.overrides:
            variable, data = value.context.overrides[name]
            return Value(data, value.context, name, name, variable)
        given = [key for key in (setting.key, *setting.aliases) if mapping.get(key) is not None]
        for other in given[1:]:
            value.child(other, None).report(f'means the same as "{given[0]}", which is given too; remove one')
        if given:
            return value.child(given[0], mapping[given[0]], name=setting.key)
        if setting.key in mapping:
            return value.child(setting.key, None)
        if setting.kind.has_settings and value.context.has_override_below(name):
            return Value({}, value.context, name, name)
        return None

    def _unknown(self, value: Value, mapping: Mapping[str, Any]) -> dict[str, Any]:
        unknown: dict[str, Any] = {}
        for key, data in mapping.items():
            if key in self._by_key or self.ignored(key):
                continue
            unknown[key] = data
            inner = value.child(key, data)
            if self.extra is None:
                known = f"; the keys here are {', '.join(setting.key for setting in self.settings)}"
                inner.report(f"unknown key{did_you_mean(key, self._by_key) or known}")
            elif meant := difflib.get_close_matches(key, self._by_key, n=1, cutoff=_SLIP):
                # Kept, as other programs have keys of their own; but a slip in `toolsDenied` must be seen.
                inner.context.warn(inner.path, f'unknown key, kept without effect; did you mean "{meant[0]}"?')
        return unknown


def read_named_entries(kind: ValueType[T], value: Value, *, what: str) -> dict[str, T]:
    """Named entries: a mapping by name, or a list whose elements have a `name`."""
    found: dict[str, T] = {}
    for name, inner in list_named_values(value, what=what):
        try:
            found[name] = read_value(kind, inner)
        except AlreadyReported:
            continue
    return found


def list_named_values(value: Value, *, what: str) -> list[tuple[str, Value]]:
    """The entries of a mapping by name, or of a list whose elements have a `name`, each under its name."""
    if isinstance(value.data, Mapping):
        return [(name, inner) for name, inner in value.items() if _has_content(inner)]
    if not isinstance(value.data, list):
        raise InvalidValue(f"a mapping of {what} by name, or a list of them with a name each")
    found: dict[str, Value] = {}
    for inner in value.elements():
        try:
            mapping = inner.mapping()
        except InvalidValue as wrong:
            inner.report_invalid(str(wrong))
            continue
        name = mapping.get("name")
        if not isinstance(name, str) or not name:
            inner.report('"name" is missing; expected a string')
        elif name in found:
            first = value.context.document.find_line(found[name].path)
            inner.report(f"the name {format_value(name)} is given twice, first in line {first}")
        else:
            rest = {key: data for key, data in mapping.items() if key != "name"}
            found[name] = Value(rest, value.context, inner.path, (*value.key, name))
    return list(found.items())


def _has_content(value: Value) -> bool:
    if value.data is None:
        value.report("is empty; expected a mapping")
    return value.data is not None


def snake_case(key: str) -> str:
    """`toolTimeout` → `tool_timeout`, `traceMCP` → `trace_mcp`."""
    return _CAMEL.sub("_", key).lower()

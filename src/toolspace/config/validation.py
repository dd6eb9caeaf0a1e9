"""Reads the values of a document into typed sections and reports everything that is wrong with them.

A `Section` declares its settings on its fields: `Annotated[type, "What it does."] = default`. That is the only place
where a setting is described; the reader, the documentation, `toolspace explain`, the starter file, the environment
variables and the JSON Schema are derived from it. The type of the field decides how the value is read; a `ValueType`
after it says otherwise, and a `SettingOptions` after the text has the rest: other keys, secrecy. A reader that cannot
continue raises `InvalidValue`, which becomes a problem at its place; reading goes on with the next value, so that users
see all problems at once.

Used by the other modules of `config`. Knows no particular setting.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar, cast

import msgspec

from toolspace.config.file_formats import ConfigDocument, ConfigProblem, KeyPath, format_key_path, format_value
from toolspace.core.names import did_you_mean

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_TYPO_SIMILARITY = 0.85
"""How similar an unknown key must be to a setting to count as its misspelling and not as another program's key."""
_REQUIRED: Any = object()
"""The default of a setting that has none."""
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class InvalidValue(Exception):
    """A value is not what its setting accepts. The text says what is expected: `an integer of at least 1`."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.hint = hint


class AlreadyReported(Exception):
    """A value cannot be used, and its problem has been reported already."""


class ReadingContext:
    """The state of reading one document: its inputs, and the problems, warnings and origins that come out."""

    def __init__(
        self,
        document: ConfigDocument,
        *,
        base_dir: Path,
        original_texts: Mapping[KeyPath, str] | None = None,
        overrides: Mapping[KeyPath, tuple[str, Any]] | None = None,
        problems: Iterable[ConfigProblem] = (),
    ) -> None:
        self.document = document
        self.base_dir = base_dir
        """The directory that relative paths are relative to."""
        self.original_texts = original_texts or {}
        """The text of each value before its variables were filled in. Messages show it instead of the value."""
        self.overrides = overrides or {}
        """Key of a setting → the environment variable that overrides it, and its value."""
        self.problems = list(problems)
        self.warnings: list[str] = []
        self.origins: dict[KeyPath, KeyPath | str] = {}
        """Key of a setting → its place in the document, or the name of its environment variable."""
        self._failed_paths = {problem.path for problem in self.problems}

    def without_overrides(self) -> ReadingContext:
        """A context for one part of the document that no variable overrides. Its problems are reported here."""
        part = ReadingContext(self.document, base_dir=self.base_dir, original_texts=self.original_texts)
        part.problems, part.warnings, part._failed_paths = self.problems, self.warnings, self._failed_paths
        return part

    def report(self, path: KeyPath, message: str, variable: str | None = None) -> None:
        if variable is not None or path not in self._failed_paths:  # A failed expansion has been reported already.
            self.problems.append(ConfigProblem(path, message, variable))

    def warn(self, path: KeyPath, message: str) -> None:
        self.warnings.append(f"{self.document.format_location(path)}: {format_key_path(path)}: {message}")

    def has_override_below(self, key: KeyPath) -> bool:
        return any(path[: len(key)] == key for path in self.overrides)


class Value:
    """One value, with its place in the document (`path`) and in the configuration (`key`)."""

    __slots__ = ("context", "data", "key", "path", "variable")

    def __init__(
        self, data: Any, context: ReadingContext, path: KeyPath = (), key: KeyPath = (), variable: str | None = None
    ) -> None:
        self.data = data
        self.context = context
        self.path = path
        self.key = key
        self.variable = variable
        """The environment variable that the value comes from, if it does."""

    def child(self, part: str | int, data: Any, *, key: str | None = None) -> Value:
        inner_key = (*self.key, part if key is None else key)
        return Value(data, self.context, (*self.path, part), inner_key, self.variable)

    def with_key(self, *key: str | int) -> Value:
        """The same value under another key of the configuration."""
        return Value(self.data, self.context, self.path, key, self.variable)

    def with_data(self, data: Any) -> Value:
        """Other data at the same place."""
        return Value(data, self.context, self.path, self.key)

    def report(self, message: str) -> None:
        self.context.report(self.path, message, self.variable)

    def fail(self, message: str) -> NoReturn:
        """Reports a problem of this value, and raises `AlreadyReported`."""
        self.report(message)
        raise AlreadyReported

    def report_invalid(self, expected: str, hint: str = "", *, secret: bool = False) -> None:
        """Reports the expected and the actual value. Never shows the content of a variable or a secret."""
        if self.path in self.context.original_texts and self.variable is None:
            actual = f"what {format_value(self.context.original_texts[self.path])} expands to"
        else:
            actual = "something else" if secret and isinstance(self.data, str) else format_value(self.data)
        self.report(f"expected {expected}, got {actual}{hint}")

    def record_origin(self) -> None:
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
        """The elements of a list. A single string counts as a list with one element."""
        data: object = self.data
        if isinstance(data, str):
            return [self]
        if not isinstance(data, list):
            raise InvalidValue("a list")
        return [self.child(index, item) for index, item in enumerate(cast("list[Any]", data))]


def format_default(value: object) -> str:
    """A default as users would write it in the file; empty for anything but text, numbers and booleans."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int) else ""


@dataclass(eq=False)
class ValueType(Generic[T]):
    """A type of value: how to read it, and its name in messages and in the documentation."""

    label: str
    """Its name in the documentation: `list of strings`."""
    expected: str
    """Its name in messages: `a list of strings`."""
    read: Callable[[Value], T]
    schema: Mapping[str, Any]
    """The JSON Schema of its values in a file. Where it has another `ValueType`, the schema of that is meant."""
    nullable: bool = False
    """Whether `null` is a value of its own. Elsewhere it means that the setting is absent."""
    separator: str | None = None
    """The separator between list elements in an environment variable."""
    fits_variable: bool = True
    """Whether one environment variable can hold it."""
    has_settings: bool = False
    """Whether it has settings of its own. Variables may set some of them though the section itself is absent."""
    format_default: Callable[[Any], str] = format_default


def value_type(
    label: str, expected: str, schema: Mapping[str, Any], **options: Any
) -> Callable[[Callable[[Value], T]], ValueType[T]]:
    """Makes a function that reads a value a `ValueType`."""
    return lambda read: ValueType(label, expected, read, schema, **options)


def read_value(value_type: ValueType[T], value: Value, *, secret: bool = False) -> T:
    """Reads a value and records its origin. Reports an invalid value and raises `AlreadyReported`."""
    try:
        result = value_type.read(value)
    except InvalidValue as error:
        value.report_invalid(str(error), error.hint, secret=secret)
        raise AlreadyReported from None
    value.record_origin()
    return result


# Settings and sections


class SettingOptions(NamedTuple):
    """What a declared setting may have besides its type and its effect."""

    key: str = ""
    """Empty: the field's name in camel case."""
    aliases: tuple[str, ...] = ()
    """Other keys with the same meaning."""
    secret: bool = False
    """Whether messages and logs must not show it."""
    environment: bool = True
    """Whether an environment variable may override it."""


SECRET = SettingOptions(secret=True)


class Setting(msgspec.Struct, frozen=True):
    """One setting, as a field of a section declares it."""

    attribute: str
    value_type: ValueType[Any]
    effect: str
    """What it does, for the documentation, `toolspace explain` and editors."""
    options: SettingOptions = SettingOptions()
    default: Any = _REQUIRED

    @property
    def key(self) -> str:
        return self.options.key or camel_case(self.attribute)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that it may have in a file."""
        return (self.key, *self.options.aliases)

    @property
    def is_required(self) -> bool:
        return self.default is _REQUIRED

    @property
    def default_text(self) -> str:
        """The default as users would write it; empty if there is none."""
        if self.default is None:
            return "null" if self.value_type.nullable else ""
        return "" if self.is_required else self.value_type.format_default(self.default)


@functools.cache
def declared_settings(section: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The settings that the fields of a section declare, in their order; those of its base class come last."""
    defaults = dict(zip(reversed(section.__struct_fields__), reversed(section.__struct_defaults__), strict=False))
    return tuple(
        _declared_setting(attribute, annotation, defaults.get(attribute, msgspec.NODEFAULT))
        for base in section.__mro__
        for attribute, annotation in inspect.get_annotations(base).items()
        if hasattr(annotation, "__metadata__")
    )


def _declared_setting(attribute: str, annotation: Any, default: object) -> Setting:
    from toolspace.config.value_types import default_type  # Here: that module imports this one.

    value_type, *rest = annotation.__metadata__
    if not isinstance(value_type, ValueType):
        value_type, rest = default_type(annotation.__origin__), annotation.__metadata__
    default = _REQUIRED if default is msgspec.NODEFAULT else default
    return Setting(attribute, cast("ValueType[Any]", value_type), *rest, default=default)


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the configuration. Its `repr` shows no secret, so that it may be logged."""

    hidden: ClassVar[frozenset[str]] = frozenset()
    """Fields that `repr` does not show, besides those of secret settings."""
    shorthand: ClassVar[str | None] = None
    """The key that a bare string stands for."""

    def __repr__(self) -> str:
        secret_fields = {setting.attribute for setting in declared_settings(type(self)) if setting.options.secret}
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        hidden = secret_fields | self.hidden
        fields = (f"{name}={'…' if name in hidden and value else repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(fields)})"


class SectionType(ValueType[S]):
    """A mapping with known keys, read into a section.

    The settings are those that the section declares, unless others are given. A section with a field `name` that is no
    setting gets the name of its entry there. A section with a field `extra` keeps unknown keys there; in all others an
    unknown key is an error.
    """

    def __init__(
        self,
        section: type[S],
        *,
        settings: Iterable[Setting] | None = None,
        is_ignored: Callable[[str], bool] = lambda key: False,
        is_lenient: bool = False,
    ) -> None:
        """`is_lenient`: valid settings are returned even if others are invalid, so that they are checked too."""
        super().__init__("mapping", "a mapping", self._read_section, schema={}, fits_variable=False, has_settings=True)
        self.section = section
        self.settings = declared_settings(section) if settings is None else tuple(settings)
        self.shorthand: str | None = getattr(section, "shorthand", None)
        self.is_ignored = is_ignored
        self.is_lenient = is_lenient
        self._keys = [key for setting in self.settings for key in setting.keys]
        other_fields = set(section.__struct_fields__).difference(setting.attribute for setting in self.settings)
        self._has_name = settings is None and "name" in other_fields
        self.keeps_unknown = "extra" in other_fields

    def _read_section(self, value: Value) -> S:
        if isinstance(value.data, str) and self.shorthand is not None:
            mapping: Mapping[str, Any] = {self.shorthand: value.data}
        else:
            mapping = {} if value.data is None else value.mapping()
        fields, is_valid = self._read_fields(value, mapping)
        unknown = self._check_unknown_keys(value, mapping)
        if self.keeps_unknown:
            fields["extra"] = unknown
        if self._has_name:
            fields["name"] = str(value.key[-1])
        if not self.is_lenient and (not is_valid or (unknown and not self.keeps_unknown)):
            raise AlreadyReported
        return self.section(**fields)

    def _read_fields(self, value: Value, mapping: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        fields: dict[str, Any] = {}
        is_valid = True
        for setting in self.settings:
            value_type = setting.value_type
            inner = self._find_value(value, mapping, setting)
            if inner is None or (inner.data is None and not value_type.nullable and not value_type.has_settings):
                if setting.is_required:
                    value.report(f'"{setting.key}" is missing; expected {value_type.expected}')
                    is_valid = False
            elif inner.data is None and value_type.nullable:
                inner.record_origin()
                fields[setting.attribute] = None
            else:
                try:
                    fields[setting.attribute] = read_value(value_type, inner, secret=setting.options.secret)
                except AlreadyReported:
                    is_valid = False
        return fields, is_valid

    def _find_value(self, value: Value, mapping: Mapping[str, Any], setting: Setting) -> Value | None:
        """The value of a setting: from the environment, else under its key, else under an alias."""
        key = (*value.key, setting.key)
        if key in value.context.overrides:
            variable, data = value.context.overrides[key]
            return Value(data, value.context, key, key, variable)
        present_keys = [name for name in setting.keys if mapping.get(name) is not None]
        for duplicate in present_keys[1:]:
            value.child(duplicate, None).report(
                f'means the same as "{present_keys[0]}", which is given too; remove one'
            )
        if present_keys:
            return value.child(present_keys[0], mapping[present_keys[0]], key=setting.key)
        if setting.key in mapping:
            return value.child(setting.key, None)
        if setting.value_type.has_settings and value.context.has_override_below(key):
            return Value({}, value.context, key, key)
        return None

    def _check_unknown_keys(self, value: Value, mapping: Mapping[str, Any]) -> dict[str, Any]:
        unknown = {key: data for key, data in mapping.items() if key not in self._keys and not self.is_ignored(key)}
        for key, data in unknown.items():
            inner = value.child(key, data)
            if not self.keeps_unknown:
                hint = f"; the keys here are {', '.join(setting.key for setting in self.settings)}"
                inner.report(f"unknown key{did_you_mean(key, self._keys) or hint}")
            elif matches := difflib.get_close_matches(key, self._keys, n=1, cutoff=_TYPO_SIMILARITY):
                # Other programs have keys of their own, which are kept. A misspelt `toolsDenied` must be noticed.
                inner.context.warn(inner.path, f'unknown key, kept without effect; did you mean "{matches[0]}"?')
        return unknown


# Entries by name


def read_named_entries(value_type: ValueType[T], value: Value, *, entry_label: str) -> dict[str, T]:
    """Entries by name: of a mapping, or of a list whose elements have a `name`. Leaves out invalid entries."""
    return _read_entries(value_type, list_named_values(value, entry_label=entry_label))


def _read_entries(value_type: ValueType[T], values: Iterable[tuple[str, Value]]) -> dict[str, T]:
    entries: dict[str, T] = {}
    for name, inner in values:
        with suppress(AlreadyReported):
            entries[name] = read_value(value_type, inner)
    return entries


def list_named_values(value: Value, *, entry_label: str) -> list[tuple[str, Value]]:
    """The entries of a mapping, or of a list whose elements have a `name`, each with its name."""
    if isinstance(value.data, Mapping):
        entries = dict(value.items())
        for inner in entries.values():
            if inner.data is None:
                inner.report("is empty; expected a mapping")
        return [(name, inner) for name, inner in entries.items() if inner.data is not None]
    if not isinstance(value.data, list):
        raise InvalidValue(f"a mapping of {entry_label} by name, or a list of them with a name each")
    return _list_named_elements(value.elements(), value.key)


def read_named_elements(value_type: ValueType[T], elements: Iterable[Value], key: KeyPath) -> dict[str, T]:
    """Entries by name: of the elements of a list that have a `name`. Leaves out invalid entries."""
    return _read_entries(value_type, _list_named_elements(elements, key))


def _list_named_elements(elements: Iterable[Value], key: KeyPath) -> list[tuple[str, Value]]:
    entries = dict[str, Value]()
    for inner in elements:
        try:
            mapping = inner.mapping()
        except InvalidValue as error:
            inner.report_invalid(str(error))
            continue
        name = mapping.get("name")
        if not isinstance(name, str) or not name:
            inner.report('"name" is missing; expected a string')
        elif name in entries:
            first_line = inner.context.document.find_line(entries[name].path)
            inner.report(f"the name {format_value(name)} is given twice, first in line {first_line}")
        else:
            rest = {field: data for field, data in mapping.items() if field != "name"}
            entries[name] = Value(rest, inner.context, inner.path, (*key, name))
    return list(entries.items())


def camel_case(attribute: str) -> str:
    """`tool_timeout` → `toolTimeout`."""
    first, *rest = attribute.split("_")
    return first + "".join(word.capitalize() for word in rest)


def snake_case(key: str) -> str:
    """`toolTimeout` → `tool_timeout`, `traceMCP` → `trace_mcp`."""
    return _WORD_START.sub("_", key).lower()

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

from toolspace.config.document import Document, KeyPath, Problem, dotted, shown
from toolspace.core.names import did_you_mean

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_SLIP = 0.85
"""How much alike two keys are if one is the other mistyped, and not the key of another program."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Wrong(Exception):
    """A value is not what its setting takes; the text says what is: `an integer of at least 1`."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.hint = hint


class Reported(Exception):
    """A value cannot be used, and why has been noted already."""


class Session:
    """One reading of one document: what it needs to know, and what it finds out."""

    def __init__(
        self,
        document: Document,
        *,
        base_dir: Path,
        written: Mapping[KeyPath, str] | None = None,
        overrides: Mapping[KeyPath, tuple[str, Any]] | None = None,
        problems: Iterable[Problem] = (),
    ) -> None:
        self.document = document
        self.base_dir = base_dir
        self.written = written or {}
        self.overrides = overrides or {}
        self.problems = list(problems)
        self.warnings: list[str] = []
        self.origins: dict[KeyPath, KeyPath | str] = {}
        """Where each setting that was given came from: a place in the document, or the name of a variable."""
        self._unusable = {problem.at for problem in self.problems}

    def apart(self) -> Session:
        """A reading of one part of the document by itself, which no variable overrides. Its faults are noted here."""
        part = Session(self.document, base_dir=self.base_dir, written=self.written)
        part.problems, part.warnings, part._unusable = self.problems, self.warnings, self._unusable
        return part

    def note(self, at: KeyPath, message: str, variable: str | None = None) -> None:
        if variable is not None or at not in self._unusable:  # What could not be expanded has had its word.
            self.problems.append(Problem(at, message, variable))

    def warn(self, at: KeyPath, message: str) -> None:
        self.warnings.append(f"{self.document.place(at)}: {dotted(at)}: {message}")

    def overridden_below(self, name: KeyPath) -> bool:
        return any(path[: len(name)] == name for path in self.overrides)


class Value:
    """One value, with its place in the document (`at`) and in the configuration (`name`)."""

    __slots__ = ("at", "data", "name", "session", "variable")

    def __init__(
        self, data: Any, session: Session, at: KeyPath = (), name: KeyPath = (), variable: str | None = None
    ) -> None:
        self.data = data
        self.session = session
        self.at = at
        self.name = name
        self.variable = variable

    def child(self, key: str | int, data: Any, *, name: str | None = None) -> Value:
        named = (*self.name, key if name is None else name)
        return Value(data, self.session, (*self.at, key), named, self.variable)

    def renamed(self, *name: str | int) -> Value:
        """The same value under another name in the configuration."""
        return Value(self.data, self.session, self.at, name, self.variable)

    def note(self, message: str) -> None:
        self.session.note(self.at, message, self.variable)

    def wrong(self, expected: str, hint: str = "", *, secret: bool = False) -> None:
        """Notes what was expected and what was there instead; never what a variable or a secret holds."""
        if self.at in self.session.written and self.variable is None:
            got = f"what {shown(self.session.written[self.at])} expands to"
        else:
            got = "something else" if secret and isinstance(self.data, str) else shown(self.data)
        self.note(f"expected {expected}, got {got}{hint}")

    def trace(self) -> None:
        """Remembers where this setting came from."""
        self.session.origins[self.name] = self.variable or self.at

    def mapping(self) -> Mapping[str, Any]:
        data: object = self.data
        if not isinstance(data, Mapping):
            raise Wrong("a mapping")
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
            raise Wrong("a list")
        return [self.child(index, item) for index, item in enumerate(cast("list[Any]", data))]


class Kind(Generic[T]):
    """A kind of value: how to read it, what messages and documentation call it."""

    def __init__(
        self,
        label: str,
        expects: str,
        read: Callable[[Value], T],
        *,
        nullable: bool = False,
        separator: str | None = None,
        single: bool = True,
        nested: bool = False,
    ) -> None:
        self.label = label
        self.expects = expects
        self._read = read
        self.nullable = nullable
        """Whether `null` is a value of its own; elsewhere it means that nothing is said."""
        self.separator = separator
        """What parts the elements of a list in an environment variable."""
        self.single = single
        """Whether one environment variable can hold it."""
        self.nested = nested
        """Whether it has settings of its own, some of which may be given though it is not."""

    def read(self, value: Value) -> T:
        return self._read(value)


def attempt(kind: Kind[T], value: Value, *, secret: bool = False) -> T:
    """Reads a value; a wrong one is noted. Raises `Reported` then."""
    try:
        result = kind.read(value)
    except Wrong as wrong:
        value.wrong(str(wrong), wrong.hint, secret=secret)
        raise Reported from None
    value.trace()
    return result


class Setting:
    """One key of a record: what it takes, what it does, and what holds without it."""

    def __init__(
        self,
        key: str,
        kind: Kind[Any],
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
        self.attribute = attribute or snake(key)
        self.aliases = aliases
        self.required = required
        self.secret = secret
        self.environment = environment


class Record(Kind[S]):
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
        super().__init__("mapping", "a mapping", self._record, single=False, nested=True)
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
            raise Wrong("a mapping")
        mapping = cast("Mapping[str, Any]", data)
        fields, sound = self._fields(value, mapping)
        unknown = self._unknown(value, mapping)
        if self.extra is not None:
            fields[self.extra] = unknown
        elif unknown:
            sound = False
        if self.named:
            fields["name"] = str(value.name[-1])
        if not sound:
            raise Reported
        return self.struct(**fields)

    def _fields(self, value: Value, mapping: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        fields: dict[str, Any] = {}
        sound = True
        for setting in self.settings:
            inner = self._find(value, mapping, setting)
            if inner is None or (inner.data is None and not setting.kind.nullable and not setting.kind.nested):
                if setting.required:
                    value.note(f'"{setting.key}" is missing; expected {setting.kind.expects}')
                    sound = False
                continue
            if inner.data is None and setting.kind.nullable:
                inner.trace()
                fields[setting.attribute] = None
                continue
            try:
                fields[setting.attribute] = attempt(setting.kind, inner, secret=setting.secret)
            except Reported:
                sound = False
        return fields, sound

    def _find(self, value: Value, mapping: Mapping[str, Any], setting: Setting) -> Value | None:
        """The value of a setting: from the environment, else under its key, else under an older one."""
        name = (*value.name, setting.key)
        if name in value.session.overrides:
            variable, data = value.session.overrides[name]
            return Value(data, value.session, name, name, variable)
        given = [key for key in (setting.key, *setting.aliases) if mapping.get(key) is not None]
        for other in given[1:]:
            value.child(other, None).note(f'means the same as "{given[0]}", which is given too; remove one')
        if given:
            return value.child(given[0], mapping[given[0]], name=setting.key)
        if setting.key in mapping:
            return value.child(setting.key, None)
        if setting.kind.nested and value.session.overridden_below(name):
            return Value({}, value.session, name, name)
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
                inner.note(f"unknown key{did_you_mean(key, self._by_key) or known}")
            elif meant := difflib.get_close_matches(key, self._by_key, n=1, cutoff=_SLIP):
                # Kept, as other programs have keys of their own; but a slip in `toolsDenied` must be seen.
                inner.session.warn(inner.at, f'unknown key, kept without effect; did you mean "{meant[0]}"?')
        return unknown


def entries(kind: Kind[T], value: Value, *, what: str) -> dict[str, T]:
    """Named entries: a mapping by name, or a list whose elements have a `name`."""
    found: dict[str, T] = {}
    for name, inner in named_values(value, what=what):
        try:
            found[name] = attempt(kind, inner)
        except Reported:
            continue
    return found


def named_values(value: Value, *, what: str) -> list[tuple[str, Value]]:
    """The entries of a mapping by name, or of a list whose elements have a `name`, each under its name."""
    if isinstance(value.data, Mapping):
        return [(name, inner) for name, inner in value.items() if _has_content(inner)]
    if not isinstance(value.data, list):
        raise Wrong(f"a mapping of {what} by name, or a list of them with a name each")
    found: dict[str, Value] = {}
    for inner in value.elements():
        try:
            mapping = inner.mapping()
        except Wrong as wrong:
            inner.wrong(str(wrong))
            continue
        name = mapping.get("name")
        if not isinstance(name, str) or not name:
            inner.note('"name" is missing; expected a string')
        elif name in found:
            first = value.session.document.line(found[name].at)
            inner.note(f"the name {shown(name)} is given twice, first in line {first}")
        else:
            rest = {key: data for key, data in mapping.items() if key != "name"}
            found[name] = Value(rest, value.session, inner.at, (*value.name, name))
    return list(found.items())


def _has_content(value: Value) -> bool:
    if value.data is None:
        value.note("is empty; expected a mapping")
    return value.data is not None


def snake(key: str) -> str:
    """`toolTimeout` → `tool_timeout`, `traceMCP` → `trace_mcp`."""
    return _CAMEL.sub("_", key).lower()

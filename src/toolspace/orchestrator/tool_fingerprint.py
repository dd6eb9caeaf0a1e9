"""Fingerprints of tools: a digest of what a tool executes, so that a changed tool never returns a result cached before.

The stage `cache` makes it a part of its keys. The digest covers the schema, the version, the execution and the settings
of the provider; for a Python function also its code and the code and plain values of the user's program that it refers
to. It contains secrets as a digest only.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from toolspace.core.tool import FunctionTool

if TYPE_CHECKING:
    from toolspace.orchestrator.catalog import CatalogEntry

_DIGEST_BYTES = 16
_MAX_OBJECTS = 2_000
"""How many objects a fingerprint covers at most: functions may refer to half a program."""
_MAX_DEPTH = 12
_PLAIN_TYPES = frozenset((str, bytes, int, float, complex, bool, type(None)))


def get_fingerprint(entry: CatalogEntry) -> str:
    """Returns the fingerprint of a tool. It is computed once: values that a function changes do not change it."""
    if not entry.fingerprint:
        tool, provider = entry.tool, entry.provider
        description: list[object] = [
            _package_version(),
            provider.kind,
            provider.namespace,
            tool.name,
            tool.version,
            tool.execution_type,
            tool.execution,
            tool.input_schema,
            provider.describe_execution(entry.local_name),
        ]
        entry.fingerprint = digest(description, tool.function if isinstance(tool, FunctionTool) else tool.handler)
    return entry.fingerprint


def digest(*values: object) -> str:
    """Returns a digest of values and code. Equal values have equal digests, in every process."""
    from hashlib import blake2b  # Imported here: programs that only call tools do not need it.

    text = repr([_Describer().describe(value) for value in values])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


def _package_version() -> str:
    # Imported here: only toolspaces with a cache need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("toolspace")
    except PackageNotFoundError:
        return ""


class _Describer:
    """Describes values and code by nested lists of plain values, without addresses and other traces of a process."""

    def __init__(self) -> None:
        self._object_count = 0
        self._active_ids: set[int] = set()
        """The objects whose description has begun: they may refer to each other."""

    def describe(self, value: Any, depth: int = 0) -> object:
        if type(value) in _PLAIN_TYPES:
            return value
        self._object_count += 1
        if depth > _MAX_DEPTH or self._object_count > _MAX_OBJECTS or id(value) in self._active_ids:
            return type(value).__qualname__
        self._active_ids.add(id(value))
        try:
            return [type(value).__qualname__, self._describe_object(value, depth + 1)]
        finally:
            self._active_ids.discard(id(value))

    def _describe_object(self, value: Any, depth: int) -> object:
        match value:
            case Mapping():
                items = cast("Mapping[Any, Any]", value).items()
                return sorted(([repr(key), self.describe(item, depth)] for key, item in items), key=repr)
            case list() | tuple():
                return [self.describe(item, depth) for item in cast("list[Any]", value)]
            case set() | frozenset():
                return sorted((self.describe(item, depth) for item in cast("set[Any]", value)), key=repr)
            case str() | int() | float() | bytes() | PurePath() | re.Pattern() | enum.Enum():
                return str(cast("Any", value))
            case partial():
                bound = cast("partial[Any]", value)
                return self.describe((bound.func, bound.args, bound.keywords), depth)
            case MethodType():
                return self.describe((value.__func__, value.__self__), depth)
            case CodeType():
                constants = [self.describe(constant, depth) for constant in value.co_consts]
                return [value.co_code, value.co_names, value.co_varnames, constants]
            case FunctionType():
                return self._describe_function(value, depth)
            case FunctionTool():
                return self.describe(value.function, depth)
            case ModuleType() | BuiltinFunctionType():
                return value.__name__
            case type():
                return self._describe_class(cast("type[Any]", value), depth)
            case msgspec.Struct():
                return self.describe({name: getattr(value, name) for name in value.__struct_fields__}, depth)
            case _ if _is_users_code(type(value)) and isinstance(fields := getattr(value, "__dict__", None), dict):
                return [self.describe(type(value), depth), self.describe(fields, depth)]
            case _:
                return None

    def _describe_function(self, function: FunctionType, depth: int) -> object:
        code = function.__code__
        description: list[object] = [function.__module__, function.__qualname__, self.describe(code, depth)]
        description.append(self.describe((function.__defaults__, function.__kwdefaults__), depth))
        for cell in function.__closure__ or ():
            try:
                description.append(self.describe(cell.cell_contents, depth))
            except ValueError:  # The cell is still empty.
                description.append(None)
        if _is_users_code(function):
            names = _list_names(code)
            for name in sorted(names & function.__globals__.keys()):
                value = function.__globals__[name]
                if isinstance(value, ModuleType) and _is_users_code(value):
                    value = {key: member for key, member in vars(value).items() if key in names}
                description.append([name, self.describe(value, depth)])
        return description

    def _describe_class(self, value: type[Any], depth: int) -> object:
        if not _is_users_code(value):
            return [value.__module__, value.__qualname__]
        members: dict[str, Any] = {}
        for name, member in cast("Mapping[str, Any]", vars(value)).items():
            member = getattr(member, "__func__", getattr(member, "fget", member))
            if (isinstance(member, FunctionType) or type(member) in _PLAIN_TYPES) and name != "__doc__":
                members[name] = member
        return [value.__module__, value.__qualname__, self.describe((members, value.__bases__), depth)]


def _list_names(code: CodeType) -> set[str]:
    """Returns the global names and attributes that a code uses, with those of the functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _list_names(constant)
    return names


def _is_users_code(value: Any) -> bool:
    """Whether a function, class or module is neither installed nor a part of Python: its code changes often."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    package = str(name).partition(".")[0]
    if package in sys.stdlib_module_names or package == "toolspace":
        return False
    file = getattr(sys.modules.get(str(name)), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file

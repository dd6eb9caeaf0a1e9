"""Finds the Python tools that a configuration names: by file, by module, or one by name. Runs none."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from toolspace.core.function_tool import FunctionTool, as_tool
from toolspace.core.names import did_you_mean, short_hash
from toolspace.core.tool import Tool
from toolspace.errors import ConfigError, RegistrationError

_FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<name>\w+))?")
_MODULE = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::(?P<name>\w+))?")

_brought: dict[tuple[str, str], dict[str, ModuleType]] = {}
"""The user's modules that each load brought in, by what was loaded from where: the next load of it drops
them, so that changed code is read again. Modules that the program had before are never touched."""
_sources: dict[str, bytes] = {}
"""What each file said when its module was made."""


def load_functions(spec: str, base_dir: Path) -> list[Tool]:
    """The tools that a line of `functions` names: `./tools.py`, `package.module`, or either with `:name`.

    A file is relative to `base_dir`, and modules are looked for there too. Loading again reads changed code,
    of the module and of the modules beside it. Raises `ConfigError` that says where the fault is.
    """
    if (match := _FILE.fullmatch(spec)) is not None:
        file = Path(os.path.normpath(base_dir / Path(match["file"]).expanduser()))
        if not file.is_file():
            raise ConfigError(f"functions: {spec}: there is no file {file}")
        with user_imports(spec, file.parent):
            module = import_file(file)
    elif (match := _MODULE.fullmatch(spec)) is not None:
        with user_imports(spec, Path(os.path.abspath(base_dir))):
            module = importlib.import_module(match["module"])
    else:
        raise ConfigError(
            f"functions: {spec!r} names no tools; write a file (./tools.py), a module (package.module), "
            "or one name in it (package.module:name)"
        )
    name = match["name"]
    return _all_tools(module, spec) if name is None else _named_tools(module, name, spec)


def list_loaded_files() -> tuple[Path, ...]:
    """The files of the user's modules that loads brought in: a change of one asks for loading again."""
    modules = (module for brought in _brought.values() for module in brought.values())
    return tuple(dict.fromkeys(Path(module.__file__) for module in modules if module.__file__))


def _all_tools(module: ModuleType, spec: str) -> list[Tool]:
    """Every public tool of a module, in the order of the file; of those it imports, the ones in `__all__`."""
    listed = getattr(module, "__all__", None)
    public = set(map(str, listed)) if listed is not None else None
    found: dict[int, Tool] = {}
    passed: list[str] = []
    for name, value in vars(module).items():
        if not isinstance(value, Tool) or (name.startswith("_") if public is None else name not in public):
            continue
        if public is None and not _is_own(value, module):
            passed.append(name)
            continue
        found.setdefault(id(value), value)
    if not found:
        hint = "; decorate a function with @tool"
        if passed:
            hint = f"; it only imports {', '.join(passed)}: list what it offers in __all__"
        raise ConfigError(f"functions: {spec} defines no @tool function{hint}")
    return list(found.values())


def _is_own(tool: Tool, module: ModuleType) -> bool:
    """Whether a tool was made in a module, or in one below it that the package gathers."""
    maker = tool.function if isinstance(tool, FunctionTool) else tool.handler
    origin = getattr(inspect.unwrap(maker) if maker is not None else None, "__module__", None)
    return origin is None or origin == module.__name__ or str(origin).startswith(f"{module.__name__}.")


def _named_tools(module: ModuleType, name: str, spec: str) -> list[Tool]:
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if not key.startswith("_") and callable(value)]
        raise ConfigError(f"functions: {spec}: there is no {name!r} in it{did_you_mean(name, known)}")
    value: object = getattr(module, name)
    items = list(cast("list[object]", value)) if isinstance(value, list | tuple) else [value]
    if not items:
        raise ConfigError(f"functions: {spec}: the list is empty")
    return [_as_tool(item, spec) for item in items]


def _as_tool(item: object, spec: str) -> Tool:
    if not isinstance(item, Tool) and (not callable(item) or isinstance(item, type)):
        raise ConfigError(f"functions: {spec}: a {type(item).__name__} is no tool; name a function or a Tool")
    try:
        return as_tool(cast("Callable[..., Any]", item))
    except RegistrationError as error:
        raise ConfigError(f"functions: {spec}: {error}") from error


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the source as it is now.

    The interpreter's cache tells versions apart by size and whole seconds: a quick edit would go unseen. It
    also leaves files beside the user's.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(file: Path) -> ModuleType:
    name = f"toolspace_functions_{short_hash(str(file))}_{file.stem if file.stem.isidentifier() else 'file'}"
    loader = _SourceLoader(name, str(file))
    source = loader.get_data(str(file))
    present = sys.modules.get(name)
    if present is not None and _sources.get(name) == source:
        return present  # Another line names the same file: what it holds at module level is shared.
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    if spec is None:
        raise ImportError(f"{file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Type hints written as text are looked up there.
    _sources[name] = source
    loader.exec_module(module)
    return module


@contextmanager
def user_imports(spec: str, folder: Path) -> Generator[None]:
    """Imports inside it see `folder` first, as a script there would, and read changed code again.

    Afterwards the folder comes last: functions may import their neighbours when called, but a file that is
    named like a library must not stand in for it in the rest of the program. A failed import leaves all as it
    was, so that tools of the earlier load keep working.
    """
    key = (spec, str(folder))
    earlier = {name: module for name, module in _brought.get(key, {}).items() if sys.modules.get(name) is module}
    for name in earlier:
        del sys.modules[name]
    before = set(sys.modules)
    writing, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # See `_SourceLoader`.
    importlib.invalidate_caches()
    linecache.checkcache()
    sys.path.insert(0, str(folder))
    try:
        yield
    except (Exception, SystemExit) as error:
        for name in _new_modules(folder, before):
            del sys.modules[name]
        sys.modules.update(earlier)
        raise ConfigError(f"functions: {spec} cannot be imported: {_fault(error, folder)}") from error
    else:
        _brought[key] = _new_modules(folder, before)
    finally:
        sys.dont_write_bytecode = writing
        with suppress(ValueError):  # The user's code may have taken it off itself.
            sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _new_modules(folder: Path, before: set[str]) -> dict[str, ModuleType]:
    """The user's own modules that came since: below the folder, from source, and not installed there."""
    installed = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")})
    own = str(folder) + os.sep
    found: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in before or not isinstance(file, str) or name.partition(".")[0] == "toolspace":
            continue
        if file.startswith(own) and file.endswith(".py") and not file.startswith(installed):
            found[name] = module
    return found


def _fault(error: BaseException, folder: Path) -> str:
    """`tools.py:3: ModuleNotFoundError: No module named 'x'`: the user's line that failed, and how."""
    last = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {last}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(str(folder) + os.sep)]
    if not own:  # A module that was not found, or one of a library.
        own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"{own[-1].filename}:{own[-1].lineno}: {last}" if own else last

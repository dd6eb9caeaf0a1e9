"""Tools that this process runs itself: functions, tools with a handler, built-ins; and the user's code they come from.

`ToolRegistry` holds the tools, which can be added and removed while calls run. `run_tool` runs one tool without the
stages of the orchestrator. `load_functions` finds the tools that the `functions` setting names. `plugins` imports
providers with `import_user_code`, so that the user's code is found, reloaded and reported in the same way.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from toolspace.core.call_statistics import StatsCollector, ToolStats
from toolspace.core.extension_points import ToolProvider
from toolspace.core.function_signature import execution_style
from toolspace.core.names import did_you_mean, short_hash
from toolspace.core.prebuilt_actions import PrebuiltAction
from toolspace.core.result import ToolResult, get_content_parts, join_parts
from toolspace.core.tool import FunctionTool, Tool, ToolCategory, as_tool, check_local_name
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ConfigError, RegistrationError, ToolExecutionError, ToolNameConflict, ToolNotFoundError

if TYPE_CHECKING:
    from toolspace.core.tool_export import ToolFormat

_SPECIFICATION = re.compile(r"(?:(?P<file>.+\.py)|(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*))(?::(?P<name>\w+))?")
_loaded_modules: dict[tuple[str, str], dict[str, ModuleType]] = {}
"""The user's modules that each load imported, by what was loaded and its folder. The next load removes them, so that
changed code is read again. Modules that the program imported before are never removed."""
_loaded_sources: dict[str, bytes] = {}
"""The source of each file when its module was imported."""


async def run_tool(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
    """Runs a tool's function or handler and returns its result. Exceptions of the function propagate."""
    value = await _run_function(tool, parameters, context)
    if isinstance(value, ToolResult):
        return value
    parts = get_content_parts(value)
    return ToolResult(ok=True, result=join_parts(parts) if parts else value, parts=parts, tool=tool.name)


async def _run_function(tool: Tool, parameters: dict[str, Any], context: ToolContext) -> Any:
    if isinstance(tool, FunctionTool):
        signature = tool.signature
        keywords = dict(tool.validator.from_mapping(parameters))
        if signature.context_parameter is not None:
            keywords[signature.context_parameter] = context
        positional = [keywords.pop(name) for name in signature.positional_only if name in keywords]
        function, style = tool.function, tool.style
    elif tool.handler is not None:
        function, positional, keywords = tool.handler, [parameters, context], {}
        style = execution_style(tool.handler, tool.name)
    else:
        raise ToolExecutionError(f'tool "{tool.name}" has no function that this process can run')
    if style == "stream":
        async with aclosing(function(*positional, **keywords)) as stream:
            values = [value async for value in stream]
        return "".join(values) if all(isinstance(value, str) for value in values) else values
    if style == "sync":
        return await asyncio.to_thread(function, *positional, **keywords)
    return await function(*positional, **keywords)


class ToolRegistry(ToolProvider):
    """Tools under bare names, without a namespace. An orchestrator runs them through its stages."""

    circuit_scope = "none"

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        kind: str = "local",
        stats: StatsCollector | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self._tools: dict[str, Tool] = {}
        self._stats = stats or StatsCollector()
        self.register_many(tools)

    def register(self, tool: Tool | Callable[..., Any]) -> Tool:
        """Adds a tool, or a function as a tool. Raises `ToolNameConflict` if the name is in use."""
        new_tool = as_tool(tool)
        self.register_many([new_tool])
        return new_tool

    def register_many(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        """Adds all tools, or none of them if one cannot be added."""
        new_tools: dict[str, Tool] = {}
        for item in tools:
            tool = as_tool(item)
            check_local_name(tool.name)
            _ = tool.input_schema  # Built now: an unsupported type hint is reported when the tool is added.
            existing_tool = self._tools.get(tool.name) or new_tools.get(tool.name)
            if existing_tool is not None:
                raise ToolNameConflict(
                    f'"{tool.name}" is offered by {_origin(existing_tool)} and {_origin(tool)}; rename one with name=…'
                )
            new_tools[tool.name] = tool
        if new_tools:
            self._tools.update(new_tools)
            self.notify_changed()

    def unregister(self, name: str) -> Tool:
        """Removes a tool. Raises `ToolNotFoundError`. Running calls continue."""
        try:
            tool = self._tools.pop(name)
        except KeyError:
            raise ToolNotFoundError(f'Tool "{name}" not found{did_you_mean(name, self._tools)}') from None
        self.notify_changed()
        return tool

    def replace_all(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        """Replaces all tools, or none if one cannot be added."""
        self._tools = ToolRegistry(tools)._tools
        self.notify_changed()

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    has = has_tool

    def list(self) -> list[Tool]:
        return [*self._tools.values()]

    def list_tools(self) -> Sequence[Tool]:
        return self.list()

    def list_by_category(self, category: ToolCategory | str) -> Sequence[Tool]:
        return [tool for tool in self._tools.values() if tool.category == category]

    def to_llm_tools(self, format: ToolFormat = "openai", *, strict: bool = False) -> Sequence[dict[str, Any]]:
        """The tool definitions in the format of a model API. `strict`: for OpenAI, where the schema allows it."""
        from toolspace.core.tool_export import export_tools  # Imported here: programs may never export tools.

        return export_tools(self._tools.values(), format, strict=strict)

    def get_stats(self) -> ToolStats:
        return self._stats.summary(self._tools.values())

    def update_call_stats(self, name: str, duration: float, success: bool) -> None:
        """Adds a call to the statistics that this registry did not run itself. `duration` is in milliseconds."""
        self._stats.add(name, duration, success)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        """Runs a tool without stages, for callers without an orchestrator."""
        tool = self._tools.get(name)
        if tool is None:
            raise ToolNotFoundError(f'Tool "{name}" not found{did_you_mean(name, self._tools)}')
        return await run_tool(tool, parameters, context)


def _origin(tool: Tool) -> str:
    """Describes a tool in an error message: the function with its file and line."""
    if isinstance(tool, FunctionTool):
        code = getattr(inspect.unwrap(tool.function), "__code__", None)
        name = getattr(tool.function, "__qualname__", tool.name)
        return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
    return f"the tool {tool.name!r}"


def load_functions(spec: str, base_dir: Path) -> list[Tool]:
    """The tools that a line of `functions` names: `./tools.py`, `package.module`, or either with `:name`.

    Files are relative to `base_dir`, and modules are looked for there too. Loading again reads changed code of the
    module and of the modules beside it. Raises `ConfigError` that names the faulty line.
    """
    try:
        match = _SPECIFICATION.fullmatch(spec)
        if match is None:
            raise ConfigError(
                f"{spec!r} names no tools; write a file (./tools.py), a module (package.module), "
                "or one name in it (package.module:name)"
            )
        module = import_user_code(spec, match, base_dir)
        name = match["name"]
        return _list_tools(module, spec) if name is None else _get_tools(module, name, spec)
    except ConfigError as error:
        raise ConfigError(f"functions: {error}") from error.__cause__


def import_user_code(spec: str, match: re.Match[str], base_dir: Path) -> ModuleType:
    """Imports the `file` or `module` that a match of a specification names. Raises `ConfigError`."""
    if match["file"] is not None:
        file = Path(os.path.normpath(base_dir / Path(match["file"]).expanduser()))
        if not file.is_file():
            raise ConfigError(f"{spec}: there is no file {file}")
        with _user_imports(spec, file.parent):
            return _import_file(file)
    with _user_imports(spec, Path(os.path.abspath(base_dir))):
        return importlib.import_module(match["module"])


def list_loaded_files() -> tuple[Path, ...]:
    """The files of all loaded user modules. If one changes, the tools must be loaded again."""
    modules = (module for modules in _loaded_modules.values() for module in modules.values())
    return tuple(dict.fromkeys(Path(module.__file__) for module in modules if module.__file__))


def _list_tools(module: ModuleType, spec: str) -> list[Tool]:
    """Every public tool of a module in the order of the file. Imported tools count only if `__all__` lists them."""
    listed_names = getattr(module, "__all__", None)
    public_names = set(map(str, listed_names)) if listed_names is not None else None
    tools: dict[int, Tool] = {}
    imported_names: list[str] = []
    for name, value in vars(module).items():
        is_private = name.startswith("_") if public_names is None else name not in public_names
        if not isinstance(value, Tool) or is_private:
            continue
        if public_names is None and not _is_defined_in(value, module):
            imported_names.append(name)
        else:
            tools.setdefault(id(value), value)
    has_actions = any(isinstance(value, PrebuiltAction) for value in vars(module).values())
    if not tools and not has_actions:
        hint = "; decorate a function with @tool"
        if imported_names:
            hint = f"; it only imports {', '.join(imported_names)}: list the tools that it offers in __all__"
        raise ConfigError(f"{spec} defines no @tool function{hint}")
    return list(tools.values())


def _is_defined_in(tool: Tool, module: ModuleType) -> bool:
    """Whether a tool was defined in a module, or in a module below that package."""
    function = tool.function if isinstance(tool, FunctionTool) else tool.handler
    origin = getattr(inspect.unwrap(function) if function is not None else None, "__module__", None)
    return origin is None or origin == module.__name__ or str(origin).startswith(f"{module.__name__}.")


def _get_tools(module: ModuleType, name: str, spec: str) -> list[Tool]:
    """The tool, or the list of tools, under a name."""
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if not key.startswith("_") and callable(value)]
        raise ConfigError(f"{spec}: there is no {name!r} in it{did_you_mean(name, names)}")
    value: object = getattr(module, name)
    items = list(cast("list[object]", value)) if isinstance(value, list | tuple) else [value]
    if not items:
        raise ConfigError(f"{spec}: the list is empty")
    tools: list[Tool] = []
    for item in items:
        if isinstance(item, PrebuiltAction):
            continue  # Its import has registered it; tools of the configuration offer it.
        if not isinstance(item, Tool) and (not callable(item) or isinstance(item, type)):
            raise ConfigError(f"{spec}: a {type(item).__name__} is no tool; name a function or a Tool")
        try:
            tools.append(as_tool(cast("Callable[..., Any]", item)))
        except RegistrationError as error:
            raise ConfigError(f"{spec}: {error}") from error
    return tools


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the current source, without the interpreter's cache.

    The cache compares size and whole seconds, so it misses quick edits. It also writes files beside the user's.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import_file(file: Path) -> ModuleType:
    """Imports a file as a module. Returns the loaded module if its source has not changed."""
    name = f"toolspace_functions_{short_hash(str(file))}_{file.stem if file.stem.isidentifier() else 'file'}"
    loader = _SourceLoader(name, str(file))
    source = loader.get_data(str(file))
    loaded_module = sys.modules.get(name)
    if loaded_module is not None and _loaded_sources.get(name) == source:
        return loaded_module  # Two lines may name the same file; they share its module-level state.
    from importlib.util import module_from_spec, spec_from_file_location  # Imported here: it slows the start down.

    spec = spec_from_file_location(name, file, loader=loader)
    if spec is None:
        raise ImportError(f"{file} cannot be loaded")
    module = module_from_spec(spec)
    sys.modules[name] = module  # Type hints that are text are resolved there.
    _loaded_sources[name] = source
    loader.exec_module(module)
    return module


@contextmanager
def _user_imports(spec: str, folder: Path) -> Generator[None]:
    """Imports inside the block search `folder` first, as a script there would, and read changed code again.

    Afterwards the folder is the last entry of `sys.path`: functions may import their neighbours when they are called,
    but a file with the name of a library must not replace it in the rest of the program. A failed import restores
    everything, so that the tools of the previous load keep working. Raises `ConfigError`.
    """
    key = (spec, str(folder))
    previous_modules = {
        name: module for name, module in _loaded_modules.get(key, {}).items() if sys.modules.get(name) is module
    }
    for name in previous_modules:
        del sys.modules[name]
    names_before = set(sys.modules)
    dont_write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # See `_SourceLoader`.
    importlib.invalidate_caches()
    linecache.checkcache()
    sys.path.insert(0, str(folder))
    try:
        yield
    except (Exception, SystemExit) as error:
        for name in _find_new_modules(folder, names_before):
            del sys.modules[name]
        sys.modules.update(previous_modules)
        raise ConfigError(f"{spec} cannot be imported: {_describe_failure(error, folder)}") from error
    else:
        _loaded_modules[key] = _find_new_modules(folder, names_before)
    finally:
        sys.dont_write_bytecode = dont_write_bytecode
        with suppress(ValueError):  # The user's code may have removed it.
            sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _find_new_modules(folder: Path, names_before: set[str]) -> dict[str, ModuleType]:
    """The user's modules that were imported since: source files below the folder that are not installed packages."""
    import sysconfig  # Imported here: it slows the start down.

    installed_folders = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")})
    prefix = str(folder) + os.sep
    modules: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in names_before or not isinstance(file, str) or name.partition(".")[0] == "toolspace":
            continue
        if file.startswith(prefix) and file.endswith(".py") and not file.startswith(installed_folders):
            modules[name] = module
    return modules


def _describe_failure(error: BaseException, folder: Path) -> str:
    """`tools.py:3: ModuleNotFoundError: No module named 'x'`: the user's line that failed, and the error."""
    last_line = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {last_line}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename.startswith(str(folder) + os.sep)]
    if not user_frames:  # The module was not found, or it belongs to a library.
        user_frames = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}: {last_line}" if user_frames else last_line
